"""Inputs and the two comparisons of the kernel tests."""

from __future__ import annotations

import torch

UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Spacing of the numbers just above 1: one rounding moves a value by at most half of it, so a moved rounding by one."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(device)


def assert_rounded(got: torch.Tensor, expected: torch.Tensor, roundings: int) -> None:
    """Elementwise: `got` may be `roundings` units in the last place away. fp32 sums over up to 2560 terms in another order
    differ by about sqrt(2560) units more, hence 64 there. A sum that cancels keeps the rounding of its terms, which have the
    tensor's mean size."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    unit = UNIT[got.dtype] * (roundings if got.dtype is not torch.float32 else 64)
    scale = expected.float().abs() + expected.float().abs().mean()
    excess = (got.float() - expected.float()).abs() - unit * scale
    assert bool((excess <= 0).all()), f"off by {float((excess / scale).max()) + unit:.3g} of the value, allowed {unit:.3g}"


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected|, Frobenius, in fp32; infinite when anything is not finite."""
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    return error if error == error else float("inf")
