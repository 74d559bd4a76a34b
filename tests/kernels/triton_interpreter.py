"""Triton's interpreter with the card's arithmetic: the stock one truncates fp32 to bf16, rounds to fp8 without carry and
multiplies bf16 operands as their bit patterns. With this, bf16 kernels can be checked on a CPU. Also: loop bounds that are
tensors, which the stock one hands to numpy as 1-element arrays (refused since numpy 2.4), and a device function called a
second time no longer patches triton.language again (most of the time of a test)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

STORED_AS = {tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8)}


def _to_float(data: np.ndarray, dtype: Any) -> np.ndarray:
    if dtype not in STORED_AS:
        return data.astype(np.float32)
    as_torch, container, _ = STORED_AS[dtype]
    bits = np.ascontiguousarray(data).view(np.int16 if container is torch.int16 else np.uint8)
    return torch.from_numpy(bits.copy()).view(as_torch).float().numpy()


def _from_float(data: np.ndarray, dtype: Any) -> np.ndarray:
    if dtype not in STORED_AS:
        return data.astype(interpreter._get_np_dtype(dtype))
    as_torch, container, stored = STORED_AS[dtype]
    values = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
    if as_torch is torch.float8_e4m3fn:
        values = values.clamp(-448, 448)  # the card's conversion saturates
    return values.to(as_torch).view(container).numpy().view(stored)


@cache
def install() -> None:
    """Replace the interpreter's casts and dot for every kernel run after this call; calling it again changes nothing."""
    plain_cast = InterpreterBuilder.cast_impl

    def cast(self: InterpreterBuilder, src: TensorHandle, dst_type: Any) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        if source not in STORED_AS and target not in STORED_AS:
            return plain_cast(self, src, dst_type)
        return TensorHandle(_from_float(_to_float(src.data, source), target).reshape(src.data.shape), target)

    def dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> TensorHandle:
        # summed in fp64: numpy's BLAS gives a row other fp32 bits among 64 rows than among 16 on some processors (OpenBLAS on an EPYC)
        product = np.matmul(_to_float(a.data, a.dtype.scalar).astype(np.float64), _to_float(b.data, b.dtype.scalar).astype(np.float64))
        return TensorHandle(product.astype(np.float32) + d.data, d.dtype.scalar)

    plain_patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched: set[int] = set()

    def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call
    interpreter._patch_lang_tensor = patch_tensor
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = lambda self, src, dst_type, rounding: cast(self, src, dst_type)
    InterpreterBuilder.create_dot = dot
