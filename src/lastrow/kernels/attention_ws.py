"""Tiled attention for Hopper with the work of a program divided by hand (Gluon): one warp loads tiles by TMA, two groups of
four warps compute 64 query rows each; the scores of the next key tile and the product with the current values are in flight
while the softmax runs. Programs stay on their multiprocessor and walk the tile list, so that the next tile's loads and the
last one's store overlap with computing. (Giving each program a few neighbouring tiles instead hung on an H200 on 2026-11-29.)

Same tile list and key order as attention.tiled_attention_kernel, and with the same key tile the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lastrow.kernels._gluon import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lastrow.kernels._triton import L2E
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.matmul import num_programs
from lastrow.kernels.rows import QueryRows

GROUP_ROWS = 64  # of one warpgroup_mma
ROWS = 2 * GROUP_ROWS


@gluon.jit
def key_tiles(first, last, BN: gl.constexpr, WINDOW: gl.constexpr):
    """First key tile and one past the last of a query tile."""
    begin = 0
    if WINDOW > 0:
        begin = gl.maximum(first - WINDOW + 1, 0) // BN
    return begin, last // BN + 1


@gluon.jit
def load_tiles(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, tiles_ptr, table_ptr,
    table_stride, items,
    G: gl.constexpr, BLOCK_SIZE: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp. `step` counts key tiles over all query tiles: stage and phase of their buffers."""
    step = 0
    done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile = tiles_ptr + item // (D // DV) * 5
        v_col = item % (D // DV) * DV
        count = gl.load(tile + 1)
        if count > 0:
            q_row = gl.load(tile)
            table = table_ptr + gl.load(tile + 2).to(gl.int64) * table_stride
            begin, end = key_tiles(gl.load(tile + 3), gl.load(tile + 4), BN, WINDOW)
            block = gl.load(table + begin * BN // BLOCK_SIZE)
            for i in range(begin, end):
                slot = block * BLOCK_SIZE + i * BN % BLOCK_SIZE
                block = gl.load(table + gl.minimum(i + 1, end - 1) * BN // BLOCK_SIZE)
                stage = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), BN * D * 2)
                tma.async_copy_global_to_shared(k_desc, [slot, 0], k_full.index(stage), k_smem.index(stage))
                if i == begin:  # behind the first keys, whose buffer is free earlier
                    mbarrier.wait(q_empty, (done & 1) ^ 1)
                    mbarrier.expect(q_full, 2 * 64 * D * 2)
                    tma.async_copy_global_to_shared(q_desc, [q_row * G, 0], q_full, q_smem.index(0))
                    tma.async_copy_global_to_shared(q_desc, [q_row * G + 64, 0], q_full, q_smem.index(1))
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), BN * DV * 2)
                tma.async_copy_global_to_shared(v_desc, [slot, v_col], v_full.index(stage), v_smem.index(stage))
                step += 1
            done += 1


@gluon.jit
def softmax(s, m, total, n0, first, last, pos, cols, BN: gl.constexpr, WINDOW: gl.constexpr):
    """As attention.softmax_step; masks only where some row of the tile does not see some key of it."""
    partial = n0 + BN - 1 > first
    if WINDOW > 0:
        partial = partial | (n0 < last - WINDOW + 1)
    if partial:
        d = pos[:, None] - (n0 + cols)[None, :]
        visible = d >= 0
        if WINDOW > 0:
            visible = visible & (d < WINDOW)
        s = gl.where(visible, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    p = gl.exp2(s * L2E - (m_new * L2E)[:, None])
    alpha = gl.exp2((m - m_new) * L2E)
    return p, alpha, m_new, total * alpha + gl.sum(p, 1)


@gluon.jit
def compute_tiles(
    w: gl.constexpr, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, o_desc, out_ptr,
    tiles_ptr, positions_ptr, items,
    G: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Warpgroup w: rows 64 w to 64 w + 63 of every tile. PARTS: pieces in which a full tile goes out through o_smem by TMA, 0:
    from registers, as a partial tile always does (TMA cannot leave out rows)."""
    BT: gl.constexpr = 128 // G
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    q = q_smem.index(w)
    rows = w * 64 + gl.arange(0, 64, gl.SliceLayout(1, SL))
    cols = gl.arange(0, BN, gl.SliceLayout(0, SL))
    zero = gl.zeros([64, BN], gl.float32, SL)
    step = 0
    done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile = tiles_ptr + item // (D // DV) * 5
        v_col = item % (D // DV) * DV
        count = gl.load(tile + 1)
        if count > 0:
            q_row = gl.load(tile)
            first = gl.load(tile + 3)
            last = gl.load(tile + 4)
            begin, end = key_tiles(first, last, BN, WINDOW)
            pos = gl.load(positions_ptr + q_row + gl.minimum(rows // G, count - 1))
            m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, SL))
            total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, SL))
            acc = gl.zeros([64, DV], gl.float32, OL)
            mbarrier.wait(q_full, done & 1)
            stage = step % STAGES
            mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
            s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False)
            thread_barrier()
            mbarrier.arrive(k_empty.index(stage), count=1)
            p, alpha, m, total = softmax(s, m, total, begin * BN, first, last, pos, cols, BN, WINDOW)
            pb = gl.convert_layout(p.to(gl.bfloat16), PL)
            for i in range(begin + 1, end):
                v_stage = step % STAGES
                v_phase = (step // STAGES) & 1
                step += 1
                stage = step % STAGES
                mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
                scores = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(v_stage), v_phase)
                product = warpgroup_mma(pb, v_smem.index(v_stage), acc, is_async=True)
                s = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
                thread_barrier()
                mbarrier.arrive(k_empty.index(stage), count=1)
                p, alpha, m, total = softmax(s, m, total, i * BN, first, last, pos, cols, BN, WINDOW)
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
                thread_barrier()
                mbarrier.arrive(v_empty.index(v_stage), count=1)
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
                pb = gl.convert_layout(p.to(gl.bfloat16), PL)
            mbarrier.arrive(q_empty, count=1)  # the last scores are done: the next queries may come
            stage = step % STAGES
            mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
            acc = warpgroup_mma(pb, v_smem.index(stage), acc)
            thread_barrier()
            mbarrier.arrive(v_empty.index(stage), count=1)
            step += 1
            done += 1
            o = (acc / gl.convert_layout(total, gl.SliceLayout(1, OL))[:, None]).to(gl.bfloat16)
            if PARTS > 0:
                if count == BT:
                    store_tile(o, o_smem.index(w), o_desc, q_row * G + w * 64, v_col, DV, PARTS)
                else:
                    store_rows(o, out_ptr, q_row * G, w * 64, count * G, v_col, D, DV, OL)
            else:
                store_rows(o, out_ptr, q_row * G, w * 64, count * G, v_col, D, DV, OL)
    if PARTS > 0:
        tma.store_wait(0)


@gluon.jit
def store_rows(o, out_ptr, first_row, r0, rows, v_col, D: gl.constexpr, DV: gl.constexpr, OL: gl.constexpr):
    r = r0 + gl.arange(0, 64, gl.SliceLayout(1, OL))
    c = gl.arange(0, DV, gl.SliceLayout(0, OL))
    target = out_ptr + (first_row + r).to(gl.int64)[:, None] * D + v_col + c[None, :]
    gl.store(target, o, mask=(r < rows)[:, None] & (c >= 0)[None, :])


@gluon.jit
def store_tile(o, smem, o_desc, row, v_col, DV: gl.constexpr, PARTS: gl.constexpr):
    if PARTS == 1:
        store_part(o, smem, o_desc, row, v_col)
    else:
        left, right = o.reshape([64, 2, DV // 2]).permute((0, 2, 1)).split()
        store_part(left, smem, o_desc, row, v_col)
        store_part(right, smem, o_desc, row, v_col + DV // 2)


@gluon.jit
def store_part(o, smem, o_desc, row, col):
    tma.store_wait(0)  # what was in smem is on its way out
    thread_barrier()
    smem.store(o)
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(o_desc, [row, col], smem)


@gluon.jit
def ws_attention_kernel(
    q_desc, k_desc, v_desc, o_desc, out_ptr, tiles_ptr, positions_ptr, table_ptr, table_stride, items,
    G: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, DV], v_desc.layout)
    o_smem = q_smem
    if PARTS > 0:
        o_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, DV // PARTS], o_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (compute_tiles, (0, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, o_desc, out_ptr,
                         tiles_ptr, positions_ptr, items, G, BN, D, DV, WINDOW, STAGES, PARTS)),
        (compute_tiles, (1, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, o_desc, out_ptr,
                         tiles_ptr, positions_ptr, items, G, BN, D, DV, WINDOW, STAGES, PARTS)),
        (load_tiles, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, tiles_ptr,
                      table_ptr, table_stride, items, G, BLOCK_SIZE, BN, D, DV, WINDOW, STAGES)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


@dataclass(frozen=True, slots=True)
class WsConfig:
    """keys per step, value columns of a program, stages of the K and V buffers, parts of the output (see compute_tiles). persistent:
    a program walks the tile list in fixed steps; else each tile has its own, and the card gives the next one to whoever is free."""

    keys: int
    value_columns: int
    stages: int = 2
    parts: int = 0
    registers: int = 240
    persistent: bool = True


CONFIGS = {256: WsConfig(64, 256, parts=2), 512: WsConfig(32, 256, persistent=False)}
"""Without a window tiles differ in length by their position, and fixed steps can meet the long ones again and again: prompts of 1,024
tokens are 128 items each, close to the 132 programs, and 16 of them took 1.3 times as long."""


def supported(q: torch.Tensor, kv: PagedKV) -> bool:
    """One K/V head of dim 256 or 512 in bf16, whole key tiles in a block: E2B. The rest is attention.triton's."""
    _, heads, d = q.shape
    return (
        q.dtype is torch.bfloat16 and not kv.is_quantized and kv.k.shape[2] == 1 and d in CONFIGS and ROWS % heads == 0
        and kv.block_size % CONFIGS[d].keys == 0
    )  # fmt: skip


def triton(
    q: torch.Tensor,
    kv: PagedKV,
    rows: QueryRows,
    block_table: torch.Tensor,
    window: int,
    *,
    out: torch.Tensor | None = None,
    config: WsConfig | None = None,
) -> torch.Tensor:
    """As attention.triton, where `supported`."""
    n, heads, d = q.shape
    c = config or CONFIGS[d]
    tiles = rows.tile_list(ROWS // heads)
    out = torch.empty_like(q) if out is None else out
    if not tiles.shape[0]:
        return out

    def descriptor(x: torch.Tensor, height: int, block_rows: int, block_columns: int) -> Any:
        block = [block_rows, block_columns]
        return TensorDescriptor(x, [height, d], [d, 1], block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))

    slots = kv.k.shape[0] * kv.block_size
    items = tiles.shape[0] * (d // c.value_columns)
    ws_attention_kernel[(min(items, num_programs(q.device)) if c.persistent else items,)](
        descriptor(q, n * heads, GROUP_ROWS, d), descriptor(kv.k, slots, c.keys, d), descriptor(kv.v, slots, c.keys, c.value_columns),
        descriptor(out, n * heads, GROUP_ROWS, c.value_columns // max(c.parts, 1)), out, tiles, rows.positions, block_table,
        block_table.stride(0), items, heads, d, c.value_columns, c.keys, kv.block_size, window, c.stages, c.parts, c.registers,
        num_warps=4,
    )  # fmt: skip
    return out
