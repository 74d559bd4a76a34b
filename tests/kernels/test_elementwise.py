"""Elementwise kernels against their references: same roundings, so in bf16 they differ by summation order alone."""

from __future__ import annotations

import pytest
import torch

from kernels.compare import assert_rounded, randn
from lastrow.kernels import add_norm, embedding, ple_gate, ple_inputs

EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def tokens(device: str) -> int:
    return 5 if device == "cpu" else 1003


def seam_sizes(h, x, expected, post, pre, scalar):
    """Sum of what add_norm rounds, elementwise, for x' and for h': each of those roundings may move by one step.

    p = norm(h) * post is rounded, s = x + p is rounded, and rounds what a moved p left: a step of p and one of s. The scalar
    multiplies that and the product is rounded. h' = x' * pre / rms(x') multiplies that again, then is rounded; a row's rms averages over
    roundings that move in either direction, and does not count."""
    p = add_norm.rms_norm(h.float(), post.float(), EPS)
    s = x.float() + p
    size = p.abs() + s.abs()
    if scalar is not None:
        size = size * scalar.float().abs() + expected[0].float().abs()
    if pre is None:
        return size, None
    factor = pre.float().abs() * add_norm.inverse_rms(expected[0].float(), EPS)
    return size, size * factor + expected[1].float().abs()


@DTYPES
@pytest.mark.parametrize("hidden", [192, 1536, 2560])
@pytest.mark.parametrize("parts", ["both", "no pre", "scalar"])
def test_add_norm_rounds_where_the_reference_does(device, dtype, hidden, parts):
    n = tokens(device)
    h, x, post, pre = (
        randn(n, hidden, dtype=dtype, device=device),
        *(randn(*s, dtype=dtype, device=device) for s in ((n, hidden), (hidden,), (hidden,))),
    )
    pre = None if parts == "no pre" else pre
    scalar = torch.tensor([0.37], device=device, dtype=dtype) if parts == "scalar" else None
    before = x.clone()
    expected = add_norm.reference(h.clone(), x.clone(), post, pre, scalar, EPS)
    got = add_norm.triton(h, x, post, pre, scalar, EPS)
    assert got[0] is x
    size, next_size = seam_sizes(h, before, expected, post, pre, scalar)
    assert_rounded(got[0], expected[0], roundings=1, size=size)
    assert (got[1] is None) == (pre is None)
    if next_size is not None:
        assert_rounded(got[1], expected[1], roundings=1, size=next_size)


@DTYPES
def test_add_norm_with_several_rows_per_program_has_the_same_bits(device, dtype):
    h, x, post, pre = (randn(*s, dtype=dtype, device=device) for s in ((7, 192), (7, 192), (192,), (192,)))
    one = add_norm.triton(h, x.clone(), post, pre, None, EPS)
    many = add_norm.triton(h, x.clone(), post, pre, None, EPS, rows=4)
    for a, b in zip(one, many, strict=True):
        assert_rounded(a, b, roundings=1)


@DTYPES
@pytest.mark.parametrize("hidden", [192, 2560])
def test_embedding_scales_rounds_and_norms(device, dtype, hidden):
    table, weight = randn(50, hidden, dtype=dtype, device=device), randn(hidden, dtype=dtype, device=device)
    ids = torch.randint(0, 50, (tokens(device),), device=device, dtype=torch.int32)
    scale = float(torch.tensor(hidden**0.5).to(dtype))
    for got, expected in zip(
        embedding.triton(ids, table, scale, weight, EPS), embedding.reference(ids, table, scale, weight, EPS), strict=True
    ):
        assert_rounded(got, expected, roundings=1)


@DTYPES
@pytest.mark.parametrize("p, n, first", [(32, 5, 0), (256, 3, 2), (32, 4, 6)])
def test_ple_inputs_of_a_slice_of_the_layers(device, dtype, p, n, first):
    layers = 10
    context, table = randn(tokens(device), n * p, dtype=dtype, device=device), randn(50, layers * p, dtype=dtype, device=device)
    ids = torch.randint(0, 50, (tokens(device),), device=device, dtype=torch.int32)
    weight = randn(p, dtype=dtype, device=device)
    args = (context, ids, table, weight, first, 192, EPS)
    got = ple_inputs.triton(*args)
    assert_rounded(got, ple_inputs.reference(*args), roundings=2)  # which may overwrite the context


@pytest.mark.gpu
def test_ple_inputs_reads_a_pinned_host_table():
    context, table = randn(64, 3 * 256, dtype=torch.bfloat16, device="cuda"), randn(500, 5 * 256, dtype=torch.bfloat16, device="cpu")
    ids = torch.randint(0, 500, (64,), device="cuda", dtype=torch.int32)
    weight = randn(256, dtype=torch.bfloat16, device="cuda")
    on_card = ple_inputs.triton(context, ids, table.cuda(), weight, 1, 192, EPS)
    assert torch.equal(ple_inputs.triton(context, ids, table.pin_memory(), weight, 1, 192, EPS), on_card)


@DTYPES
@pytest.mark.parametrize("p", [32, 256])
def test_ple_gate_takes_its_layers_slice(device, dtype, p):
    gate, ple = randn(tokens(device), p, dtype=dtype, device=device, scale=3), randn(tokens(device), 3, p, dtype=dtype, device=device)
    assert_rounded(ple_gate.triton(gate, ple, 1), ple_gate.reference(gate, ple, 1), roundings=1)


def test_no_rows_launch_nothing(device):
    empty, weight = torch.empty(0, 192, device=device), torch.ones(192, device=device)
    x, h = add_norm.triton(empty, empty, weight, weight, None, EPS)
    assert x.shape == h.shape == (0, 192)
    assert embedding.triton(torch.empty(0, device=device, dtype=torch.int32), torch.ones(3, 192, device=device), 1.0, weight, EPS)[
        0
    ].shape == (0, 192)
