"""Rotary tables of the two attention types (spec section 2.6)."""

from __future__ import annotations

import torch


def rope_table(
    head_dim: int, theta: float, positions: int, rotated_pairs: int | None, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """cos and sin, [positions, 2, head_dim // 2] in `dtype` (angles in fp32, rounded once, as transformers casts them).

    rotated_pairs: pairs that rotate, the rest has frequency 0 ("proportional" RoPE: the exponent's denominator stays
    head_dim). None: all."""
    pair = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    frequency = theta ** (-2.0 * pair / head_dim)
    if rotated_pairs is not None:
        frequency = torch.where(pair < rotated_pairs, frequency, torch.zeros_like(frequency))
    angle = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], 1).to(dtype)


def apply_rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, d], cos_sin [T, 2, d // 2]: element j turns with element j + d/2."""
    cos, sin = cos_sin.unsqueeze(1).unbind(2)
    pairs = x.view(*x.shape[:-1], 2, -1)
    a, b = pairs.unbind(2)
    if x.dtype is not torch.float32:  # every product rounds, as in transformers
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    out = pairs * cos.unsqueeze(2)
    left, right = out.unbind(2)
    left.addcmul_(b, sin, value=-1)
    right.addcmul_(a, sin)
    return out.view(x.shape)
