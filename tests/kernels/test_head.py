"""The head's kernels against torch."""

from __future__ import annotations

import pytest
import torch

from kernels.compare import randn, spacing
from lastrow.kernels import head

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
CAPS = pytest.mark.parametrize("cap", [30.0, None])


def case(device, dtype, rows=3, vocab=301, hidden=192):
    if device == "cuda":  # exact fp32 products take 140 times the shared memory accesses: racecheck was at one of them for minutes
        rows, vocab, hidden = (20, 10_001, 192) if dtype is torch.float32 else (70, 50_001, 1536)
    # logits up to about 40, so that the cap of 30 bends them
    return randn(rows, hidden, dtype=dtype, device=device), randn(vocab, hidden, dtype=dtype, device=device, scale=10 / hidden**0.5)


def moved(h, table, cap):
    """How far each logit may move: its fp32 sum is taken in another order (1e-4 for 1536 terms of up to 1 that add up to 40), and in
    bf16 it then falls on the other side of a rounding now and then, one step away: 0.25 for logits of 32 to 64. The cap shrinks the
    step; it is steeper towards zero."""
    raw = head.reference(h, table, None).abs()
    step = spacing(raw, h.dtype) if h.dtype is torch.bfloat16 else torch.zeros_like(raw)
    return 1e-4 + head.softcap(raw, cap) - head.softcap(raw - step, cap)


def assert_logits(got, expected, allowed):
    assert got.shape == expected.shape and got.dtype is torch.float32
    assert bool(((got - expected).abs() <= allowed).all())


@DTYPES
@CAPS
def test_logits_are_softcapped_in_fp32(device, dtype, cap):
    h, table = case(device, dtype)
    assert_logits(head.triton(h, table, cap), head.reference(h, table, cap), moved(h, table, cap))


@DTYPES
@CAPS
@pytest.mark.parametrize("labels", [1, 4, 7])
def test_label_rows_are_the_columns_of_the_whole(device, dtype, cap, labels):
    h, table = case(device, dtype)
    ids = torch.randint(0, table.shape[0], (labels,), device=device)
    got = head.triton_labels(h, table, ids, cap)
    # not from bf16 operands: the vendor's matmul may add partial sums up in bf16, which moved a logit of 0.05 by 0.007 on an H200
    expected = head.softcap((h.float() @ table[ids].float().T).to(dtype), cap)
    assert_logits(got, expected, moved(h, table, cap)[:, ids])
    assert torch.equal(head.triton_labels(h[1:2].contiguous(), table, ids[-1:], cap), got[1:2, -1:])


@DTYPES
@CAPS
def test_logsumexp_streams_the_vocabulary(device, dtype, cap):
    h, table = case(device, dtype)
    parts = 4 if device == "cpu" else 256
    got = head.triton_logsumexp(h, table, cap, parts=parts)
    expected = torch.logsumexp(head.reference(h, table, cap).double(), -1)
    # where every logit moves by at most a, their logsumexp moves by at most a: the whole step of one logit where that one is the sum
    assert bool(((got.double() - expected).abs() <= moved(h, table, cap).amax(-1)).all())
    assert torch.equal(head.triton_logsumexp(h[1:2].contiguous(), table, cap, parts=parts), got[1:2])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_softcap_of_huge_logits_is_the_cap(device):
    x = torch.tensor([[1e4, -1e4, 0.0, 3e38, 1e-6]], device=device)
    eye = torch.eye(5, device=device)
    assert torch.allclose(head.triton(x, eye, 30.0), torch.tensor([[30.0, -30.0, 0.0, 30.0, 1e-6]], device=device), rtol=1e-6, atol=2e-6)


def test_row_logsumexp_in_one_order(device):
    logits = randn(5, 1000 if device == "cpu" else 262144, device=device, scale=8.0)
    expected = torch.logsumexp(logits.double(), -1)
    got = head.triton_row_logsumexp(logits)
    # fp32 sum of up to 2^18 terms relative to the largest: far under 1e-4 of a logsumexp near 30
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-4)
    assert torch.equal(head.triton_row_logsumexp(logits[2:3]), got[2:3])


@DTYPES
@pytest.mark.parametrize("vocab", [5, 4096, 10_001])
def test_argmax_is_the_first_of_the_largest(device, dtype, vocab):
    logits = torch.randn(6, vocab, device=device).to(dtype)
    logits[0] = 0.5  # all equal
    logits[1, vocab // 2] = logits[1, vocab - 1] = 9.0  # a tie across blocks
    logits[2] = float("-inf")
    logits[3, vocab - 1] = 9.0
    logits[4] = float("nan")
    ids = head.triton_argmax(logits)
    assert ids.dtype is torch.int64 and ids[:4].tolist() == [0, vocab // 2, 0, vocab - 1]
    assert 0 <= int(ids[4]) < vocab
    assert int(ids[5]) == int(head.reference_argmax(logits)[5])
