"""Blocks copied for forks: the kernel against the reference, and lists that may be done at once against one after the other."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kernels.pools import FORMATS, empty_pool
from lastrow.engine.block_copies import resolve
from lastrow.kernels import copy_tokens


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kv_heads, head_dim", [(1, 32), (3, 64)])
def test_the_kernel_copies_what_the_reference_copies(device, form, kv_heads, head_dim):
    got, expected = (empty_pool(9, 16, kv_heads, head_dim, form, torch.bfloat16, device) for _ in range(2))
    for a, b in zip(got.tensors(), expected.tensors(), strict=True):
        a.copy_((torch.randn(a.shape) * 9).to(a.dtype))
        b.copy_(a)
    # a whole block, a part of one, one token, and the padding of a captured list
    copies = torch.tensor([[1, 2, 0, 16], [1, 3, 0, 5], [4, 3, 5, 11], [7, 8, 15, 16], [0, 0, 0, 0]], dtype=torch.int32, device=device)
    copy_tokens.triton(got, copies)
    copy_tokens.reference(expected, copies)
    for a, b in zip(got.tensors(), expected.tensors(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    before = [t.clone() for t in got.tensors()]
    copy_tokens.triton(got, copies[:0])
    copy_tokens.triton(got, copies[-1:])
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, got.tensors(), strict=True))


def test_forks_of_forks_may_be_copied_at_once():
    rng = random.Random(3)
    for _ in range(300):
        memory = np.arange(12 * 8).reshape(12, 8)
        unused, sources, copies = list(range(4, 12)), [0, 1, 2, 3], []
        for _ in range(rng.randint(0, 8)):
            destination = unused.pop(rng.randrange(len(unused)))
            copies.append((rng.choice(sources), destination, rng.randint(1, 8)))
            sources.append(destination)
        one_by_one = memory.copy()
        for source, destination, tokens in copies:
            one_by_one[destination, :tokens] = one_by_one[source, :tokens]
        at_once = memory.copy()
        for source, destination, first, end in resolve(copies).tolist():
            assert first < end
            at_once[destination, first:end] = memory[source, first:end]
        assert (at_once == one_by_one).all()
