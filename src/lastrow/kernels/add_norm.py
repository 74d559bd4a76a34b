"""RMSNorm, alone and fused with the residual stream (spec sections 2.1 and 2.4)."""

from __future__ import annotations

from functools import lru_cache

import torch

from lastrow.kernels._triton import cdiv, gdc_launch_dependents, gdc_wait, jit, next_power_of_2, round_to, tl
from lastrow.kernels.split_linear import load_sum, pdl_launch, splits_of, use_pdl


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, overwrite: bool = False) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; fp32 inside, one rounding to x.dtype. The weight is plain w, not 1 + w.

    overwrite: x is needed no more and may hold the result, which spares a CPU's caches one tensor."""
    if x.dtype is torch.float32:
        scale = inverse_rms(x, eps)
        y = x.mul_(scale) if overwrite else x * scale
        return y if weight is None else y.mul_(weight)
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, which stays with size 1; fewer passes over memory than F.rms_norm on a CPU."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@lru_cache(maxsize=8)
def _constant(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor([value], device=device)


def reference(
    h: torch.Tensor,
    x: torch.Tensor,
    post_weight: torch.Tensor,
    pre_weight: torch.Tensor | None,
    scalar: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The seam between two blocks: x' = (x + norm(h) * post_weight) [* scalar]; h' = norm(x') * pre_weight.

    h, x: [T, H], block output and residual (both may be overwritten). scalar: [1], the layer scalar. Returns (x', h' or None).
    Roundings as in transformers: after the norm, the add, the product with the scalar, and the second norm."""
    fused = x.dtype is torch.float32
    x = x.addcmul_(rms_norm(h, None, eps, overwrite=True), post_weight) if fused else x + rms_norm(h, post_weight, eps)
    if scalar is not None:
        x = x.mul_(scalar)
    return x, None if pre_weight is None else rms_norm(x, pre_weight, eps)


@jit(do_not_specialize=["rows"])
def add_norm_kernel(
    h_ptr, x_ptr, post_ptr, pre_ptr, scalar_ptr, out_ptr, next_ptr, rows, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_SCALAR: tl.constexpr, HAS_PRE: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows per program. Rounds where the reference rounds, so in bf16 the two differ by summation order only."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    inside = c < H
    mask = (r < rows)[:, None] & inside[None, :]
    offset = r[:, None] * H + c[None, :]
    post = tl.load(post_ptr + c, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    h = load_sum(h_ptr, offset, mask, rows * H, SPLITS, dtype)
    rstd = 1.0 / tl.sqrt(tl.sum(h * h, 1) / H + eps)
    x = round_to(x + round_to(h * rstd[:, None] * post[None, :], dtype), dtype)
    if HAS_SCALAR:
        x = round_to(x * tl.load(scalar_ptr).to(tl.float32), dtype)
    tl.store(out_ptr + offset, x.to(dtype), mask=mask)
    if HAS_PRE:
        pre = tl.load(pre_ptr + c, mask=inside, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / H + eps)
        tl.store(next_ptr + offset, (x * rstd[:, None] * pre[None, :]).to(dtype), mask=mask)


def triton(
    h: torch.Tensor,
    x: torch.Tensor,
    post_weight: torch.Tensor,
    pre_weight: torch.Tensor | None,
    scalar: torch.Tensor | None,
    eps: float,
    *,
    rows: int = 1,
    warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`reference` in one pass; x is overwritten and returned. h may be partial sums, [splits, T, H] (split_linear.py)."""
    tokens, hidden = x.shape
    pdl = use_pdl(x)
    following = None if pre_weight is None else torch.empty_like(x)
    if tokens:
        add_norm_kernel[(cdiv(tokens, rows),)](
            h, x, post_weight, pre_weight, scalar, x, following, tokens, eps,
            hidden, next_power_of_2(hidden), rows, scalar is not None, pre_weight is not None, splits_of(h), pdl,
            num_warps=warps, **pdl_launch(pdl),
        )  # fmt: skip
    return x, following
