"""Matmuls of few rows: K divided among programs, so that every multiprocessor streams its share of the weight.

The partial sums stay apart, [splits, M, N] fp32: whatever reads them next (add_norm, qkv_epilogue, ple_gate) adds them in
ascending order on its way in, which saves a launch and keeps the result deterministic. The vendor's matmul sums in another
order, so batch invariance takes whole sums: one program per tile of the weight, whose bits are then those of the vendor's unsplit
matmul (an H200, every tile tried; engine/invariance.py tests it at start-up)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lastrow.kernels._triton import INTERPRETED, TensorDescriptor, cdiv, gdc_launch_dependents, gdc_wait, gelu_tanh, jit, round_to, tl

MAX_ROWS = 64
"""More rows are no longer bound by the weight's bytes, and the vendor's matmul wins."""
PROGRAMS = 200
"""Programs aimed at: 1.5 per multiprocessor of an H200 (132 and 264 were slower, docs/benchmarks)."""

LONG_K = 6144
"""A sum this long fills its program's pipeline by itself; more programs would only leave more partial sums to read."""


def reference(x: torch.Tensor, weight: torch.Tensor, splits: int) -> torch.Tensor:
    """x [M, K], weight [N, K] -> partial sums [splits, M, N] fp32 whose sum over the first axis is x @ weight.T."""
    parts = zip(x.float().chunk(splits, 1), weight.float().chunk(splits, 1), strict=True)
    return torch.stack([F.linear(a, w) for a, w in parts])


@jit(do_not_specialize=["M"])
def split_linear_kernel(
    x_desc, w_desc, w_ptr, w_stride, out_ptr, M, N,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr, GEGLU: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """program (BN weight rows, SPAN of K). The weight is the left operand: its rows fill the tensor cores' M, the few rows N.

    AHEAD: the first steps (0, 1 or 2), whose weights do not wait for the kernel in front.
    GEGLU: weight rows alternate gate, up, K is not divided, and the output [M, N/2] is in x's dtype."""
    n0 = tl.program_id(0) * BN
    k0 = tl.program_id(1) * SPAN
    if AHEAD > 0:
        n = n0 + tl.arange(0, BN)
        first = w_ptr + n[:, None].to(tl.int64) * w_stride + k0 + tl.arange(0, BK)[None, :]
        w0 = tl.load(first, mask=(n < N)[:, None], other=0.0)
        if AHEAD > 1:
            w1 = tl.load(first + BK, mask=(n < N)[:, None], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BN, BM], tl.float32)
    if AHEAD > 0:
        acc = tl.dot(w0, x_desc.load([0, k0]).T, acc, input_precision=PRECISION)
        if AHEAD > 1:
            acc = tl.dot(w1, x_desc.load([0, k0 + BK]).T, acc, input_precision=PRECISION)
    for k in tl.range(AHEAD * BK, SPAN, BK, num_stages=STAGES):
        w = w_desc.load([n0, k0 + k])
        x = x_desc.load([0, k0 + k])
        acc = tl.dot(w, x.T, acc, input_precision=PRECISION)
    m = tl.arange(0, BM)
    if GEGLU:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        gate, up = acc.reshape(BN // 2, 2, BM).permute(0, 2, 1).split()
        y = (round_to(gelu_tanh(round_to(gate, dtype)), dtype) * round_to(up, dtype)).to(dtype)
        n = n0 // 2 + tl.arange(0, BN // 2)
        tl.store(out_ptr + m[None, :] * (N // 2) + n[:, None], y, mask=(m < M)[None, :] & (n < N // 2)[:, None])
    else:
        n = n0 + tl.arange(0, BN)
        row = (tl.program_id(1) * M + m).to(tl.int64)
        tl.store(out_ptr + row[None, :] * N + n[:, None], acc, mask=(m < M)[None, :] & (n < N)[:, None])


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """n: weight rows per program. k: of one step. splits: programs that share a weight row. stages: steps in flight. ahead: steps
    whose weights are loaded before the kernel in front has ended."""

    n: int
    k: int
    splits: int
    stages: int = 3
    ahead: int = 0


def split_config(weight_rows: int, k: int, geglu: bool = False, rows: int = MAX_ROWS, whole: bool = False) -> SplitConfig:
    """Tile and splits of a weight [weight_rows, k] for so many rows, the best found on an H200 for the shapes of E2B. whole: K is not
    divided. Raises ValueError for a k that no step divides."""
    step = next((size for size in (128, 64, 32, 16) if k % size == 0), 0)
    if not step:
        raise ValueError(f"a weight has {k} columns: the Triton kernels need a multiple of 16")
    n = 64 if weight_rows >= 64 else 16
    if whole:  # few programs, so each of them has as many bytes in flight as fit
        return SplitConfig(n, 256, 1, 4) if rows <= 32 and k % 256 == 0 else SplitConfig(n, step, 1, 6)
    tiles, steps = cdiv(weight_rows, n), k // step
    long, many = k >= LONG_K, rows > 32
    most = 4 if long or many else 16  # partial sums of many rows are bytes that the reader waits for
    fitting = [s for s in range(1, most + 1) if steps % s == 0 and tiles * s <= PROGRAMS]
    splits = 1 if geglu or not fitting else fitting[-1]
    stages = 6 if long else 4 if many and not geglu else 3
    # registers for weights ahead cost many rows more than the wait does
    return SplitConfig(n, step, splits, stages, 0 if long or many or geglu else min(2, steps // splits))


def triton(x: torch.Tensor, weight: torch.Tensor, *, geglu: bool = False, whole: bool = False) -> torch.Tensor:
    """`reference` with the splits of `split_config`, or one with whole=True; with geglu=True and a weight from geglu.pack the finished
    output [M, N/2]."""
    (m, k), n = x.shape, weight.shape[0]
    c = split_config(n, k, geglu, m, whole)
    bm = 16 if m <= 16 else 32 if m <= 32 else 64
    if geglu:
        out = torch.empty(m, n // 2, device=x.device, dtype=x.dtype)
    else:
        out = torch.empty(c.splits, m, n, device=x.device, dtype=torch.float32)
    x_desc = TensorDescriptor(x, [m, k], [x.stride(0), 1], [bm, c.k])
    w_desc = TensorDescriptor(weight, [n, k], [weight.stride(0), 1], [c.n, c.k])
    pdl = use_pdl(x)
    split_linear_kernel[(cdiv(n, c.n), c.splits)](
        x_desc, w_desc, weight, weight.stride(0), out, m, n, bm, c.n, c.k, k // c.splits, geglu, c.stages, c.ahead,
        "ieee" if x.dtype is torch.float32 else "tf32", pdl, num_warps=4, **pdl_launch(pdl),
    )  # fmt: skip
    return out


def use_pdl(x: torch.Tensor) -> bool:
    """Programmatic dependent launch: a kernel's start overlaps the end of the one in front. Worth it, and used, for few rows."""
    return not INTERPRETED and x.is_cuda and x.shape[-2] <= MAX_ROWS


def pdl_launch(pdl: bool) -> dict[str, bool]:
    """The launch option that goes with a kernel's PDL argument."""
    return {"launch_pdl": True} if pdl else {}


@jit
def load_sum(ptr, offset, mask, plane, SPLITS: tl.constexpr, dtype: tl.constexpr):
    """The value at `offset`: as it is (SPLITS 0), or the sum of SPLITS partial planes of `plane` elements, rounded to dtype."""
    x = tl.load(ptr + offset, mask=mask, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SPLITS):
        x += tl.load(ptr + s * plane + offset, mask=mask, other=0.0)
    if SPLITS > 0:
        x = round_to(x, dtype)
    return x


def splits_of(x: torch.Tensor) -> int:
    """SPLITS of `load_sum` for a tensor that may hold partial sums: 0 for a plain [M, N]."""
    return x.shape[0] if x.dim() == 3 else 0
