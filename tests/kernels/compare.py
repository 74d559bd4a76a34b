"""Inputs and the two comparisons of the kernel tests."""

from __future__ import annotations

import torch


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(device)


def assert_rounded(got: torch.Tensor, expected: torch.Tensor, roundings: float, size: torch.Tensor | None = None) -> None:
    """Elementwise: `got` may be `roundings` moved roundings away from `expected`.

    A value beside the border of two roundings falls to the one or to the other side as its fp32 sum was taken in this or that order.
    The two sides are one step apart, at most `finfo.eps` of the value (eps is the step above 1: 2^-7 in bf16; rounding once loses half
    of it). fp32 sums over up to 2560 terms in another order differ by about sqrt(2560) steps, hence 64 of them there.

    size: what is rounded on the way, elementwise, where that can be larger than the result (a sum that cancels, a rotated pair).
    None: the result, and for sums that cancel the tensor's mean size."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    unit = torch.finfo(got.dtype).eps * (roundings if got.dtype is not torch.float32 else 64)
    scale = expected.float().abs() + expected.float().abs().mean() if size is None else size.float()
    excess = (got.float() - expected.float()).abs() - unit * scale
    assert bool((excess <= 0).all()), f"off by {float((excess / scale).max()) + unit:.3g} of the value, allowed {unit:.3g}"


def spacing(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance of the numbers of `dtype` around x, elementwise, fp32."""
    return torch.exp2(torch.floor(torch.log2(x.float().abs().clamp_min(1e-30)))) * torch.finfo(dtype).eps


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected|, Frobenius, in fp32; infinite when anything is not finite."""
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    return error if error == error else float("inf")
