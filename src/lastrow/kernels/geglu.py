"""Gate and up projections with GeGLU behind them (spec section 2.9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lastrow.kernels import matmul
from lastrow.kernels._triton import cdiv, gelu_tanh, jit, round_to, tl

gelu: Any = F.gelu  # takes out=, which its stub does not know; torch.ops.aten.gelu.out is slower to call by 2 us
COLUMN_ROWS = 256
"""Up to here a CPU's GeGLU of columns wins; of 512 rows it takes 1 to 2 % more."""
FUSED_ROWS = 512
"""From here on the matmul with GeGLU behind it wins over the vendor's matmul and a second kernel."""
FUSED = matmul.MatmulConfig(group=48, stages=3)
"""5 % faster than 8 tile rows and 4 stages while the card is held at its power limit: the weight comes from memory less often."""


def reference_pack(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate, up [I, H] -> the weight `reference` takes, [2I, H]: gate rows, then up rows."""
    return torch.cat([gate, up])


def reference_unpack(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `reference_pack` was given."""
    gate, up = gate_up.chunk(2)
    return gate.contiguous(), up.contiguous()


def reference(h: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """h [T, H], gate_up from `reference_pack` -> gelu_tanh(h @ gate.T) * (h @ up.T), [T, I].

    fp32 on an AMD CPU: both as tensors of their own (7 % of a layer's MLP at 512 rows of e2b-eighth, two cores of an EPYC), and up to 256
    rows as columns, which nothing has to write by rows again (20 % at 128 rows)."""
    if matmul.takes_columns(h, COLUMN_ROWS):
        gate, up = matmul.columns(h, gate_up).chunk(2)
        return gelu(gate, approximate="tanh", out=gate).mul_(up)[:, : h.shape[0]].t()
    if not matmul.on_amd(h):
        gate, up = matmul.reference(h, gate_up).chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)
    gate_weight, up_weight = gate_up.chunk(2)
    gate = matmul.reference(h, gate_weight)
    return gelu(gate, approximate="tanh", out=gate).mul_(matmul.reference(h, up_weight))  # while the caches hold the gate


def pack(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate, up [I, H] -> the weight `triton` takes, [2I, H]: gate 0, up 0, gate 1, up 1, ... so that both halves of an
    output are in one tile of the matmul."""
    return torch.stack([gate, up], 1).flatten(0, 1)


def unpack(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `pack` was given."""
    return gate_up[0::2].contiguous(), gate_up[1::2].contiguous()


@jit
def geglu_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """gate_up: interleaved pairs; one output per pair."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * BLOCK
    both = first * 2 + tl.arange(0, 2 * BLOCK)
    gate, up = tl.load(gate_up_ptr + both, mask=both < size * 2, other=0.0).to(tl.float32).reshape(BLOCK, 2).split()
    i = first + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, (round_to(gelu_tanh(gate), dtype) * up).to(dtype), mask=i < size)


def pairs(gate_up: torch.Tensor, *, block: int = 1024, warps: int = 4) -> torch.Tensor:
    """Interleaved projections [T, 2I] -> gelu_tanh(gate) * up, [T, I]."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, device=gate_up.device, dtype=gate_up.dtype)
    if out.numel():
        geglu_kernel[(cdiv(out.numel(), block),)](gate_up, out, out.numel(), block, num_warps=warps)
    return out


def triton(h: torch.Tensor, gate_up: torch.Tensor, linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear) -> torch.Tensor:
    """`reference` on a weight from `pack`. Few rows: `linear`, then one kernel; the bits are those of the fused one."""
    if h.shape[0] >= FUSED_ROWS and h.dtype is not torch.float32:
        return matmul.triton(h, gate_up, geglu=True, config=FUSED)
    return pairs(linear(h, gate_up))
