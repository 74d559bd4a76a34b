"""Bodies are read as json.loads reads them, by whichever parser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lastrow.server.json_route import parse
from lastrow.server.protocol import CompletionRequest

MISTAKES = '{}[],:"\\-+.eE019 \n\t\x00ntfNI/u'
texts = st.text(st.characters(codec=None)) | st.text(st.sampled_from('\ud83d\ude42\\"/\x00\x1f\x7f€'))
leaves = st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=10)


def outcome(read: Any, body: bytes) -> tuple[str, str]:
    try:
        value = read(body)
    except (ValueError, RecursionError) as error:
        return type(error).__name__, str(error)
    return type(value).__name__, repr(value)


@given(values, st.booleans(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-le"]))
def test_what_json_writes_is_read_as_json_reads_it(value: Any, escaped: bool, encoding: str) -> None:
    body = json.dumps(value, ensure_ascii=escaped).encode(encoding, "surrogatepass")
    assert outcome(parse, body) == outcome(json.loads, body)


@given(values, st.integers(0, 200), st.sampled_from([*MISTAKES, "\ufeff", "\ud800"]), st.booleans())
def test_a_mistake_anywhere_is_the_same_mistake(value: Any, place: int, wrong: str, replace: bool) -> None:
    text = json.dumps(value)
    place %= len(text) + 1
    body = (text[:place] + wrong + text[place + replace :]).encode("utf-8", "surrogatepass")
    assert outcome(parse, body) == outcome(json.loads, body)


CORNERS = [
    '{"a":1,"b":2,"a":3}',
    "NaN",
    "[-Infinity]",
    "1e400",
    "-0",
    "-0.0",
    "01",
    "1.",
    "4" * 5000,
    r'"\ud83d"',
    "[1,]",
    "1 2",
    "[" * 100_000,
]


@pytest.mark.parametrize("body", CORNERS, ids=lambda body: body[:20])
def test_corners_are_those_of_json(body: str) -> None:
    assert outcome(parse, body.encode()) == outcome(json.loads, body.encode())


def test_nothing_is_no_object() -> None:
    assert parse(b"") is None


@pytest.mark.parametrize("prompt", [[7] * 1000 + ["a"], ["a"] * 1000 + [7], [[7]] * 1000 + ["a"], [["a"] * 1000]], ids=lambda p: str(p)[:8])
def test_of_a_long_list_one_mistake_is_looked_for(prompt: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": prompt})
    assert caught.value.error_count() <= 4  # one of each kind that a prompt may be
