"""The names warp-specialised kernels are written with; only modules that are imported on a card use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # as in _triton.py
    TensorDescriptor: Any
    fence_async_shared: Any
    gluon: Any
    mbarrier: Any
    thread_barrier: Any
    tma: Any
    warpgroup_mma: Any
    warpgroup_mma_wait: Any

    class Language(type):
        def __getattr__(cls, name: str) -> Any: ...

    class gl(metaclass=Language):
        constexpr: TypeAlias = Any
else:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name up to triton 3.6, and from 3.7

__all__ = [
    "TensorDescriptor", "fence_async_shared", "gl", "gluon", "mbarrier", "thread_barrier", "tma", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip
