"""Faults that servers of this model have had, one test each. Expected outputs are transformers' (tests/data/heldout.jsonl) or a rule."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import pytest

from .conftest import MAX_MODEL_LEN, STEP_TOKENS, ServerProcess

T = TypeVar("T")
SAFE = ("chat", "multiturn", "decide", "yesno", "json")
TOOL = {
    "type": "function",
    "function": {
        "name": "play_music",
        "description": "Play music.",
        "parameters": {
            "type": "object",
            "properties": {"artist": {"type": "string"}, "volume": {"type": "integer"}},
            "required": ["volume"],
        },
    },
}


@pytest.fixture(scope="module")
def items(heldout) -> list[dict[str, Any]]:
    """Items whose every margin is far above what rounding moves: their greedy output does not depend on the batch."""
    return [row for task in SAFE for row in heldout if row["task"] == task and row["min_margin"] > 0.5][::5]


def complete(server: ServerProcess, row: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"prompt": row["prompt_ids"], "temperature": 0, "max_tokens": 64, "return_token_ids": True, **fields}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def together(*calls: Any) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_sampling_rows_stale_after_a_batch_reorder(server, items):
    """Greedy, seeded and penalised requests of different lengths come and go; each is answered as if it were alone."""
    rows = items[:16]
    noisy = {"temperature": 1.5, "top_k": 40, "max_tokens": 12, "ignore_eos": True}
    alone = [complete(server, row, seed=i, **noisy)["token_ids"] for i, row in enumerate(rows[:4])]
    jobs = []
    for i, row in enumerate(rows):
        jobs.append(lambda row=row: complete(server, row)["token_ids"])
        jobs.append(lambda i=i: complete(server, rows[i % 4], seed=i % 4, **noisy)["token_ids"])
    results = together(*jobs)
    assert results[0::2] == [row["output_ids"] for row in rows]
    assert results[1::2] == [alone[i % 4] for i in range(len(rows))]


def test_structured_output_steps_using_another_requests_parameters(server, items):
    words = ["alpha one", "beta", "gamma ray burst", "delta", "epsilon x y z", "zeta"]
    jobs = [lambda w=w: complete(server, items[0], structured_outputs={"choice": [w]})["text"] for w in words]
    jobs += [lambda row=row: complete(server, row)["token_ids"] for row in items[:6]]
    results = together(*jobs)
    assert results[: len(words)] == words
    assert results[len(words) :] == [row["output_ids"] for row in items[:6]]


def test_grammar_masks_on_the_wrong_row_beside_a_partial_prompt_chunk(server, items):
    long_prompt = (items[0]["prompt_ids"] * 100)[: 5 * STEP_TOKENS]
    long = {"prompt_ids": long_prompt}
    jobs = []
    for i in range(4):
        jobs.append(lambda i=i: complete(server, long, structured_outputs={"regex": f"long {i}+"}, max_tokens=8)["text"])
        jobs.append(lambda i=i: complete(server, items[i], structured_outputs={"regex": f"short {i}{{3}}"})["text"])
        jobs.append(lambda i=i: complete(server, items[i])["token_ids"])
    results = together(*jobs)
    for i in range(4):
        assert results[3 * i].startswith(f"long {i}") and set(results[3 * i][5:]) == {str(i)}
        assert results[3 * i + 1] == f"short {i}{i}{i}"
        assert results[3 * i + 2] == items[i]["output_ids"]


STUCK = {"grammar": 'start: "a" endless\nendless: endless'}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_grammar_that_cannot_go_on_ends_its_own_request_only(server, items, ignore_eos):
    """It ended the engine, and with it every other request."""
    body = {"prompt": "x", "structured_outputs": STUCK, "temperature": 0, "ignore_eos": ignore_eos, "max_tokens": 500}
    engine = server.engine_pid()
    whole, many, streamed, beside = together(
        lambda: server.error("/v1/completions", body),
        lambda: server.error("/v1/completions", {**body, "n": 2}),
        lambda: server.post("/v1/completions", {**body, "stream": True}).text,
        lambda: complete(server, items[0]),
    )
    for text in (whole, many, streamed):
        assert "can never be fulfilled" in text
    assert beside["token_ids"] == items[0]["output_ids"]
    assert server.engine_pid() == engine and server.wait_idle()


def test_bad_words_index_error(server, items):
    row = items[0]
    first = complete(server, row)["text"].split()[0].strip(".,")
    for words in ([first], ["🙂", "\u0000", "a much longer phrase of several words", first]):
        assert first not in complete(server, row, bad_words=words)["text"]
    only = complete(server, row, bad_words=["certain"], structured_outputs={"choice": ["certain"]})
    assert only["text"] == "certain", "where the grammar allows one thing, that comes"
    contradiction = {"prompt": row["prompt_ids"], "allowed_token_ids": [106], "min_tokens": 1}
    assert "allowed_token_ids [106], min_tokens=1 excludes stop ids [106]" in server.error("/v1/completions", contradiction)


def test_logit_bias_min_p_and_min_tokens_silently_ignored(server, items):
    row = items[0]
    wanted = row["output_ids"][0] + 7
    assert complete(server, row, logit_bias={str(wanted): 100}, max_tokens=1)["token_ids"] == [wanted]
    hot = {"temperature": 5.0, "seed": 3}
    assert complete(server, row, **hot, min_p=1.0)["token_ids"] == row["output_ids"]
    assert complete(server, row, **hot)["token_ids"] != row["output_ids"]
    longer = complete(server, row, min_tokens=len(row["output_ids"]) + 5)
    assert len(longer["token_ids"]) >= len(row["output_ids"]) + 5


def test_wrong_top_logprobs_ids(server, items):
    """top1 - top2 of the logprobs is the margin that transformers found, and top1 its token."""
    for row in items[:4]:
        body = {"prompt": row["prompt_ids"], "temperature": 0, "max_tokens": 64, "logprobs": 3, "return_tokens_as_token_ids": True}
        logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{token}" for token in row["output_ids"]]
        for token, top, margin in zip(row["output_ids"], logprobs["top_logprobs"], row["margins"], strict=True):
            assert len(top) == 3
            ordered = sorted(top.items(), key=lambda pair: -pair[1])
            assert ordered[0][0] == f"token_id:{token}"
            # The file rounds margins to three digits; both sides are fp32, whose differences are below 0.001.
            assert math.isclose(ordered[0][1] - ordered[1][1], margin, rel_tol=0.005, abs_tol=0.001)


def test_a_bad_logprob_id_that_stops_the_server(server, items):
    for ids in ([4096], [-1], [10**12]):
        body = {"prompt": items[0]["prompt_ids"], "max_tokens": 1, "logprob_token_ids": ids}
        assert "logprob_token_ids" in server.error("/v1/completions", body)
    for field, value in [("allowed_token_ids", [5000]), ("stop_token_ids", [-3]), ("logit_bias", {"4096": 1}), ("prompt", [1, 2, 99999])]:
        assert field in server.error("/v1/completions", {"prompt": items[0]["prompt_ids"], "max_tokens": 1, field: value})
    assert complete(server, items[0])["token_ids"] == items[0]["output_ids"]


def test_a_seed_that_crashes_the_worker(server, items):
    for seed in (0, -1, 2**31, -(2**63), 2**63, 2**64 - 1):
        assert len(complete(server, items[0], seed=seed, temperature=1, max_tokens=2, ignore_eos=True)["token_ids"]) == 2
    assert "seed" in server.error("/v1/completions", {"prompt": "x", "seed": 2**70})
    assert server.health() == 200


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "play_music"}}])
@pytest.mark.parametrize("thinking", [False, True])
def test_forced_tool_calls_coming_back_as_prose(server, choice, thinking):
    answer = server.chat(
        "On which continent is Nepal?", tools=[TOOL], tool_choice=choice, chat_template_kwargs={"enable_thinking": thinking}
    )
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
    call = answer["message"]["tool_calls"][0]["function"]
    assert call["name"] == "play_music" and isinstance(json.loads(call["arguments"])["volume"], int)


def test_escaped_quotes_inside_native_string_delimiters(server):
    text = 'say \\"hi\\", {x: [1]}, "and"\nmore <é>'
    parameters = {"type": "object", "properties": {"text": {"enum": [text]}}, "required": ["text"]}
    tool = {"type": "function", "function": {"name": "say", "description": "", "parameters": parameters}}
    answer = server.chat("Say it.", tools=[tool], tool_choice="required")
    assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {"text": text}


def test_raw_completions_without_bos_or_with_two(server, client):
    bos = 2
    for text in ("In the beginning", "<bos>In the beginning", "<bos><bos>In the beginning"):
        tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
        assert tokens[0] == bos and tokens.count(bos) == 1
        answer = client.completions.create(model="tiny-e", prompt=text, max_tokens=4, temperature=0)
        by_ids = client.completions.create(model="tiny-e", prompt=tokens, max_tokens=4, temperature=0)
        assert answer.usage.prompt_tokens == by_ids.usage.prompt_tokens == len(tokens)
        assert answer.choices[0].text == by_ids.choices[0].text
    for text in ("x", "<bos>", "say <bos> to me"):
        talk = {"messages": [{"role": "user", "content": text}]}
        chat = server.post("/tokenize", talk).json()["tokens"]
        assert chat[0] == bos and chat.count(bos) == 1
        assert server.post("/v1/chat/completions", {**talk, "max_tokens": 1, "return_token_ids": True}).json()["prompt_token_ids"] == chat
        answer = server.post("/v1/responses", {"input": text, "max_output_tokens": 1}).json()
        assert answer["usage"]["input_tokens"] == len(chat)
    # add_special_tokens false: one of the text's own at its beginning, as of a template that the client rendered, or none
    for text, count in (("x <bos> y", 0), ("<bos>x <bos> y", 1), ("<bos><bos>x", 1)):
        fields = {"prompt": text, "add_special_tokens": False}
        tokens = server.post("/tokenize", fields).json()["tokens"]
        assert tokens.count(bos) == count and (tokens[0] == bos) == bool(count)
        answer = server.post("/v1/completions", {**fields, "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_a_truncated_text_keeps_its_bos(server):
    text = "In the beginning of the days"
    fields = {"max_tokens": 1, "temperature": 0, "return_token_ids": True, "echo": True, "logprobs": 0, "truncate_prompt_tokens": 4}
    whole = server.post("/tokenize", {"prompt": text}).json()["tokens"]

    def given(prompt, **more) -> list[int]:
        body = {**fields, "prompt": prompt, "return_tokens_as_token_ids": True, **more}
        tokens = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["tokens"][:-1]
        return [int(token.removeprefix("token_id:")) for token in tokens]

    assert given(text) == [2, *whole[-3:]] and given(text, truncate_prompt_tokens=100) == whole
    assert given(whole) == whole[-4:], "ids are taken as they are"
    assert given(text, add_special_tokens=False) == whole[-4:]
    chat = {"messages": [{"role": "user", "content": text}]}
    whole = server.post("/tokenize", chat).json()["tokens"]
    cut = server.post("/v1/chat/completions", {**chat, "max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 6}).json()
    assert cut["prompt_token_ids"] == [2, *whole[-5:]]


def test_stop_ids_dropped_by_an_override(server, items):
    row = items[0]
    assert complete(server, row, stop_token_ids=[7])["token_ids"] == row["output_ids"], "the model's own stop ids still count"
    stopped = complete(server, row, stop_token_ids=[row["output_ids"][1]])
    assert stopped["token_ids"] == row["output_ids"][:2] and stopped["stop_reason"] == row["output_ids"][1]


def test_reasoning_leaking_when_thinking_is_off(server, heldout):
    for row in [row for row in heldout if row["task"] == "think"][:3]:
        conversation = row["conversation"]
        fields = {"tools": conversation.get("tools"), "chat_template_kwargs": {"enable_thinking": False}}
        message = server.chat(conversation["messages"], **{k: v for k, v in fields.items() if v})["message"]
        assert "thought" not in (message["content"] or "") and "<|" not in (message["content"] or "")
        thinking = server.chat(conversation["messages"], **{**fields, "chat_template_kwargs": {"enable_thinking": True}})["message"]
        assert thinking["reasoning_content"] and "thought\n" not in (thinking["content"] or "")
        hidden = server.chat(conversation["messages"], reasoning_effort="high", include_reasoning=False, tools=conversation.get("tools"))
        assert "reasoning_content" not in hidden["message"]
        assert thinking["reasoning_content"] not in (hidden["message"]["content"] or "")


def test_system_only_empty_and_tool_last_conversations(server, heldout):
    assert server.chat([{"role": "system", "content": "You are brief."}], max_tokens=4)["finish_reason"] in ("stop", "length")
    assert "messages" in server.error("/v1/chat/completions", {"messages": []})
    assert server.chat([{"role": "user", "content": ""}], max_tokens=4)["finish_reason"] in ("stop", "length")
    row = next(row for row in heldout if row["task"] == "tool_answer" and row["correct"])
    assert row["conversation"]["messages"][-1]["role"] == "tool"
    answer = server.chat(row["conversation"]["messages"], tools=row["conversation"]["tools"])
    assert answer["message"]["content"] == row["output"].removesuffix("<turn|>")


def test_a_client_that_disconnects_mid_stream(server):
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True, "max_tokens": 900, "n": 3}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(4):
            next(lines)
    status = server.wait_idle()
    assert all(group["free"] == group["total"] for group in status["groups"].values())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/chat/completions", json={**body, "stream": False}, timeout=0.5)
    server.wait_idle()


def test_prompt_exactly_max_model_len(server):
    full = [2] + [300] * (MAX_MODEL_LEN - 1)
    message = server.error("/v1/completions", {"prompt": full, "max_tokens": 1})
    assert str(MAX_MODEL_LEN) in message
    assert str(MAX_MODEL_LEN) in server.error("/v1/completions", {"prompt": full, "max_tokens": 1, "stream": True})
    response = server.post("/v1/completions", {"prompt": full[:-1], "max_tokens": 1, "ignore_eos": True})
    assert response.json()["usage"]["completion_tokens"] == 1
    scored = server.post("/v1/completions", {"prompt": full, "max_tokens": 0, "echo": True, "logprobs": 0}).json()["choices"][0]
    assert len(scored["logprobs"]["token_logprobs"]) == MAX_MODEL_LEN


def test_max_tokens_beyond_the_window(server):
    prompt = [2] + [300] * (MAX_MODEL_LEN - 7)
    response = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 10**9, "ignore_eos": True}).json()
    assert response["usage"]["completion_tokens"] == 6 and response["choices"][0]["finish_reason"] == "length"


def test_surrogate_and_nul_characters(server):
    for path, template in [
        ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a%s"}],"max_tokens":2}'),
        ("/v1/completions", '{"prompt":"a%s","max_tokens":2}'),
        ("/tokenize", '{"prompt":"a%s"}'),
    ]:
        for text, status in [(r"\ud83d", 400), (r"\udc00x", 400), (r"\ud83d\ude42", 200), (r"\u0000", 200)]:
            response = httpx.post(server.url + path, content=template % text, timeout=60)
            assert response.status_code == status, (path, text, response.text)
    assert server.post("/v1/completions", {"prompt": "a", "model": "\x00"}).status_code == 404
    assert httpx.post(server.url + "/v1/completions", content=r'{"prompt":"a","model":"\ud83d"}', timeout=60).status_code in (400, 404)
    assert httpx.post(server.url + "/v1/completions", content=b"\xff\xfe{", timeout=60).status_code == 400


def test_unknown_fields_are_ignored_with_a_warning(server):
    assert server.chat("x", max_tokens=1, no_such_field_of_ours=3)["index"] == 0
    assert "no_such_field_of_ours" in server.log.read_text()


def test_malformed_model_output_is_never_an_empty_answer(server):
    """A call cut off by max_tokens is no call; its text is shown."""
    answer = server.chat("Play music.", tools=[TOOL], tool_choice="required", max_tokens=6)
    assert answer["finish_reason"] == "length"
    assert answer["message"]["content"].startswith("<|tool_call>") and "tool_calls" not in answer["message"]


def test_remote_urls_are_not_fetched(server):
    import socket

    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.setblocking(False)
        part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"}}
        message = server.error("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
        assert "image_url" in message
        with pytest.raises(BlockingIOError):
            trap.accept()


def worst_health(server: ServerProcess, call: Callable[[], T]) -> tuple[T, float, float]:
    """(result of call, its seconds, the slowest of the health checks meanwhile)."""
    slowest = 0.0
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=60) as client:
        began = time.monotonic()
        future = pool.submit(call)
        while not future.done():
            asked = time.monotonic()
            assert client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - asked)
        return future.result(), time.monotonic() - began, slowest


def test_a_huge_prompt_that_keeps_everybody_waiting(server):
    """Megabytes of text held the event loop for half a minute. What can never fit is not read at all; what is cut is read aside."""
    text = "The river runs by stones and light. " * 20_000
    many = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 10_000
    for path, body in [
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": [text[:19_000]] * 30}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
        ("/v1/chat/completions", {"messages": many}),
        ("/v1/responses", {"input": text}),
    ]:
        message, _, slowest = worst_health(server, lambda path=path, body=body: server.error(path, body))
        assert "max_model_len is 1024" in message and slowest < 1
    for path, body in [
        ("/v1/completions", {"prompt": text, "truncate_prompt_tokens": 5, "max_tokens": 1}),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
    ]:
        response, seconds, slowest = worst_health(server, lambda path=path, body=body: server.post(path, body))
        assert response.status_code == 200 and slowest < seconds / 2
