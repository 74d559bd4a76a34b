"""Small copies between host and device that never make the host wait."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

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


def pin(t: torch.Tensor) -> torch.Tensor:
    """A copy of host tensor t in page-locked memory, whose rows kernels read by its own address. Raises RuntimeError where the system
    locks no more memory.

    torch's pin_memory() rounds a size up to a power of two, 8.6 GB for the 4.7 GB table of E2B; registering pages does not."""
    host = torch.empty(t.shape, dtype=t.dtype).copy_(t)
    runtime: Any = torch.cuda.cudart()
    address, size = host.data_ptr(), host.numel() * host.element_size()
    error = int(runtime.cudaHostRegister(address, size, 0))
    if error:
        raise RuntimeError(f"{size:,} bytes of host memory cannot be page-locked (cudaHostRegister: {error}): use embed_weights=device")
    weakref.finalize(host, runtime.cudaHostUnregister, address)
    return host
