"""The qkv epilogue against its reference: what it returns and what it writes into the paged pool."""

from __future__ import annotations

import pytest
import torch

from kernels.compare import assert_rounded, randn
from kernels.pools import FORMATS, empty_pool
from lastrow.kernels import qkv_epilogue
from lastrow.kernels.rope import rope_table
from lastrow.kernels.split_linear import MAX_ROWS

EPS = 1e-6
BLOCK = 16


def case(device, dtype, form, head_dim=32, q_heads=4, kv_heads=1, k_eq_v=False, tokens=5):
    pools = [empty_pool(tokens // BLOCK + 2, BLOCK, kv_heads, head_dim, form, dtype, device) for _ in range(2)]
    width = q_heads + kv_heads * (1 if k_eq_v else 2)
    qkv = randn(tokens, width * head_dim, dtype=dtype, device=device)
    positions = torch.randint(0, 90, (tokens,), dtype=torch.int32)
    slots = (torch.randperm(tokens // BLOCK * BLOCK + BLOCK)[:tokens] + BLOCK).int()
    slots[1] = -1  # padding row
    rope = rope_table(head_dim, 1e4, 96, head_dim // 8, dtype, "cpu")
    args = (qkv, positions.to(device), rope.to(device), randn(head_dim, dtype=dtype, device=device), head_dim, EPS)
    keys = dict(k_weight=randn(head_dim, dtype=dtype, device=device), slots=slots.to(device), kv_heads=kv_heads, k_eq_v=k_eq_v)
    return args, keys, pools


def pair_norm(x: torch.Tensor) -> torch.Tensor:
    """For each element the norm of itself and the element it turns with."""
    norm = torch.hypot(*x.float().chunk(2, -1))
    return torch.cat((norm, norm), -1)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHAPES = pytest.mark.parametrize(
    "shape",
    [
        dict(head_dim=32, q_heads=4, kv_heads=1),
        dict(head_dim=64, q_heads=4, kv_heads=2),
        dict(head_dim=256, q_heads=8, kv_heads=1),
        dict(head_dim=512, q_heads=8, kv_heads=1),
        dict(head_dim=512, q_heads=16, kv_heads=1, k_eq_v=True),
        dict(head_dim=32, q_heads=12, kv_heads=12, k_eq_v=True),
        dict(head_dim=32, q_heads=12, kv_heads=12),
    ],
    ids=str,
)


@DTYPES
@SHAPES
def test_queries_and_the_pool_agree_with_the_reference(device, dtype, shape):
    args, keys, (expected_pool, got_pool) = case(device, dtype, "auto", **shape, tokens=5 if device == "cpu" else 513)
    expected = qkv_epilogue.reference(*args, kv=expected_pool, **keys)
    got = qkv_epilogue.triton(*args, kv=got_pool, **keys)
    # out = a cos - b sin with S = |a cos| + |b sin| <= norm of the pair (a, b), which the rotation keeps. The normed a and b round, and
    # each may move by a step: S. The reference rounds both products, the kernel does not: half a step each, S / 2. Both round the
    # result, and it may move by a step: at most S. Together 2.5 steps of the pair's norm, 3 with the squares of a step and the
    # rounding of cos and sin.
    assert_rounded(got, expected, roundings=3, size=pair_norm(expected))
    written = keys["slots"][keys["slots"] >= 0].long()
    k, expected_k = got_pool.k.flatten(0, 1)[written], expected_pool.k.flatten(0, 1)[written]
    assert_rounded(k, expected_k, roundings=3, size=pair_norm(expected_k))
    assert_rounded(got_pool.v.flatten(0, 1)[written], expected_pool.v.flatten(0, 1)[written], roundings=1)
    assert int(got_pool.v.flatten(2).any(-1).sum()) == len(written)


@DTYPES
@SHAPES
def test_few_tokens_have_the_same_bits_as_many(device, dtype, shape):
    """In bf16 another order of a head's sum shows in few elements, so on a card there are many tokens."""
    few, times = (3, 3) if device == "cpu" else (MAX_ROWS, 16)
    (qkv, positions, *rest), keys, (whole, parts) = case(device, dtype, "auto", **shape, tokens=few * times)
    q = qkv_epilogue.triton(qkv, positions, *rest, kv=whole, **keys)
    slots = keys.pop("slots")
    for i in range(0, few * times, few):
        rows = slice(i, i + few)
        for some in (qkv[rows], qkv[rows].float()[None]):  # as it is, and as the one sum of a matmul of few rows
            assert torch.equal(qkv_epilogue.triton(some, positions[rows], *rest, kv=parts, slots=slots[rows], **keys), q[rows])
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors(), parts.tensors(), strict=True))


@pytest.mark.parametrize("form", FORMATS[1:])
@pytest.mark.parametrize("k_eq_v", [False, True])
def test_quantized_store_is_that_of_the_reference(device, form, k_eq_v):
    args, keys, (expected_pool, got_pool) = case(device, torch.float32, form, head_dim=64, q_heads=4, kv_heads=2, k_eq_v=k_eq_v)
    qkv_epilogue.reference(*args, kv=expected_pool, **keys)
    qkv_epilogue.triton(*args, kv=got_pool, **keys)
    # fp32 values that differ by summation order fall on the other side of a rounding now and then: one quantum, rarely
    for got, expected, scale in ((got_pool.k, expected_pool.k, "k_scale"), (got_pool.v, expected_pool.v, "v_scale")):
        difference = (got.float() - expected.float()).abs()
        quantum = 1.0 if form.startswith("int8") else expected.float().abs() / 8 + 2.0**-9
        assert bool((difference <= quantum).all()) and float((difference > 0).float().mean()) < 0.01
        assert_rounded(getattr(got_pool, scale), getattr(expected_pool, scale), roundings=1)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("form", FORMATS)
def test_one_bad_activation_leaves_no_nan_in_the_pool(device, form):
    args, keys, (_, pool) = case(device, torch.float32, form)
    args[0][0, :] = float("nan")
    args[0][2, -1] = float("inf")
    qkv_epilogue.triton(*args, kv=pool, **keys)
    for t in pool.tensors():
        assert bool(torch.isfinite(t.float()).all())


def test_queries_alone_and_keys_alone_are_slices_of_the_whole(device):
    args, keys, (whole, half) = case(device, torch.float32, "auto", head_dim=32, q_heads=4, kv_heads=2)
    q = qkv_epilogue.triton(*args, kv=whole, **keys)
    qkv, *rest = args
    assert torch.equal(qkv_epilogue.triton(qkv[:, : 4 * 32].contiguous(), *rest), q)
    rest[2] = None
    assert qkv_epilogue.triton(qkv[:, 4 * 32 :].contiguous(), *rest, kv=half, **keys) is None
    assert torch.equal(half.k, whole.k) and torch.equal(half.v, whole.v)


def test_a_negative_slot_writes_nothing(device):
    args, keys, (_, pool) = case(device, torch.float32, "auto")
    keys["slots"] = torch.full_like(keys["slots"], -1)
    qkv_epilogue.triton(*args, kv=pool, **keys)
    assert not any(bool(t.any()) for t in pool.tensors())
