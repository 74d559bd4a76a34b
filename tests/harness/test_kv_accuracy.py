"""The accuracy table of a K/V format: right for a good format, and it shows a bad one."""

from __future__ import annotations

import pytest
import torch

from lastrow.cli import main
from lastrow.config import EngineConfig
from lastrow.harness import kv_accuracy
from lastrow.kernels import kv_cache
from lastrow.models.config import ConfigError


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_good_format_agrees_and_a_coarse_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    report = kv_accuracy.run(EngineConfig(kv_cache_dtype="int8_per_token_head"), items=1)
    whole = report["tasks"][-1]
    assert report["passed"] and whole["task"] == "all" and whole["prompts"] == 12
    # all 480 held-out prompts (docs/kv-cache.md): 99.8 % and 0.008
    assert whole["top1_agreement"] > 0.98 and 0 < whole["mean_difference"] < 0.03 and whole["greedy_equal"] >= 10
    plain = kv_cache.quantize

    def coarse(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = plain(x, dtype)
        return (values.float() / 42).round().mul(42).to(dtype), scale  # seven levels

    monkeypatch.setattr(kv_cache, "quantize", coarse)
    bad = kv_accuracy.run(EngineConfig(kv_cache_dtype="int8_per_token_head"), items=1)["tasks"][-1]
    assert bad["mean_difference"] > 10 * whole["mean_difference"] and bad["top1_agreement"] < 0.97 and bad["kl"] > 0.02


def test_the_arithmetic_on_distributions_known_by_hand() -> None:
    expected = torch.tensor([[0.0, 0.0], [4.0, 0.0]]).log_softmax(-1)
    got = torch.tensor([[2.0, 0.0], [4.0, 0.0]]).log_softmax(-1)
    a = kv_accuracy.Accuracy("x")
    a.add(got, expected, torch.tensor([0, 1]))
    p = torch.tensor(2.0).sigmoid().item()
    assert a.rows == 2 and a.agree == 2 and a.finite
    rise = torch.tensor(2 * p).log().item()  # of token 0, target and most likely token alike; the second row does not change
    assert a.max_difference == pytest.approx(rise) and a.mean_difference == pytest.approx(rise / 2)
    assert a.kl == pytest.approx((-0.5 * torch.tensor(4 * p * (1 - p)).log().item()) / 2)
    a.add(torch.tensor([[float("nan"), 0.0]]), expected[:1], torch.tensor([0]))
    assert not a.finite


def test_the_command_takes_shapes_and_refuses_auto(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--kv-cache-dtype", "fp8_per_token_head", "--shape", "e2b-eighth"]) == 0
    out = capsys.readouterr().out
    assert "| 1100 random tokens | 1 | - | 64 |" in out and "every number is finite" in out
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'auto'"):
        kv_accuracy.run(EngineConfig())
