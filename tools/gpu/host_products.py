"""A pytest plugin of sanitize.sh: torch's matrix products run on the host.

racecheck (compute-sanitizer 2025.3) dies of a hardware exception in the vendor's bf16 matmuls for Hopper, also where its filter leaves
them out. Only this project's kernels are checked, and the references may compute anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {f.default for f in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.linear, aten.matmul)}


class ProductsOnHost(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        host = [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]
        return func(*host, **(kwargs or {})).to(args[0].device)


@pytest.fixture(autouse=True)
def products_on_host() -> Iterator[None]:
    with ProductsOnHost():
        yield
