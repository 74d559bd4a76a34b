"""A step's fields in host and device memory: named int32 arrays in one buffer, so that a step is one copy."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

ALIGN = 32  # int32 elements: every field starts on 128 bytes, so kernels see one pointer alignment
RING = 8  # staging buffers: a step copies at most three times, one step is in flight
Layout = dict[str, tuple[int, int]]
"""Field -> (offset, elements)."""


def layout_of(sizes: dict[str, int]) -> tuple[Layout, int]:
    """(offset, elements) of each field, aligned, and the whole size."""
    offset, layout = 0, {}
    for name, size in sizes.items():
        layout[name] = (offset, size)
        offset += -(-size // ALIGN) * ALIGN
    return layout, offset


def views(buffer: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    return {name: buffer[start : start + count] for name, (start, count) in layout.items()}


class StaticFields:
    """A step's fields at fixed device addresses, those a captured graph reads. sizes: int32 elements by name. t: name -> view.
    tiles: rows per tile -> tiles, for the fields `tiles_N`."""

    def __init__(self, sizes: dict[str, int], device: torch.device | str) -> None:
        self.sizes = sizes
        self.layout, size = layout_of(sizes)
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self.t = views(self.buffer, self.layout)
        self.tiles = {int(name.removeprefix("tiles_")): count // 5 for name, count in sizes.items() if name.startswith("tiles_")}


class Staging:
    """Host memory of a step, int32, as named fields; pinned and reused on CUDA, where allocating it costs a millisecond.

    capacity: elements of one buffer; a larger step gets memory of its own. A buffer is written again only when the copy out of it
    has finished; enough of them keep the host from ever waiting."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        count = RING if self.is_cuda else 0
        self._free = deque(torch.empty(capacity, dtype=torch.int32, pin_memory=True) for _ in range(count))
        self._busy: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._capacity = capacity
        self._current = torch.empty(0, dtype=torch.int32)
        self._size = 0

    def begin(self, layout: Layout, size: int) -> dict[str, np.ndarray]:
        """Fields at `layout` of `size` int32 elements, uninitialised."""
        self._size = size
        self._current = self._buffer(size)
        array = self._current.numpy()
        return {name: array[start : start + count] for name, (start, count) in layout.items()}

    def _buffer(self, size: int) -> torch.Tensor:
        if not self.is_cuda or size > self._capacity:  # on a CPU the step's tensors are views of this memory: each step its own
            return torch.empty(size, dtype=torch.int32, pin_memory=self.is_cuda)
        if not self._free:
            buffer, copied = self._busy.popleft()
            copied.synchronize()
            return buffer
        return self._free.popleft()

    def to_device(self) -> torch.Tensor:
        """What was written, on the device."""
        whole = self._current[: self._size]
        if not self.is_cuda:
            return whole
        whole = whole.to(self.device, non_blocking=True)
        self._copied()
        return whole

    def copy_to(self, target: torch.Tensor) -> None:
        """What was written, at a fixed device address."""
        target.copy_(self._current[: self._size], non_blocking=True)
        self._copied()

    def _copied(self) -> None:
        if self.is_cuda and self._current.numel() == self._capacity:
            copied = torch.cuda.Event()
            copied.record()
            self._busy.append((self._current, copied))
