"""The names warp-specialised kernels are written with; only modules that are imported on a card use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # as in _triton.py
    TensorDescriptor: Any
    fence_async_shared: Any
    gluon: Any
    mbarrier: Any
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

__all__ = ["TensorDescriptor", "fence_async_shared", "gl", "gluon", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"]
