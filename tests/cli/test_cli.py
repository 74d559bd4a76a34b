"""The command line: what is printed where, and that every mistake is one line and exit code 2.

The engine behind `generate` and `chat` is a script here (`ScriptedLLM`), so that these tests are about the commands; tests of the
commands on tiny-e itself are in test_cli_tiny_e.py.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lastrow
from conftest import TINY_E
from lastrow.cli import COMMANDS, main
from lastrow.cli.chat import Display
from lastrow.config import EngineConfig
from lastrow.core.output import CompletionOutput, RequestOutput
from lastrow.core.request import FinishReason
from lastrow.core.sampling_params import SamplingParams
from lastrow.core.stats import RequestMetrics
from lastrow.tokenizer import Tokenizer

ANSWER = "<|channel>thought\nLook.\n<channel|>It is 4.<turn|>"


class ScriptedLLM:
    """Answers ANSWER or, to text, the text reversed; records what it was asked."""

    asked: list[Any]
    config: EngineConfig

    def __init__(self, **options: Any) -> None:
        type(self).config = EngineConfig(**options)
        type(self).asked = []
        self.tokenizer = Tokenizer(TINY_E)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=1.0, top_k=64, top_p=0.95)

    def _output(self, prompt: Any, text: str, params: SamplingParams, finished: bool = True) -> RequestOutput:
        ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else self.tokenizer.encode(prompt)
        metrics = RequestMetrics(arrival_time=1.0, first_scheduled_time=1.0, first_token_time=1.5, last_token_time=2.5, finished_time=2.5)
        metrics.rows_given, metrics.rows_computed = len(ids) + 2, 3
        done = [CompletionOutput(i, text, [7, 8, 9], finish_reason=FinishReason.STOP if finished else None) for i in range(params.n)]
        return RequestOutput("0", None if isinstance(prompt, dict) else prompt, ids, done, finished, num_cached_tokens=1, metrics=metrics)

    def generate(self, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
        self.asked.append((prompts, params))
        return [self._output(prompt, prompt[::-1], params) for prompt in prompts]

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append((prompt, params))
        text = ANSWER if isinstance(prompt, dict) else prompt[::-1]
        body = len(text.removesuffix("<turn|>"))  # the stop token comes in one piece
        for end in [*range(1, body), len(text)]:
            yield self._output(prompt, text[:end], params, end == len(text))


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedLLM]:
    monkeypatch.setitem(lastrow.__dict__, "LLM", ScriptedLLM)  # setattr would look at the lazy attribute first
    return ScriptedLLM


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# ------------------------------------------------------------------------------------------------ generate
def test_generate_streams_one_prompt(llm: type[ScriptedLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "tiny-e", "abc", "--max-tokens", "1k", "--temperature", "0", "--stop", "x", "--stop", "y"]) == 0
    out, err = capsys.readouterr()
    assert out == "cba\n"
    assert "shared layers ran on 3 of" in err and "first after 500 ms" in err and "then 2 tokens/s" in err
    params = llm.asked[0][1]
    assert (params.max_tokens, params.temperature, params.stop, params.top_k) == (1000, 0.0, ["x", "y"], 64)


def test_options_and_positionals_in_any_order(llm: type[ScriptedLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--seed", "5", "tiny-e", "--temperature", "0", "ab", "--max-model-len", "2K", "cd"]) == 0
    assert capsys.readouterr().out == "[ab] ba\n[cd] dc\n"
    assert llm.config.max_model_len == 2048 and llm.config.seed == 5 and llm.asked[0][1].seed == 5


def test_generate_json_has_stable_keys(llm: type[ScriptedLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "tiny-e", "ab", "cd", "--json", "--n", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["ab", "cd"]
    assert set(rows[0]) == {"prompt", "prompt_token_ids", "outputs", "timings"}
    assert [set(o) for o in rows[0]["outputs"]] == [{"index", "text", "token_ids", "finish_reason", "stop_reason"}] * 2
    assert rows[0]["outputs"][1]["finish_reason"] == "stop"
    assert set(rows[0]["timings"]) == {
        "prompt_tokens", "cached_tokens", "completion_tokens", "queue_s", "first_token_s", "total_s", "decode_tokens_per_s",
        "rows_given", "rows_computed",
    }  # fmt: skip


def test_generate_reads_standard_input(llm: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(monkeypatch, "one\ntwo\n")
    assert main(["generate"]) == 0
    assert llm.asked[0][0] == "one\ntwo"
    pipe(monkeypatch, "one\n\ntwo\n")
    assert main(["generate", "--lines"]) == 0
    assert llm.asked[0][0] == ["one", "two"]
    capsys.readouterr()
    pipe(monkeypatch, " \n")
    assert main(["generate"]) == 2
    assert "standard input is empty" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ chat
def test_chat_keeps_the_conversation(llm: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(monkeypatch, "What is 2 + 2?\n\nAnd again?\n/reset\nNew.\n/exit\nnever read\n")
    assert main(["chat", "--system", "S", "--thinking"]) == 0
    out, err = capsys.readouterr()
    assert out == "[thought\nLook.\n]\nIt is 4.\n" * 3
    assert err.count("shared layers") == 3
    system, first = {"role": "system", "content": "S"}, {"role": "user", "content": "What is 2 + 2?"}
    talks = [
        [system, first],
        [system, first, {"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "And again?"}],
        [system, {"role": "user", "content": "New."}],
    ]
    tokenizer = Tokenizer(TINY_E)
    want = [{"prompt_token_ids": tokenizer.apply_chat_template(talk, enable_thinking=True)} for talk in talks]
    assert [prompt for prompt, _ in llm.asked] == want


@pytest.mark.parametrize("step", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("text", "shown", "answer"),
    [
        (ANSWER, "[thought\nLook.\n]\nIt is 4.", "It is 4."),
        ("plain<turn|>", "plain", "plain"),
        ("a <| b <|channel", "a <| b <|channel", "a <| b <|channel"),
        ("<|channel>cut", "[cut]\n", ""),
        ("a<|channel>b<channel|>c<|channel>d<channel|>e<eos>", "a[b]\nc[d]\ne", "ace"),
        ("", "", ""),
    ],
)
def test_display_splits_thinking_at_any_cut(text: str, shown: str, answer: str, step: int) -> None:
    display, out = Display(color=False), ""
    body = len(text.removesuffix("<turn|>").removesuffix("<eos>"))  # the stop token comes in one piece
    for end in range(step, body, step):
        out += display.update(text[:end], False)
        assert shown.startswith(out)
    assert out + display.update(text, True) == shown
    assert display.answer == answer


# ------------------------------------------------------------------------------------------------ info
def test_info_of_the_bundled_model_and_of_a_shape(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["info"]) == 0
    assert capsys.readouterr().out.startswith("tiny-e: 10 layers")
    plot = tmp_path / "e2b.svg"
    assert main(["info", "--shape", "e2b", "--json", "--memory", "24G", "--plot", str(plot)]) == 0
    assert json.loads(capsys.readouterr().out)["cut"] == 14
    assert plot.read_text().startswith("<?xml")


# ------------------------------------------------------------------------------------------------ flags
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: lastrow {command}" in capsys.readouterr().out


def test_every_engine_option_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "--help"])
    text = capsys.readouterr().out
    for item in dataclasses.fields(EngineConfig):
        assert item.name == "model" or "--" + item.name.replace("_", "-") in text


def test_flags_reach_the_engine(llm: type[ScriptedLLM]) -> None:
    flags = ["--no-enable-prefix-caching", "--enforce-eager", "--kv-cache-dtype", "int8_per_token_head", "--kv-cache-memory-bytes", "2G"]
    assert main(["generate", "--load-format", "dummy", "--gpu-memory-utilization", "0.5", *flags, "tiny-e", "x"]) == 0
    want = {"enable_prefix_caching": False, "enforce_eager": True, "kv_cache_dtype": "int8_per_token_head"}
    want |= {"kv_cache_memory_bytes": 2 * 2**30, "load_format": "dummy", "gpu_memory_utilization": 0.5}
    assert llm.config == EngineConfig(**want)


# ------------------------------------------------------------------------------------------------ mistakes
MISTAKES = {
    "no command": ([], "no command: one of generate, chat"),
    "unknown command": (["generat"], "invalid choice: 'generat'"),
    "unknown option": (["generate", "tiny-e", "x", "--bogus"], "unrecognized arguments: --bogus"),
    "abbreviated option": (["generate", "tiny-e", "x", "--temp", "1"], "unrecognized arguments: --temp"),
    "missing value": (["generate", "tiny-e", "x", "--seed"], "--seed: expected one argument"),
    "wrong type": (["generate", "tiny-e", "x", "--top-k", "many"], "--top-k: invalid int value: 'many'"),
    "wrong choice": (["generate", "tiny-e", "x", "--dtype", "fp4"], "--dtype: invalid choice: 'fp4'"),
    "wrong size": (["generate", "tiny-e", "x", "--max-model-len", "3q"], "'3q' is no size"),
    "refused by the config": (["generate", "tiny-e", "x", "--block-size", "24"], "block_size is 24: a power of two"),
    "refused by the sampling": (["generate", "tiny-e", "x", "--temperature", "-1"], "temperature is -1.0: 0 (greedy) or a positive"),
    "no such model": (["info", "nope"], "no model 'nope': give a folder, a hub id"),
    "prompt as model": (["info", "In the beginning"], "no model 'In the beginning'"),
    "a revision of the bundled model": (["info", "--revision", "v1"], "revision is 'v1': only a hub model has revisions, and tiny-e"),
    "a revision of a folder": (
        ["info", str(TINY_E), "--revision", "v1"],
        f"only a hub model has revisions, and {TINY_E} is",
    ),
    "a revision of a shape": (
        ["info", "--shape", "e2b", "--revision", "v1"],
        "only a hub model has revisions, and shape",
    ),
    "no such shape": (["info", "--shape", "e9b"], "--shape: invalid choice: 'e9b'"),
    "a model and a shape": (["info", "nope", "--shape", "e2b"], "MODEL is 'nope', and --shape e2b is a model without files"),
    "the bundled model and a shape": (["serve", "tiny-e", "--shape", "e2b"], "give one of the two"),
    "no such picture": (["info", "--plot", "a.bmp"], "must end in .svg"),
    "no such folder": (["info", "--plot", "/nope/a.svg"], "/nope/a.svg"),
    "no memory": (["info", "--memory", "-5"], "memory is -5: a positive size"),
    "a text for a shape without a tokenizer": (["generate", "tiny-e", "x", "--shape", "e2b"], "no tokenizer: give a checkpoint folder"),
    "a chat with a shape": (["chat", "--shape", "e2b"], "no tokenizer: give a checkpoint folder"),
}


@pytest.mark.parametrize(("argv", "says"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line_and_code_2(llm: type[ScriptedLLM], capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lastrow: error: ") and err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{broken", "config.json: not readable as JSON"),
        ("[]", "holds no JSON object"),
        ('{"model_type": "llama"}', "model_type is 'llama'"),
        ('{"model_type": "gemma4"}', "num_hidden_layers is missing"),
        ("\xff", "not readable"),
    ],
)
def test_unreadable_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, says: str) -> None:
    (tmp_path / "config.json").write_bytes(config.encode("latin-1"))
    assert main(["info", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lastrow: error: ") and err.count("\n") == 1 and says in err


def test_text_that_is_no_unicode(llm: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "tiny-e", "a\udcff"]) == 2
    pipe(monkeypatch, "a\udcff\n")
    assert main(["chat"]) == 2
    assert capsys.readouterr().err.count("lone surrogate") == 2


# ------------------------------------------------------------------------------------------------ processes
def start(*argv: str, **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(TINY_E.parents[2])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "lastrow", *argv], env=env, **pipes, **options)


def test_exit_codes_of_the_process() -> None:
    process = start("info", "nope")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "") and "Traceback" not in err
    process = start("info")
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0


def test_a_reader_that_leaves_early_is_no_error() -> None:
    process = start("info", "--json")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == ""


@pytest.mark.parametrize(("redirect", "code", "says"), [(">/dev/full", 2, "No space left"), (">&-", 0, "")])
def test_an_output_that_takes_nothing_is_no_traceback(redirect: str, code: int, says: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(TINY_E.parents[2])}
    done = subprocess.run(["sh", "-c", f'"{sys.executable}" -m lastrow info {redirect}'], env=env, stderr=subprocess.PIPE, text=True)
    assert done.returncode == code and says in done.stderr and done.stderr.count("\n") == bool(says)


def test_ctrl_c_is_quiet() -> None:
    code = (
        "import lastrow.cli as c, time\nc.run_command = lambda *_: (print('up', flush=True), time.sleep(60))\nc.sys.exit(c.main(['info']))"
    )
    env = {**os.environ, "PYTHONPATH": str(TINY_E.parents[2])}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 130
