"""One row times a weight with its fused neighbours, against the composition of the references."""

from __future__ import annotations

import pytest
import torch

from kernels.compare import assert_rounded, randn
from lastrow.kernels import gemv
from lastrow.kernels.gemv import GemvConfig

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
USES = {
    "plain": set(),
    "pre-norm": {"pre_weight"},
    "seam": {"residual", "post_weight", "pre_weight"},
    "seam with scalar": {"residual", "post_weight", "pre_weight", "scalar"},
    "raw residual and PLE gate": {"residual", "post_weight", "ple"},
    "seam and GeGLU": {"residual", "post_weight", "pre_weight", "geglu"},
}


def case(use, n, k, dtype, device):
    shapes = dict(residual=(1, k), post_weight=(k,), pre_weight=(k,), scalar=(1,), ple=(n,))
    keys = {name: randn(*shapes[name], dtype=dtype, device=device) for name in sorted(USES[use] - {"geglu"})}
    geglu = "geglu" in USES[use]
    weight = randn(n * (2 if geglu else 1), k, dtype=dtype, device=device, scale=k**-0.5)
    return (randn(1, k, dtype=dtype, device=device), weight), {**keys, "geglu": geglu}


def check(args, keys, **config):
    given = args[0].clone()
    got, new = gemv.triton(*args, **keys, **config)
    expected, expected_new = gemv.reference(*args, **keys)
    assert torch.equal(args[0], given)  # a normed input would be normed again without anybody's notice
    # the seam: see test_elementwise. The sum of products inherits a moved rounding of single terms, far below one unit of
    # its own, then one rounding each: the sum, gelu, the product
    assert_rounded(got, expected, roundings=3)
    assert (new is None) == (expected_new is None)
    if new is not None:
        assert_rounded(new, expected_new, roundings=1)


@DTYPES
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("waves", [0, 1])
def test_one_row_with_what_stands_around_it(device, dtype, use, waves):
    n, k = (13, 48) if device == "cpu" else (2560, 1536)
    args, keys = case(use, n, k, dtype, device)
    check(args, keys, config=GemvConfig(rows=4 if waves == 0 else 1, warps=4, waves=waves))


@DTYPES
@pytest.mark.parametrize("k", [2304, 4096])
def test_a_long_row_is_walked_in_steps(device, dtype, k):
    check(*case("plain", 5 if device == "cpu" else 1536, k, dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(
    "use, n, k",
    [("seam with scalar", 2560, 1536), ("plain", 1536, 2048), ("seam and GeGLU", 6144, 1536), ("seam and GeGLU", 12288, 1536),
     ("plain", 1536, 12288), ("raw residual and PLE gate", 256, 1536), ("plain", 1536, 256), ("seam with scalar", 262144, 1536),
     ("seam with scalar", 4096, 2560)],
)  # fmt: skip
def test_real_shapes(use, n, k, pdl):
    check(*case(use, n, k, torch.bfloat16, "cuda"), pdl=pdl)
