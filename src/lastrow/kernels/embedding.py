"""Token embedding with its scale, and the input norm of the first layer (spec section 2.2)."""

from __future__ import annotations

import torch

from lastrow.kernels.add_norm import rms_norm


def reference(
    ids: torch.Tensor, table: torch.Tensor, scale: float, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T] int32, table [V, H] -> residual x = table[ids] * scale and h = norm(x) * norm_weight, both [T, H].

    scale is already rounded to the table's dtype (39.25 in bf16 for E2B), as the published runs have it."""
    x = table[ids.long()] * scale
    return x, rms_norm(x, norm_weight, eps)
