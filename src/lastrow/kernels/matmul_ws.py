"""The matmul of many rows for Hopper with the work divided by hand (Gluon): one warp loads tiles by TMA, two groups of four warps
multiply 64 rows each, and each group's epilogue and store run while the other group still multiplies.

The order of summation is that of matmul.matmul_kernel, and so are the bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lastrow.kernels._gluon import TensorDescriptor, fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from lastrow.kernels.matmul import num_programs


@gluon.jit
def tile_place(tile, num_m, num_n, GROUP: gl.constexpr, BN: gl.constexpr):
    """First row and first weight row of a tile: GROUP row tiles are walked together."""
    first = tile // (GROUP * num_n) * GROUP
    rows = gl.minimum(num_m - first, GROUP)
    return (first + tile % (GROUP * num_n) % rows) * 128, tile % (GROUP * num_n) // rows * BN


@gluon.jit
def load_operands(
    x_desc, w_desc, x_smem, w_smem, full, empty, num_m, num_n, k_tiles,
    BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = tile_place(tile, num_m, num_n, GROUP, BN)
        for k in range(k_tiles):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (128 + BN) * BK * 2)
            tma.async_copy_global_to_shared(x_desc, [m, k * BK], full.index(stage), x_smem.index(stage * 2))
            tma.async_copy_global_to_shared(x_desc, [m + 64, k * BK], full.index(stage), x_smem.index(stage * 2 + 1))
            tma.async_copy_global_to_shared(w_desc, [n, k * BK], full.index(stage), w_smem.index(stage))
            step += 1


@gluon.jit
def rounded(x):
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def geglu_pairs(acc, BN: gl.constexpr):
    """Alternating gate and up columns -> gelu_tanh(gate) * up; as _triton.gelu_tanh."""
    gate, up = acc.reshape([64, BN // 2, 2]).split()
    gate = rounded(gate)
    z2 = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (rounded(gate / (1.0 + gl.exp2(-1.4426950408889634 * z2))) * rounded(up)).to(gl.bfloat16)


@gluon.jit
def store_part(y, smem, out_desc, m, n):
    tma.store_wait(0)  # what was in smem is on its way out
    gl.thread_barrier()
    smem.store(y)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [m, n], smem)


@gluon.jit
def multiply(
    w: gl.constexpr, x_smem, w_smem, out_smem, full, empty, out_desc, num_m, num_n, k_tiles,
    BN: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, GEGLU: gl.constexpr,
):  # fmt: skip
    """Warpgroup w: rows 64 w to 64 w + 63 of every tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    step = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = tile_place(tile, num_m, num_n, GROUP, BN)
        acc = gl.zeros([64, BN], gl.float32, LAYOUT)
        for k in range(k_tiles):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            acc = warpgroup_mma(x_smem.index(stage * 2 + w), w_smem.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            if k > 0:  # the product before this one is done with its operands
                gl.thread_barrier()
                mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        gl.thread_barrier()
        mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
        if GEGLU:
            store_part(geglu_pairs(acc, BN), out_smem.index(w), out_desc, m + w * 64, n // 2)
        else:
            left, right = acc.to(gl.bfloat16).reshape([64, 2, BN // 2]).permute((0, 2, 1)).split()
            store_part(left, out_smem.index(w), out_desc, m + w * 64, n)
            store_part(right, out_smem.index(w), out_desc, m + w * 64, n + BN // 2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def ws_matmul_kernel(
    x_desc, w_desc, out_desc, M, N, K,
    BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, GEGLU: gl.constexpr, REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, 64, BK], x_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], w_desc.layout)
    out_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BN // 2], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    num_m = (M + 127) // 128
    num_n = (N + BN - 1) // BN
    k_tiles = (K + BK - 1) // BK
    gl.warp_specialize([
        (multiply, (0, x_smem, w_smem, out_smem, full, empty, out_desc, num_m, num_n, k_tiles, BN, GROUP, STAGES, GEGLU)),
        (multiply, (1, x_smem, w_smem, out_smem, full, empty, out_desc, num_m, num_n, k_tiles, BN, GROUP, STAGES, GEGLU)),
        (load_operands, (x_desc, w_desc, x_smem, w_smem, full, empty, num_m, num_n, k_tiles, BN, BK, GROUP, STAGES)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


@dataclass(frozen=True, slots=True)
class WsMatmulConfig:
    """n: weight rows of a tile. k: of one step. group: row tiles walked together. stages of the operands' buffers."""

    n: int = 256
    k: int = 64
    group: int = 8
    stages: int = 4
    registers: int = 240


def triton(
    x: torch.Tensor, weight: torch.Tensor, *, geglu: bool = False, config: WsMatmulConfig | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As matmul.triton, bf16: x [M, K] @ weight [N, K].T, or with geglu and a weight from geglu.pack the GeGLU of it, [M, N/2]."""
    c = config or WsMatmulConfig()
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty(m, n // 2 if geglu else n, device=x.device, dtype=x.dtype) if out is None else out
    if not m:
        return out

    def descriptor(t: torch.Tensor, rows: int, columns: int) -> Any:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
        return TensorDescriptor(t, list(t.shape), [t.stride(0), 1], [rows, columns], layout)

    tiles = -(-m // 128) * -(-n // c.n)
    ws_matmul_kernel[(min(tiles, num_programs(x.device)),)](
        descriptor(x, 64, c.k), descriptor(weight, c.n, c.k), descriptor(out, 64, c.n // 2), m, n, k, c.n, c.k, c.group, c.stages,
        geglu, c.registers, num_warps=4,
    )  # fmt: skip
    return out
