"""The ordered head: kernel against reference, reference against a dense head with everything else masked."""

from __future__ import annotations

import pytest
import torch

from kernels.compare import randn
from lastrow.kernels import centroid_head


def inputs(n: int, vocab: int, hidden: int, centroids: int, dtype: torch.dtype, device: str):
    table, centroid = randn(vocab, hidden, dtype=dtype, device=device), randn(centroids, hidden, dtype=dtype, device=device)
    clusters, ids = centroid_head.group_rows(table, torch.randperm(vocab).to(device), centroids)
    return randn(n, hidden, dtype=dtype, device=device), centroid, clusters, ids, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("n", "vocab", "hidden", "centroids", "top_k"), [(3, 384, 64, 8, 2), (1, 260, 80, 4, 4), (2, 90, 257, 30, 1), (0, 90, 16, 30, 1)]
)
def test_kernel_streams_what_the_reference_gathers(device, dtype, n, vocab, hidden, centroids, top_k):
    y, centroid, clusters, ids, _ = inputs(n, vocab, hidden, centroids, dtype, device)
    got_ids, got = centroid_head.triton(y, centroid, clusters, ids, top_k)
    expected_ids, expected = centroid_head.reference(y, centroid, clusters, ids, top_k)
    assert torch.equal(got_ids, expected_ids)
    # both multiply the same bf16 or fp32 values in fp32: sums of at most 257 terms of size 1 in two orders
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)


def test_candidates_are_the_tokens_of_the_best_groups():
    y, centroid, clusters, ids, table = inputs(4, 96, 16, 12, torch.float32, "cpu")
    got_ids, logits = centroid_head.reference(y, centroid, clusters, ids, 3)
    for row in range(4):
        groups = sorted(range(12), key=lambda g, row=row: -float(centroid[g] @ y[row]))[:3]
        assert got_ids[row].tolist() == [int(t) for g in groups for t in ids[g]]
        for token, logit in zip(got_ids[row].tolist(), logits[row].tolist(), strict=True):
            assert logit == pytest.approx(float(table[token] @ y[row]), abs=1e-5)
    assert sorted(ids.flatten().tolist()) == list(range(96))
