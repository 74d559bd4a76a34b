"""What one forward computes, as tensors: the argument of the model that replaces any global attention context."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lastrow.kernels.rows import QueryRows


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of S sequences and the R of them whose final hidden state is wanted.

    input_ids [T] int32. rows: all T rows. slots: (full, sliding), each [T] int32, where each token's K/V goes (block *
    block_size + offset; negative: nowhere). logits_indices [R] int64 into the T rows, ascending, or None when no row is
    wanted. wanted: the R rows (their positions, tables and lengths); None with logits_indices.
    copies: (full, sliding), each None or [n, 4] int32 as kernels/copy_tokens.py reads it, done after each owner's store."""

    input_ids: torch.Tensor
    rows: QueryRows
    slots: tuple[torch.Tensor, torch.Tensor]
    logits_indices: torch.Tensor | None = None
    wanted: QueryRows | None = None
    copies: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
