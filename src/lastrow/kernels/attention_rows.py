"""Attention of few query rows (decodes, wanted rows): the keys of each row are divided into fixed splits.

Split boundaries are multiples of CHUNK in absolute positions, starting at the window's edge rounded down, and the splits
are combined in ascending order: a row's bits depend on its position and keys alone."""

from __future__ import annotations

import torch

from lastrow.kernels import attention
from lastrow.kernels._triton import L2E, cdiv, jit, next_power_of_2, tl
from lastrow.kernels.attention import softmax_step
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rows import QueryRows

CHUNK = 128
WORKSPACE_BYTES = 256 << 20
"""Partial sums of one launch; more rows take several launches."""


def reference(q: torch.Tensor, kv: PagedKV, rows: QueryRows, block_table: torch.Tensor, window: int) -> torch.Tensor:
    """As attention.reference: q [N, heads, d] -> [N, heads, d]."""
    return attention.reference(q, kv, rows, block_table, window)


@jit
def first_key(n, WINDOW: tl.constexpr):
    """First position that a row which reads n keys of the sequence (its own last) sees."""
    return tl.maximum(n - WINDOW, 0) if WINDOW > 0 else 0


@jit
def load_kv_tile(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slot, ok, kv_head, dtype: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    QUANTIZED: tl.constexpr,
):  # fmt: skip
    """K, V [n, D] of head kv_head at slots slot [n] where ok, in dtype, and their scales (1 when not quantized)."""
    row = slot.to(tl.int64) * KV_HEADS + kv_head
    d = tl.arange(0, D)
    k = tl.load(k_ptr + row[:, None] * D + d[None, :], mask=ok[:, None], other=0.0).to(dtype)
    v = tl.load(v_ptr + row[:, None] * D + d[None, :], mask=ok[:, None], other=0.0).to(dtype)
    k_scale = tl.full(row.shape, 1.0, tl.float32)
    v_scale = tl.full(row.shape, 1.0, tl.float32)
    if QUANTIZED:
        k_scale = tl.load(k_scale_ptr + row, mask=ok, other=0.0)
        v_scale = tl.load(v_scale_ptr + row, mask=ok, other=0.0)
    return k, v, k_scale, v_scale


@jit(do_not_specialize=["splits", "chunk"])
def split_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, positions_ptr, seq_ptr, table_ptr, part_ptr, ml_ptr, out_ptr,
    table_stride, splits, chunk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, GP: tl.constexpr, QUANTIZED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """program (row x K/V head, split). Splits past a row's length end at once and leave nothing behind."""
    G: tl.constexpr = HEADS // KV_HEADS
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    r = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    c = tl.program_id(1)
    n = tl.load(positions_ptr + r) + 1
    low = first_key(n, WINDOW)
    base = (low // chunk + c) * chunk
    if base < n:
        table = table_ptr + tl.load(seq_ptr + r).to(tl.int64) * table_stride
        h = tl.arange(0, GP)
        d = tl.arange(0, D)
        q_row = r.to(tl.int64) * HEADS + kv_head * G + h
        q = tl.load(q_ptr + q_row[:, None] * D + d[None, :], mask=(h < G)[:, None], other=0.0)
        m = tl.full([GP], -1e30, tl.float32)
        total = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, D], tl.float32)
        for n0 in tl.range(tl.maximum(base, low // BN * BN), tl.minimum(base + chunk, n), BN, num_stages=STAGES):
            cols = n0 + tl.arange(0, BN)
            ok = (cols < n) & (cols >= low)
            slot = tl.load(table + n0 // BLOCK_SIZE) * BLOCK_SIZE + n0 % BLOCK_SIZE + tl.arange(0, BN)
            k, v, k_scale, v_scale = load_kv_tile(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slot, ok, kv_head, dtype, KV_HEADS, D, QUANTIZED)
            s = tl.dot(q, k.T, input_precision=PRECISION)
            if QUANTIZED:
                s = s * k_scale[None, :]
            p, alpha, m, total = softmax_step(tl.where(ok[None, :], s, float("-inf")), m, total)
            if QUANTIZED:
                p = p * v_scale[None, :]
            acc = tl.dot(p.to(dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        if splits == 1:
            tl.store(out_ptr + q_row[:, None] * D + d[None, :], (acc / total[:, None]).to(dtype), mask=(h < G)[:, None])
        else:
            part = (tl.program_id(0).to(tl.int64) * splits + c) * G + h
            tl.store(part_ptr + part[:, None] * D + d[None, :], acc, mask=(h < G)[:, None])
            tl.store(ml_ptr + part * 2, m, mask=h < G)
            tl.store(ml_ptr + part * 2 + 1, total, mask=h < G)


@jit(do_not_specialize=["splits"])
def combine_splits_kernel(
    part_ptr, ml_ptr, positions_ptr, out_ptr, splits, chunk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """program (row, head): its splits in ascending order."""
    G: tl.constexpr = HEADS // KV_HEADS
    r = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    n = tl.load(positions_ptr + r) + 1
    used = tl.cdiv(n, chunk) - first_key(n, WINDOW) // chunk
    d = tl.arange(0, D)
    m = -1e30
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for c in range(used):
        part = ((r * KV_HEADS + head // G) * splits + c) * G + head % G
        m_c = tl.load(ml_ptr + part * 2)
        m_new = tl.maximum(m, m_c)
        old = tl.exp2((m - m_new) * L2E)
        new = tl.exp2((m_c - m_new) * L2E)
        acc = acc * old + tl.load(part_ptr + part * D + d) * new
        total = total * old + tl.load(ml_ptr + part * 2 + 1) * new
        m = m_new
    tl.store(out_ptr + (r * HEADS + head) * D + d, (acc / total).to(out_ptr.dtype.element_ty))


def chunk_size(max_kv_len: int, smallest: int) -> int:
    """Keys of a split where nothing asks for fixed ones: small for short contexts, whose latency counts, larger for long ones,
    whose splits have to be combined."""
    return max(smallest, min(1024, next_power_of_2(max_kv_len) // 128))


def split_count(max_kv_len: int, window: int, chunk: int) -> int:
    """Upper bound on the splits of a row with at most max_kv_len keys: a window covers window + chunk - 1 positions once its
    edge is rounded down."""
    return max(cdiv(min(max_kv_len, window + chunk - 1) if window else max_kv_len, chunk), 1)


def key_tile(head_dim: int, block_size: int, dtype: torch.dtype) -> int:
    keys = 16 if dtype is torch.float32 else 64 if head_dim <= 256 else 32
    while block_size % keys:
        keys //= 2
    if keys < 16:
        raise ValueError(f"block_size is {block_size}: the Triton attention kernels need a multiple of 16")
    return keys


def triton(
    q: torch.Tensor,
    kv: PagedKV,
    rows: QueryRows,
    block_table: torch.Tensor,
    window: int,
    *,
    out: torch.Tensor | None = None,
    chunk: int = CHUNK,
    keys: int | None = None,
    warps: int = 4,
    stages: int = 2,
) -> torch.Tensor:
    """`reference` of the first q.shape[0] rows. The grid is sized by rows.max_kv_len, an upper bound."""
    n, heads, d = q.shape
    kv_heads = kv.k.shape[2]
    out = torch.empty_like(q) if out is None else out
    splits = split_count(rows.max_kv_len, window, chunk)
    step = max(WORKSPACE_BYTES // (splits * heads * d * 4), 1)
    for a in range(0, n, step):
        b = min(a + step, n)
        part = torch.empty((b - a) * splits * heads * d if splits > 1 else 0, device=q.device, dtype=torch.float32)
        ml = torch.empty((b - a) * splits * heads * 2 if splits > 1 else 0, device=q.device, dtype=torch.float32)
        positions = rows.positions[a:b]
        split_attention_kernel[((b - a) * kv_heads, splits)](
            q[a:b], kv.k, kv.v, kv.k_scale, kv.v_scale, positions, rows.seq_index[a:b], block_table, part, ml, out[a:b],
            block_table.stride(0), splits, chunk, heads, kv_heads, d, keys or key_tile(d, kv.block_size, q.dtype), kv.block_size,
            window, max(16, next_power_of_2(heads // kv_heads)), kv.is_quantized,
            "ieee" if q.dtype is torch.float32 else "tf32", stages, num_warps=warps,
        )  # fmt: skip
        if splits > 1:
            combine_splits_kernel[(b - a, heads)](part, ml, positions, out[a:b], splits, chunk, heads, kv_heads, d, window, num_warps=2)
    return out
