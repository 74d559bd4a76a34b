"""Log probabilities of the engine beside transformers': equal for the right weights, and a wrong number shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lastrow.config import EngineConfig
from lastrow.core.output import Logprob
from lastrow.harness import logprob_parity
from lastrow.harness.logprob_parity import Agreement


def test_the_arithmetic_on_places_known_by_hand() -> None:
    a = Agreement("x")
    a.add({5: -0.1, 7: -2.0}, {5: -0.3, 7: -2.0}, best=5)
    a.add({5: -0.1, 9: -3.0}, {7: -0.1, 5: -1.1}, best=7)
    assert (a.places, a.top1, a.compared, a.unseen) == (2, 1, 3, 1)
    assert a.mean_difference == pytest.approx(0.4) and a.max_difference == pytest.approx(1.0)
    a.add({5: float("nan")}, {5: -1.0}, best=5)
    assert a.max_difference != a.max_difference
    entry = {4: Logprob(-3.0), 1: Logprob(-0.5), 2: Logprob(-1.0)}
    assert list(logprob_parity.plain(entry, 2)) == [1, 2]


def test_tiny_e_agrees_with_transformers_and_with_all_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    everything = logprob_parity.prompts_of
    monkeypatch.setattr(logprob_parity, "prompts_of", lambda *args: everything(*args)[:2])
    monkeypatch.setattr(logprob_parity, "TOKENS", 3)
    report = logprob_parity.run(EngineConfig(), items=1)
    assert report["passed"]
    for check in report["checks"]:
        assert check["places"] == check["top1"] == 6 and check["compared"] > 110 and check["max_difference"] < 1e-3
    page = logprob_parity.write_record(report, tmp_path).read_text(encoding="utf-8")
    assert "fast against transformers fp32 | 100.00% of 6" in page
