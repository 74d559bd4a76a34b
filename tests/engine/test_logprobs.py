"""The best tokens of a row, where equal logits leave a choice."""

from __future__ import annotations

import torch

from lastrow.engine.logprobs import best_tokens


def test_ties_go_to_the_lowest_ids_whatever_else_is_in_the_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (40, 97), generator=generator).float()  # seven values: ties everywhere
    for count in (1, 2, 5, 20, 97):
        expected = [sorted(range(97), key=lambda i, row=row: (-float(row[i]), i))[:count] for row in logits]
        assert best_tokens(logits, count).tolist() == expected
        assert best_tokens(logits[7:8], count).tolist() == expected[7:8]


def test_rows_without_ties_and_with_masked_tokens():
    row = torch.tensor([[0.5, float("-inf"), 2.0, float("-inf"), 1.0]])
    assert best_tokens(row, 5).tolist() == [[2, 4, 0, 1, 3]]
