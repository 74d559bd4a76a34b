"""Partial sums of few-row matmuls against fp32 torch, and the operations that read them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels.compare import assert_rounded, randn
from lastrow.kernels import add_norm, geglu, ple_gate, ple_inputs, qkv_epilogue, split_linear
from lastrow.kernels.rope import rope_table

EPS = 1e-6
SHAPES = [(1, 64, 128), (5, 96, 192), (17, 200, 256), (64, 128, 512)]


def bf16(device: str, *shape: int) -> torch.Tensor:
    return randn(*shape, dtype=torch.bfloat16, device=device)


def added_up(parts: torch.Tensor) -> torch.Tensor:
    """The sum in ascending order, rounded once: what a reader of partial sums must see."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.bfloat16()


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_partial_sums_add_up_to_the_product(device, rows, n, k):
    x, w = bf16(device, rows, k), bf16(device, n, k)
    parts = split_linear.triton(x, w)
    splits = split_linear.split_config(n, k, rows=rows).splits
    assert parts.shape == (splits, rows, n)
    # k products of size 1 summed in fp32: each addition rounds by at most 2^-24 of a partial sum of size sqrt(k)
    torch.testing.assert_close(parts, split_linear.reference(x, w, splits), rtol=0, atol=k**1.5 * 2.0**-22)


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_a_whole_sum_has_the_bits_of_a_large_matmul(device, rows, n, k):
    x, w = bf16(device, 4096, k), bf16(device, n, k)
    parts = split_linear.triton(x[:rows].contiguous(), w, whole=True)
    torch.testing.assert_close(parts, split_linear.reference(x[:rows], w, 1), rtol=0, atol=k**1.5 * 2.0**-22)  # as above
    if device == "cuda":  # the interpreter's products are numpy's, in an order of their own
        assert torch.equal(parts[0].bfloat16(), F.linear(x, w)[:rows])


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_geglu_behind_the_sum(device, rows, n, k):
    h, gate, up = bf16(device, rows, k), bf16(device, n, k), bf16(device, n, k)
    expected = geglu.reference(h.float(), geglu.reference_pack(gate, up).float())
    got = split_linear.triton(h, geglu.pack(gate, up), geglu=True)
    # gate, up, gelu and the product are each rounded once
    assert_rounded(got, expected.bfloat16(), roundings=4)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_steps_loaded_ahead_are_the_same_steps(device, monkeypatch, ahead):
    x, w = bf16(device, 9, 384), bf16(device, 72, 384)
    config = split_linear.split_config(72, 384)
    monkeypatch.setattr(split_linear, "split_config", lambda *_: replace(config, splits=1, ahead=ahead))
    got = split_linear.triton(x, w)
    torch.testing.assert_close(got, split_linear.reference(x, w, 1), rtol=0, atol=384**1.5 * 2.0**-22)  # as above


def test_every_reader_adds_the_parts_up(device):
    rows, hidden, p, heads, d = 5, 192, 32, 4, 32
    parts = torch.randn(3, rows, hidden, device=device)
    x, post, pre = bf16(device, rows, hidden), bf16(device, hidden), bf16(device, hidden)
    for a, b in zip(
        add_norm.triton(parts, x.clone(), post, pre, None, EPS),
        add_norm.triton(added_up(parts), x.clone(), post, pre, None, EPS),
        strict=True,
    ):
        assert torch.equal(a, b)
    ple = bf16(device, rows, 3, p)
    assert torch.equal(ple_gate.triton(parts[:, :, :p].contiguous(), ple, 1), ple_gate.triton(added_up(parts)[:, :p].contiguous(), ple, 1))
    ids, table, norm = torch.arange(rows, device=device, dtype=torch.int32), bf16(device, rows, hidden), bf16(device, p)
    whole = ple_inputs.triton(added_up(parts), ids, table, norm, 0, hidden, EPS)
    assert torch.equal(ple_inputs.triton(parts, ids, table, norm, 0, hidden, EPS), whole)
    rope, q_norm = rope_table(d, 1e4, 64, None, torch.bfloat16, device), bf16(device, d)
    wide = parts[:, :, : heads * d].contiguous()
    args = (ids, rope, q_norm, d, EPS)
    assert torch.equal(qkv_epilogue.triton(wide, *args), qkv_epilogue.triton(added_up(wide), *args))


@pytest.mark.parametrize(("n", "k"), [(2560, 1536), (1536, 2048), (1536, 12288), (256, 1536), (1536, 256), (64, 192)])
@pytest.mark.parametrize("rows", [2, 64])
def test_splits_divide_the_sum_evenly(n, k, rows):
    c = split_linear.split_config(n, k, rows=rows)
    assert k % (c.splits * c.k) == 0 and 1 <= c.splits <= 16
    assert c.ahead * c.k * c.splits <= k


def test_a_width_that_no_step_divides_is_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        split_linear.split_config(64, 100)
