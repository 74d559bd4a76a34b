"""The per-layer gate: gelu(gate) times the layer's embedding (spec section 2.3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lastrow.kernels._triton import cdiv, gdc_launch_dependents, gdc_wait, gelu_tanh, jit, next_power_of_2, round_to, tl
from lastrow.kernels.split_linear import MAX_ROWS, load_sum, pdl_launch, splits_of, use_pdl


def reference(gate: torch.Tensor, ple: torch.Tensor, index: int) -> torch.Tensor:
    """gate [T, P], ple [T, n, P] -> gelu_tanh(gate) * ple[:, index], [T, P]."""
    return F.gelu(gate, approximate="tanh").mul_(ple[:, index])


@jit(do_not_specialize=["rows"])
def ple_gate_kernel(
    gate_ptr, ple_ptr, out_ptr, rows, ple_stride, ple_offset,
    P: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    mask = (r < rows)[:, None] & (c < P)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = load_sum(gate_ptr, r[:, None] * P + c[None, :], mask, rows * P, SPLITS, dtype)
    ple = tl.load(ple_ptr + r[:, None] * ple_stride + ple_offset + c[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + r[:, None] * P + c[None, :], (round_to(gelu_tanh(gate), dtype) * ple).to(dtype), mask=mask)


def triton(gate: torch.Tensor, ple: torch.Tensor, index: int, *, warps: int = 4) -> torch.Tensor:
    """`reference` in one pass. gate may be partial sums, [splits, T, P] (split_linear.py)."""
    tokens, p = gate.shape[-2:]
    rows = 8 if tokens > MAX_ROWS else 1  # one program with eight rows of partial sums took 6 us of a decode step's layer, not 1
    out = torch.empty(tokens, p, device=ple.device, dtype=ple.dtype)
    if tokens:
        pdl = use_pdl(gate)
        ple_gate_kernel[(cdiv(tokens, rows),)](
            gate, ple, out, tokens, ple.stride(0), index * p, p, next_power_of_2(p), rows, splits_of(gate), pdl,
            num_warps=warps, **pdl_launch(pdl),
        )  # fmt: skip
    return out
