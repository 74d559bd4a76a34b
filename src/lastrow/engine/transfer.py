"""Small copies between host and device that never make the host wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(values: np.ndarray | Sequence[int], device: torch.device) -> torch.Tensor:
    """values on `device`; a list becomes int64. On CUDA through pinned memory: a copy from pageable memory would wait for the stream,
    and with it for the forward that the next step should hide behind."""
    host = torch.from_numpy(np.ascontiguousarray(values) if isinstance(values, np.ndarray) else np.array(values, np.int64))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def download(t: torch.Tensor) -> torch.Tensor:
    """A pinned host tensor that holds `t` once the stream has got there; record an event behind it."""
    host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    return host.copy_(t, non_blocking=True)
