"""Per-layer embeddings: the looked-up and the projected part combined, for a slice of the layers (spec section 2.3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lastrow.kernels._triton import cdiv, gdc_launch_dependents, gdc_wait, jit, next_power_of_2, round_to, tl
from lastrow.kernels.add_norm import rms_norm
from lastrow.kernels.split_linear import load_sum, pdl_launch, splits_of, use_pdl


def lookup_scale(p: int, dtype: torch.dtype) -> float:
    """sqrt(P) as transformers holds it: rounded to the activation dtype (exact for the published P of 256)."""
    return float(torch.tensor(p**0.5, dtype=dtype))


def reference(
    context: torch.Tensor,
    ids: torch.Tensor,
    table: torch.Tensor,
    norm_weight: torch.Tensor,
    first_layer: int,
    hidden_size: int,
    eps: float,
) -> torch.Tensor:
    """context [T, n*P], may be overwritten: the scaled embedding times the projection rows of layers first_layer .. first_layer+n-1.
    table [V, L*P], layer-major, possibly in host memory and in another dtype than context. Returns [T, n, P].

    out = (norm(context * H^-1/2) * norm_weight + table[ids] * P^1/2) * 2^-1/2, roundings as in transformers."""
    p = norm_weight.shape[0]
    n = context.shape[1] // p
    columns = slice(first_layer * p, (first_layer + n) * p)
    rows = F.embedding(ids.to(table.device), table[:, columns]).to(device=context.device, dtype=context.dtype).view(-1, n, p)
    scale = lookup_scale(p, context.dtype)
    if context.dtype is torch.float32:  # the same sum with the scales in its weights: fewer passes over memory
        projected = rms_norm(context.view(-1, n, p), norm_weight * 2**-0.5, eps * hidden_size, overwrite=True)
        return projected.add_(rows, alpha=scale * 2**-0.5)
    projected = rms_norm((context * hidden_size**-0.5).view(-1, n, p), norm_weight, eps)
    return (projected + rows * scale) * 2**-0.5


@jit
def ple_inputs_kernel(
    context_ptr, ids_ptr, table_ptr, weight_ptr, out_ptr, table_stride, first_column, layers, plane, context_scale, table_scale, eps,
    P: tl.constexpr, BLOCK: tl.constexpr, LAYERS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token and LAYERS layers per program."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * LAYERS + tl.arange(0, LAYERS)
    c = tl.arange(0, BLOCK)
    mask = (i < layers)[:, None] & (c < P)[None, :]
    offset = i[:, None] * P + c[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(ids_ptr + t).to(tl.int64)
    looked_up = tl.load(table_ptr + row * table_stride + first_column + offset, mask=mask, other=0.0).to(tl.float32)
    x = load_sum(context_ptr, t * layers * P + offset, mask, plane, SPLITS, dtype)
    x = round_to(x * context_scale, dtype)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / P + eps)
    weight = tl.load(weight_ptr + c, mask=c < P, other=0.0).to(tl.float32)
    y = round_to(x * rstd[:, None] * weight[None, :], dtype) + round_to(looked_up * table_scale, dtype)
    tl.store(out_ptr + t * layers * P + offset, (round_to(y, dtype) * 0.7071067811865476).to(dtype), mask=mask)


def triton(
    context: torch.Tensor,
    ids: torch.Tensor,
    table: torch.Tensor,
    norm_weight: torch.Tensor,
    first_layer: int,
    hidden_size: int,
    eps: float,
    *,
    layers_per_program: int = 2,
    warps: int = 2,
) -> torch.Tensor:
    """`reference` in one pass. A table in host memory must be pinned (`table.pin_memory()`): the kernel then reads its rows
    over the bus, also inside a CUDA graph. context may be partial sums, [splits, T, n*P] (split_linear.py)."""
    (tokens, width), p, dtype = context.shape[-2:], norm_weight.shape[0], norm_weight.dtype
    n = width // p
    out = torch.empty(tokens, n, p, device=context.device, dtype=dtype)
    if tokens:
        scale, pdl = lookup_scale(p, dtype), use_pdl(context)
        ple_inputs_kernel[(tokens, cdiv(n, layers_per_program))](
            context, ids, table, norm_weight, out, table.stride(0), first_layer * p, n, tokens * width,
            hidden_size**-0.5, scale, eps, p, next_power_of_2(p), layers_per_program, splits_of(context), pdl,
            num_warps=warps, **pdl_launch(pdl),
        )  # fmt: skip
    return out
