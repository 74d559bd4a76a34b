"""The persistent matmul and GeGLU against torch, at sizes that are no multiple of any tile."""

from __future__ import annotations

import pytest
import torch

from kernels.compare import assert_rounded, randn, relative_error
from lastrow.kernels import geglu, matmul
from lastrow.kernels.matmul import MatmulConfig

TINY = MatmulConfig(m=16, n=32, k=32, group=2, warps=4, stages=2)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("m, n, k", [(1, 64, 192), (37, 80, 200), (50, 48, 64)])
@pytest.mark.parametrize("halves", [True, False])
def test_matmul_agrees_with_torch(device, dtype, m, n, k, halves):
    x, w = randn(m, k, dtype=dtype, device=device), randn(n, k, dtype=dtype, device=device)
    config = MatmulConfig(m=16, n=32, k=32, group=2, warps=4, stages=2, halves=halves)
    if device == "cuda":
        config = matmul.MEDIUM if not halves else MatmulConfig(n=128)
    if dtype is torch.float32 and device == "cuda":
        pytest.skip("fp32 weights go through the vendor's matmul on the card")
    # one rounding of an fp32 sum; the sum's order moves it by at most one unit
    assert_rounded(matmul.triton(x, w, config=config), (x.float() @ w.float().T).to(dtype), roundings=1)


@DTYPES
def test_geglu_in_the_matmul_and_behind_it(device, dtype):
    h, gate, up = randn(21, 96, dtype=dtype, device=device), *(randn(40, 96, dtype=dtype, device=device, scale=0.15) for _ in "gu")
    expected = geglu.reference(h, geglu.reference_pack(gate, up))
    packed = geglu.pack(gate, up)
    # gate, gelu and product are rounded in both; a moved sum reaches the result through gelu's slope (at most 1.13)
    assert_rounded(geglu.triton(h, packed), expected, roundings=3)
    if device == "cpu" or dtype is torch.bfloat16:
        config = TINY if device == "cpu" else matmul.LARGE
        assert_rounded(matmul.triton(h, packed, geglu=True, config=config), expected, roundings=3)


@pytest.mark.gpu
@pytest.mark.parametrize("k, n", [(1536, 2560), (2048, 1536), (4096, 1536), (6144, 1536), (12288, 1536), (1536, 12288)])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(k, n):
    x, w = randn(2048, k, dtype=torch.bfloat16, device="cuda"), randn(n, k, dtype=torch.bfloat16, device="cuda", scale=0.03)
    whole = matmul.triton(x, w)
    for m in (1, 7, 64, 200, 999, 1500):
        assert torch.equal(matmul.triton(x[100 : 100 + m].contiguous(), w), whole[100 : 100 + m])


@pytest.mark.gpu
@pytest.mark.parametrize("intermediate", [6144, 12288])
def test_fused_geglu_at_real_size(intermediate):
    h = randn(2050, 1536, dtype=torch.bfloat16, device="cuda")
    gate, up = (randn(intermediate, 1536, dtype=torch.bfloat16, device="cuda", scale=0.03) for _ in "gu")
    packed = geglu.pack(gate, up)
    fused = geglu.triton(h, packed)
    assert torch.equal(geglu.triton(h[:100], packed), fused[:100])  # the vendor's matmul and a kernel: the same bits
    # sums of 1536 products rounded to bf16, gelu, product: 3 roundings of 2^-9, rms about half of their worst case
    assert relative_error(fused, geglu.reference(h.float(), geglu.reference_pack(gate, up).float())) < 6e-3


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 15, 16, 64, 65])
@pytest.mark.parametrize("shape", [(64, 96), (65, 96), (64, 3072), (2048, 130)])
@pytest.mark.parametrize("amd, threads", [(True, 2), (True, 1), (False, 2)])
def test_few_rows_on_a_cpu_are_the_same_product(monkeypatch, rows, shape, amd, threads):
    monkeypatch.setattr(matmul, "is_amd", lambda: amd)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    made, by_columns = [], matmul.columns
    monkeypatch.setattr(matmul, "columns", lambda x, weight: made.append(x.shape[0]) or by_columns(x, weight))
    x, w = torch.randn(rows, shape[1]), torch.randn(shape)
    got = matmul.reference(x, w)
    assert got.is_contiguous()  # the sampler writes into logits by flat index
    assert bool(made) == (amd and threads > 1 and shape == (2048, 130) and 2 < rows <= 64)
    # k products of size 1 in another order: each addition rounds by at most 2^-24 of a partial sum of size sqrt(k)
    torch.testing.assert_close(got, x @ w.T, rtol=0, atol=shape[1] ** 1.5 * 2.0**-23)


@pytest.mark.parametrize("rows", [1, 2, 3, 15, 256, 257])
@pytest.mark.parametrize("amd, threads", [(True, 2), (True, 1), (False, 2)])
def test_geglu_on_a_cpu_is_the_same_whichever_way_its_products_go(monkeypatch, rows, amd, threads):
    monkeypatch.setattr(matmul, "is_amd", lambda: amd)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    h, gate, up, down = torch.randn(rows, 48), torch.randn(96, 48), torch.randn(96, 48), torch.randn(24, 96)
    act = geglu.reference(h, geglu.reference_pack(gate, up))
    expected = torch.nn.functional.gelu(h.double() @ gate.T.double(), approximate="tanh") * (h.double() @ up.T.double())
    # fp32 sums of 48 and 96 products in any order: 2.4e-7 at most, measured; a wrong row or half is off by its own size
    assert relative_error(act.double(), expected) < 1e-6
    assert relative_error(matmul.reference(act, down).double(), expected @ down.T.double()) < 1e-6
