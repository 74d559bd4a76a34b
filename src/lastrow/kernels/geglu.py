"""Gate and up projections with GeGLU behind them (spec section 2.9)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def reference_pack(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate, up [I, H] -> the weight `reference` takes, [2I, H]: gate rows, then up rows."""
    return torch.cat([gate, up])


def reference(h: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """h [T, H], gate_up from `reference_pack` -> gelu_tanh(h @ gate.T) * (h @ up.T), [T, I]."""
    gate, up = F.linear(h, gate_up).chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up
