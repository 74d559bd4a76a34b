"""Token embedding with its scale, and the input norm of the first layer (spec section 2.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lastrow.kernels._triton import jit, next_power_of_2, round_to, tl
from lastrow.kernels.add_norm import rms_norm


def reference(
    ids: torch.Tensor, table: torch.Tensor, scale: float, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T] int32, table [V, H] -> residual x = table[ids] * scale and h = norm(x) * norm_weight, both [T, H].

    scale is already rounded to the table's dtype (39.25 in bf16 for E2B), as the published runs have it."""
    x = F.embedding(ids, table) * scale
    return x, rms_norm(x, norm_weight, eps)


@jit
def embedding_kernel(ids_ptr, table_ptr, weight_ptr, x_ptr, h_ptr, scale, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < H
    row = tl.load(ids_ptr + t).to(tl.int64)
    x = round_to(tl.load(table_ptr + row * H + c, mask=inside, other=0.0).to(tl.float32) * scale, dtype)
    tl.store(x_ptr + t * H + c, x.to(dtype), mask=inside)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(h_ptr + t * H + c, (x * rstd * weight).to(dtype), mask=inside)


def triton(
    ids: torch.Tensor, table: torch.Tensor, scale: float, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference` in one pass. Padding ids must be rows of the table (0 will do)."""
    tokens, hidden = ids.shape[0], table.shape[1]
    x = torch.empty(tokens, hidden, device=table.device, dtype=table.dtype)
    h = torch.empty_like(x)
    if tokens:
        embedding_kernel[(tokens,)](ids, table, norm_weight, x, h, scale, eps, hidden, next_power_of_2(hidden), num_warps=4)
    return x, h
