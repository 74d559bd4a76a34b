"""A server with drafts answers as the one without: a step that brings several tokens is seen by nobody.

Greedy, fp32 on one thread: what differs would be the serving of the tokens, not the tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.conftest import MAX_MODEL_LEN, STEP_TOKENS, ServerProcess

DRAFTS = {"model": "tiny-e-assistant", "num_speculative_tokens": 4, "adaptive": False}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory) -> Iterator[ServerProcess]:
    flags = ("--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", "64")
    process = ServerProcess(tmp_path_factory.mktemp("drafting"), *flags, "--speculative-config", json.dumps(DRAFTS))
    yield process.wait_ready()
    process.stop()


def whole(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What an answer says, without ids, times and how much of the prompt was cached."""
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    choice = answer["choices"][0]
    for call in choice.get("message", {}).get("tool_calls") or ():
        del call["id"]
    for entry in (choice["logprobs"] or {}).get("content") or ():
        entry.pop("logprob"), entry.pop("top_logprobs")
    if (choice["logprobs"] or {}).get("token_logprobs"):
        choice["logprobs"] = choice["logprobs"]["tokens"]
    return {"choice": choice, "tokens": answer["usage"]["completion_tokens"]}


def streamed(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same from a stream, put together as a client does."""
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "logprobs": [], "events": 0}
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", server.url + path, json=body, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            said["tokens"] = (chunk.get("usage") or {}).get("completion_tokens")
            for choice in chunk["choices"]:
                delta = choice.get("delta", {})
                said["events"] += 1
                said["content"] += delta.get("content") or choice.get("text") or ""
                said["reasoning"] += delta.get("reasoning_content") or ""
                said["logprobs"] += [entry["token"] for entry in (choice["logprobs"] or {}).get("content") or ()]
                for call in delta.get("tool_calls") or ():
                    if "id" in call:
                        assert call["index"] == len(said["calls"])
                        said["calls"].append({"name": call["function"]["name"], "arguments": ""})
                    said["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
                if choice["finish_reason"]:
                    said["end"] = choice["finish_reason"], choice.get("stop_reason")
    return said


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["th"]},
        {"stop": ["ica", "Am"], "logprobs": True, "top_logprobs": 2},
        # counted token by token: a stop string among the first min_tokens does not end it, wherever the steps end
        *({"stop": [" is", "e", "or"], "min_tokens": least} for least in (2, 3, 4, 5, 6, 8)),
        {"stop": ["e"], "include_stop_str_in_output": True, "return_token_ids": True},
        {"stop": ["e"], "chat_template_kwargs": {"enable_thinking": True}},
    ],
    ids=str,
)
def test_a_stop_string_ends_a_chat_at_its_own_token(server: ServerProcess, drafting: ServerProcess, fields: dict[str, Any]) -> None:
    for question in ("Where in the world is Guyana?", "What is the capital of Norway?"):
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 48, **fields}
        expected = whole(server, "/v1/chat/completions", body)
        assert whole(drafting, "/v1/chat/completions", body) == expected
        plain, drafted = (streamed(s, "/v1/chat/completions", body) for s in (server, drafting))
        assert drafted == plain
        assert (plain["content"], plain["tokens"]) == (expected["choice"]["message"]["content"], expected["tokens"])


@pytest.mark.parametrize("fields", [{"stop": ["the"]}, {"stop": ["e"], "min_tokens": 5}, {"stop": ["th", "of"], "logprobs": 2}], ids=str)
def test_a_stop_string_ends_a_completion_at_its_own_token(server: ServerProcess, drafting: ServerProcess, fields: dict[str, Any]) -> None:
    for prompt in ("In the beginning", "And God said", "The capital of Norway is"):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 40, **fields}
        assert whole(drafting, "/v1/completions", body) == whole(server, "/v1/completions", body)


def test_streamed_calls_lose_no_argument(server: ServerProcess, drafting: ServerProcess) -> None:
    """Several tokens a step: a name, an argument and the end of a call may come together."""
    for question in ("What is the weather in Porto?", "What is the weather in Oslo in celsius?"):
        for choice in ("auto", "required"):
            body = {
                "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 60, "tools": [WEATHER],
                "tool_choice": choice, "parallel_tool_calls": False,
            }  # fmt: skip
            expected = whole(server, "/v1/chat/completions", body)
            assert whole(drafting, "/v1/chat/completions", body) == expected
            said = streamed(drafting, "/v1/chat/completions", body)
            calls = [call["function"] for call in expected["choice"]["message"]["tool_calls"]]
            assert said["calls"] == calls and said["end"][0] == "tool_calls" and said["tokens"] == expected["tokens"]
            assert json.loads(calls[0]["arguments"])["city"]
            # fewer events than tokens: the steps did bring several at once
            assert said["events"] < said["tokens"]


def test_metrics_tell_what_drafts_bring(server: ServerProcess, drafting: ServerProcess) -> None:
    body = {"prompt": "And God said", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    assert drafting.post("/v1/completions", body).status_code == 200
    drafting.wait_idle()
    lines = httpx.get(drafting.url + "/metrics").text.splitlines()
    of = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if "spec_decode" in line and line[0] != "#")}

    def value(name: str, *positions: int) -> float:
        labels = ['model_name="tiny-e"', *(f'position="{position}"' for position in positions)]
        return of[f"{name}{{{','.join(labels)}}}"]

    verified, drafts, stood = (value(f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens"))
    by_position = [value("vllm:spec_decode_num_accepted_tokens_per_pos_total", i) for i in range(4)]
    assert drafts > verified > 0 and drafts > stood > 0 and sum(by_position) == stood
    assert by_position == sorted(by_position, reverse=True)
    assert value("lastrow:spec_decode_acceptance_rate", 0) == pytest.approx(by_position[0] / verified)
    # a stop token among the drafts cuts what a verification brings
    assert 1 + 0.5 * stood / verified < value("lastrow:spec_decode_mean_accepted_length") <= 1 + stood / verified
    assert value("lastrow:spec_decode_switched_off_total") == 0, "adaptive is off"
    assert "spec_decode" not in httpx.get(server.url + "/metrics").text
