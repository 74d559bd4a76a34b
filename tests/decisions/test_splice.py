"""Tokens put together from parts are the tokens of the whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lastrow.decisions.splice import Splicer, common_prefix

PIECES = [
    "the ",
    "cat",
    "\n",
    "\n\n",
    " ",
    "  ",
    "<turn|>",
    "<bos>",
    "<|turn>",
    "<tur",
    "n|>",
    "|",
    "<",
    "é",
    "🙂",
    "▁",
    "Account",
    " access",
    "A",
    "9",
    "17",
    ".",
]
texts = st.one_of(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.text(max_size=12))


@settings(max_examples=300)
@given(left=texts, right=texts)
def test_joined_tokens_are_those_of_the_whole_text(splicer: Splicer, left: str, right: str) -> None:
    joined = splicer.join(left, splicer.encode(left), right, splicer.encode(right))
    assert joined == splicer.encode(left + right)


def test_common_cases_are_joined_without_encoding_again(splicer: Splicer) -> None:
    """Else the state would be tokenized once per question."""
    fresh = Splicer(splicer.tokenizer)
    for left in ("<|turn>user\nMessage: the lamp is broken.", "x", "It is 7"):
        for right in ("\n\nQuestion: Which team?<turn|>\n<|turn>model\n", "\n\nIs it spam?"):
            fresh.join(left, fresh.encode(left), right, fresh.encode(right))
    assert (fresh.num_joined, fresh.num_encoded) == (6, 0)


def test_a_special_token_across_the_seam_is_seen(splicer: Splicer) -> None:
    fresh = Splicer(splicer.tokenizer)
    for at in range(1, 7):
        left, right = "see <turn|> there"[: 4 + at], "see <turn|> there"[4 + at :]
        assert fresh.join(left, fresh.encode(left), right, fresh.encode(right)) == fresh.encode("see <turn|> there")


@given(a=st.lists(st.integers(0, 2), max_size=6), b=st.lists(st.integers(0, 2), max_size=6), known=st.integers(0, 7))
def test_common_prefix_whatever_was_guessed(a: list[int], b: list[int], known: int) -> None:
    expected = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        expected += 1
    assert common_prefix(a, b, known) == expected
