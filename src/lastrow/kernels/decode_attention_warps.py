"""decode_attention for 8-bit K/V on a card (Gluon): every warp streams keys of its own from global memory straight into the fragments
of the tensor cores, and meets the other warps once, at the end.

Why not the tiles of decode_attention.py: with half the bytes, what a tile costs besides them decides. Here K and V are the left
operands, scores [keys, heads] and output [columns, heads]: the eight query heads are the N of an instruction, nothing is padding, and
a warp of 16 keys needs no shared memory, no barrier and no other warp. The order of the columns (of q . k a contraction) and of a
tile's keys is free, so a thread reads 16 adjacent bytes and they are what its fragments hold; `decode_attention.reference` is the
reference, and the splits are those of decode_attention.py.

A fragment's bits, lowest first, by what they are in memory (byte: of a 32-bit word; w: the word of a key's row):
  K, the left operand of the scores   lanes w2 w3, key 3 bits    registers byte1 (the two values of one), byte0 w0 w1 w4 ...
  V^T, the left operand of the output lanes key2 key3, w2 w3 w4  registers key0 (the two values of one), byte0 key1 byte1 w0 w1 w5 ..."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lastrow.kernels._gluon import gdc_launch_dependents, gdc_wait, gl, gluon, mma_v2, thread_barrier
from lastrow.kernels._triton import L2E
from lastrow.kernels.attention_rows import split_count
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rows import QueryRows
from lastrow.kernels.split_linear import pdl_launch, splits_of

KEYS = 16
"""Of a warp's step."""
HEADS = 8
"""Query heads of a K/V head: the N of an instruction."""

# Four int8 to bf16, bytes 0 and 2 in $0, 1 and 3 in $1: 128 + the low seven bits, less 128 or, where the sign is set, 256. All exact.
INT8_WORD = """{
    .reg .b32 a, b, x;
    lop3.b32 a, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, $2, 0x00800080, 0x43004300, 0xea;
    sub.rn.bf16x2 $0, a, b;
    shr.u32 x, $2, 8;
    lop3.b32 a, x, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, x, 0x00800080, 0x43004300, 0xea;
    sub.rn.bf16x2 $1, a, b;
}"""
# Byte i of $4 and of $5 to two bf16 in $i.
INT8_PAIRS = (
    "{\n.reg .b32 a, b, x;\n"
    + "".join(
        f"""prmt.b32 x, $4, $5, 0x0{4 + i}0{i};
    lop3.b32 a, x, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, x, 0x00800080, 0x43004300, 0xea;
    sub.rn.bf16x2 ${i}, a, b;
    """
        for i in range(4)
    )
    + "}"
)
# The same of e4m3: sign, exponent and mantissa into place, times 2^120 (_triton.FP8_TO_BF16).
FP8_WORD = """{
    .reg .b32 a, c, x, bias;
    mov.b32 bias, 0x7b807b80;
    shl.b32 x, $2, 8;
    shl.b32 c, $2, 4;
    and.b32 c, c, 0x07f007f0;
    lop3.b32 a, x, 0x80008000, c, 0xea;
    mul.rn.bf16x2 $0, a, bias;
    shr.u32 c, $2, 4;
    and.b32 c, c, 0x07f007f0;
    lop3.b32 a, $2, 0x80008000, c, 0xea;
    mul.rn.bf16x2 $1, a, bias;
}"""
FP8_PAIRS = (
    "{\n.reg .b32 a, c, x, bias;\nmov.b32 bias, 0x7b807b80;\n"
    + "".join(
        f"""prmt.b32 x, $4, $5, 0x{4 + i}0{i}0;
    shr.u32 c, x, 4;
    and.b32 c, c, 0x07f007f0;
    lop3.b32 a, x, 0x80008000, c, 0xea;
    mul.rn.bf16x2 ${i}, a, bias;
    """
        for i in range(4)
    )
    + "}"
)

CONVERSIONS = {torch.int8: (INT8_WORD, INT8_PAIRS), torch.float8_e4m3fn: (FP8_WORD, FP8_PAIRS)}


@gluon.jit
def halves(x):
    """int32 [..] -> the two bf16 of each [.., 2], the low one first."""
    low = (x & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (x >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def key_operand(x, W: gl.constexpr, D: gl.constexpr, WORD: gl.constexpr, layout: gl.constexpr):
    """Words of K [W, 16, D/4] -> bf16 [W, 16, D], columns in the order of `query_operand`."""
    even, odd = gl.inline_asm_elementwise(WORD, "=r,=r,r", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    x = gl.join(halves(even), halves(odd)).reshape([W, 16, D // 64, 4, 4, 2, 2])
    return gl.convert_layout(x.permute([0, 1, 2, 4, 6, 3, 5]).reshape([W, 16, D]), layout)


@gluon.jit
def byte_pairs(q, D: gl.constexpr):
    """Columns 1 and 2 of every four change places: a register of `key_operand` holds bytes 0 and 2 of a word, or 1 and 3."""
    return q.reshape([8, D // 4, 2, 2]).permute([0, 1, 3, 2]).reshape([8, D])


@gluon.jit
def query_operand(q_smem, W: gl.constexpr, D: gl.constexpr, words: gl.constexpr, layout: gl.constexpr):
    """q [8, D] in shared memory, in the order of `byte_pairs` -> [W, D, 8], the same for every warp."""
    q = q_smem.load(words).reshape([8, D // 64, 4, 4, 2, 2]).permute([0, 1, 3, 4, 2, 5]).reshape([8, D])
    q = gl.convert_layout(q.permute([1, 0]).reshape([1, D, 8]), layout)
    return gl.broadcast(q, gl.zeros([W, D, 8], gl.bfloat16, layout))[0]


@gluon.jit
def scores(k, qa, qb, zero, W: gl.constexpr, D: gl.constexpr, WORD: gl.constexpr, layout: gl.constexpr):
    """[W, 16, 8]. Two sums: an instruction that adds to the one in front waits for it."""
    ka, kb = k.reshape([W, 16, 2, D // 8]).permute([0, 1, 3, 2]).split()
    return mma_v2(key_operand(ka, W, D // 2, WORD, layout), qa, zero) + mma_v2(key_operand(kb, W, D // 2, WORD, layout), qb, zero)


@gluon.jit
def value_operand(x, W: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr, SHARED: gl.constexpr, layout: gl.constexpr):
    """Words of V [W, 16, D/4] -> bf16 [W, D, 16], SHARED: [D, 16 W]; columns in an order that `natural_columns` undoes, keys of a
    tile in that of `key_order`."""
    first, second = x.reshape([W, 8, 2, D // 4]).permute([0, 1, 3, 2]).split()
    b0, b1, b2, b3 = gl.inline_asm_elementwise(
        PAIRS, "=r,=r,=r,=r,r,r", [first, second], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    x = gl.join(gl.join(halves(b0), halves(b1)), gl.join(halves(b2), halves(b3)))  # [.., key0, byte0, byte1]
    if SHARED:
        x = x.reshape([W, 4, 2, D // 128 // W, W, 8, 4, 2, 2, 2]).permute([3, 6, 9, 4, 8, 5, 0, 2, 1, 7]).reshape([D, 16 * W])
    else:
        x = x.reshape([W, 4, 2, D // 128, 8, 4, 2, 2, 2]).permute([0, 3, 5, 8, 7, 4, 2, 1, 6]).reshape([W, D, 16])
    return gl.convert_layout(x, layout)


@gluon.jit
def natural_columns(x, W: gl.constexpr, D: gl.constexpr, SHARED: gl.constexpr):
    """[D, 8] of `value_operand`'s columns -> [8, D]."""
    if SHARED:
        x = x.reshape([D // 128 // W, 4, 2, W, 2, 8, 8]).permute([6, 0, 3, 5, 1, 2, 4])
    else:
        x = x.reshape([D // 128, 4, 2, 2, 8, 8]).permute([5, 0, 4, 1, 2, 3])
    return x.reshape([8, D])


@gluon.jit
def key_positions(n0, W: gl.constexpr, layout: gl.constexpr):
    """Positions [W, 16] of a step's keys. Row r of a tile's scores is not key r: `value_operand` says why."""
    r = gl.arange(0, 16, gl.SliceLayout(0, layout))
    tile = n0 + 16 * gl.arange(0, W, gl.SliceLayout(1, layout))
    return tile[:, None] + (r // 2 % 4 * 4 + r // 8 * 2 + r % 2)[None, :]


@gluon.jit
def tile_rows(
    table, n0, last, kv_head, W: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV_HEADS: gl.constexpr, ORDERED: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Positions and rows of the pool [W, 16] of the keys of a step that starts at n0; behind `last`, rows of its block. ORDERED: row r
    of a tile is key `key_order` says, else key r."""
    key = gl.arange(0, 16, gl.SliceLayout(0, layout))
    if ORDERED:
        key = key // 2 % 4 * 4 + key // 8 * 2 + key % 2
    tile = n0 + 16 * gl.arange(0, W, gl.SliceLayout(1, layout))
    block = gl.load(table + gl.minimum(tile, last) // BLOCK_SIZE)
    slot = (block * BLOCK_SIZE + tile % BLOCK_SIZE)[:, None] + key[None, :]
    return tile[:, None] + key[None, :], slot.to(gl.int64) * KV_HEADS + kv_head


@gluon.jit
def load_words(ptr, key, row, limit, D: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr):
    at = ptr + row[:, :, None] * (D // 4) + gl.arange(0, D // 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return gl.load(at, mask=(key < limit)[:, :, None]) if MASKED else gl.load(at)  # a mask costs an instruction per word


@gluon.jit
def load_keys(
    k_ptr, k_scale_ptr, v_scale_ptr, table, n0, limit, last, kv_head,
    W: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, KL: gl.constexpr, SL: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Words of K [W, 16, D/4] and the scales of K and V [W, 16]. MASKED: keys from `limit` on are not touched and come back as
    anything, which in 8 bits is finite."""
    key, row = tile_rows(table, n0, last, kv_head, W, BLOCK_SIZE, KV_HEADS, True, gl.SliceLayout(2, KL))
    k = load_words(k_ptr, key, row, limit, D, MASKED, KL)
    key, row = tile_rows(table, n0, last, kv_head, W, BLOCK_SIZE, KV_HEADS, True, SL)
    # past the L1: before the wait, neighbours would bring in the line of the newest key's scales
    k_scale = gl.load(k_scale_ptr + row, mask=key < limit, other=0.0, cache_modifier=".cg")
    v_scale = gl.load(v_scale_ptr + row, mask=key < limit, other=0.0, cache_modifier=".cg")
    return k, k_scale, v_scale


@gluon.jit
def load_values(
    v_ptr, table, n0, limit, last, kv_head,
    W: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, VL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Words of V [W, 16, D/4], as `load_keys`."""
    key, row = tile_rows(table, n0, last, kv_head, W, BLOCK_SIZE, KV_HEADS, False, gl.SliceLayout(2, VL))
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
def norm_rope(a, b, rstd, weight_ptr, j, cos, sin, D: gl.constexpr):
    """As qkv_epilogue.norm_rope."""
    a = (a * rstd[:, None] * gl.load(weight_ptr + j).to(gl.float32)[None, :]).to(gl.bfloat16).to(gl.float32)
    b = (b * rstd[:, None] * gl.load(weight_ptr + D // 2 + j).to(gl.float32)[None, :]).to(gl.bfloat16).to(gl.float32)
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


@gluon.jit(do_not_specialize=["splits", "plane", "chunk"])
def decode_attention_warps_kernel(
    qkv_ptr, qkv_stride, positions_ptr, seq_ptr, slots_ptr, table_ptr, table_stride, rope_ptr, q_weight_ptr, k_weight_ptr,
    k_ptr, v_ptr, k_words, v_words, k_scale_ptr, v_scale_ptr, part_ptr, ml_ptr, counter_ptr, out_ptr, splits, plane, chunk, eps,
    G: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr, OWN: gl.constexpr,
    K_EQ_V: gl.constexpr, QUANT_MAX: gl.constexpr, WORD: gl.constexpr, PAIRS: gl.constexpr,
    SPLITS: gl.constexpr, AHEAD: gl.constexpr, SHARED: gl.constexpr,
    RELOAD: gl.constexpr, PDL: gl.constexpr,
    W: gl.constexpr, KL: gl.constexpr, VL: gl.constexpr, QL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """program (row x K/V head, split), as decode_attention_kernel; the newest key is read like the others. AHEAD: what of a step's K
    (1) and V (2) is loaded during the one in front. RELOAD: q is read again from shared memory at every step, for want of
    registers. SHARED: the warps have one maximum and divide V's columns, at the price of barriers in every step."""
    HD: gl.constexpr = D // 2
    ML: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    AL: gl.constexpr = gl.DotOperandLayout(0, ML, 2)
    BL: gl.constexpr = gl.DotOperandLayout(1, ML, 2)
    SL: gl.constexpr = gl.SliceLayout(2, ML)  # [W, 16], keys of a step
    OL: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    HL: gl.constexpr = gl.SliceLayout(1, ML)  # [W, 8], heads of each warp
    RL: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])  # [heads, columns], a head in a warp
    r = gl.program_id(0) // KV_HEADS
    kv_head = gl.program_id(0) % KV_HEADS
    c = gl.program_id(1)
    n = gl.load(positions_ptr + r) + 1
    low = 0
    if WINDOW > 0:
        low = gl.maximum(n - WINDOW, 0)
    base = (low // chunk + c) * chunk
    used = (n + chunk - 1) // chunk - low // chunk
    if base < n:
        table = table_ptr + gl.load(seq_ptr + r).to(gl.int64) * table_stride
        begin = gl.maximum(base, low // 16 * 16)
        end = gl.minimum(base + chunk, n)
        h = gl.arange(0, 8, gl.SliceLayout(1, RL))
        j = gl.arange(0, HD, gl.SliceLayout(0, RL))
        cos = gl.load(rope_ptr + (n - 1).to(gl.int64) * D + j).to(gl.float32)
        sin = gl.load(rope_ptr + (n - 1).to(gl.int64) * D + HD + j).to(gl.float32)
        # the newest key may not be there before the wait: not even a line of it may come into the L1
        old_end = gl.minimum(end, n - 1)
        if AHEAD > 0:
            k, k_scale, v_scale = load_keys(
                k_words, k_scale_ptr, v_scale_ptr, table, begin, old_end, end - 1, kv_head, W, BLOCK_SIZE, KV_HEADS, D, KL, SL, True
            )
        if AHEAD > 1:
            v = load_values(v_words, table, begin, old_end, end - 1, kv_head, W, BLOCK_SIZE, KV_HEADS, D, VL, True)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        src = qkv_ptr + r.to(gl.int64) * qkv_stride
        newest = base + chunk >= n
        if OWN:  # noqa: SIM102  one is known when compiling, the other is not
            if newest:
                slot = gl.load(slots_ptr + r).to(gl.int64)
                keep = slot >= 0
                row = slot * KV_HEADS + kv_head
                one = gl.arange(0, 1, gl.SliceLayout(1, RL))
                every = one[:, None] + j[None, :] >= 0
                a, b, squares = load_heads(src + (KV_HEADS * G + kv_head) * D, one, j, every, plane, D, SPLITS)
                rstd = 1.0 / gl.sqrt(squares / D + eps)
                ka, kb = norm_rope(a, b, rstd, k_weight_ptr, j, cos, sin, D)
                store_head(ka, kb, k_ptr, k_scale_ptr, one, j, row, keep, D, QUANT_MAX)
                if not K_EQ_V:
                    a, b, squares = load_heads(src + (KV_HEADS * G + KV_HEADS + kv_head) * D, one, j, every, plane, D, SPLITS)
                    rstd = 1.0 / gl.sqrt(squares / D + eps)
                store_head(a * rstd[:, None], b * rstd[:, None], v_ptr, v_scale_ptr, one, j, row, keep, D, QUANT_MAX)
        heads = (h < G)[:, None] & (j >= 0)[None, :]
        a, b, squares = load_heads(src + kv_head * G * D, h, j, heads, plane, D, SPLITS)
        a, b = norm_rope(a, b, 1.0 / gl.sqrt(squares / D + eps), q_weight_ptr, j, cos, sin, D)
        q_smem = gl.allocate_shared_memory(gl.bfloat16, [8, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
        q_smem.slice(0, HD, dim=1).store(byte_pairs(a.to(gl.bfloat16), HD))
        q_smem.slice(HD, HD, dim=1).store(byte_pairs(b.to(gl.bfloat16), HD))
        thread_barrier()  # also for the newest key, which other threads of this program read
        if AHEAD > 0:  # noqa: SIM102
            if begin + 16 * W >= n:
                k, k_scale, v_scale = load_keys(
                    k_words, k_scale_ptr, v_scale_ptr, table, begin, end, end - 1, kv_head, W, BLOCK_SIZE, KV_HEADS, D, KL, SL, True
                )
                if AHEAD > 1:
                    v = load_values(v_words, table, begin, end, end - 1, kv_head, W, BLOCK_SIZE, KV_HEADS, D, VL, True)
        if not RELOAD:
            qa = query_operand(q_smem.slice(0, HD, dim=1), W, HD, QL, BL)
            qb = query_operand(q_smem.slice(HD, HD, dim=1), W, HD, QL, BL)
        m = gl.full([W, 8], -1e30, gl.float32, HL)
        total = gl.zeros([W, 16, 8], gl.float32, ML)  # by key: summed at the end
        zero = gl.zeros([W, 16, 8], gl.float32, ML)
        acc = gl.zeros([D, 8], gl.float32, OL) if SHARED else gl.zeros([W, D, 8], gl.float32, ML)
        for n0 in range(begin, end, 16 * W):
            if AHEAD == 0:
                k, k_scale, v_scale = load_keys(
                    k_words, k_scale_ptr, v_scale_ptr, table, n0, end, end - 1, kv_head, W, BLOCK_SIZE, KV_HEADS, D, KL, SL, False
                )
            if AHEAD <= 1:
                v = load_values(v_words, table, n0, end, end - 1, kv_head, W, BLOCK_SIZE, KV_HEADS, D, VL, False)
            if RELOAD:
                qa = query_operand(q_smem.slice(0, HD, dim=1), W, HD, QL, BL)
                qb = query_operand(q_smem.slice(HD, HD, dim=1), W, HD, QL, BL)
            p_scale = v_scale
            s = scores(k, qa, qb, zero, W, D, WORD, AL) * (k_scale * L2E)[:, :, None]
            if AHEAD > 0:
                k, k_scale, v_scale = load_keys(
                    k_words, k_scale_ptr, v_scale_ptr, table, n0 + 16 * W, end, end - 1, kv_head, W, BLOCK_SIZE, KV_HEADS, D, KL, SL, False
                )
            key = key_positions(n0, W, SL)
            s = gl.where(((key < end) & (key >= low))[:, :, None], s, float("-inf"))
            m_new = gl.maximum(m, gl.max(s, 1))
            if SHARED:
                m_new = gl.broadcast(gl.max(m_new, 0)[None, :], m)[0]
            p = gl.exp2(s - m_new[:, None, :])
            alpha = gl.exp2(m - m_new)
            m = m_new
            total = total * alpha[:, None, :] + p
            p = (p * p_scale[:, :, None]).to(gl.bfloat16)
            if SHARED:
                acc *= gl.convert_layout(gl.max(alpha, 0), gl.SliceLayout(0, OL))[None, :]
                p = gl.convert_layout(p.reshape([16 * W, 8]), gl.DotOperandLayout(1, OL, 2))
                acc = mma_v2(value_operand(v, W, D, PAIRS, SHARED, gl.DotOperandLayout(0, OL, 2)), p, acc)
            else:
                p = gl.convert_layout(p, BL)
                acc = mma_v2(value_operand(v, W, D, PAIRS, SHARED, AL), p, acc * alpha[:, None, :])
            if AHEAD > 1:
                v = load_values(v_words, table, n0 + 16 * W, end, end - 1, kv_head, W, BLOCK_SIZE, KV_HEADS, D, VL, False)
        # the warps meet
        m_all = gl.max(m, 0)
        factor = gl.exp2(m - m_all[None, :])
        sums = gl.sum(gl.sum(total, 1) * factor, 0)
        if not SHARED:
            acc = gl.sum(acc * factor[:, None, :], 0)
        acc_all = gl.convert_layout(natural_columns(acc, W, D, SHARED), RL)
        m_all = gl.convert_layout(m_all, gl.SliceLayout(1, RL))
        sums = gl.convert_layout(sums, gl.SliceLayout(1, RL))
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


@dataclass(frozen=True, slots=True)
class WarpsConfig:
    """chunk: keys of a split, a multiple of 16. warps: of a program, which share its split. registers: a limit per thread, so that
    more programs fit. The rest: decode_attention_warps_kernel."""

    chunk: int
    warps: int = 4
    ahead: int = 2
    shared: bool = False
    reload: bool = False
    registers: int | None = None


def layouts(d: int, warps: int, shared: bool) -> tuple[gl.DistributedLinearLayout, gl.DistributedLinearLayout, gl.DistributedLinearLayout]:
    """Of K's words, V's words [warps, 16, d/4] and q [8, d] (head of the file)."""
    words = d // 4
    own = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]

    def word(*bits: int) -> list[list[int]]:
        return [[0, 0, 1 << i] for i in bits]

    top = words.bit_length() - 1
    key = [[0, 1 << i, 0] for i in range(4)]
    k = gl.DistributedLinearLayout([*word(0, 1), key[3], *word(*range(4, top))], [*word(2, 3), *key[:3]], own, [], [warps, 16, words])
    if shared:  # the warps divide V's columns
        v_own, tiles, free = word(*range(5, 5 + len(own))), own, word(*range(5 + len(own), top))
    else:
        v_own, tiles, free = own, [], word(*range(5, top))
    v = gl.DistributedLinearLayout([*word(0, 1), *key[:2], *tiles, *free], [*key[2:], *word(2, 3, 4)], v_own, [], [warps, 16, words])
    column = [[0, 1 << i] for i in range(top + 1)]
    q = gl.DistributedLinearLayout(
        [*column[:4], *column[6:]], [*column[4:6], [1, 0], [2, 0], [4, 0]], [[0, 0] for _ in own], [], [8, d // 2]
    )
    return k, v, q


def supported(qkv: torch.Tensor, q_weight: torch.Tensor, kv: PagedKV, heads: int) -> bool:
    """8-bit K/V of dim 256 or 512 and at most eight query heads on each of its heads: E2B."""
    d = kv.k.shape[3]
    return (
        q_weight.dtype is torch.bfloat16 and kv.is_quantized and d in (256, 512) and heads <= HEADS * kv.k.shape[2]
        and kv.block_size % KEYS == 0
    )  # fmt: skip


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
    """As decode_attention.triton, where `supported`."""
    (r, width), kv_heads = qkv.shape[-2:], kv.k.shape[2]
    own = k_weight is not None
    heads = width // head_dim - (kv_heads * (1 if k_eq_v else 2) if own else 0)
    out = torch.empty(r, heads, head_dim, device=qkv.device, dtype=q_weight.dtype)
    if not r:
        return out
    c = config
    splits = split_count(rows.max_kv_len, window, c.chunk)
    part = torch.empty(r * splits * heads * head_dim, device=qkv.device, dtype=torch.float32)
    ml = torch.empty(r * splits * heads * 2, device=qkv.device, dtype=torch.float32)
    decode_attention_warps_kernel[(r * kv_heads, splits)](
        qkv, width, rows.positions, rows.seq_index, slots, block_table, block_table.stride(0), rope, q_weight, k_weight,
        kv.k, kv.v, kv.k.view(torch.int32), kv.v.view(torch.int32), kv.k_scale, kv.v_scale, part, ml, counters, out, splits, r * width,
        c.chunk, eps, heads // kv_heads, kv_heads, head_dim, kv.block_size, window, own, k_eq_v, kv.quant_max,
        *CONVERSIONS[kv.k.dtype], splits_of(qkv), c.ahead, c.shared, c.reload, pdl, c.warps,
        *layouts(head_dim, c.warps, c.shared), num_warps=c.warps, maxnreg=c.registers, **pdl_launch(pdl),
    )  # fmt: skip
    return out
