"""x @ weight.T with one fixed order of summation, and the same with GeGLU behind it.

The vendor's matmuls split K when there are few rows, which changes a row's bits with the batch; this one never does. On
an H200 its bits equal the vendor's unsplit ones for every tile size tried, so the two may share a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F

from lastrow.kernels._triton import TensorDescriptor, cdiv, gelu_tanh, jit, round_to, tl

RowProduct = Callable[[], torch.Tensor]
PARTS, BATCHED_ROWS, BATCHED_K = 4, 2, 2048  # longer sums and more rows are faster in one product
COLUMN_ROWS, COLUMN_WEIGHT = 64, 1 << 18  # more rows, or a smaller weight, and writing the product by rows again costs too much
COLUMN_TILE = 8


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K], weight [N, K] -> [M, N].

    fp32 on an AMD CPU takes other ways to few rows (EPYC, torch 2.13). One or two go through a batched product over four parts of the
    weight: MKL then reads it at 25 GB/s instead of 8 (one core, [3072, 192]) and on several cores at once, which its matrix-vector
    product does not there. Up to 64 rows of a large weight are `columns`. On an Intel CPU the matrix-vector product reads 12 GB/s on one
    core and 18 to 45 on two, and the batched product half (Emerald Rapids); columns are not measured there."""
    (m, k), n = x.shape, weight.shape[0]
    if on_amd(x) and m <= BATCHED_ROWS and _in_parts(weight):
        y = torch.bmm(weight.view(PARTS, n // PARTS, k), x.t().expand(PARTS, k, m)).view(n, m)
        return y.view(1, n) if m == 1 else y.t().contiguous()
    if takes_columns(x, COLUMN_ROWS) and n >= k and weight.numel() >= COLUMN_WEIGHT:
        return columns(x, weight)[:, :m].t().contiguous()
    return F.linear(x, weight)


def takes_columns(x: torch.Tensor, most: int) -> bool:
    """Whether a product of up to `most` rows on several cores is to be one of columns: the other way round MKL does not share few rows
    among the cores of an AMD CPU (two cores, [32768, 192]: 16 rows 2.8 instead of 5.8 ms, 3 rows 1.6 instead of 10.9)."""
    return on_amd(x) and BATCHED_ROWS < x.shape[0] <= most and torch.get_num_threads() > 1


def columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K], weight [N, K] -> [N, M or more]: more than four rows are filled up with zeros to a multiple of COLUMN_TILE, because of 15
    MKL makes twice the time of 16."""
    m = x.shape[0]
    return torch.mm(weight, (F.pad(x, (0, 0, 0, -m % COLUMN_TILE)) if m > 4 and m % COLUMN_TILE else x).t())


def row_product(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> RowProduct:
    """`reference` of one fp32 row on a CPU, x [1, K] -> out [1, N], to call again whenever x has changed."""
    n, k = weight.shape
    if on_amd(x) and _in_parts(weight):
        parts = weight.view(PARTS, n // PARTS, k)
        return partial(torch.bmm, parts, x.t().expand(PARTS, k, 1), out=out.view(PARTS, n // PARTS, 1))
    return partial(torch.mm, x, weight.t(), out=out)


def _in_parts(weight: torch.Tensor) -> bool:
    """Whether the weight can be a batch of parts."""
    n, k = weight.shape
    return k <= BATCHED_K and n % PARTS == 0 and weight.is_contiguous()


def on_amd(x: torch.Tensor) -> bool:
    """Whether products with x are those of fp32 on an AMD CPU."""
    return x.dtype is torch.float32 and x.device.type == "cpu" and is_amd()


@cache
def is_amd() -> bool:
    """Whether this is an AMD CPU, for which MKL has other code paths."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


@jit(do_not_specialize=["M"])
def matmul_kernel(
    x_desc, w_desc, out_desc, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, GEGLU: tl.constexpr,
    HALVES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Persistent. Every output is one fp32 sum over K in steps of BK, whatever M is.

    GEGLU: weight rows alternate gate, up; the output has N/2 columns. HALVES: store a tile in two parts (less shared memory)."""
    dtype: tl.constexpr = out_desc.dtype
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(N, BN)
    group = GROUP * num_n
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=True):
        first = tile // group * GROUP
        rows = tl.minimum(num_m - first, GROUP)
        m = (first + tile % group % rows) * BM
        n = tile % group // rows * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(tl.cdiv(K, BK)):
            x = x_desc.load([m, k * BK])
            w = w_desc.load([n, k * BK])
            acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        if GEGLU:
            gate, up = acc.reshape(BM, BN // 2, 2).split()
            y = round_to(gelu_tanh(round_to(gate, dtype)), dtype) * round_to(up, dtype)
            out_desc.store([m, n // 2], y.to(dtype))
        elif HALVES:
            left, right = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
            out_desc.store([m, n], left.to(dtype))
            out_desc.store([m, n + BN // 2], right.to(dtype))
        else:
            out_desc.store([m, n], acc.to(dtype))


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """Tile sizes, rows of tiles walked together (so that the weight stays in L2), warps, stages."""

    m: int = 128
    n: int = 256
    k: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 4
    halves: bool = True


LARGE = MatmulConfig()
MEDIUM = MatmulConfig(m=64, n=64, warps=4, halves=False)
SMALL = MatmulConfig(m=64, n=16, k=128, warps=4, halves=False)


def matmul_config(rows: int) -> MatmulConfig:
    return SMALL if rows <= 64 else MEDIUM if rows < 1000 else LARGE


@cache
def num_programs(device: torch.device) -> int:
    """Programs of a persistent kernel: one per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def triton(
    x: torch.Tensor, weight: torch.Tensor, *, geglu: bool = False, config: MatmulConfig | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`reference`, or with geglu=True and a weight from geglu.pack: gelu_tanh(x @ gate.T) * (x @ up.T), [M, N/2].

    x and weight need rows that start at multiples of 16 bytes (TMA)."""
    c = config or matmul_config(x.shape[0])
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty(m, n // 2 if geglu else n, device=x.device, dtype=x.dtype) if out is None else out
    if not m:
        return out
    x_desc = TensorDescriptor(x, [m, k], [x.stride(0), 1], [c.m, c.k])
    w_desc = TensorDescriptor(weight, [n, k], [weight.stride(0), 1], [c.n, c.k])
    out_desc = TensorDescriptor(out, list(out.shape), [out.stride(0), 1], [c.m, c.n // 2 if geglu or c.halves else c.n])
    programs = min(num_programs(x.device), cdiv(m, c.m) * cdiv(n, c.n))
    matmul_kernel[(programs,)](
        x_desc, w_desc, out_desc, m, n, k, c.m, c.n, c.k, c.group, programs, geglu, c.halves,
        "ieee" if x.dtype is torch.float32 else "tf32", num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return out
