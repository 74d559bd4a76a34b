"""The output parser against the chat template, which writes what it reads, and against itself under every split of the stream."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastrow.server.output_parser import Delta, OutputParser
from lastrow.tokenizer import Tokenizer

TOKENIZER = Tokenizer(Path(__file__).parent.parent.parent / "src" / "lastrow" / "assets" / "tiny-e")
MARKS = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "thought\n", "call:f{", "}", "a:", ",", "[", "]", "{", " "]
MARKS += ["\n", "<turn|>"]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_bos=False)


def parser(tools: dict[str, Any] | None, **options: Any) -> OutputParser:
    numbers = itertools.count()
    return OutputParser(TOKENIZER, tools=tools, new_id=lambda: f"call_{next(numbers)}", **options)


def run(
    ids: list[int], sizes: list[int] | None = None, tools: dict[str, Any] | None = None, **options: Any
) -> tuple[OutputParser, list[Delta]]:
    """Push `ids` in pieces of the given sizes (the rest at once)."""
    p, deltas, start = parser(tools, **options), [], 0
    for size in [*(sizes or []), len(ids)]:
        deltas.append(p.push(ids[start : start + size]))
        start += size
    deltas.append(p.finish())
    return p, deltas


def joined(deltas: list[Delta]) -> tuple[str, str, list[list[str | None]]]:
    """What a client puts together from the deltas; checks OpenAI's order (id and name first, indices ascending)."""
    calls: list[list[Any]] = []
    for delta in deltas:
        for call in delta.tool_calls:
            if call.index == len(calls):
                assert call.id and call.name, "the first delta of a call brings its id and name"
                calls.append([call.id, call.name, ""])
            else:
                assert call.index == len(calls) - 1 and call.id is None and call.name is None
            calls[-1][2] += call.arguments
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


def parse(text: str, tools: dict[str, Any] | None = None, **options: Any) -> OutputParser:
    return run(ids_of(text), tools=tools, **options)[0]


def arguments(text: str, schema: dict[str, Any] | None = None) -> str:
    p = parse(f"<|tool_call>call:f{text}<tool_call|>", tools={"f": schema or {}})
    assert not p.content and len(p.tool_calls) == 1, p.content
    return p.tool_calls[0].arguments


# ------------------------------------------------------------------------------------------------ properties
@given(st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=8)), max_size=25), st.lists(st.integers(0, 5), max_size=40))
def test_any_split_of_any_stream_gives_the_same_result(pieces, sizes):
    ids = ids_of("".join(pieces).encode("utf-8", "replace").decode())
    whole, deltas = run(ids, tools={"f": {}})
    split, split_deltas = run(ids, sizes, tools={"f": {}})
    assert (split.reasoning, split.content, split.tool_calls) == (whole.reasoning, whole.content, whole.tool_calls)
    assert joined(split_deltas) == joined(deltas)
    reasoning, content, calls = joined(split_deltas)
    assert (reasoning, content) == (whole.reasoning, whole.content)
    complete = [[c.id, c.name, c.arguments] for c in whole.tool_calls]
    assert [c for c in calls if c in complete] == complete
    for call in whole.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


@given(st.lists(st.integers(0, 4095), max_size=60), st.lists(st.integers(0, 5), max_size=60))
def test_any_split_of_random_ids_gives_the_same_result(ids, sizes):
    _, deltas = run(ids, tools={"f": {}})
    assert joined(run(ids, sizes, tools={"f": {}})[1]) == joined(deltas)


keys = st.text(st.characters(codec="utf-8", exclude_characters="▁<:,{}[]\"' \n\t", exclude_categories=["C", "Z"]), min_size=1, max_size=8)
# U+2581 stands for the blank in this vocabulary: the tokenizer cannot keep the two apart.
strings = st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=30).filter(lambda s: "<" not in s)
numbers = st.one_of(st.integers(-(10**12), 10**12), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(strings, numbers, st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(keys, values, max_size=5), min_size=1, max_size=3), st.lists(st.integers(0, 4), max_size=60))
def test_what_the_template_renders_is_read_back_as_the_same_json(calls, sizes):
    message = {
        "role": "assistant",
        "tool_calls": [{"id": str(i), "function": {"name": f"f_{i}", "arguments": a}} for i, a in enumerate(calls)],
    }
    text = TOKENIZER.apply_chat_template([{"role": "user", "content": "x"}, message], tokenize=False, add_generation_prompt=False)
    p, deltas = run(ids_of(text[text.index("<|tool_call>") :]), sizes, tools={})
    assert [(c.name, json.loads(c.arguments)) for c in p.tool_calls] == [(f"f_{i}", a) for i, a in enumerate(calls)]
    assert p.content == "" and [json.loads(c[2]) for c in joined(deltas)[2]] == calls


@given(strings, strings, st.lists(st.integers(0, 4), max_size=40))
def test_reasoning_and_answer_are_kept_apart_exactly(thought, answer, sizes):
    p, deltas = run([*ids_of("<|channel>thought\n"), *ids_of(thought), *ids_of("\n"), 101, *ids_of(answer), 106], sizes, tools={})
    assert (p.reasoning, p.content) == (thought, answer)
    assert joined(deltas)[:2] == (thought, answer)


# ------------------------------------------------------------------------------------------------ named cases
def test_heldout_tool_calls_are_read_as_expected(heldout):
    rows = [row for row in heldout if row["task"] in ("tool_call", "think") and row["correct"]]
    calls = 0
    for row in rows:
        tools = {t["function"]["name"]: t["function"].get("parameters") for t in row["conversation"].get("tools") or []}
        p = run(row["output_ids"], tools=tools)[0]
        assert p.content or p.tool_calls
        assert "<|" not in p.content and "thought" not in p.content
        assert bool(p.reasoning) == ("<|channel>" in row["output"])
        assert len(p.tool_calls) == row["output"].count("<|tool_call>")
        calls += len(p.tool_calls)
        for call in p.tool_calls:
            assert set(json.loads(call.arguments)) == set(tools[call.name]["properties"]) & set(json.loads(call.arguments))
    assert calls > 20


def test_escaped_quotes_inside_native_string_delimiters():
    text = r'say \"hi\", {x: [1]} "and" \\n' + "\nnew line <tool_call|> end"
    assert json.loads(arguments('{a:<|"|>' + text + '<|"|>,b:1}')) == {"a": text, "b": 1}


def test_numbers_keep_their_spelling():
    assert arguments("{a:1.50,b:1e5,c:-0,d:12345678901234567890.10}") == '{"a":1.50,"b":1e5,"c":-0,"d":12345678901234567890.10}'
    assert arguments("{a:+5,b:.5,c:007,d:-3.}") == '{"a":5,"b":0.5,"c":7,"d":-3.0}'


@pytest.mark.parametrize(
    "written, schema, json_text",
    [
        ("12", {"type": "string"}, '"12"'),
        ("1.50", {"type": "string"}, '"1.50"'),
        ("true", {"type": "string"}, '"true"'),
        ('<|"|>12<|"|>', {"type": "integer"}, "12"),
        ('<|"|>1.50<|"|>', {"type": "number"}, "1.50"),
        ('<|"|>True<|"|>', {"type": "boolean"}, "true"),
        ('<|"|>null<|"|>', {"type": ["integer", "null"]}, "null"),
        ('<|"|>null<|"|>', {"type": "string"}, '"null"'),
        ("None", {}, "null"),
        ("False", {"type": "boolean"}, "false"),
        ('<|"|>[1, 2]<|"|>', {"type": "array"}, "[1, 2]"),
        ('<|"|>{"k": 1}<|"|>', {"type": "object"}, '{"k": 1}'),
        ('<|"|>[1, 2<|"|>', {"type": "array"}, '"[1, 2"'),
        ('<|"|>twelve<|"|>', {"type": "integer"}, '"twelve"'),
        ("Paris", {"type": "string"}, '"Paris"'),
        ("2", {"enum": ["1", "2"]}, '"2"'),
        ('<|"|>2<|"|>', {"enum": [1, 2]}, "2"),
        ("7", {"anyOf": [{"type": "string"}, {"type": "null"}]}, '"7"'),
        ("7", {"$ref": "#/$defs/s"}, '"7"'),
        ("[1,2]", {"type": "array", "items": {"type": "string"}}, '["1","2"]'),
        ("{x:1,y:1}", {"type": "object", "properties": {"x": {"type": "string"}}}, '{"x":"1","y":1}'),
        ('"plain \\"json\\""', {"type": "string"}, '"plain \\"json\\""'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("[]", {}, "[]"),
        ("{}", {}, "{}"),
    ],
)
def test_values_follow_the_declared_schema(written, schema, json_text):
    root = {"type": "object", "properties": {"v": schema}, "$defs": {"s": {"type": "string"}}}
    assert arguments("{v:" + written + "}", root) == f'{{"v":{json_text}}}'


def test_several_calls_with_text_before_and_line_breaks_between():
    p = parse(
        'Let me look.\n<|tool_call>call:f{a:1}<tool_call|>\n<|tool_call>call:g{ b : <|"|>x<|"|> , }<tool_call|><|tool_response>', tools={}
    )
    assert p.content == "Let me look.\n"
    assert [(c.name, c.arguments) for c in p.tool_calls] == [("f", '{"a":1}'), ("g", '{"b":"x"}')]
    assert len({c.id for c in p.tool_calls}) == 2


@pytest.mark.parametrize(
    "text",
    [
        '<|tool_call>call:f{a:<|"|>unfinished',
        "<|tool_call>call:f{a:1]<tool_call|>",
        "<|tool_call>call:f{a:}<tool_call|>",
        "<|tool_call>nothing of the kind<tool_call|>",
        "<|tool_call>call:f<tool_call|>",
        "<|tool_call>call:{a:1}<tool_call|>",
        "<|tool_call>call:f{a:1}}<tool_call|>",
        "<|tool_call>call:f{a:1}x<tool_call|>",
        '<|tool_call>call:f{a<|"|>b<|"|>}<tool_call|>',
        "<|tool_call><tool_call|>",
        "<|tool_call>",
    ],
)
def test_a_malformed_call_keeps_its_raw_text(text):
    for tools in ({"f": {}}, None):
        p = parse(text, tools=tools)
        assert p.content == text and not p.tool_calls


def test_a_good_call_after_a_malformed_one_is_a_call():
    p, deltas = run(ids_of("<|tool_call>call:f{a:1]<|tool_call>call:f{b:2}<tool_call|>"), tools={"f": {}})
    assert p.content == "<|tool_call>call:f{a:1]" and [c.arguments for c in p.tool_calls] == ['{"b":2}']
    assert joined(deltas)[2][-1][2] == '{"b":2}'


def test_a_call_without_its_end_mark_that_is_complete_counts():
    assert [c.arguments for c in parse("<|tool_call>call:f{a:1}<|tool_response>", tools={}).tool_calls] == ['{"a":1}']


def test_calls_stay_text_when_none_are_asked_for():
    assert parse("<|tool_call>call:f{a:1}<tool_call|>").content == "<|tool_call>call:f{a:1}<tool_call|>"


def test_a_string_argument_streams_before_it_ends():
    ids = ids_of('<|tool_call>call:f{a:<|"|>one two three four five')
    _, deltas = run(ids, [1] * len(ids), tools={"f": {"type": "object", "properties": {"a": {"type": "string"}}}})
    assert joined(deltas[:-1])[2][0][2].startswith('{"a":"one two three four')


def test_reasoning_open_in_the_prompt_and_reasoning_cut_off():
    assert parse("so far\n<channel|>yes", in_reasoning=True).reasoning == "so far"
    assert parse("thought\nso far\n<channel|>yes", in_reasoning=True).reasoning == "so far"
    p = parse("<|channel>thought\nand then")
    assert (p.reasoning, p.content) == ("and then", "")
    assert parse("<|channel>tho").reasoning == "tho"
    assert parse("<|channel>thought\n<channel|>yes").reasoning == ""
    assert parse("<|channel>thought<channel|>yes").content == "yes"


def test_a_call_inside_a_thought_ends_the_thought():
    p = parse("<|channel>thought\nI call\n<|tool_call>call:f{}<tool_call|>", tools={})
    assert p.reasoning == "I call" and [c.name for c in p.tool_calls] == ["f"]


def test_split_characters_stay_whole():
    smile = ids_of("🙂")
    assert len(smile) == 4, "four byte tokens"
    _, deltas = run([*smile, *ids_of("ok")], [1] * 5)
    assert joined(deltas)[1] == "🙂ok"
    ids = [*ids_of('<|tool_call>call:f{a:<|"|>'), *smile, *ids_of('<|"|>}<tool_call|>')]
    assert json.loads(run(ids, [1] * len(ids), tools={})[0].tool_calls[0].arguments) == {"a": "🙂"}
