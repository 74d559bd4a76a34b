"""One row times a weight, with what stands in front of it (residual add, norms) and behind it (GeGLU, PLE gate) in the kernel.

A decode step of one sequence is a chain of these and of decode_attention: 7 launches per layer. With programmatic dependent
launch a kernel's weights are on their way while the kernel in front still runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lastrow.kernels import add_norm
from lastrow.kernels._triton import INTERPRETED, cdiv, gdc_launch_dependents, gdc_wait, gelu_tanh, jit, next_power_of_2, round_to, tl
from lastrow.kernels.matmul import num_programs
from lastrow.kernels.split_linear import pdl_launch

LONG_K = 2048
"""A longer row does not stay in one program's registers beside the weight: it is walked in steps."""


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    post_weight: torch.Tensor | None = None,
    pre_weight: torch.Tensor | None = None,
    scalar: torch.Tensor | None = None,
    geglu: bool = False,
    ple: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [1, K] -> (y [1, N], new residual [1, K] or None).

    In front: with residual [1, K], x becomes (residual + norm(x) * post_weight) [* scalar], the new residual; with pre_weight
    what is multiplied is norm(x) * pre_weight. Behind: geglu, weight from geglu.pack [2N, K]: gelu_tanh(gate) * up; ple [N]:
    gelu_tanh(y) * ple."""
    new = None
    if residual is not None:
        assert post_weight is not None
        new, normed = add_norm.reference(x.clone(), residual.clone(), post_weight, pre_weight, scalar, eps)
        x = new if normed is None else normed
    elif pre_weight is not None:
        x = add_norm.rms_norm(x, pre_weight, eps)
    y = F.linear(x, weight)
    if geglu:
        y = F.gelu(y[:, 0::2], approximate="tanh") * y[:, 1::2]
    return (y if ple is None else F.gelu(y, approximate="tanh") * ple), new


@jit
def gemv_kernel(
    x_ptr, residual_ptr, post_ptr, pre_ptr, scalar_ptr, new_ptr, w_ptr, ple_ptr, out_ptr, N, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_PRE: tl.constexpr,
    HAS_SCALAR: tl.constexpr, GEGLU: tl.constexpr, HAS_PLE: tl.constexpr, LOOP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """program: ROWS outputs; LOOP: then those further on by the grid, their weights loaded while the first are summed."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    PAIR: tl.constexpr = 2 if GEGLU else 1
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    inside = k < K
    # weights do not depend on the kernel in front: they are loaded before the wait
    w_row = w_ptr + (n * PAIR)[:, None].to(tl.int64) * K + k[None, :]
    w = tl.load(w_row, mask=(n < N)[:, None] & inside[None, :], other=0.0)
    if GEGLU:
        w_up = tl.load(w_row + K, mask=(n < N)[:, None] & inside[None, :], other=0.0)
    if HAS_RESIDUAL:
        post = tl.load(post_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if HAS_PRE:
        pre = tl.load(pre_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    h = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + k, mask=inside, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(h * h, 0) / K + eps)
        h = round_to(residual + round_to(h * rstd * post, dtype), dtype)
        if HAS_SCALAR:
            h = round_to(h * tl.load(scalar_ptr).to(tl.float32), dtype)
        if tl.program_id(0) == 0:
            tl.store(new_ptr + k, h.to(dtype), mask=inside)
    if HAS_PRE:
        rstd = 1.0 / tl.sqrt(tl.sum(h * h, 0) / K + eps)
        h = round_to(h * rstd * pre, dtype)
    step = tl.num_programs(0) * ROWS
    for n0 in range(tl.program_id(0) * ROWS, N, step):
        n = n0 + tl.arange(0, ROWS)
        y_row = w
        if GEGLU:
            up_row = w_up
        if LOOP:
            w_row += (step * PAIR).to(tl.int64) * K
            following = (n + step < N)[:, None] & inside[None, :]
            w = tl.load(w_row, mask=following, other=0.0)
            if GEGLU:
                w_up = tl.load(w_row + K, mask=following, other=0.0)
        y = tl.sum(y_row.to(tl.float32) * h[None, :], 1)
        if GEGLU:
            up = tl.sum(up_row.to(tl.float32) * h[None, :], 1)
            y = round_to(gelu_tanh(round_to(y, dtype)), dtype) * round_to(up, dtype)
        if HAS_PLE:
            y = round_to(gelu_tanh(round_to(y, dtype)), dtype) * tl.load(ple_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + n, y.to(dtype), mask=n < N)


@jit
def gemv_steps_kernel(
    x_ptr, w_ptr, out_ptr, N, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """program: ROWS outputs over K in steps of BLOCK, two steps of weights in flight."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    w_row = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    valid = (n < N)[:, None]
    w = tl.load(w_row, mask=valid & (k < K)[None, :], other=0.0)
    w_next = tl.load(w_row + BLOCK, mask=valid & (BLOCK + k < K)[None, :], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for k0 in range(0, K, BLOCK):
        w_after = tl.load(w_row + k0 + 2 * BLOCK, mask=valid & (k0 + 2 * BLOCK + k < K)[None, :], other=0.0)
        x = tl.load(x_ptr + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        w = w_next
        w_next = w_after
    tl.store(out_ptr + n, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), mask=n < N)


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """rows: outputs per program. waves: programs per multiprocessor, 0: one per `rows` outputs. block: of K, for long rows."""

    rows: int = 4
    warps: int = 4
    waves: int = 0
    block: int = 1024


def gemv_config(n: int, k: int, geglu: bool = False) -> GemvConfig:
    """Best found on an H200 for the shapes of E2B."""
    if k > LONG_K and not geglu:
        return GemvConfig(rows=1)
    if geglu:
        return GemvConfig(warps=8, waves=2) if n <= 8192 else GemvConfig(warps=4, waves=8)
    if n <= 512:
        return GemvConfig(rows=2)
    return GemvConfig(waves=4) if n > 65536 else GemvConfig(warps=8 if k > 1536 else 4)


def triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    post_weight: torch.Tensor | None = None,
    pre_weight: torch.Tensor | None = None,
    scalar: torch.Tensor | None = None,
    geglu: bool = False,
    ple: torch.Tensor | None = None,
    eps: float = 1e-6,
    pdl: bool = False,
    config: GemvConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`reference` in one launch; residual is left alone."""
    k = x.shape[1]
    n = weight.shape[0] // (2 if geglu else 1)
    c = config or gemv_config(n, k, geglu)
    out = torch.empty(1, n, device=x.device, dtype=x.dtype)
    pdl = pdl and not INTERPRETED
    blocks = cdiv(n, c.rows)
    if k > LONG_K and residual is None and pre_weight is None and not geglu and ple is None:
        gemv_steps_kernel[(blocks,)](x, weight, out, n, k, c.block, c.rows, pdl, num_warps=c.warps, **pdl_launch(pdl))
        return out, None
    new = None if residual is None else torch.empty_like(residual)
    programs = min(blocks, c.waves * num_programs(x.device)) if c.waves else blocks
    gemv_kernel[(programs,)](
        x, residual, post_weight, pre_weight, scalar, new, weight, ple, out, n, eps, k, next_power_of_2(k), c.rows,
        residual is not None, pre_weight is not None, scalar is not None, geglu, ple is not None,
        programs < blocks, pdl,
        num_warps=c.warps, **pdl_launch(pdl),
    )  # fmt: skip
    return out, new
