"""Per-layer embeddings: the looked-up and the projected part combined, for a slice of the layers (spec section 2.3)."""

from __future__ import annotations

import torch

from lastrow.kernels.add_norm import rms_norm


def reference(
    context: torch.Tensor,
    ids: torch.Tensor,
    table: torch.Tensor,
    norm_weight: torch.Tensor,
    first_layer: int,
    hidden_size: int,
    eps: float,
) -> torch.Tensor:
    """context [T, n*P]: the scaled embedding times the projection rows of layers first_layer .. first_layer+n-1.
    table [V, L*P], layer-major, possibly in host memory and in another
    dtype than context. Returns [T, n, P].

    out = (norm(context * H^-1/2) * norm_weight + table[ids] * P^1/2) * 2^-1/2, roundings as in transformers."""
    p = norm_weight.shape[0]
    n = context.shape[1] // p
    columns = slice(first_layer * p, (first_layer + n) * p)
    looked_up = table[ids.long().to(table.device), columns].to(device=context.device, dtype=context.dtype).view(-1, n, p) * p**0.5
    projected = rms_norm((context * hidden_size**-0.5).view(-1, n, p), norm_weight, eps)
    return (projected + looked_up) * 2**-0.5
