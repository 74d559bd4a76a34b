"""The process' heap on a CPU, where a step's activations are pieces of it."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
LARGEST_THRESHOLD = 32 << 20  # that glibc takes
NEVER = -1


def keep_freed_memory() -> None:
    """Memory that a step gives back stays in the heap for the next one, and what the process frees otherwise, too, for as long as it runs;
    tensors past LARGEST_THRESHOLD still go back to the system.

    By default glibc moves the border between heap and system with the sizes it sees, and cuts the heap's free end off. A prompt's
    activations then go to the kernel and come back, filled with zeros again, while it is computed: some 4,000 page faults and 5 % of the
    time of 512 tokens of e2b-eighth (`LLM.generate`, two cores of an EPYC). And what small long-lived objects have taken of the gaps, the
    next large step adds at the end, a piece of 4 MiB at a time, long after the largest step has been (docs/server.md links the
    measurement). Nothing happens with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, NEVER)
