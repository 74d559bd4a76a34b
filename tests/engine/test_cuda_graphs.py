"""Steps through the padded fields of captured forwards: the tokens of transformers. Here a "graph" is the forward itself; what is checked
is everything around the capture: routes, one copy of all fields, padding, and the rows handed over at the cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.cuda_graphs import CUDAGraphs, GraphBuckets, _CUDACapture
from lastrow.engine.llm import LLM
from lastrow.kernels.decode_attention import decode_config

BUCKETS = GraphBuckets(tokens=(8, 64, 128), rows=(1, 2, 4, 8), contexts=(64, 256))


@pytest.fixture(scope="module")
def llm() -> LLM:
    torch.set_num_threads(1)
    llm = LLM("tiny-e", max_num_seqs=16, max_num_batched_tokens=192)
    runner = llm.engine.runner
    runner.inputs.use_tiles((16,))
    graphs = CUDAGraphs(llm.engine.runner.model, runner.pool, runner.inputs, BUCKETS, capture=lambda forward: forward)
    graphs.warm_up()
    runner.use_graphs(graphs)
    llm.engine.depth = 1  # a step is launched before the tokens of the one before it are read
    return llm


def run(llm: LLM, rows: list[dict[str, Any]], most: int) -> None:
    params = [SamplingParams(temperature=0, max_tokens=min(most, len(row["output_ids"]))) for row in rows]
    outputs = llm.generate([{"prompt_token_ids": row["prompt_ids"]} for row in rows], params, use_tqdm=False)
    for row, output in zip(rows, outputs, strict=True):
        assert output.outputs[0].token_ids == row["output_ids"][:most], (row["task"], row["id"])


def test_tokens_are_the_reference_through_every_kind_of_route(llm: LLM, heldout: list[dict[str, Any]]) -> None:
    graphs, stats = llm.engine.runner.graphs, llm.engine.runner.stats
    short = sorted((row for row in heldout if len(row["output_ids"]) > 3), key=lambda row: len(row["prompt_ids"]))
    run(llm, short[:1], 4)
    assert stats.eager == 0 and stats.graphs > 1, "one prompt in one step, then decodes"
    run(llm, short[:7:2] + short[40:43], 4)
    run(llm, short[:1] + short[200:202], 3)
    assert stats.graphs > stats.eager > 0
    run(llm, short[10:22], 2)
    assert {"tokens past the last bucket", "rows or context past the last bucket"} <= set(graphs.misses)


def test_compiling_runs_every_kind_of_forward_and_keeps_nothing(llm: LLM) -> None:
    graphs = llm.engine.runner.graphs
    ran: list[int] = []
    forward, before = graphs.model.forward, dict(graphs._of_fields)
    graphs.model.forward = lambda batch, pool: ran.append(len(batch.input_ids)) or forward(batch, pool)
    try:
        graphs.compile_kernels()
    finally:
        del graphs.model.forward
    assert sorted(ran) == [1, 1, 2, 2, 4, 8]
    assert graphs._of_fields == before and not llm.engine.runner.pool.reader(0).k.isnan().any()


def test_requests_that_sample_beside_others_that_do_not(llm: LLM, heldout: list[dict[str, Any]]) -> None:
    """Then only some wanted rows are sampled: the choice of rows travels with the fields."""
    rows = sorted(heldout, key=lambda row: len(row["prompt_ids"]))[:4]
    params = SamplingParams(temperature=0, max_tokens=2)
    expected = {}
    for i, row in enumerate(rows):
        llm.engine.add_request(f"alone-{i}", row["prompt_ids"], params, label_token_ids=row["output_ids"][:1])
        while llm.engine.has_unfinished_requests:
            expected |= {out.request_id[-1]: out.label_logits for out in llm.engine.step() if out.finished}
    got = {}
    for i, row in enumerate(rows):
        llm.engine.add_request(f"label-{i}", row["prompt_ids"], params, label_token_ids=row["output_ids"][:1])
        llm.engine.add_request(f"token-{i}", row["prompt_ids"], params)
    while llm.engine.has_unfinished_requests:
        got |= {out.request_id: out for out in llm.engine.step()}
    for i, row in enumerate(rows):
        assert got[f"token-{i}"].outputs[0].token_ids == row["output_ids"][:2]
        ((place, (values, _)),) = got[f"label-{i}"].label_logits.items()
        assert values == pytest.approx(expected[str(i)][place][0], abs=2e-4)  # fp32, sums in another order


def test_every_forward_runs_before_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel must not compile inside a capture, and contexts of one row bucket have kernels of their own."""
    kernels = {replace(decode_config(16, context), chunk=0) for context in (512, 8192)}
    assert len(kernels) == 2
    happened: list[str] = []

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        happened.append("capture begins")
        yield
        happened.append("capture ends")

    for name, made in (("graph_pool_handle", object), ("CUDAGraph", object), ("graph", graph), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, made)
    capture = _CUDACapture()
    for _ in range(2):
        capture(lambda: happened.append("forward") or ())
    assert happened == ["forward", "capture begins", "forward", "capture ends"] * 2
