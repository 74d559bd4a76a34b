"""`lastrow bench prefix`: what it times is a hit and a cold prompt, and its numbers are those of the rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastrow.cli import main
from lastrow.harness import prefix_bench
from lastrow.models.config import ConfigError


def test_arms_find_exactly_what_is_shared_and_the_record_holds_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "prefix", "--shared", "100", "--prompt", "130", "--rounds", "2", "--threads", "1", "--record", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "prompts of 130 tokens, 100 of them shared" in out and "| cold |" in out
    page = next(tmp_path.glob("prefix-cpu-*.md")).read_text(encoding="utf-8")
    assert "## Not measured" in page and len(list(tmp_path.glob("data/*/rows.jsonl"))) == 1
    lines = next(tmp_path.glob("data/*/rows.jsonl")).read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 2 * 3
    # 6 whole blocks of 16 lie inside the 100 shared tokens
    assert sum('"cached": 96, "rows_given": 34' in line for line in lines) == 4
    assert sum('"cached": 0, "rows_given": 130' in line for line in lines) == 2


def test_ratios_are_those_of_the_rounds() -> None:
    ms = {"hit": (10.0, 20.0), "cold": (60.0, 160.0), "hit again": (10.0, 20.0)}
    rows = [
        {"arm": arm, "round": r, "ms": times[r], "rows_given": 450 if arm == "cold" else 45} for arm, times in ms.items() for r in range(2)
    ]
    summary = prefix_bench.summarize(rows)
    assert summary["ratio"]["cold"] == {"median": 7.0, "low": 6.0, "high": 8.0} and summary["ratio"]["hit again"]["median"] == 1.0
    assert summary["median_ms"]["hit"] == 15.0 and summary["min_ms"]["cold"] == 60.0 and summary["token_ratio"] == 10.0


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="shared is 10 of prompt=10 tokens"):
        prefix_bench.PrefixBench(shared=10, prompt=10)
