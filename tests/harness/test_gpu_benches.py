"""The benches that are meant for a card, on small shapes: every arm does what it says, and the record holds every row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lastrow.cli import main
from lastrow.engine.cuda_graphs import CUDAGraphs, GraphBuckets
from lastrow.engine.draft_graphs import DraftGraphs
from lastrow.harness import kv_bench, mixed_bench, speculative_bench
from lastrow.harness.kv_bench import KVBench
from lastrow.harness.mixed_bench import MixedBench
from lastrow.harness.speculative_bench import SpeculativeBench


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_drafts_stand_as_often_as_asked_and_the_page_says_that_it_is_simulated(tmp_path: Path) -> None:
    bench = SpeculativeBench("e2b-eighth", drafts=(3,), rates=(0.0, 1.0), three=(), prompt=8, output=17, rounds=1)
    report = speculative_bench.run(bench)
    by_arm = {r["arm"]: r["tokens_per_verification"] for r in report["results"]}
    arms = {"plain": 1.0, "plain again": 1.0, "3 drafts, 0": 1.0, "3 drafts, 1": 4.0}
    assert by_arm == arms | {"3 drafts, 0, batch_invariant=False": 1.0, "3 drafts, 1, batch_invariant=False": 4.0}
    assert len(report["rows"]) == 6 and report["steps"] == []  # nothing is captured on a CPU
    page = speculative_bench.write_record(report, tmp_path).read_text(encoding="utf-8")
    assert "Acceptance is simulated" in page and "## Not measured" in page


def test_the_single_steps_that_are_timed_are_those_of_a_sequence_of_that_length() -> None:
    bench = SpeculativeBench("e2b-eighth", drafts=(3,), rates=(1.0,), three=(), prompt=8, output=16, rounds=1)
    stream = speculative_bench.DraftingStream(bench)
    runner, proposer = stream.llm.engine.runner, stream.speculator.proposer
    runner.inputs.use_tiles((16,))
    graphs = CUDAGraphs(
        runner.model, runner.pool, runner.inputs, GraphBuckets((8,), (1, 2, 4), (64,)), verifies=True, capture=lambda forward: forward
    )
    graphs.warm_up()
    runner.use_graphs(graphs)
    inputs = runner.inputs
    drafter = DraftGraphs(proposer.assistant, runner.pool, inputs.block_tables, inputs.null_slot, (64,), 1, capture=lambda step: step)
    drafter.warm_up()
    proposer.use_pool(drafter, runner.pool)
    steps = stream.steps(context=40)
    assert list(steps) == ["decode", *(f"verify {k} drafts" for k in (1, 2, 3)), "draft", "decode again"]
    for name, rows in (("decode", 1), ("verify 1 drafts", 2), ("verify 3 drafts", 4)):
        hidden = steps[name]()()[0]
        assert graphs._token_memory[0, :rows].tolist() == list(range(40 - rows, 40)) and len(hidden) == rows and hidden.isfinite().all()
        assert (graphs._token_memory[2, :rows] // inputs.block_size > 0).all(), "K/V of blocks that a request may hold"
    assert len(speculative_bench.time_steps(steps, rounds=2, calls=1)) == 2 * len(steps)


def test_a_report_is_shown_again_and_another_benchs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"round": 0, "arm": "plain", "seconds": 1.0, "decode_tok_s": 16.0, "tokens_per_verification": 1.0}
    report = {
        "bench": "speculative", "environment": {"shape": "e2b"}, "rows": [row], "results": [speculative_bench.summarize([row], "plain")],
        "steps": [{"step": "decode", "ms": 1.8, "of_a_decode_step": 1.0}],
    }  # fmt: skip
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    assert main(["bench", "speculative", "--report", str(file)]) == 0
    assert "| decode | 1.800 | 100% |" in capsys.readouterr().out
    assert main(["bench", "prefix", "--report", str(file)]) == 2
    assert "it is one of speculative" in capsys.readouterr().err


def test_every_part_of_the_kv_bench_measures_what_it_says(tmp_path: Path) -> None:
    bench = KVBench(
        "e2b-eighth", rounds=2, streams=3, context=40, steps=2, prefill=(2, 30), short=8, prefix=(64, 80), long=1200, chunks=(512, 128),
        kv_bytes=32 << 20,
    )  # fmt: skip
    report = kv_bench.run(bench)
    parts = report["parts"]
    assert list(parts) == list(kv_bench.PARTS)
    assert parts["table"]["tokens_equal"] and parts["table"]["bytes"]["closed_form"] == 32768 * 35 * 32 * 4
    assert [of["steps"] for of in parts["long"]["arms"].values()] == [3, 10, 3]
    assert all(row["closed_form"] == row["tensors"] == row["allocated"] <= row["budget"] for row in parts["capacity"]["rows"])
    assert [row["tokens"] for row in report["rows"] if row["part"] == "formats"] == [6] * 2 * 4
    assert {row["tokens"] for row in report["rows"] if row["part"] == "table"} == {60, 2, 6}
    page = kv_bench.write_record(report, tmp_path).read_text(encoding="utf-8")
    assert "int8 decodes" in page and "`fp8_per_token_head` against auto" in page
    lines = next(tmp_path.glob("data/*/rows.jsonl")).read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + len(report["rows"])


def test_streams_and_arrivals_are_all_seen(tmp_path: Path) -> None:
    bench = MixedBench("e2b-eighth", streams=2, short=5, prompt=40, rate=10.0, seconds=0.4, bounds=(16,), rounds=1)
    report = mixed_bench.run(bench)
    rows = {row["arm"]: row for row in report["rows"]}
    assert list(rows) == ["alone", "default", "default again", "bound 16"] and rows["alone"]["ttft_ms_p50"] is None
    assert rows["bound 16"]["bound"] == 16 and all(row["gaps"] > 2 and row["itl_ms_max"] >= row["itl_ms_p50"] for row in rows.values())
    assert all(rows[arm]["ttft_ms_p99"] > 0 for arm in ("default", "bound 16"))
    assert "| bound 16 |" in mixed_bench.write_record(report, tmp_path).read_text(encoding="utf-8")
