"""The per-layer gate: gelu(gate) times the layer's embedding (spec section 2.3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def reference(gate: torch.Tensor, ple: torch.Tensor, index: int) -> torch.Tensor:
    """gate [T, P], ple [T, n, P] -> gelu_tanh(gate) * ple[:, index], [T, P]."""
    return F.gelu(gate, approximate="tanh") * ple[:, index]
