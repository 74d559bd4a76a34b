"""The output head: all logits, or only the rows of some labels, or the logsumexp alone (spec section 2.10)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

VOCAB_CHUNK = 16384


def softcap(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(logits / cap) in fp32; cap None: fp32 logits as they are."""
    logits = logits.float()
    return logits if cap is None else cap * torch.tanh(logits / cap)


def reference(h: torch.Tensor, table: torch.Tensor, cap: float | None) -> torch.Tensor:
    """h [R, H] after the final norm, table [V, H] (unscaled token table) -> softcapped fp32 logits [R, V]."""
    return softcap(F.linear(h, table), cap)


def reference_labels(h: torch.Tensor, table: torch.Tensor, label_ids: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Logits [R, n] of label_ids [n] only: n rows of the table are read instead of V."""
    return softcap(F.linear(h, table[label_ids.long()]), cap)


def reference_logsumexp(h: torch.Tensor, table: torch.Tensor, cap: float | None) -> torch.Tensor:
    """log sum exp over the whole vocabulary of the softcapped logits, [R] fp32, without holding [R, V]."""
    total = torch.full((h.shape[0],), float("-inf"), device=h.device)
    for chunk in table.split(VOCAB_CHUNK):
        total = torch.logaddexp(total, torch.logsumexp(softcap(F.linear(h, chunk), cap), -1))
    return total
