"""One new token per sequence: qkv epilogue, attention and the combination of splits in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lastrow.kernels import attention, qkv_epilogue
from lastrow.kernels._triton import (
    FP8_BITS,
    FP8_TO_BF16,
    INTERPRETED,
    L2E,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    next_power_of_2,
    round_to,
    tl,
)
from lastrow.kernels.attention import softmax_step
from lastrow.kernels.attention_rows import first_key, split_count
from lastrow.kernels.kv_cache import PagedKV, store_heads
from lastrow.kernels.qkv_epilogue import load_heads, norm_rope
from lastrow.kernels.rows import QueryRows
from lastrow.kernels.split_linear import pdl_launch, splits_of

LONG = 2048
"""Keys from which a context is long."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """chunk: keys of a split. keys: of one step. stages: up to 2, the first step's keys are loaded before the kernel in front ends
    and no load overlaps a step's arithmetic; from 3 on, stages - 1 steps are in flight."""

    chunk: int
    keys: int
    stages: int = 1
    warps: int = 8


def decode_config(rows: int, max_kv_len: int, window: int = 0) -> DecodeConfig:
    """Best found on an H200 for the shapes of E2B. At 256 keys inside a decode step: one row needs every split it can get, many rows
    fill the card with few, and the combination of splits costs each of them. At 1,984 and 7,936 keys behind the projection (64, 16
    and 1 rows; what lies between them follows by programs per multiprocessor: one with 32 keys a step, two with 16): steps in flight
    are worth more than keys before the wait, in full windows of many rows too."""
    if window and max_kv_len > window and rows >= 16:
        return DecodeConfig(128, 32, 3, 4) if rows > 32 else DecodeConfig(128, 64, 2)
    if not window and max_kv_len >= LONG:
        least = 128 if max_kv_len <= 4096 else 256
        chunk = min(max(next_power_of_2(rows * max_kv_len) // 128, least), 1024)
        return DecodeConfig(chunk, 32 if rows * max_kv_len <= 128 * chunk else 16, 3, 4)
    chunk = 32 if rows == 1 else 64 if rows <= 32 else 128
    return DecodeConfig(chunk, min(chunk, 64), 2 if chunk > 64 else 1)


@dataclass(frozen=True, slots=True)
class WarpsConfig:
    """Of decode_attention_warps. splits: of a row, at most. warps: of a program; a step is 16 keys of each. shared: the warps divide
    V's columns and have one maximum, at the price of barriers in every step; else each keeps its own sums of all columns, and they
    are added at the end."""

    splits: int
    warps: int
    shared: bool = False


def warps_supported(qkv: torch.Tensor, q_weight: torch.Tensor, kv: PagedKV, own: bool = False, k_eq_v: bool = False) -> bool:
    """8-bit K/V of dim 256 or 512 and at most eight query heads on each of its heads: E2B."""
    kv_heads, d = kv.k.shape[2:]
    heads = qkv.shape[-1] // d - (kv_heads * (1 if k_eq_v else 2) if own else 0)
    return q_weight.dtype is torch.bfloat16 and kv.is_quantized and d in (256, 512) and heads <= 8 * kv_heads and kv.block_size % 16 == 0


def warps_config(rows: int, max_kv_len: int, window: int, head_dim: int) -> WarpsConfig | None:
    """Best found on an H200 at 7,936 keys of E2B for 64, 16 and 1 rows (of one K/V head each); None where the tiles of `decode_config`
    were best: short contexts."""
    if window:
        return None if max_kv_len <= window else WarpsConfig(8 if rows < 16 else 4, 4)
    if max_kv_len < LONG:
        return None
    # two programs a multiprocessor; at least 128 keys each, and few enough for the last one, which combines them alone
    splits = max(min(264 // rows, 132, max_kv_len // 128), 1)
    return WarpsConfig(splits, 4, shared=True) if head_dim == 512 else None


def reference(
    qkv: torch.Tensor,
    rows: QueryRows,
    rope: torch.Tensor,
    q_weight: torch.Tensor,
    head_dim: int,
    eps: float,
    kv: PagedKV,
    block_table: torch.Tensor,
    window: int,
    k_weight: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    k_eq_v: bool = False,
) -> torch.Tensor:
    """qkv [R, (heads + k and v heads) * head_dim], the raw projections of one row per sequence -> attention output
    [R, heads, head_dim]. With k_weight and slots [R] the rows' K and V are stored first; without them the layer shares K/V
    and qkv holds q heads alone."""
    own: dict[str, Any] = {} if k_weight is None else dict(k_weight=k_weight, kv=kv, slots=slots, kv_heads=kv.k.shape[2], k_eq_v=k_eq_v)
    q = qkv_epilogue.reference(qkv, rows.positions, rope, q_weight, head_dim, eps, **own)
    assert q is not None
    return attention.reference(q, kv, rows, block_table, window)


@jit
def load_keys(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, n0, low, end, kv_head,
    BN: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, QUANT_MAX: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Keys n0 to n0 + BN - 1: both halves of K [BN, D/2] and V [BN, D] in dtype, their scales (1 when not quantized), and which of
    them lie in [low, end). A tile lies in one block."""
    cols = n0 + tl.arange(0, BN)
    ok = (cols < end) & (cols >= low)
    block = tl.load(table + n0 // BLOCK_SIZE, mask=n0 < end, other=0)
    row = (block * BLOCK_SIZE + n0 % BLOCK_SIZE + tl.arange(0, BN)).to(tl.int64) * KV_HEADS + kv_head
    half = k_ptr + row[:, None] * D + tl.arange(0, D // 2)[None, :]
    k1 = tl.load(half, mask=ok[:, None], other=0.0).to(dtype)
    k2 = tl.load(half + D // 2, mask=ok[:, None], other=0.0).to(dtype)
    v = tl.load(v_ptr + row[:, None] * D + tl.arange(0, D)[None, :], mask=ok[:, None], other=0.0).to(dtype)
    k_scale = tl.full([BN], 1.0, tl.float32)
    v_scale = tl.full([BN], 1.0, tl.float32)
    if QUANT_MAX > 0:
        k_scale = tl.load(k_scale_ptr + row, mask=ok, other=0.0)
        v_scale = tl.load(v_scale_ptr + row, mask=ok, other=0.0)
    return k1, k2, v, k_scale, v_scale, ok


@jit
def attend_keys(qa, qb, k1, k2, v, k_scale, v_scale, ok, m, total, acc, QUANT_MAX: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of `load_keys` added to the online softmax of queries qa, qb (halves, [GP, D/2])."""
    s = tl.dot(qb, k2.T, tl.dot(qa, k1.T, input_precision=PRECISION), input_precision=PRECISION)
    if QUANT_MAX > 0:
        s = s * k_scale[None, :]
    p, alpha, m, total = softmax_step(tl.where(ok[None, :], s, float("-inf")), m, total)
    if QUANT_MAX > 0:
        p = p * v_scale[None, :]
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m, total, acc


@jit
def widen(x, dtype: tl.constexpr):
    """Stored K or V in dtype, exactly. e4m3 to bf16 costs a slow F2F per value where the compiler does it (through fp16, 16 a
    clock); here the bits move into place, and times 2^120 sets the exponent's bias."""
    if FP8_BITS and x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(FP8_TO_BF16, "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return x.to(dtype)


@jit
def swap_columns(x, ROWS: tl.constexpr, D: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Columns of x [ROWS, D] in each group of A * B: a * B + b -> b * A + a."""
    return x.reshape(ROWS, D // (A * B), A, B).permute(0, 1, 3, 2).reshape(ROWS, D)


@jit(do_not_specialize=["splits", "plane", "chunk"])
def decode_attention_kernel(
    qkv_ptr, qkv_stride, positions_ptr, seq_ptr, slots_ptr, table_ptr, table_stride, rope_ptr, q_weight_ptr, k_weight_ptr,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, part_ptr, ml_ptr, counter_ptr, out_ptr, splits, plane, chunk, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, GP: tl.constexpr, GC: tl.constexpr, OWN: tl.constexpr, K_EQ_V: tl.constexpr,
    QUANT_MAX: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """program (row x K/V head, split). The split that holds the row's own position also stores its K and V; the last program
    of a row and head to arrive combines the splits in ascending order."""
    G: tl.constexpr = HEADS // KV_HEADS
    HD: tl.constexpr = D // 2
    # Of an 8-bit V the dot wants single bytes, one column of several keys a thread. Its columns change places, so that the
    # BYTES adjacent ones of a key that a thread reads at once are those of its tiles: lanes and warps make LANES of a row.
    LANES: tl.constexpr = 8 * WARPS if 8 * WARPS < D else D
    BYTES: tl.constexpr = 16 if 16 * LANES < D else D // LANES
    SWAP: tl.constexpr = STAGES > 2 and QUANT_MAX > 0 and BYTES > 1
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    r = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    c = tl.program_id(1)
    n = tl.load(positions_ptr + r) + 1
    low = first_key(n, WINDOW)
    base = (low // chunk + c) * chunk
    used = tl.cdiv(n, chunk) - low // chunk
    if base < n:  # the programs of splits that this row does not have end here
        table = table_ptr + tl.load(seq_ptr + r).to(tl.int64) * table_stride
        h = tl.arange(0, GP)
        j = tl.arange(0, HD)
        d = tl.arange(0, D)
        # nothing up to the wait depends on the kernel in front: positions, tables, weights and the keys of earlier steps
        cos = tl.load(rope_ptr + (n - 1).to(tl.int64) * D + j).to(tl.float32)
        sin = tl.load(rope_ptr + (n - 1).to(tl.int64) * D + HD + j).to(tl.float32)
        own_row = (tl.load(table + (n - 1) // BLOCK_SIZE) * BLOCK_SIZE + (n - 1) % BLOCK_SIZE).to(tl.int64) * KV_HEADS + kv_head
        begin = tl.maximum(base, low // BN * BN)
        end = tl.minimum(base + chunk, n - 1)  # of the keys of earlier steps
        if STAGES <= 2:
            k1, k2, v, k_scale, v_scale, ok = load_keys(
                k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, begin, low, end, kv_head, BN, BLOCK_SIZE, KV_HEADS, D, QUANT_MAX, dtype
            )
        else:
            block = tl.load(table + tl.minimum(begin, n - 1) // BLOCK_SIZE)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        src = qkv_ptr + r.to(tl.int64) * qkv_stride
        newest = base + chunk >= n
        if OWN:  # noqa: SIM102  one is known when compiling, the other is not
            if newest:
                one = kv_head + tl.arange(0, 1)
                slot = tl.load(slots_ptr + r).to(tl.int64)
                keep = (one >= 0) & (slot >= 0)
                a, b, squares = load_heads(src + HEADS * D, one, one >= 0, plane, D, SPLITS, dtype)
                rstd = 1.0 / tl.sqrt(squares / D + eps)
                ka, kb = norm_rope(a, b, rstd, k_weight_ptr, cos, sin, D, dtype)
                store_heads(round_to(ka, dtype), round_to(kb, dtype), k_ptr, k_scale_ptr, slot, one, keep, KV_HEADS, D, QUANT_MAX)
                if not K_EQ_V:
                    a, b, squares = load_heads(src + (HEADS + KV_HEADS) * D, one, one >= 0, plane, D, SPLITS, dtype)
                    rstd = 1.0 / tl.sqrt(squares / D + eps)
                va = round_to(a * rstd[:, None], dtype)
                vb = round_to(b * rstd[:, None], dtype)
                store_heads(va, vb, v_ptr, v_scale_ptr, slot, one, keep, KV_HEADS, D, QUANT_MAX)
                tl.debug_barrier()  # the newest key is read back below, by other threads of this program
        a, b, squares = load_heads(src + kv_head * G * D, h, h < G, plane, D, SPLITS, dtype)
        a, b = norm_rope(a, b, 1.0 / tl.sqrt(squares / D + eps), q_weight_ptr, cos, sin, D, dtype)
        qa = a.to(dtype)
        qb = b.to(dtype)
        m = tl.full([GP], -1e30, tl.float32)
        total = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, D], tl.float32)
        if newest:
            ka = tl.load(k_ptr + own_row * D + j).to(tl.float32)
            kb = tl.load(k_ptr + own_row * D + HD + j).to(tl.float32)
            own_d = d
            if SWAP:
                own_d = d // (LANES * BYTES) * (LANES * BYTES) + d % LANES * BYTES + d % (LANES * BYTES) // LANES
            one_v = tl.load(v_ptr + own_row * D + own_d).to(tl.float32)
            # + 0.0: where a thread holds one product, it would go unrounded into the sum with its neighbour's rounded one, and threads
            # that share a score would hold it with other last bits (head dim 32; racecheck found them storing it)
            m = tl.sum(qa.to(tl.float32) * ka[None, :] + 0.0, 1) + tl.sum(qb.to(tl.float32) * kb[None, :] + 0.0, 1)
            if QUANT_MAX > 0:  # past the L1: the load of older keys before the wait may have brought their line in, without this one's
                m = m * tl.load(k_scale_ptr + own_row, cache_modifier=".cg")
                one_v = one_v * tl.load(v_scale_ptr + own_row, cache_modifier=".cg")
            total += 1.0
            acc += one_v[None, :]
        if STAGES <= 2:
            m, total, acc = attend_keys(qa, qb, k1, k2, v, k_scale, v_scale, ok, m, total, acc, QUANT_MAX, PRECISION)
            for n0 in tl.range(begin + BN, end, BN, num_stages=STAGES):
                k1, k2, v, k_scale, v_scale, ok = load_keys(
                    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, n0, low, end, kv_head, BN, BLOCK_SIZE, KV_HEADS, D, QUANT_MAX, dtype
                )
                m, total, acc = attend_keys(qa, qb, k1, k2, v, k_scale, v_scale, ok, m, total, acc, QUANT_MAX, PRECISION)
        else:
            k_scale = tl.full([BN], 1.0, tl.float32)
            v_scale = tl.full([BN], 1.0, tl.float32)
            for n0 in tl.range(begin, end, BN, num_stages=STAGES):
                cols = n0 + tl.arange(0, BN)
                row = (block * BLOCK_SIZE + n0 % BLOCK_SIZE + tl.arange(0, BN)).to(tl.int64) * KV_HEADS + kv_head
                # the next tile's block number comes a step ahead: a load that waits for a load halves the stages
                block = tl.load(table + tl.minimum(n0 + BN, n - 1) // BLOCK_SIZE)
                # keys outside [low, end) are read, finite (kv_cache.finite), and weigh nothing: a mask costs instructions
                half = k_ptr + row[:, None] * D + j[None, :]
                k1 = widen(tl.load(half), dtype)
                k2 = widen(tl.load(half + HD), dtype)
                v = tl.load(v_ptr + row[:, None] * D + d[None, :])
                if SWAP:
                    v = swap_columns(v, BN, D, LANES, BYTES)
                v = widen(v, dtype)
                if QUANT_MAX > 0:
                    k_scale = tl.load(k_scale_ptr + row)
                    v_scale = tl.load(v_scale_ptr + row)
                ok = (cols < end) & (cols >= low)
                m, total, acc = attend_keys(qa, qb, k1, k2, v, k_scale, v_scale, ok, m, total, acc, QUANT_MAX, PRECISION)
            if SWAP:
                acc = swap_columns(acc, GP, D, BYTES, LANES)
        if used == 1:
            out = out_ptr + (r.to(tl.int64) * HEADS + kv_head * G + h)[:, None] * D + d[None, :]
            tl.store(out, (acc / total[:, None]).to(dtype), mask=(h < G)[:, None])
        else:
            first = tl.program_id(0).to(tl.int64) * splits * G
            part = first + c * G + h
            tl.store(part_ptr + part[:, None] * D + d[None, :], acc, mask=(h < G)[:, None])
            tl.store(ml_ptr + part * 2, m, mask=h < G)
            tl.store(ml_ptr + part * 2 + 1, total, mask=h < G)
            tl.debug_barrier()
            arrived = tl.atomic_add(counter_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
            if arrived == used - 1:
                tl.store(counter_ptr + tl.program_id(0), 0)
                g = tl.arange(0, GC)
                m_all = tl.full([GC], -1e30, tl.float32)
                total_all = tl.zeros([GC], tl.float32)
                acc_all = tl.zeros([GC, D], tl.float32)
                for e in tl.range(0, used, loop_unroll_factor=8):
                    at = first + e * G + g
                    m_e = tl.load(ml_ptr + at * 2, mask=g < G, other=-1e30, cache_modifier=".cg")
                    total_e = tl.load(ml_ptr + at * 2 + 1, mask=g < G, other=1.0, cache_modifier=".cg")
                    acc_e = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0, cache_modifier=".cg")
                    m_new = tl.maximum(m_all, m_e)
                    old = tl.exp2((m_all - m_new) * L2E)
                    new = tl.exp2((m_e - m_new) * L2E)
                    acc_all = acc_all * old[:, None] + acc_e * new[:, None]
                    total_all = total_all * old + total_e * new
                    m_all = m_new
                out = out_ptr + (r.to(tl.int64) * HEADS + kv_head * G + g)[:, None] * D + d[None, :]
                tl.store(out, (acc_all / total_all[:, None]).to(dtype), mask=(g < G)[:, None])


def triton(
    qkv: torch.Tensor,
    rows: QueryRows,
    rope: torch.Tensor,
    q_weight: torch.Tensor,
    head_dim: int,
    eps: float,
    kv: PagedKV,
    block_table: torch.Tensor,
    window: int,
    k_weight: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    k_eq_v: bool = False,
    *,
    counters: torch.Tensor,
    pdl: bool = False,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """`reference` in one launch; qkv may be partial sums, [splits, R, ..] (split_linear.py). A row must not read a position
    that another row of the same call writes: one row per sequence.

    counters: int32 zeros, at least R x K/V heads of them, left at zero; one buffer serves all layers of a stream.
    pdl: programmatic dependent launch, for a chain of kernels that all wait before they read; positions, tables and slots
    must have been written before the chain. The grid is sized by rows.max_kv_len, an upper bound."""
    (r, width), kv_heads = qkv.shape[-2:], kv.k.shape[2]
    own = k_weight is not None
    heads = width // head_dim - (kv_heads * (1 if k_eq_v else 2) if own else 0)
    out = torch.empty(r, heads, head_dim, device=qkv.device, dtype=q_weight.dtype)
    if not r:
        return out
    c = config or decode_config(r, rows.max_kv_len, window)
    splits = split_count(rows.max_kv_len, window, c.chunk)
    part = torch.empty(r * splits * heads * head_dim, device=qkv.device, dtype=torch.float32)
    ml = torch.empty(r * splits * heads * 2, device=qkv.device, dtype=torch.float32)
    exact = out.dtype is torch.float32
    keys = min(16 if exact else c.keys, kv.block_size & -kv.block_size)
    pdl = pdl and not INTERPRETED
    decode_attention_kernel[(r * kv_heads, splits)](
        qkv, width, rows.positions, rows.seq_index, slots, block_table, block_table.stride(0), rope, q_weight, k_weight,
        kv.k, kv.v, kv.k_scale, kv.v_scale, part, ml, counters, out, splits, r * width, c.chunk, eps,
        heads, kv_heads, head_dim, keys, kv.block_size, window,
        max(16, next_power_of_2(heads // kv_heads)), next_power_of_2(heads // kv_heads), own, k_eq_v, kv.quant_max,
        "ieee" if exact else "tf32", splits_of(qkv), c.stages, pdl, c.warps,
        num_warps=c.warps, **pdl_launch(pdl),
    )  # fmt: skip
    return out
