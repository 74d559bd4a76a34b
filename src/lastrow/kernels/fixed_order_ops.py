"""The reference backend with batch_invariant: every sum of a row in an order that does not depend on how many rows there are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lastrow.kernels import attention_fixed_order
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kernels.head import VOCAB_CHUNK, softcap

ROWS = 16
"""Fewest rows of a matmul: a CPU's matmul takes another path below 12 and gives other bits (measured with torch 2.13, AVX-512;
the start-up test of engine/invariance.py repeats the measurement)."""


class FixedOrderReferenceOps(ReferenceOps):
    """ReferenceOps, slower, with results that are the same bits alone and in any batch."""

    def __init__(self) -> None:
        super().__init__(batch_invariant=True)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.counts["linear"] += 1
        rows = x.shape[0]
        return F.linear(x, weight) if rows >= ROWS else F.linear(F.pad(x, (0, 0, 0, ROWS - rows)), weight)[:rows]

    def geglu(self, h: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        self.counts["geglu"] += 1
        gate, up = self.linear(h, gate_up).chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def attention(self, q, kv, rows, block_table, window):
        self.counts["attention"] += 1
        return attention_fixed_order.reference(q, kv, rows, block_table, window)

    def head(self, h: torch.Tensor, table: torch.Tensor, cap: float | None) -> torch.Tensor:
        self.counts["head"] += 1
        return softcap(self.linear(h, table), cap)

    def head_labels(self, h: torch.Tensor, table: torch.Tensor, label_ids: torch.Tensor, cap: float | None) -> torch.Tensor:
        self.counts["head_labels"] += 1
        # one label at a time: a matmul's sums also depend on how many columns it has
        x = h.float()
        logits = [(x * row).sum(-1) for row in table[label_ids.long()].float()]
        return softcap(torch.stack(logits, 1).to(h.dtype), cap)

    def head_logsumexp(self, h: torch.Tensor, table: torch.Tensor, cap: float | None) -> torch.Tensor:
        self.counts["head_logsumexp"] += 1
        total = torch.full((h.shape[0],), float("-inf"), device=h.device)
        for chunk in table.split(VOCAB_CHUNK):
            total = torch.logaddexp(total, torch.logsumexp(softcap(self.linear(h, chunk), cap), -1))
        return total
