"""Endpoints through the clients people use. Expected texts are transformers' (tests/data/heldout.jsonl)."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import openai
import pytest

import lastrow

from .conftest import MAX_MODEL_LEN, ServerProcess
from .test_known_faults import TOOL

NEPAL = [{"role": "user", "content": "On which continent is Nepal?"}]
NEPAL_ANSWER = "Nepal is in Asia."


def pick(heldout: list[dict[str, Any]], task: str, accept: Any = lambda row: True) -> dict[str, Any]:
    return next(row for row in heldout if row["task"] == task and row["correct"] and row["min_margin"] > 0.5 and accept(row))


@pytest.fixture(scope="module")
def tool_row(heldout) -> dict[str, Any]:
    """An item that calls two tools."""
    return pick(heldout, "tool_call", lambda row: row["output"].count("<|tool_call>") == 2)


@pytest.fixture(scope="module")
def think_row(heldout) -> dict[str, Any]:
    return pick(heldout, "think", lambda row: "<|tool_call>" not in row["output"])


# ------------------------------------------------------------------------------------------------ chat
def test_chat_whole_and_streamed_say_the_same(client: openai.OpenAI):
    whole = client.chat.completions.create(model="tiny-e", messages=NEPAL, temperature=0)
    assert whole.choices[0].message.content == NEPAL_ANSWER and whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="tiny-e", messages=NEPAL, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == NEPAL_ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1


def test_usage_counts_cached_tokens_and_timings_are_reported(server: ServerProcess):
    body = {"messages": [{"role": "user", "content": "cache me " * 30}], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    first, second = server.post("/v1/chat/completions", body).json(), server.post("/v1/chat/completions", body).json()
    prompt = first["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt - 1) // 16 * 16
    timings = second["timings"]
    assert timings["total_seconds"] >= timings["decode_seconds"] > 0 and timings["tokens_per_second"] > 0
    assert timings["rows_computed"] == 2 and timings["rows_given"] == prompt + 1 - second["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_n_choices_differ_by_seed_and_come_by_index(client: openai.OpenAI):
    fields: dict[str, Any] = {"model": "tiny-e", "messages": [{"role": "user", "content": "x"}], "n": 3, "seed": 5, "max_tokens": 6}
    whole = client.chat.completions.create(**fields, extra_body={"ignore_eos": True})
    assert [c.index for c in whole.choices] == [0, 1, 2]
    texts = [""] * 3
    for chunk in client.chat.completions.create(**fields, extra_body={"ignore_eos": True}, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices] and len(set(texts)) > 1


def test_logprobs_of_a_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model="tiny-e", messages=NEPAL, temperature=0, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert b"".join(bytes(e.bytes) for e in entries[:-1]).decode() == NEPAL_ANSWER and entries[-1].token == "<turn|>"
    for entry in entries:
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.top_logprobs[0].token == entry.token and math.isclose(entry.top_logprobs[0].logprob, entry.logprob)
    streamed = client.chat.completions.create(model="tiny-e", messages=NEPAL, temperature=0, logprobs=True, stream=True)
    tokens = [e.token for chunk in streamed for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    assert tokens == [e.token for e in entries]


def test_stop_strings_are_cut_and_never_shown_in_a_stream(client: openai.OpenAI):
    for stop, text in [(["in As"], "Nepal is "), (["sia", "zzz"], "Nepal is in A"), (["nothing"], NEPAL_ANSWER)]:
        whole = client.chat.completions.create(model="tiny-e", messages=NEPAL, temperature=0, stop=stop)
        stream = client.chat.completions.create(model="tiny-e", messages=NEPAL, temperature=0, stop=stop, stream=True)
        assert whole.choices[0].message.content == text and whole.choices[0].finish_reason == "stop"
        assert "".join(c.choices[0].delta.content or "" for c in stream) == text
    kept = client.chat.completions.create(
        model="tiny-e", messages=NEPAL, temperature=0, stop=["in As"], extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].message.content == "Nepal is in As"


def test_tools_whole_and_streamed(client: openai.OpenAI, tool_row: dict[str, Any]):
    conversation = tool_row["conversation"]
    fields = {"model": "tiny-e", "messages": conversation["messages"], "tools": conversation["tools"], "temperature": 0}
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls" and len(whole.message.tool_calls) == 2
    for call in whole.message.tool_calls:
        assert f"call:{call.function.name}{{" in tool_row["output"]
        for value in json.loads(call.function.arguments).values():
            assert str(value).lower() in tool_row["output"].lower()
    calls: list[dict[str, str]] = []
    reason = None
    for chunk in client.chat.completions.create(**fields, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.index == len(calls):
                calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
            calls[delta.index]["arguments"] += delta.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    assert reason == "tool_calls"
    assert [(c["name"], c["arguments"]) for c in calls] == [(c.function.name, c.function.arguments) for c in whole.message.tool_calls]
    one = client.chat.completions.create(**fields, parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls"
    none = client.chat.completions.create(**fields, tool_choice="none").choices[0]
    assert none.message.tool_calls is None and none.message.content


def test_a_whole_tool_conversation(client: openai.OpenAI, heldout):
    """Ask, call, answer the call as clients send it (arguments as JSON text), and get the sentence that transformers gives."""
    row = pick(heldout, "tool_answer", lambda row: any(m.get("tool_calls") for m in row["conversation"]["messages"]))
    messages = json.loads(json.dumps(row["conversation"]["messages"]))
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["type"] = "function"
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    answer = client.chat.completions.create(model="tiny-e", messages=messages, tools=row["conversation"]["tools"], temperature=0)
    assert answer.choices[0].message.content == row["output"].removesuffix("<turn|>")


def test_thinking_by_effort_and_by_template_kwargs(client: openai.OpenAI, think_row: dict[str, Any]):
    thought, _, rest = think_row["output"].partition("<|channel>thought\n")[2].partition("\n<channel|>")
    fields = {"model": "tiny-e", "messages": think_row["conversation"]["messages"], "temperature": 0}
    for extra in ({"reasoning_effort": "low"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}):
        answer = client.chat.completions.create(**fields, **extra)
        assert answer.choices[0].message.reasoning_content == thought
        assert answer.choices[0].message.content == rest.removesuffix("<turn|>")
        assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    stream = client.chat.completions.create(**fields, reasoning_effort="low", stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == thought
    assert "".join(d.content or "" for d in deltas) == rest.removesuffix("<turn|>")


def test_response_formats(client: openai.OpenAI):
    properties = {"age": {"type": "integer"}, "who": {"type": "string", "maxLength": 12}}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": ["age", "who"]}
    schema["additionalProperties"] = False
    asked = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for extra in ({}, {"reasoning_effort": "high"}):
        answer = client.chat.completions.create(model="tiny-e", messages=NEPAL, response_format=asked, temperature=0, **extra)
        value = json.loads(answer.choices[0].message.content)
        assert set(value) == {"age", "who"} and isinstance(value["age"], int)
        assert bool(getattr(answer.choices[0].message, "reasoning_content", None)) == bool(extra)
    body = {"response_format": {"type": "json_object"}, "max_tokens": 200}
    answer = client.chat.completions.create(model="tiny-e", messages=NEPAL, temperature=0, **body)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}, "nope"),
        ({"response_format": {"type": "yaml"}}, "yaml"),
        ({"structured_outputs": {"regex": "(["}}, "regex"),
        ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "exactly one"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "other"),
        ({"tool_choice": "required"}, "tools is empty"),
        ({"tools": [TOOL, TOOL]}, "twice"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": [{"role": "user"}], "chat_template": "{{ 1 }}"}, "trust-request-chat-template"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": "hello"}, "messages"),
        ({"priority": 3}, "priority"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "null"}}}], "tool_choice": "required"},
            "object",
        ),
    ],
)
def test_what_is_wrong_is_a_400_that_names_it(server: ServerProcess, fields: dict[str, Any], says: str):
    for stream in (False, True):
        assert says in server.error("/v1/chat/completions", {"messages": NEPAL, "stream": stream, **fields})


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"top_k": 2**64}, "top_k"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"min_tokens": 10**30, "max_tokens": None}, "min_tokens"),
        ({"priority": -(10**30)}, "priority"),
        ({"logit_bias": {"²": 1}}, "'²': token ids"),
        ({"logit_bias": {"--5": 1}}, "'--5': token ids"),
        ({"stop": 5}, "stop: Input should be a valid string / Input should be a valid list"),
        ({"prompt": {"a": 1}}, "prompt: Input should be a valid string / Input should be a valid list"),
        ({"prompt": [1, "x"]}, "prompt: "),
        ({"structured_outputs": {"regex": 5}}, "regex is 5"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs come with whole answers only"),
    ],
)
def test_values_that_no_message_can_carry_are_a_400_that_names_the_field(server: ServerProcess, fields: dict[str, Any], says: str):
    """Integers beyond 64 bits, texts that are no Unicode and the like were a 500. One field of several kinds is one message."""
    assert says in server.error("/v1/completions", {"prompt": "x", "max_tokens": 1, **fields})


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "the body is empty or holds no JSON object"),
        (b"[]", "the body is empty or holds no JSON object"),
        (b'{"prompt": "x"', "the body is no JSON: Expecting ',' delimiter at character 14"),
        (b"hello", "the body is no JSON: Expecting value at character 0"),
        (b'{"prompt": "\xff"}', "parsing the body"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "parsing the body"),
        (b'{"prompt": "x", "stop": ["\\ud800"]}', "stop"),
        (b'{"prompt": "x", "bad_words": ["\\ud800"]}', "bad_words.0: Value error, U+D800 is a lone surrogate"),
        (b'{"prompt": "x", "structured_outputs": {"choice": ["\\ud800"]}}', "U+D800 is a lone surrogate"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature is nan"),
    ],
    ids=lambda value: value[:20].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_bodies_that_are_no_request_are_a_400_that_says_why(server: ServerProcess, content: bytes, says: str):
    response = httpx.post(server.url + "/v1/completions", content=content, timeout=60)
    assert response.status_code == 400 and says in response.json()["error"]["message"], response.text


def chunks(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, parsed."""
    text = server.post(path, {**body, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("fields", [{"echo": True}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}, {"logprob_token_ids": [300]}])
def test_an_answer_of_no_tokens_ends_by_its_length(server: ServerProcess, fields: dict[str, Any]):
    """vLLM's word for max_tokens 0; requests for the logits of a few ids said `stop`."""
    body = {"prompt": "In the beginning", "max_tokens": 0, "temperature": 0, **fields}
    answer = server.post("/v1/completions", body).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0
    if "prompt_logprobs" not in fields:
        assert chunks(server, "/v1/completions", body)[-1]["choices"][0]["finish_reason"] == "length"
    if "echo" not in fields:
        chat = {"messages": NEPAL, "max_tokens": 0, "temperature": 0, **fields}
        assert server.post("/v1/chat/completions", chat).json()["choices"][0]["finish_reason"] == "length"


def test_logprobs_of_named_ids_need_no_token(server: ServerProcess):
    """max_tokens 0 gives what one token gives; the server answered with an empty list."""
    fields = {"temperature": 0, "logprob_token_ids": [300, 400]}
    for path, prompt in (("/v1/completions", {"prompt": "In the beginning"}), ("/v1/chat/completions", {"messages": NEPAL})):
        one, none = ({**prompt, **fields, "max_tokens": count} for count in (1, 0))
        sampled, bare = (server.post(path, body).json()["choices"][0]["logprobs"] for body in (one, none))
        (told,) = [found for chunk in chunks(server, path, none) if (found := chunk["choices"][0]["logprobs"])]
        assert list(told) == list(bare) and len(next(iter(told.values()))) == 1
        if "content" in bare:
            (entry,), (wanted,) = bare["content"], sampled["content"]
            assert (entry["token"], entry["logprob"], entry["bytes"]) == ("", 0.0, [])
            named = wanted["top_logprobs"][1:]  # behind the sampled token
            assert [top["token"] for top in entry["top_logprobs"]] == [top["token"] for top in named] and len(named) == 2
            assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx([top["logprob"] for top in named], abs=1e-4)
        else:
            assert (bare["tokens"], bare["token_logprobs"], bare["text_offset"]) == ([""], [0.0], [0])
            (top,), (wanted,) = bare["top_logprobs"], sampled["top_logprobs"]
            assert len(top) == 2 and top == pytest.approx({token: wanted[token] for token in top}, abs=1e-4)


def test_streams_bring_what_whole_answers_bring(server: ServerProcess):
    """Logprobs of named ids, an echo and the running usage were left out of one kind of answer or the other."""
    body = {"prompt": "In the beginning", "temperature": 0, "max_tokens": 3, "logprob_token_ids": [300, 400]}
    whole = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert len(whole["tokens"]) == 3 and all(len(top) == 3 for top in whole["top_logprobs"])
    told = chunks(server, "/v1/completions", {**body, "stream_options": {"continuous_usage_stats": True}})
    assert [top for chunk in told for top in chunk["choices"][0]["logprobs"]["top_logprobs"]] == whole["top_logprobs"]
    assert [chunk["usage"]["completion_tokens"] for chunk in told] == [1, 2, 3]
    messages = [*NEPAL, {"role": "assistant", "content": "Nepal is"}]
    chat = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True, "temperature": 0}
    chat |= {"max_tokens": 3, "logprob_token_ids": [300, 400]}
    answer = server.post("/v1/chat/completions", chat).json()["choices"][0]
    told = chunks(server, "/v1/chat/completions", chat)
    deltas = [chunk["choices"][0] for chunk in told]
    assert answer["message"]["content"].startswith("Nepal is ")
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == answer["message"]["content"]
    assert [entry for delta in deltas if delta["logprobs"] for entry in delta["logprobs"]["content"]] == answer["logprobs"]["content"]


def test_two_requests_with_one_id_do_not_mix(server: ServerProcess):
    body = {"messages": NEPAL, "request_id": "mine", "temperature": 0, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=60) as first:
        lines = first.iter_lines()
        next(lines)
        assert "mine" in server.error("/v1/chat/completions", body)
        assert sum('"content"' in line for line in lines) > 100  # tokens without text of their own come with later ones
    assert server.post("/v1/chat/completions", {**body, "stream": False, "max_tokens": 1}).status_code == 200


def test_errors_have_openais_envelope(server: ServerProcess, client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.chat.completions.create(model="gpt-4", messages=NEPAL)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny-e", messages=NEPAL, temperature=-3)
    assert httpx.get(server.url + "/nowhere").json()["error"]["code"] == 404
    assert httpx.get(server.url + "/v1/completions").status_code == 405


# ------------------------------------------------------------------------------------------------ completions
def test_completions_of_several_prompts_whole_and_streamed(client: openai.OpenAI, heldout):
    rows = [pick(heldout, task) for task in ("decide", "yesno", "json")]
    prompts = [row["prompt_ids"] for row in rows]
    whole = client.completions.create(model="tiny-e", prompt=prompts, max_tokens=64, temperature=0)
    expected = [row["output"].removesuffix("<turn|>") for row in rows]
    assert [c.text for c in whole.choices] == expected
    texts = [""] * 3
    for chunk in client.completions.create(model="tiny-e", prompt=prompts, max_tokens=64, temperature=0, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI):
    """The echoed logprobs of a text equal those of the same text generated token by token under a mask that allows nothing else."""
    text = "In the beginning God"
    scored = client.completions.create(model="tiny-e", prompt=text, max_tokens=0, echo=True, logprobs=1).choices[0]
    tokens = scored.logprobs.tokens
    assert scored.text == text and tokens[0] == "<bos>" and "".join(tokens[1:]) == text
    assert scored.logprobs.token_logprobs[0] is None and scored.logprobs.top_logprobs[0] is None
    assert [text[o:].startswith(t) for o, t in zip(scored.logprobs.text_offset[1:], tokens[1:], strict=True)] == [True] * (len(tokens) - 1)
    choice = {"structured_outputs": {"choice": [text]}}
    fields = {"max_tokens": len(tokens) - 1, "temperature": 0, "logprobs": 1, "extra_body": choice}
    forced = client.completions.create(model="tiny-e", prompt="<bos>", **fields).choices[0]
    if forced.logprobs.tokens == tokens[1:]:
        for a, b in zip(forced.logprobs.token_logprobs, scored.logprobs.token_logprobs[1:], strict=True):
            assert math.isclose(a, b, abs_tol=1e-3)
    plus = client.completions.create(model="tiny-e", prompt=text, max_tokens=2, echo=True, logprobs=1, temperature=0).choices[0]
    assert plus.logprobs.tokens[: len(tokens)] == tokens and len(plus.logprobs.tokens) == len(tokens) + 2
    assert plus.text.startswith(text)


def test_prompt_logprobs_in_vllms_form(server: ServerProcess):
    body = {"prompt": "In the beginning", "max_tokens": 1, "prompt_logprobs": 2, "temperature": 0}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    ids = server.post("/tokenize", {"prompt": "In the beginning"}).json()["tokens"]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(ids)
    for token, entry in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
        ranks = sorted(value["rank"] for value in entry.values())
        assert str(token) in entry and ranks[:2] == [1, 2]


# ------------------------------------------------------------------------------------------------ responses
def test_responses_text_and_its_events(client: openai.OpenAI):
    whole = client.responses.create(model="tiny-e", input="On which continent is Nepal?", temperature=0)
    assert whole.output_text == NEPAL_ANSWER and whole.status == "completed" and whole.usage.output_tokens == 8
    events = list(client.responses.create(model="tiny-e", input="On which continent is Nepal?", temperature=0, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == NEPAL_ANSWER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == NEPAL_ANSWER
    with client.responses.stream(model="tiny-e", input="On which continent is Nepal?", temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == NEPAL_ANSWER


def test_responses_with_tools_and_back(client: openai.OpenAI, tool_row: dict[str, Any]):
    conversation = tool_row["conversation"]
    tools = [{"type": "function", **tool["function"]} for tool in conversation["tools"]]
    messages = [{"type": "message", **message} for message in conversation["messages"]]
    whole = client.responses.create(model="tiny-e", input=messages, tools=tools, temperature=0)
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [c.name for c in calls] == [part.split("{")[0] for part in tool_row["output"].split("call:")[1:]]
    events = list(client.responses.create(model="tiny-e", input=messages, tools=tools, temperature=0, stream=True))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [c.arguments for c in calls]
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta" and event.output_index == 0]
    assert "".join(parts) == calls[0].arguments
    follow = [*messages, *(item.model_dump(exclude_none=True) for item in whole.output)]
    follow += [{"type": "function_call_output", "call_id": c.call_id, "output": "done"} for c in calls]
    answer = client.responses.create(model="tiny-e", input=follow, tools=tools, temperature=0, max_output_tokens=30)
    assert answer.output


def test_responses_reasoning_format_and_refusals(client: openai.OpenAI, think_row: dict[str, Any]):
    messages = think_row["conversation"]["messages"]
    events = list(client.responses.create(model="tiny-e", input=messages, reasoning={"effort": "low"}, temperature=0, stream=True))
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output[0].content[0].text in think_row["output"] and final.output_text in think_row["output"]
    choice = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}}
    choice["schema"]["additionalProperties"] = False
    answer = client.responses.create(model="tiny-e", input="x", text={"format": choice}, temperature=0)
    assert json.loads(answer.output_text) == {"a": "b"}
    cut = client.responses.create(model="tiny-e", input="On which continent is Nepal?", max_output_tokens=2, temperature=0)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="tiny-e", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="only functions"):
        client.responses.create(model="tiny-e", input="x", tools=[{"type": "web_search"}])


# ------------------------------------------------------------------------------------------------ the rest
def test_an_item_that_is_cut_off_is_incomplete(server: ServerProcess):
    body = {"input": "On which continent is Nepal?", "max_output_tokens": 3, "temperature": 0}
    whole = server.post("/v1/responses", body).json()
    events = chunks(server, "/v1/responses", body)
    for response in (whole, events[-1]["response"]):
        assert response["status"] == "incomplete" and [item["status"] for item in response["output"]] == ["incomplete"]
    done = next(event for event in events if event["type"] == "response.output_item.done")
    assert done["item"]["status"] == "incomplete" and events[-1]["type"] == "response.incomplete"


def test_models_version_and_tokenizing(server: ServerProcess, client: openai.OpenAI):
    assert [m.id for m in client.models.list()] == ["tiny-e"]
    assert client.models.retrieve("tiny-e").max_model_len == MAX_MODEL_LEN
    assert httpx.get(server.url + "/version").json() == {"version": lastrow.__version__}
    text = "Größe 🙂\n\n{x}"
    made = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) and made["max_model_len"] == MAX_MODEL_LEN
    assert server.post("/detokenize", {"tokens": made["tokens"][1:]}).json()["prompt"] == text
    assert server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"] == made["tokens"][1:]
    assert "tokens" in server.error("/detokenize", {"tokens": [4096]})


def test_metrics_count_what_was_done(server: ServerProcess):
    def read() -> dict[str, float]:
        lines = httpx.get(server.url + "/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    label = '{model_name="tiny-e"}'
    server.wait_idle()
    before = read()
    body = {"prompt": [2, 300, 301, 302], "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    server.post("/v1/completions", body)
    server.wait_idle()
    after = read()

    def grew(name: str, labels: str = label) -> float:
        return after[name + labels] - before.get(name + labels, 0.0)

    assert grew("vllm:prompt_tokens_total") == 4 and grew("vllm:generation_tokens_total") == 5
    assert grew("vllm:request_success_total", '{finished_reason="length",model_name="tiny-e"}') == 1
    assert grew("vllm:time_to_first_token_seconds_count") == 1 and grew("vllm:e2e_request_latency_seconds_count") == 1
    assert grew("lastrow:rows_given_total") == 8 and grew("lastrow:rows_computed_total") == 5
    assert after["vllm:num_requests_running" + label] == 0 and after["lastrow:engine_up" + label] == 1


def test_cache_status_shows_both_groups(server: ServerProcess):
    status = server.wait_idle()
    assert set(status["groups"]) == {"full", "sliding"} and status["rows"]["computed"] <= status["rows"]["given"]


def test_every_openapi_path_is_documented(server: ServerProcess):
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize"} <= set(paths)
