"""`lastrow parity` passes the right model, fails the wrong one, and says which input is bad."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lastrow.cli import main
from lastrow.harness import parity, reference
from lastrow.harness.parity import NOISE, Check, ParityOptions, read_heldout
from lastrow.models.config import Gemma4Config

pytest.importorskip("transformers")


@pytest.fixture
def few(tmp_path: Path, heldout: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A held-out file of four items; one random shape instead of seven."""
    file = tmp_path / "few.jsonl"
    keys = [("chat", 0), ("decide", 1), ("tool_call", 1), ("recite", 1)]
    file.write_text("".join(json.dumps(d) + "\n" for d in heldout if (d["task"], d["id"]) in keys), encoding="utf-8")
    odd = "odd sizes and window 7"
    monkeypatch.setattr(reference, "RANDOM_SHAPES", {odd: reference.RANDOM_SHAPES[odd]})
    return file


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["parity", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_tiny_e_passes_every_check_and_the_keys_of_the_report_are_stable(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = report_of(capsys, "tiny-e", "--items", "1", "--heldout", str(few))
    assert code == 0 and report["passed"] and report["not_run"] == []
    assert list(report) == ["model", "dtype", "device", "backend", "transformers", "checks", "not_run", "passed"]
    names = [check["name"] for check in report["checks"]]
    assert names == [
        "transformers fp32, this checkpoint", "transformers fp32, random: odd sizes and window 7", "rows=last against rows=all",
        "any rows against rows=all", "chunked against whole", "alone against batched", "prefix of 1 token", "prefix of exactly one block",
        "prefix of exactly one window", "held-out greedy tokens", "held-out greedy tokens, 96-token steps, 5 requests",
    ]  # fmt: skip
    assert set(report["checks"][0]) == {"name", "cases", "rows", "max_difference", "mean_difference", "tolerance", "reason", "tokens_equal",
                                        "judged", "judged_equal", "detail", "passed"}  # fmt: skip
    assert all(check["cases"] and check["tokens_equal"] == check["rows"] for check in report["checks"])


def test_a_wrong_operation_fails_against_transformers_and_the_exit_code_says_so(
    few: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window one key too long: no check of the engine against itself can see it."""
    right = Gemma4Config.layer_window
    monkeypatch.setattr(Gemma4Config, "layer_window", lambda config, layer: right(config, layer) + 1 if right(config, layer) else 0)
    code, report = report_of(capsys, "tiny-e", "--items", "1", "--heldout", str(few))
    passed = {check["name"]: check["passed"] for check in report["checks"]}
    assert code == 1 and not report["passed"]
    assert not passed["transformers fp32, this checkpoint"] and not passed["transformers fp32, random: odd sizes and window 7"]
    assert passed["rows=last against rows=all"] and passed["chunked against whole"]


def test_changed_weights_fail_against_the_recorded_tokens(few: Path, tiny_e: Path, tmp_path: Path) -> None:
    """transformers reads the same wrong file and agrees; what it said when the checkpoint was recorded does not."""
    folder = tmp_path / "changed"
    shutil.copytree(tiny_e, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("layers.4.layer_scalar"):
            tensors[name] = torch.full_like(tensors[name], 0.1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = parity.run(ParityOptions(parity.EngineConfig(model=str(folder)), heldout=few, items=1, skip_transformers=True))
    failed = [check for check in report["checks"] if not check["passed"]]
    assert [check["name"] for check in failed] == ["held-out greedy tokens", "held-out greedy tokens, 96-token steps, 5 requests"]
    assert "differs first at output token" in failed[0]["detail"] and "NOT passed" in parity.render(report)


def test_without_transformers_the_command_names_what_it_did_not_run_and_fails_unless_told_to_skip(
    few: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "transformers_version", lambda: None)
    monkeypatch.setattr(parity.Parity, "_lengths", lambda self: [5])
    code, report = report_of(capsys, "--items", "1", "--heldout", str(few))
    assert code == 1 and not report["passed"] and all(check["passed"] for check in report["checks"])
    assert [item["name"] for item in report["not_run"]] == ["transformers fp32, this checkpoint", "transformers fp32, random shapes"]
    assert "pip install 'transformers==5.24.0'" in report["not_run"][0]["reason"]
    assert main(["parity", "--items", "1", "--heldout", str(few), "--skip-transformers"]) == 0
    assert "not run: left out by --skip-transformers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "no model 'no-such-model'"),
        (["--heldout", "absent.jsonl"], "absent.jsonl"),
        (["--items", "0"], "items is 0: at least 1 prompt a task is needed"),
        (["--dtype", "float8"], "float8"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"prompt_ids": [1]}', '{"prompt_ids": [], "output_ids": [1]}', '{"prompt_ids": ["a"], "output_ids": [1]}']
)
def test_a_bad_heldout_line_is_named_with_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text('{"prompt_ids": [2], "output_ids": [1]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"items.jsonl:2: no held-out item with prompt_ids and output_ids"):
        read_heldout(file, tmp_path)


def test_heldout_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text('{"prompt_ids": [2, 4096], "output_ids": [1], "task": "chat", "id": 7}\n', encoding="utf-8")
    assert main(["parity", "tiny-e", "--heldout", str(file), "--skip-transformers"]) == 2
    assert "held-out item chat 7: ids from 0 to 4095 are needed" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ the comparison
def test_a_comparison_fails_on_nan_on_no_cases_and_on_a_clear_token_only() -> None:
    tolerance, _ = NOISE["float32"]
    expected = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0 - tolerance]])

    def checked(got: torch.Tensor) -> Check:
        check = Check("c", tolerance=tolerance)
        check.compare(got, expected)
        return check

    assert not Check("c", tolerance=tolerance).passed  # nothing was compared
    assert checked(expected).passed and checked(expected).judged == 1
    swapped = expected.clone()
    swapped[1] = torch.tensor([0.0, 1.0 - tolerance / 2, 1.0])  # a tie within the tolerance may go either way
    assert checked(swapped).passed and checked(swapped).tokens_equal == 1
    assert not checked(expected + 2 * tolerance).passed
    nan = expected.clone()
    nan[0, 0] = float("nan")
    check = checked(nan)
    check.compare(expected, expected)
    assert not check.passed
