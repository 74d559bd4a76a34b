"""The commands on the bundled checkpoint: what people see is what transformers said when the held-out file was made."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from lastrow.cli import main

GREEDY = ("--temperature", "0", "--max-num-seqs", "4", "--max-num-batched-tokens", "512")


def pick(heldout: list[dict[str, Any]], task: str, turns: int) -> dict[str, Any]:
    """The first held-out conversation of a task with that many messages, each on one line, and without tools."""
    for row in heldout:
        talk = row.get("conversation") or {"messages": [], "tools": None}
        on_lines = not any("\n" in message["content"] for message in talk["messages"])
        if row["task"] == task and len(talk["messages"]) == turns and on_lines and not talk["tools"]:
            return row
    raise LookupError(task)


def test_generate_says_what_transformers_said(heldout: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    row = next(row for row in heldout if row["task"] == "yesno")
    assert main(["generate", "tiny-e", row["prompt"], "--json", *GREEDY]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["prompt_token_ids"] == row["prompt_ids"]
    assert document["outputs"][0]["token_ids"] == row["output_ids"]
    assert document["outputs"][0]["finish_reason"] == "stop"
    rows, steps = document["timings"]["rows_given"], len(row["output_ids"])
    assert rows == len(row["prompt_ids"]) + steps - 1
    assert document["timings"]["rows_computed"] == steps  # one wanted row a step: the prompt's last, then every new token's
    assert f"shared layers ran on {steps} of {rows} rows" in err


@pytest.mark.parametrize("drafts", ['{"model": "tiny-e-assistant", "num_speculative_tokens": 4}', '{"method": "ngram"}'])
def test_generate_with_drafts_says_what_transformers_said(
    heldout: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], drafts: str
) -> None:
    row = next(row for row in heldout if row["task"] == "prose")  # some drafts stand and some fall
    params = [*GREEDY, "--max-tokens", str(len(row["output_ids"]))]
    assert main(["generate", "tiny-e", row["prompt"], "--json", *params, "--speculative-config", drafts]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["outputs"][0]["token_ids"] == row["output_ids"]
    assert document["timings"]["rows_computed"] > len(row["output_ids"]), "a draft that falls is a row, too"


def test_chat_over_two_turns_says_what_transformers_said(
    heldout: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second turn of a held-out conversation, its first answer being our own: right only if the history is rendered right."""
    row = pick(heldout, "multiturn", 3)
    first, said, second = (message["content"] for message in row["conversation"]["messages"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{first}\n{second}\n"))
    assert main(["chat", *GREEDY, "--no-timings"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{said}\n{row['output'].removesuffix('<turn|>')}\n"
    assert err == ""


def test_thinking_is_shown_in_brackets(
    heldout: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = pick(heldout, "think", 1)
    monkeypatch.setattr(sys, "stdin", io.StringIO(row["conversation"]["messages"][0]["content"] + "\n"))
    assert main(["chat", "--thinking", *GREEDY]) == 0
    want = row["output"].removesuffix("<turn|>").replace("<|channel>", "[").replace("<channel|>", "]\n")
    assert capsys.readouterr().out == want + "\n"


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def no_tensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def other_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')


def wider(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"hidden_size": 192', '"hidden_size": 256'))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncated, "not a complete safetensors file"),
        (no_tensors, "model.safetensors: no such file"),
        (other_architecture, "model_type is 'llama'"),
        (wider, "the config asks for"),
        (no_tokenizer, "tokenizer.json: no such file"),
    ],
)
def test_damaged_checkpoints_are_one_line(tiny_e: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, says: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_e, folder)
    damage(folder)
    assert main(["generate", str(folder), "x", *GREEDY]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lastrow: error: ") and err.count("\n") == 1 and says in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["generate", "tiny-e", "x", "--max-model-len", "1m"], "made for 4096 positions"),
        (["generate", "tiny-e", "word " * 100, "--max-model-len", "64"], "64"),
        (["generate", "tiny-e", "x", "--shape", "e2b-eighth"], "no tokenizer"),
        (["generate", "tiny-e", "x", "--kv-cache-memory-bytes", "1k"], "kv_cache_memory_bytes"),
        (["generate", "tiny-e", "x", "--speculative-config", '{"method": "ngram", "simulated_acceptance": "x"}'], "a probability"),
        (["generate", "tiny-e", "x", "--speculative-config", '{"model": "tiny-e"}'], "an assistant's is gemma4_assistant"),
    ],
)
def test_what_the_engine_refuses_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    assert main([*argv, *GREEDY]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("lastrow: error: ") and err.count("\n") == 1 and says in err
