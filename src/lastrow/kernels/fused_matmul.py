"""Two matmuls of many rows with the elementwise kernel behind them folded in: q/k/v with its epilogue, the PLE gate.

They save a pass over [T, columns] each. Roundings are those of the separate kernels, but a head's sum of squares is added in
another order, so now and then a value differs by one rounding: batch invariance keeps to the separate ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lastrow.kernels import ple_gate, qkv_epilogue
from lastrow.kernels._triton import TensorDescriptor, cdiv, gelu_tanh, jit, round_to, tl
from lastrow.kernels.kv_cache import PagedKV, store_heads
from lastrow.kernels.matmul import num_programs


@dataclass(frozen=True, slots=True)
class FusedConfig:
    """m: rows of a tile. k: of one step. group: row tiles walked together. warps, stages."""

    m: int = 128
    k: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 3


def reference_qkv(
    h: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    q_weight: torch.Tensor,
    head_dim: int,
    eps: float,
    k_weight: torch.Tensor,
    kv: PagedKV,
    slots: torch.Tensor,
    kv_heads: int,
) -> torch.Tensor:
    """h [T, H], weight [(heads + 2 kv_heads) * head_dim, H] -> q [T, heads, head_dim]; K and V to the pool."""
    q = qkv_epilogue.reference(F.linear(h, weight), positions, rope, q_weight, head_dim, eps, k_weight, kv, slots, kv_heads)
    assert q is not None
    return q


@jit(do_not_specialize=["M"])
def qkv_matmul_kernel(
    x_desc, w_desc, q_desc, positions_ptr, slots_ptr, rope_ptr, q_weight_ptr, k_weight_ptr, k_ptr, v_ptr, k_scale_ptr,
    v_scale_ptr, M, K, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, QUANT_MAX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Persistent; a tile is BM rows of one head, so the head's norm and rotation stay in the program."""
    dtype: tl.constexpr = q_desc.dtype
    HEADS: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    num_m = tl.cdiv(M, BM)
    for tile in tl.range(tl.program_id(0), num_m * HEADS, PROGRAMS, flatten=True):
        first = tile // (GROUP * HEADS) * GROUP
        rows = tl.minimum(num_m - first, GROUP)
        m = (first + tile % (GROUP * HEADS) % rows) * BM
        head = tile % (GROUP * HEADS) // rows
        acc = tl.zeros([BM, D], tl.float32)
        for k in range(tl.cdiv(K, BK)):
            x = x_desc.load([m, k * BK])
            w = w_desc.load([head * D, k * BK])
            acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        y = round_to(acc, dtype)
        rstd = 1.0 / tl.sqrt(tl.sum(y * y, 1) / D + eps)
        a, b = y.reshape(BM, 2, D // 2).permute(0, 2, 1).split()
        # no branches: a loop with one is not flattened, and then tiles do not overlap
        r = m + tl.arange(0, BM)
        j = tl.arange(0, D // 2)
        is_q = head < Q_HEADS
        is_v = head >= Q_HEADS + KV_HEADS
        position = tl.load(positions_ptr + r, mask=r < M, other=0).to(tl.int64)
        turn = rope_ptr + position[:, None] * D + j[None, :]
        cos = tl.load(turn, mask=(r < M)[:, None] & (is_v == 0), other=1.0).to(tl.float32)
        sin = tl.load(turn + D // 2, mask=(r < M)[:, None] & (is_v == 0), other=0.0).to(tl.float32)
        a = round_to(a * rstd[:, None] * load_weight(q_weight_ptr, k_weight_ptr, j, is_q, is_v)[None, :], dtype)
        b = round_to(b * rstd[:, None] * load_weight(q_weight_ptr, k_weight_ptr, D // 2 + j, is_q, is_v)[None, :], dtype)
        left = round_to(a * cos - b * sin, dtype)
        right = round_to(b * cos + a * sin, dtype)
        q_desc.store([m, head * D], left.to(dtype))  # out of bounds, so nothing, for k and v heads
        q_desc.store([m, head * D + D // 2], right.to(dtype))
        slot = tl.load(slots_ptr + r, mask=(r < M) & (is_q == 0), other=-1).to(tl.int64)
        kv_head = (head - Q_HEADS) % KV_HEADS
        store_heads(left, right, k_ptr, k_scale_ptr, slot, kv_head, (slot >= 0) & (is_v == 0), KV_HEADS, D, QUANT_MAX)
        store_heads(left, right, v_ptr, v_scale_ptr, slot, kv_head, (slot >= 0) & is_v, KV_HEADS, D, QUANT_MAX)


@jit
def load_weight(q_weight_ptr, k_weight_ptr, j, is_q, is_v):
    """The norm weight of a query or key head; 1 for values."""
    w = tl.load(q_weight_ptr + j, mask=(j >= 0) & is_q, other=0.0).to(tl.float32)
    w += tl.load(k_weight_ptr + j, mask=(j >= 0) & (is_q == 0) & (is_v == 0), other=0.0).to(tl.float32)
    return tl.where((j >= 0) & is_v, 1.0, w)


def triton_qkv(
    h: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    q_weight: torch.Tensor,
    head_dim: int,
    eps: float,
    k_weight: torch.Tensor,
    kv: PagedKV,
    slots: torch.Tensor,
    kv_heads: int,
    *,
    config: FusedConfig | None = None,
) -> torch.Tensor:
    """`reference_qkv` for head dims up to 256 (a head is the width of a tile)."""
    c = config or FusedConfig()
    (t, k), heads = h.shape, weight.shape[0] // head_dim - 2 * kv_heads
    q = torch.empty(t, heads, head_dim, device=h.device, dtype=h.dtype)
    if not t:
        return q
    x_desc = TensorDescriptor(h, [t, k], [h.stride(0), 1], [c.m, c.k])
    w_desc = TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], [head_dim, c.k])
    q_desc = TensorDescriptor(q, [t, heads * head_dim], [heads * head_dim, 1], [c.m, head_dim // 2])
    programs = min(num_programs(h.device), cdiv(t, c.m) * (heads + 2 * kv_heads))
    qkv_matmul_kernel[(programs,)](
        x_desc, w_desc, q_desc, positions, slots, rope, q_weight, k_weight, kv.k, kv.v, kv.k_scale, kv.v_scale, t, k, eps,
        heads, kv_heads, head_dim, c.m, c.k, c.group, programs, kv.quant_max, "ieee" if h.dtype is torch.float32 else "tf32",
        num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return q


def reference_ple_gate(x: torch.Tensor, weight: torch.Tensor, ple: torch.Tensor, index: int) -> torch.Tensor:
    """x [T, H], weight [P, H], ple [T, n, P] -> gelu_tanh(x @ weight.T) * ple[:, index], [T, P]."""
    return ple_gate.reference(F.linear(x, weight), ple, index)


@jit
def ple_gate_matmul_kernel(
    x_desc, w_desc, ple_desc, out_desc, K, ple_column, BM: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """program: BM rows, all P columns."""
    dtype: tl.constexpr = out_desc.dtype
    m = tl.program_id(0) * BM
    acc = tl.zeros([BM, P], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        x = x_desc.load([m, k])
        w = w_desc.load([0, k])
        acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
    ple = ple_desc.load([m, ple_column]).to(tl.float32)
    out_desc.store([m, 0], (round_to(gelu_tanh(round_to(acc, dtype)), dtype) * ple).to(dtype))


def triton_ple_gate(
    x: torch.Tensor, weight: torch.Tensor, ple: torch.Tensor, index: int, *, config: FusedConfig | None = None
) -> torch.Tensor:
    """`reference_ple_gate` for P up to 256, a power of two."""
    c = config or FusedConfig(m=64, warps=4, stages=4)
    (t, k), p = x.shape, weight.shape[0]
    out = torch.empty(t, p, device=x.device, dtype=x.dtype)
    if t:
        columns = ple.shape[1] * p
        ple_gate_matmul_kernel[(cdiv(t, c.m),)](
            TensorDescriptor(x, [t, k], [x.stride(0), 1], [c.m, c.k]),
            TensorDescriptor(weight, [p, k], [weight.stride(0), 1], [p, c.k]),
            TensorDescriptor(ple, [t, columns], [columns, 1], [c.m, p]),
            TensorDescriptor(out, [t, p], [p, 1], [c.m, p]),
            k, index * p, c.m, p, c.k, c.stages, "ieee" if x.dtype is torch.float32 else "tf32", num_warps=c.warps,
        )  # fmt: skip
    return out
