"""The names warp-specialised kernels are written with; only modules that are imported on a card use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # as in _triton.py
    TensorDescriptor: Any
    fence_async_shared: Any
    gdc_launch_dependents: Any
    gdc_wait: Any
    gluon: Any
    mbarrier: Any
    mma_v2: Any
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
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name up to triton 3.6, and from 3.7

__all__ = [
    "TensorDescriptor", "fence_async_shared", "gdc_launch_dependents", "gdc_wait", "gl", "gluon", "mbarrier", "mma_v2",
    "thread_barrier", "tma", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip
