"""Grammar constraints against an independent judge: `json.loads`, `re.fullmatch`, the chat template's own rendering of a call."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from lastrow.engine.structured_output import GrammarBackend, GrammarMatcher, SchemaError, StructuredOutputsParams
from lastrow.tokenizer import Tokenizer

END = 106
CHANNEL, CHANNEL_END = 100, 101


@pytest.fixture(scope="module")
def tokenizer(tiny_e) -> Tokenizer:
    return Tokenizer(tiny_e)


@pytest.fixture(scope="module")
def backend(tokenizer: Tokenizer) -> GrammarBackend:
    return GrammarBackend(tokenizer, 4096)


def accepts(matcher: GrammarMatcher, ids: list[int]) -> bool:
    """Every token allowed by the mask before it, and accepted; then the end allowed."""
    for token in [*ids, END]:
        allowed = token in set(matcher.allowed_token_ids().tolist())
        assert matcher.accept(token) == allowed
        if not allowed:
            return False
    return True


def walk(matcher: GrammarMatcher, seed: int, limit: int = 400) -> list[int]:
    """Tokens drawn uniformly from the masks until the end is drawn; what a model with random weights would write."""
    draw, ids = random.Random(seed), []
    for _ in range(limit):
        allowed = matcher.allowed_token_ids().tolist()
        ends = [t for t in allowed if t in (1, 50, 106)]
        # Long strings are dull: close them, and end, when the dice say so.
        closers = [t for t in allowed if t in (52, 49)]
        token = draw.choice(ends or closers) if (ends or closers) and draw.random() < 0.3 else draw.choice(allowed)
        assert matcher.accept(token)
        if token in (1, 50, 106):
            return ids
        ids.append(token)
    return ids


SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"enum": ["a@b.c", "x"]},
        "member": {"type": "boolean"},
    },
    "required": ["age", "mail", "member"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(8))
def test_random_walk_through_a_json_schema_is_valid_json_of_that_schema(backend, tokenizer, seed):
    ids = walk(backend.matcher({"json": SCHEMA}), seed)
    value = json.loads(tokenizer.decode(ids))
    assert list(value) == ["age", "mail", "member"]
    assert (
        0 <= value["age"] <= 150 and isinstance(value["age"], int) and value["mail"] in ("a@b.c", "x") and isinstance(value["member"], bool)
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_walk_through_a_regex_matches_it(backend, tokenizer, seed):
    pattern = r"[a-f]{2,4}-(x|yy)/[0-9]+"
    ids = walk(backend.matcher({"regex": pattern}), seed, limit=60)
    assert re.fullmatch(pattern, tokenizer.decode(ids))


def test_choice_allows_exactly_the_choices(backend, tokenizer):
    params = StructuredOutputsParams(choice=["yes", "yes, but", 'a "quoted" é'])
    for text, right in [("yes", True), ("yes, but", True), ('a "quoted" é', True), ("yes,", False), ("no", False), ("", False)]:
        assert accepts(backend.matcher(params), tokenizer.encode(text, add_bos=False)) is right, text


@pytest.mark.parametrize("grammar", ['start: "a" "b"+', 'root ::= "a" "b"+'], ids=["lark", "gbnf"])
def test_grammar_in_lark_and_in_gbnf(backend, tokenizer, grammar):
    assert accepts(backend.matcher({"grammar": grammar}), tokenizer.encode("abbb", add_bos=False))
    assert not accepts(backend.matcher({"grammar": grammar}), tokenizer.encode("ba", add_bos=False))


def test_json_object_refuses_arrays_and_takes_pretty_printing(backend, tokenizer):
    value = {"a": [1, {"b": None}], "ü": "x\ny"}
    for layout in ({}, {"indent": 4}, {"separators": (",", ":")}):
        text = json.dumps(value, ensure_ascii=False, **layout)
        assert accepts(backend.matcher({"json_object": True}), tokenizer.encode(text, add_bos=False)), text
    assert not accepts(backend.matcher({"json_object": True}), tokenizer.encode("[1]", add_bos=False))


def test_white_space_in_json_is_bounded(backend, tokenizer):
    matcher = backend.matcher({"json_object": True})
    assert matcher.accept(tokenizer.encode("{", add_bos=False)[0])
    blanks = [tokenizer.encode(text, add_bos=False) for text in ("\n", " ", "  ", "\n\n", "\t")]
    count = 0
    while any(matcher.clone().accept(ids[0]) for ids in blanks if len(ids) == 1):
        ids = next(ids for ids in blanks if len(ids) == 1 and matcher.clone().accept(ids[0]))
        matcher.accept(ids[0])
        count += 1
        assert count <= 25, "a model could write blanks for ever"
    assert count >= 1


TOOLS = [
    (
        "set_alarm",
        {
            "type": "object",
            "properties": {
                "time": {"type": "string"},
                "days": {"type": "array", "items": {"enum": ["mon", "tue"]}, "maxItems": 3},
                "Volume": {"type": "number"},
                "deep": {"type": "object", "properties": {"on": {"type": "boolean"}, "note": {"type": ["string", "null"]}}},
            },
            "required": ["time"],
        },
    ),
    ("ping", None),
]


def render_call(tokenizer: Tokenizer, name: str, arguments: dict[str, Any]) -> list[int]:
    """Ids of a call as the checkpoint's template writes it: the independent form."""
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": name, "arguments": arguments}}]}
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}, call], tokenize=False, add_generation_prompt=False)
    return tokenizer.encode(text[text.index("<|tool_call>") : text.rindex("<|tool_response>")], add_bos=False)


@pytest.mark.parametrize(
    "name, arguments, right",
    [
        ("set_alarm", {"time": 'a, "b" {c}\n<é>: \\" end'}, True),
        ("set_alarm", {"time": "", "days": [], "Volume": -1.5e3, "deep": {"on": False, "note": None}}, True),
        ("set_alarm", {"time": "7", "days": ["mon", "tue", "mon"], "deep": {}}, True),
        ("ping", {}, True),
        ("set_alarm", {}, False),
        ("set_alarm", {"time": 7}, False),
        ("set_alarm", {"time": "7", "days": ["sun"]}, False),
        ("set_alarm", {"time": "7", "days": ["mon"] * 4}, False),
        ("set_alarm", {"time": "7", "other": 1}, False),
        ("pong", {}, False),
    ],
)
def test_forced_call_grammar_takes_what_the_template_renders(backend, tokenizer, name, arguments, right):
    assert accepts(backend.matcher({"tools": TOOLS}), render_call(tokenizer, name, arguments)) is right


def test_forced_call_cannot_be_prose_and_may_be_several_only_when_parallel(backend, tokenizer):
    one = render_call(tokenizer, "ping", {})
    assert not accepts(backend.matcher({"tools": TOOLS}), tokenizer.encode("Sure, I will", add_bos=False))
    assert accepts(backend.matcher({"tools": TOOLS}), one + one)
    assert not accepts(backend.matcher({"tools": TOOLS, "parallel_tool_calls": False}), one + one)


def test_answer_or_call_when_both_are_given(backend, tokenizer):
    params = {"tools": TOOLS, "json": SCHEMA}
    assert accepts(backend.matcher(params), render_call(tokenizer, "ping", {}))
    assert accepts(backend.matcher(params), tokenizer.encode('{"age":3,"mail":"x","member":true}', add_bos=False))
    assert not accepts(backend.matcher(params), tokenizer.encode('{"age":3}', add_bos=False))


def test_recursive_schema_references(backend, tokenizer):
    node = {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}, "v": {"type": "integer"}},
        "required": ["v"],
    }
    schema = {"type": "object", "properties": {"tree": {"$ref": "#/$defs/node"}}, "required": ["tree"], "$defs": {"node": node}}
    matcher = backend.matcher({"tools": [("plant", schema)]})
    assert accepts(matcher, render_call(tokenizer, "plant", {"tree": {"v": 1, "kids": [{"v": 2, "kids": []}, {"v": 3}]}}))
    assert not accepts(backend.matcher({"tools": [("plant", schema)]}), render_call(tokenizer, "plant", {"tree": {"kids": []}}))


def test_grammar_starts_exactly_where_the_reasoning_ends(backend, tokenizer):
    matcher = backend.matcher({"choice": ["yes"], "reasoning": True})
    assert CHANNEL in matcher.allowed_token_ids()
    think = tokenizer.encode("<|channel>thought\nno {anything} goes\n<channel|>", add_bos=False)
    for token in think[:-1]:
        assert matcher.accept(token)
        assert not matcher.is_terminated() and END not in matcher.allowed_token_ids()
    assert len(matcher.allowed_token_ids()) == 4096 - 3  # all but the three ends
    assert matcher.accept(CHANNEL_END)
    assert not matcher.accept(CHANNEL) and not matcher.accept(tokenizer.encode("no", add_bos=False)[0])
    assert accepts(matcher, tokenizer.encode("yes", add_bos=False))


def test_reasoning_that_the_prompt_opened_is_seen_and_without_thinking_none_may_start(backend):
    opened = backend.matcher({"choice": ["yes"], "reasoning": True}, prompt_token_ids=[2, 105, CHANNEL, 7])
    assert not opened.is_constraining
    assert CHANNEL not in backend.matcher({"choice": ["yes"]}).allowed_token_ids()


def test_rollback_and_clone_come_back_to_the_same_masks(backend, tokenizer):
    matcher = backend.matcher({"tools": TOOLS, "reasoning": True})
    ids = (
        tokenizer.encode("<|channel>thought\nx\n<channel|>", add_bos=False) + render_call(tokenizer, "set_alarm", {"time": "a b c"}) + [50]
    )
    masks = []
    for token in ids:
        masks.append(matcher.allowed_token_ids())
        assert matcher.accept(token)
    assert matcher.is_terminated()
    for back in (1, 3, 7, len(ids)):
        copy = matcher.clone()
        copy.rollback(back)
        for token, mask in list(zip(ids, masks, strict=True))[len(ids) - back :]:
            assert np.array_equal(copy.allowed_token_ids(), mask)
            assert copy.accept(token)
    with pytest.raises(ValueError, match="only"):
        matcher.rollback(len(ids) + 1)


def test_a_refused_token_changes_nothing(backend, tokenizer):
    matcher = backend.matcher({"choice": ["yes"]})
    before = matcher.allowed_token_ids()
    assert not matcher.accept(0) and not matcher.accept(END)
    assert np.array_equal(matcher.allowed_token_ids(), before) and matcher.num_tokens == 0


@pytest.mark.parametrize(
    "params, says",
    [
        ({}, "exactly one"),
        ({"json": {"type": "nope"}}, "nope"),
        ({"json": "{"}, "no JSON"),
        ({"json": 3}, "schema object"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"type": "object"}, "regex": "a"}, "exactly one"),
        ({"regex": "(["}, "regex"),
        ({"choice": [""]}, "choice"),
        ({"choice": "yes"}, "choice"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "root ::= ("}, "GBNF"),
        ({"grammar": "start: start"}, "can never be fulfilled"),
        ({"regex": "a\ud800"}, "surrogate"),
        ({"regex": 5}, "regex is 5: a text"),
        ({"grammar": 7}, "grammar is 7: a text"),
        ({"choice": {"a": 1}}, "choice is {'a': 1}: a list"),
        ({"json_object": "yes"}, "json_object is 'yes': true or false"),
        ({"json_object": True, "whitespace_pattern": 7}, "whitespace_pattern is 7: a text"),
        ({"json": {"x-guidance": 5}}, "x-guidance is 5: an object"),
        ({"tools": "x"}, "pairs"),
        ({"tools": [["a"]]}, "pairs"),
        ({"jsn": {}}, "jsn"),
        ({"tools": [("f", {"type": "string"})]}, "arguments are an object"),
        ({"tools": [("f", {"type": "object", "properties": {"a": {"type": "strnig"}}})]}, "properties.a.type"),
        ({"tools": [("f", {"type": "object", "properties": {"a": {"$ref": "#/x"}}})]}, "#/x"),
        ({"tools": [("f", {"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}})]}, "regex"),
        ({"tools": [("f", {"type": "object", "properties": {}, "required": ["a"]})]}, "required"),
    ],
)
def test_a_bad_constraint_is_refused_before_anything_runs(backend, params, says):
    with pytest.raises(SchemaError, match=re.escape(says)):
        backend.validate(params)


def test_a_grammar_that_cannot_go_on_says_so_and_allows_the_end(backend):
    """Only the output shows it: after the `a` nothing can come."""
    matcher = backend.matcher({"grammar": 'start: "a" endless\nendless: endless'})
    assert matcher.failure is None and matcher.accept(int(matcher.allowed_token_ids()[0]))
    assert matcher.failure is None and set(matcher.allowed_token_ids()) == {1, 50, END}
    assert matcher.failure is not None and "can never be fulfilled" in matcher.failure


@pytest.mark.parametrize("seed", range(12))
def test_random_walk_through_a_forced_call_is_a_call_that_can_be_parsed(backend, tokenizer, seed):
    from lastrow.server.output_parser import OutputParser

    ids = walk(backend.matcher({"tools": TOOLS}), seed)
    parser = OutputParser(tokenizer, tools=dict(TOOLS))
    parser.push(ids)
    parser.finish()
    if not ids or ids[-1] != 49:  # the walk was cut off
        return
    assert not parser.content and parser.tool_calls
    for call in parser.tool_calls:
        arguments = json.loads(call.arguments)
        assert (call.name == "ping" and arguments == {}) or (call.name == "set_alarm" and isinstance(arguments["time"], str))
