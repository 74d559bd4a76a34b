"""RMSNorm, alone and fused with the residual stream (spec sections 2.1 and 2.4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; fp32 inside, one rounding to x.dtype. The weight is plain w, not 1 + w."""
    if x.dtype is torch.float32:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def reference(
    h: torch.Tensor,
    x: torch.Tensor,
    post_weight: torch.Tensor,
    pre_weight: torch.Tensor | None,
    scalar: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The seam between two blocks: x' = (x + norm(h) * post_weight) [* scalar]; h' = norm(x') * pre_weight.

    h, x: [T, H], block output and residual (x may be overwritten). scalar: [1], the layer scalar. Returns (x', h' or None).
    Roundings as in transformers: after the norm, the add, the product with the scalar, and the second norm."""
    x = x + rms_norm(h, post_weight, eps)
    if scalar is not None:
        x = x * scalar
    return x, None if pre_weight is None else rms_norm(x, pre_weight, eps)
