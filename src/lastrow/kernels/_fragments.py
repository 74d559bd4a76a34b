"""8-bit K and V of decode_attention_warps, from 16-byte loads of a thread to the fragments of an mma m16n8k16 without an exchange: only
the order of columns and keys says which value lies where.

A fragment's bits, lowest first, by what they are in memory (byte: of a 32-bit word; w: the word of a key's row):
  K, the left operand of the scores   lanes w2 w3, key 3 bits    registers byte1 (the two values of one), byte0 w0 w1 w4 ...
  V^T, the left operand of the output lanes key2 key3, w2 w3 w4  registers key0 (the two values of one), byte0 key1 byte1 w0 w1 w5 ..."""

from __future__ import annotations

import torch

from lastrow.kernels._gluon import gl, gluon, mma_v2

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
    """`value_operand`'s columns, [W, D, 8], SHARED: [D, 8] -> [W, 8, D], [1, 8, D]."""
    if SHARED:
        return x.reshape([D // 128 // W, 4, 2, W, 2, 8, 8]).permute([6, 0, 3, 5, 1, 2, 4]).reshape([1, 8, D])
    else:
        return x.reshape([W, D // 128, 4, 2, 2, 8, 8]).permute([0, 6, 1, 5, 2, 3, 4]).reshape([W, 8, D])


@gluon.jit
def key_order(layout: gl.constexpr):
    """Keys [16] of the rows of a tile's scores. Row r is not key r: `value_operand` says why."""
    r = gl.arange(0, 16, layout)
    return r // 2 % 4 * 4 + r // 8 * 2 + r % 2


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
