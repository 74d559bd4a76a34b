"""decode_attention for 8-bit K/V on a card (Gluon): every warp streams keys of its own from global memory straight into the fragments
of the tensor cores, and meets the other warps once, at the end.

Why not the tiles of decode_attention.py: with half the bytes, what a tile costs besides them decides. Here K and V are the left
operands, scores [keys, heads] and output [columns, heads]: the eight query heads are the N of an instruction, nothing is padding, and
a warp of 16 keys needs no shared memory, no barrier and no other warp. The order of the columns (of q . k a contraction) and of a
tile's keys is free, so a thread reads 16 adjacent bytes and they are what its fragments hold; `decode_attention.reference` is the
reference."""

from __future__ import annotations

import torch

from lastrow.kernels._fragments import CONVERSIONS, byte_pairs, key_order, layouts, natural_columns, query_operand, scores, value_operand
from lastrow.kernels._gluon import gdc_launch_dependents, gdc_wait, gl, gluon, mma_v2, thread_barrier
from lastrow.kernels._triton import L2E, cdiv
from lastrow.kernels.decode_attention import WarpsConfig
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rows import QueryRows
from lastrow.kernels.split_linear import pdl_launch, splits_of


@gluon.jit
def tile_rows(
    table, n0, last, kv_head, key, W: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV_HEADS: gl.constexpr, ALIGNED: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Positions and rows of the pool [W, 16] of the keys `key` [16] of each tile of a step that starts at n0; behind `last`, rows of
    its block. ALIGNED: n0 is a multiple of 16, so a tile lies in one block."""
    tile = n0 + 16 * gl.arange(0, W, gl.SliceLayout(1, layout))
    position = tile[:, None] + key[None, :]
    if ALIGNED:
        block = gl.load(table + gl.minimum(tile, last) // BLOCK_SIZE)
        slot = (block * BLOCK_SIZE + tile % BLOCK_SIZE)[:, None] + key[None, :]
    else:
        slot = gl.load(table + gl.minimum(position, last) // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE
    return position, slot.to(gl.int64) * KV_HEADS + kv_head


@gluon.jit
def load_words(ptr, key, row, limit, D: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr):
    at = ptr + row[:, :, None] * (D // 4) + gl.arange(0, D // 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return gl.load(at, mask=(key < limit)[:, :, None]) if MASKED else gl.load(at)  # a mask costs an instruction per word


@gluon.jit
def load_keys(
    k_ptr, k_scale_ptr, v_scale_ptr, table, n0, limit, last, kv_head,
    W: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, ALIGNED: gl.constexpr, MASKED: gl.constexpr,
    KL: gl.constexpr, SL: gl.constexpr,
):  # fmt: skip
    """Words of K [W, 16, D/4] and the scales of K and V [W, 16]. MASKED: keys from `limit` on are not touched and come back as
    anything, which in 8 bits is finite."""
    order = key_order(gl.SliceLayout(0, gl.SliceLayout(2, KL)))
    key, row = tile_rows(table, n0, last, kv_head, order, W, BLOCK_SIZE, KV_HEADS, ALIGNED, gl.SliceLayout(2, KL))
    k = load_words(k_ptr, key, row, limit, D, MASKED, KL)
    order = key_order(gl.SliceLayout(0, SL))
    key, row = tile_rows(table, n0, last, kv_head, order, W, BLOCK_SIZE, KV_HEADS, ALIGNED, SL)
    # past the L1: before the wait, neighbours would bring in the line of the newest key's scales
    k_scale = gl.load(k_scale_ptr + row, mask=key < limit, other=0.0, cache_modifier=".cg")
    v_scale = gl.load(v_scale_ptr + row, mask=key < limit, other=0.0, cache_modifier=".cg")
    return k, k_scale, v_scale


@gluon.jit
def load_values(
    v_ptr, table, n0, limit, last, kv_head,
    W: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, ALIGNED: gl.constexpr, MASKED: gl.constexpr,
    VL: gl.constexpr,
):  # fmt: skip
    """Words of V [W, 16, D/4], as `load_keys`."""
    order = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, VL)))
    key, row = tile_rows(table, n0, last, kv_head, order, W, BLOCK_SIZE, KV_HEADS, ALIGNED, gl.SliceLayout(2, VL))
    return load_words(v_ptr, key, row, limit, D, MASKED, VL)


@gluon.jit
def load_sum(ptr, offset, mask, plane, SPLITS: gl.constexpr):
    """As split_linear.load_sum."""
    x = gl.load(ptr + offset, mask=mask, other=0.0).to(gl.float32)
    for s in gl.static_range(1, SPLITS):
        x += gl.load(ptr + s * plane + offset, mask=mask, other=0.0)
    if SPLITS > 0:
        x = x.to(gl.bfloat16).to(gl.float32)
    return x


@gluon.jit
def load_heads(src, h, j, mask, plane, D: gl.constexpr, SPLITS: gl.constexpr):
    """As qkv_epilogue.load_heads."""
    a = load_sum(src, h[:, None] * D + j[None, :], mask, plane, SPLITS)
    b = load_sum(src, h[:, None] * D + D // 2 + j[None, :], mask, plane, SPLITS)
    return a, b, gl.sum(a * a, 1) + gl.sum(b * b, 1)


@gluon.jit
def load_weight(ptr, j, HD: gl.constexpr):
    """Both halves of a norm's weight, fp32."""
    return gl.load(ptr + j).to(gl.float32), gl.load(ptr + HD + j).to(gl.float32)


@gluon.jit
def norm_rope(a, b, rstd, weight, cos, sin):
    """As qkv_epilogue.norm_rope."""
    a = (a * rstd[:, None] * weight[0][None, :]).to(gl.bfloat16).to(gl.float32)
    b = (b * rstd[:, None] * weight[1][None, :]).to(gl.bfloat16).to(gl.float32)
    return a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :]


@gluon.jit
def quantized(x, scale, QUANT_MAX: gl.constexpr):
    """As kv_cache.quantized."""
    x = gl.div_rn(x, gl.zeros_like(x) + scale[:, None])
    x = gl.minimum(gl.maximum(x, -QUANT_MAX), QUANT_MAX)
    if QUANT_MAX == 127.0:
        x = (x + 12582912.0) - 12582912.0
    return x


@gluon.jit
def store_head(
    a, b, cache_ptr, scale_ptr, h, j, row, keep, D: gl.constexpr, QUANT_MAX: gl.constexpr
):  # fmt: skip
    """As kv_cache.store_heads of one head."""
    a = a.to(gl.bfloat16).to(gl.float32)
    b = b.to(gl.bfloat16).to(gl.float32)
    a = gl.where(gl.abs(a) <= 3.4028234663852886e38, a, 0.0)
    b = gl.where(gl.abs(b) <= 3.4028234663852886e38, b, 0.0)
    largest = gl.maximum(gl.max(gl.abs(a), 1), gl.max(gl.abs(b), 1))
    scale = gl.div_rn(gl.minimum(gl.maximum(largest, 1e-12), 3e38), gl.zeros_like(largest) + QUANT_MAX)
    gl.store(scale_ptr + row + h, scale, mask=(h >= 0) & keep)
    target = cache_ptr + row * D + h[:, None] + j[None, :]
    mask = (h[:, None] + j[None, :] >= 0) & keep
    gl.store(target, quantized(a, scale, QUANT_MAX).to(cache_ptr.dtype.element_ty), mask=mask)
    gl.store(target + D // 2, quantized(b, scale, QUANT_MAX).to(cache_ptr.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["splits", "plane"])
def decode_attention_warps_kernel(
    qkv_ptr, qkv_stride, positions_ptr, seq_ptr, slots_ptr, table_ptr, table_stride, rope_ptr, q_weight_ptr, k_weight_ptr,
    k_ptr, v_ptr, k_words, v_words, k_scale_ptr, v_scale_ptr, part_ptr, ml_ptr, counter_ptr, out_ptr, splits, plane, eps,
    G: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr, OWN: gl.constexpr,
    K_EQ_V: gl.constexpr, QUANT_MAX: gl.constexpr, WORD: gl.constexpr, PAIRS: gl.constexpr,
    SPLITS: gl.constexpr, SHARED: gl.constexpr, PDL: gl.constexpr,
    W: gl.constexpr, KL: gl.constexpr, VL: gl.constexpr, QL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """program (row x K/V head, split). A row's keys are divided evenly: `splits` of them at most, in whole steps of every warp. The
    newest key is read like the others. The last program of a row and head to arrive combines the splits in ascending order.
    Loaded during the step in front: K, and V where the warps are not SHARED (registers)."""
    HD: gl.constexpr = D // 2
    ALIGNED: gl.constexpr = WINDOW == 0
    ML: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    AL: gl.constexpr = gl.DotOperandLayout(0, ML, 2)
    BL: gl.constexpr = gl.DotOperandLayout(1, ML, 2)
    SL: gl.constexpr = gl.SliceLayout(2, ML)  # [W, 16], keys of a step
    OL: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    HL: gl.constexpr = gl.SliceLayout(1, ML)  # [W, 8], heads of each warp
    RL: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])  # [heads, columns], a head in a warp
    XL: gl.constexpr = gl.BlockedLayout([W, 1, 4], [1, 1, 32], [1, W, 1], [2, 1, 0])  # RL under sums of all warps
    r = gl.program_id(0) // KV_HEADS
    kv_head = gl.program_id(0) % KV_HEADS
    c = gl.program_id(1)
    n = gl.load(positions_ptr + r) + 1
    low = 0
    if WINDOW > 0:
        low = gl.maximum(n - WINDOW, 0)
    chunk = gl.cdiv(gl.cdiv(n - low, splits), 16 * W) * 16 * W
    used = gl.cdiv(n - low, chunk)
    begin = low + c * chunk
    if begin < n:  # the programs of splits that this row does not need end here
        table = table_ptr + gl.load(seq_ptr + r).to(gl.int64) * table_stride
        end = gl.minimum(begin + chunk, n)
        last = end - 1
        h = gl.arange(0, 8, gl.SliceLayout(1, RL))
        j = gl.arange(0, HD, gl.SliceLayout(0, RL))
        # nothing up to the wait depends on the kernel in front: positions, tables, weights, slots and the keys of earlier steps
        cos = gl.load(rope_ptr + (n - 1).to(gl.int64) * D + j).to(gl.float32)
        sin = gl.load(rope_ptr + (n - 1).to(gl.int64) * D + HD + j).to(gl.float32)
        q_weight = load_weight(q_weight_ptr, j, HD)
        # the newest key may not be there before the wait: not even a line of it may come into the L1
        old_end = gl.minimum(end, n - 1)
        k, k_scale, v_scale = load_keys(
            k_words, k_scale_ptr, v_scale_ptr, table, begin, old_end, last, kv_head, W, BLOCK_SIZE, KV_HEADS, D, ALIGNED, True, KL, SL
        )
        if not SHARED:
            v = load_values(v_words, table, begin, old_end, last, kv_head, W, BLOCK_SIZE, KV_HEADS, D, ALIGNED, True, VL)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        src = qkv_ptr + r.to(gl.int64) * qkv_stride
        q_src = src + kv_head * G * D
        heads = (h < G)[:, None] & (j >= 0)[None, :]
        if OWN and end == n:  # the newest key is in this split; all loads come before the first store, which they could not pass
            slot = gl.load(slots_ptr + r).to(gl.int64)
            keep = slot >= 0
            row = slot * KV_HEADS + kv_head
            one = gl.arange(0, 1, gl.SliceLayout(1, RL))
            every = one[:, None] + j[None, :] >= 0
            k_weight = load_weight(k_weight_ptr, j, HD)
            ka, kb, k_squares = load_heads(src + (KV_HEADS * G + kv_head) * D, one, j, every, plane, D, SPLITS)
            va, vb, v_squares = ka, kb, k_squares
            if not K_EQ_V:
                va, vb, v_squares = load_heads(src + (KV_HEADS * G + KV_HEADS + kv_head) * D, one, j, every, plane, D, SPLITS)
            a, b, squares = load_heads(q_src, h, j, heads, plane, D, SPLITS)
            ka, kb = norm_rope(ka, kb, 1.0 / gl.sqrt(k_squares / D + eps), k_weight, cos, sin)
            store_head(ka, kb, k_ptr, k_scale_ptr, one, j, row, keep, D, QUANT_MAX)
            v_rstd = 1.0 / gl.sqrt(v_squares / D + eps)
            store_head(va * v_rstd[:, None], vb * v_rstd[:, None], v_ptr, v_scale_ptr, one, j, row, keep, D, QUANT_MAX)
        else:
            a, b, squares = load_heads(q_src, h, j, heads, plane, D, SPLITS)
        a, b = norm_rope(a, b, 1.0 / gl.sqrt(squares / D + eps), q_weight, cos, sin)
        q_smem = gl.allocate_shared_memory(gl.bfloat16, [8, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
        q_smem.slice(0, HD, dim=1).store(byte_pairs(a.to(gl.bfloat16), HD))
        q_smem.slice(HD, HD, dim=1).store(byte_pairs(b.to(gl.bfloat16), HD))
        thread_barrier()  # also for the newest key, which other threads of this program read
        if begin + 16 * W >= n:  # with the newest key
            k, k_scale, v_scale = load_keys(
                k_words, k_scale_ptr, v_scale_ptr, table, begin, end, last, kv_head, W, BLOCK_SIZE, KV_HEADS, D, ALIGNED, True, KL, SL
            )
            if not SHARED:
                v = load_values(v_words, table, begin, end, last, kv_head, W, BLOCK_SIZE, KV_HEADS, D, ALIGNED, True, VL)
        m = gl.full([1 if SHARED else W, 8], -1e30, gl.float32, HL)
        total = gl.zeros([W, 16, 8], gl.float32, ML)  # by key: summed at the end
        zero = gl.zeros([W, 16, 8], gl.float32, ML)
        acc = gl.zeros([D, 8], gl.float32, OL) if SHARED else gl.zeros([W, D, 8], gl.float32, ML)
        for n0 in range(begin, end, 16 * W):
            if SHARED:
                v = load_values(v_words, table, n0, end, last, kv_head, W, BLOCK_SIZE, KV_HEADS, D, ALIGNED, False, VL)
            # q is read again at every step: registers that hold it are keys that are not in flight
            qa = query_operand(q_smem.slice(0, HD, dim=1), W, HD, QL, BL)
            qb = query_operand(q_smem.slice(HD, HD, dim=1), W, HD, QL, BL)
            p_scale = v_scale
            s = scores(k, qa, qb, zero, W, D, WORD, AL) * (k_scale * L2E)[:, :, None]
            # SHARED: without a branch, also behind the last step. The lookup in the table then comes among the scores, and K and V
            # are in flight together; in a block of its own it waits behind the loads of V, and K waits for it.
            after = n0 + 16 * W
            if SHARED or after < end:
                k, k_scale, v_scale = load_keys(
                    k_words, k_scale_ptr, v_scale_ptr, table, after, end, last, kv_head, W, BLOCK_SIZE, KV_HEADS, D, ALIGNED, False, KL, SL
                )
            key = n0 + 16 * gl.arange(0, W, gl.SliceLayout(1, SL))[:, None] + key_order(gl.SliceLayout(0, SL))[None, :]
            s = gl.where((key < end)[:, :, None], s, float("-inf"))
            m_new = gl.max(s, 1)
            if SHARED:
                m_new = gl.max(m_new, 0)[None, :]
            m_new = gl.maximum(m, m_new)
            p = gl.exp2(s - m_new[:, None, :])
            alpha = gl.exp2(m - m_new)
            m = m_new
            total = total * alpha[:, None, :] + p
            p = (p * p_scale[:, :, None]).to(gl.bfloat16)
            if SHARED:
                acc *= gl.convert_layout(alpha.reshape([8]), gl.SliceLayout(0, OL))[None, :]
                p = gl.convert_layout(p.reshape([16 * W, 8]), gl.DotOperandLayout(1, OL, 2))
                acc = mma_v2(value_operand(v, W, D, PAIRS, SHARED, gl.DotOperandLayout(0, OL, 2)), p, acc)
            else:
                p = gl.convert_layout(p, BL)
                acc = mma_v2(value_operand(v, W, D, PAIRS, SHARED, AL), p, acc * alpha[:, None, :])
            if not SHARED:  # noqa: SIM102
                if after < end:
                    v = load_values(v_words, table, after, end, last, kv_head, W, BLOCK_SIZE, KV_HEADS, D, ALIGNED, False, VL)
        # The warps meet once: each leaves its maximum and its sums, and every thread adds up all warps' of its heads and columns
        # (gl.sum over warps took 20 us of 512 columns and two programs of 4 warps).
        m_smem = gl.allocate_shared_memory(gl.float32, [W, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        total_smem = gl.allocate_shared_memory(gl.float32, [W, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        m_smem.store(gl.broadcast(m, gl.zeros([W, 8], gl.float32, HL))[0])
        total_smem.store(gl.sum(total, 1))
        acc_all = natural_columns(acc, W, D, SHARED)
        if SHARED:
            thread_barrier()
        else:
            acc_smem = gl.allocate_shared_memory(gl.float32, [W, 8, D], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
            acc_smem.store(acc_all)
            thread_barrier()
            acc_all = acc_smem.load(XL)
        m_warps = m_smem.load(gl.SliceLayout(2, XL))
        m_all = gl.max(m_warps, 0)
        factor = gl.exp2(m_warps - m_all[None, :])
        sums = gl.convert_layout(gl.sum(total_smem.load(gl.SliceLayout(2, XL)) * factor, 0), gl.SliceLayout(1, RL))
        m_all = gl.convert_layout(m_all, gl.SliceLayout(1, RL))
        if SHARED:
            acc_all = gl.convert_layout(acc_all.reshape([8, D]), RL)
        else:
            acc_all = gl.convert_layout(gl.sum(acc_all * factor[:, :, None], 0), RL)
        d = gl.arange(0, D, gl.SliceLayout(0, RL))
        real = (h < G)[:, None] & (d >= 0)[None, :]
        out = out_ptr + ((r.to(gl.int64) * KV_HEADS + kv_head) * G + h)[:, None] * D + d[None, :]
        if used == 1:
            gl.store(out, (acc_all / sums[:, None]).to(gl.bfloat16), mask=real)
        else:
            first = gl.program_id(0).to(gl.int64) * splits * G
            part = first + c * G + h
            gl.store(part_ptr + part[:, None] * D + d[None, :], acc_all, mask=real)
            gl.store(ml_ptr + part * 2, m_all, mask=h < G)
            gl.store(ml_ptr + part * 2 + 1, sums, mask=h < G)
            thread_barrier()
            arrived = gl.atomic_add(counter_ptr + gl.program_id(0), 1, sem="acq_rel", scope="gpu")
            if arrived == used - 1:
                gl.store(counter_ptr + gl.program_id(0), 0)
                m_all = gl.full([8], -1e30, gl.float32, gl.SliceLayout(1, RL))
                sums = gl.zeros([8], gl.float32, gl.SliceLayout(1, RL))
                acc_all = gl.zeros([8, D], gl.float32, RL)
                for e in range(0, used, 4):
                    for i in gl.static_range(4):  # four splits' loads in flight
                        at = first + (e + i) * G + h
                        there = (h < G) & (e + i < used)
                        m_e = gl.load(ml_ptr + at * 2, mask=there, other=-1e30, cache_modifier=".cg")
                        total_e = gl.load(ml_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                        acc_e = gl.load(
                            part_ptr + at[:, None] * D + d[None, :], mask=real & (e + i < used), other=0.0, cache_modifier=".cg"
                        )
                        m_new = gl.maximum(m_all, m_e)
                        old = gl.exp2(m_all - m_new)
                        new = gl.exp2(m_e - m_new)
                        acc_all = acc_all * old[:, None] + acc_e * new[:, None]
                        sums = sums * old + total_e * new
                        m_all = m_new
                gl.store(out, (acc_all / sums[:, None]).to(gl.bfloat16), mask=real)


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
    config: WarpsConfig,
) -> torch.Tensor:
    """As decode_attention.triton, where decode_attention.warps_supported."""
    (r, width), kv_heads = qkv.shape[-2:], kv.k.shape[2]
    own = k_weight is not None
    heads = width // head_dim - (kv_heads * (1 if k_eq_v else 2) if own else 0)
    out = torch.empty(r, heads, head_dim, device=qkv.device, dtype=q_weight.dtype)
    if not r:
        return out
    c = config
    # A program that starts beside the projection in front keeps that kernel's division of the multiprocessor's memory, mostly shared, and
    # its keys pass through a small L1. Where the keys are long this costs more than the earlier start brings (64 rows of 7,936 keys on an
    # H200: 0.210 against 0.152 ms).
    pdl = pdl and not c.shared
    most = min(rows.max_kv_len, window) if window else rows.max_kv_len
    splits = max(min(c.splits, cdiv(most, 16 * c.warps)), 1)
    part = torch.empty(r * splits * heads * head_dim, device=qkv.device, dtype=torch.float32)
    ml = torch.empty(r * splits * heads * 2, device=qkv.device, dtype=torch.float32)
    decode_attention_warps_kernel[(r * kv_heads, splits)](
        qkv, width, rows.positions, rows.seq_index, slots, block_table, block_table.stride(0), rope, q_weight, k_weight,
        kv.k, kv.v, kv.k.view(torch.int32), kv.v.view(torch.int32), kv.k_scale, kv.v_scale, part, ml, counters, out, splits, r * width,
        eps, heads // kv_heads, kv_heads, head_dim, kv.block_size, window, own, k_eq_v, kv.quant_max,
        *CONVERSIONS[kv.k.dtype], splits_of(qkv), c.shared, pdl, c.warps,
        *layouts(head_dim, c.warps, c.shared), num_warps=c.warps, **pdl_launch(pdl),
    )  # fmt: skip
    return out
