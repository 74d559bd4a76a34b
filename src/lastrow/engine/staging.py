"""A step's fields in host and device memory: named int32 arrays in one buffer, so that a step is one copy.

On the device every step's fields lie in the same memory, and every captured graph reads them there. A step's copy waits on the
stream for the kernels of the step before, so no two steps meet. Nor do they in what kernels/token_fields.py makes of the fields: it is
the first kernel behind the copy, on the same stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

ALIGN = 32  # int32 elements: every field starts on 128 bytes, so kernels see one pointer alignment
RING = 4  # staging buffers: a step copies once, and the copies of two steps may be waiting for the card
Layout = dict[str, tuple[int, int]]
"""Field -> (offset, elements)."""


def layout_of(sizes: Mapping[str, int], offset: int = 0) -> tuple[Layout, int]:
    """(offset, elements) of each field, aligned, and where the next one would begin."""
    layout: Layout = {}
    for name, size in sizes.items():
        layout[name] = (offset, size)
        offset += -(-size // ALIGN) * ALIGN
    return layout, offset


def views(buffer: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    return {name: buffer[start : start + count] for name, (start, count) in layout.items()}


class StaticFields:
    """A step's fields at fixed device addresses, those a captured graph reads. sizes: int32 elements by name. memory: where a
    step's fields lie (`Staging.memory`), of which these begin at `offset`. t: name -> view. end: where the next field may begin."""

    def __init__(self, sizes: Mapping[str, int], memory: torch.Tensor, offset: int = 0) -> None:
        self.layout, self.end = layout_of(sizes, offset)
        if self.end > memory.numel():
            raise ValueError(f"fields of {self.end} elements do not fit into {memory.numel()}: reserve them first")
        memory[offset : self.end].zero_()
        self.t = views(memory, self.layout)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Pinned memory, the same as an array, and the event behind the last copy out of it: making either takes longer than using it."""

    tensor: torch.Tensor
    array: np.ndarray
    copied: torch.cuda.Event | None = None


class Staging:
    """Memory of a step, int32, as named fields: on the host, pinned and reused on CUDA, where allocating it costs a millisecond, and
    `memory` on the device.

    capacity: elements of one buffer; a larger step gets memory of its own. A buffer is written again only when the copy out of it
    has finished; enough of them keep the host from ever waiting."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._free: deque[_Buffer] = deque()
        self._busy: deque[_Buffer] = deque()
        self._current = self._new_buffer(0)
        self._size = 0
        self._capacity = -1
        self.reserve(capacity)

    def reserve(self, capacity: int) -> torch.Tensor:
        """`memory` with room for a step of this many elements. Before fields of captured graphs are made: it may move."""
        if capacity <= self._capacity:
            return self.memory
        self._capacity = capacity
        self._busy.clear()
        self._free = deque(self._new_buffer(capacity) for _ in range(RING if self.is_cuda else 0))
        self.memory = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        return self.memory

    def begin(self, layout: Layout, size: int) -> dict[str, np.ndarray]:
        """Fields at `layout` of `size` int32 elements, uninitialised."""
        self._size = size
        self._current = self._buffer(size)
        array = self._current.array
        return {name: array[start : start + count] for name, (start, count) in layout.items()}

    def _new_buffer(self, size: int) -> _Buffer:
        tensor = torch.empty(size, dtype=torch.int32, pin_memory=self.is_cuda)
        return _Buffer(tensor, tensor.numpy(), torch.cuda.Event() if self.is_cuda else None)

    def _buffer(self, size: int) -> _Buffer:
        if not self.is_cuda or size > self._capacity:  # on a CPU the step's tensors are views of this memory: each step its own
            return self._new_buffer(size)
        if self._free:
            return self._free.popleft()
        buffer = self._busy.popleft()
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer

    def to_device(self, is_static: bool) -> torch.Tensor:
        """What was written, on the device, in one copy. is_static: some of it are fields of a captured graph."""
        whole = self._current.tensor[: self._size]
        if not self.is_cuda and not is_static:
            return whole
        if self._size > self._capacity:
            if is_static:
                raise RuntimeError(f"a captured step of {self._size} elements, {self._capacity} are reserved")
            return whole.to(self.device, non_blocking=True)
        target = self.memory[: self._size]
        target.copy_(whole, non_blocking=True)
        if self._current.copied is not None:
            self._current.copied.record()
            self._busy.append(self._current)
        return target
