"""Draft steps through padded static buffers: the drafts of the eager loop. Here a "graph" is the function itself; what is checked is
everything around the capture."""

from __future__ import annotations

import torch

from kernels.test_assistant_triton import ORDERED, drafter
from lastrow.engine.draft_graphs import DraftGraphs
from lastrow.harness.direct import Chunk, DirectRunner
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kernels.rows import QueryRows


def test_padded_steps_give_the_drafts_of_the_eager_loop() -> None:
    torch.manual_seed(0)
    assistant = drafter(ReferenceOps(), ORDERED, torch.float32, "cpu")
    runner = DirectRunner(assistant.target, 48, sequences=5)
    lengths = (40, 7, 1, 22)
    hidden = runner.forward([Chunk(torch.randint(3, 90, (n,)).tolist(), 0, [n - 1], i) for i, n in enumerate(lengths)])
    token = runner.model.logits(hidden).argmax(-1).to(torch.int32)

    def rows(of: list[int]) -> QueryRows:
        kv_lens = tuple(lengths[i] for i in of)
        return QueryRows(
            torch.tensor(kv_lens, dtype=torch.int32) - 1, torch.tensor(of).int(), runner.tables, (1,) * len(of), kv_lens, len(of)
        )

    calls = []

    def capture(step):
        return lambda: (calls.append(1), step())

    graphs = DraftGraphs(assistant, runner.pool, runner.tables, null_slot=4, contexts=(8, 32), max_rows=3, capture=capture)
    graphs.warm_up()
    # three rows in a bucket of four, then fewer and others in the same buffers; a context past the last bucket runs eagerly
    for of, k in (([1, 2, 3], 4), ([3], 2), ([2, 1], 3), ([3, 1, 2], 1), ([0, 1], 2)):
        expected = assistant.draft(token[of], hidden[of], rows(of), runner.pool, k)
        calls.clear()
        assert torch.equal(graphs.draft(token[of], hidden[of], rows(of), runner.pool, k), expected)
        assert len(calls) == (0 if 0 in of else k)
    assert graphs.misses == {"context": 1}
