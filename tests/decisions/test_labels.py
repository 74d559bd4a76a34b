"""Labels as tries: every label's probability, every shared prefix once, and labels that cannot be told apart."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastrow.decisions.labels import LabelScores, LabelTrie, Leaf, encode_labels, log_sum, separator
from lastrow.decisions.questions import DecisionError, letter_labels, parse_questions
from lastrow.decisions.splice import Splicer

PROMPT = "Which?<turn|>\n<|turn>model\n"
END = 106


def encoded(splicer: Splicer, labels: Any, prompt: str = PROMPT, end: int | None = END) -> Any:
    count = len(labels) if isinstance(labels, list) else 3
    question = parse_questions([{"type": "choice", "instructions": "x", "choices": [f"o{i}" for i in range(count)], "labels": labels}])[0]
    return encode_labels(splicer, prompt, splicer.encode(prompt), question, end, "question 'x'")


def fake_model(prefix: tuple[int, ...]) -> tuple[dict[int, float], float]:
    """Logits of ids 0..5 behind a prefix, and their logsumexp."""
    r = random.Random(str(prefix))
    logits = {token: r.uniform(-4, 4) for token in range(6)}
    return logits, log_sum(list(logits.values()))


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12, unique=True))
def test_scores_are_the_chain_rule_and_rows_are_the_inner_nodes(labels: list[tuple[int, ...]]) -> None:
    trie = LabelTrie(tuple(Leaf(i, tokens) for i, tokens in enumerate(labels)), len(labels))
    inner = {tokens[:depth] for tokens in labels for depth in range(len(tokens))}
    rows: list[dict[int, Any]] = []
    seen: list[tuple[int, ...]] = []
    computed = 0
    for path in trie.paths:
        assert path.parent is None or path.tokens[: path.first] in [p.tokens[: path.first] for p in trie.paths[: path.parent + 1]]
        computed += len(path.tokens) - path.first
        rows.append({})
        for depth in path.depths:
            prefix = path.tokens[:depth]
            seen.append(prefix)
            logits, normalizer = fake_model(prefix)
            rows[-1][depth] = ({token: logits[token] for token in path.label_ids}, normalizer)
    assert sorted(seen) == sorted(inner)  # each node scored, and none twice
    assert computed == len(inner) - 1  # tokens behind the prompt: one per inner node but the root
    scores = trie.score(rows)
    for i, tokens in enumerate(labels):
        expected = sum(fake_model(tokens[:d])[0][token] - fake_model(tokens[:d])[1] for d, token in enumerate(tokens))
        assert scores.log_scores[i] == pytest.approx(expected, abs=1e-12)


def test_one_token_labels_need_one_row(splicer: Splicer) -> None:
    end = encoded(splicer, "letters")
    assert end.trie.num_rows == 1 and not end.trie.needs_normalizer
    assert [splicer.tokenizer.decode(list(leaf.tokens)) for leaf in end.trie.leaves] == ["A", "B", "C"]
    assert end.num_root == len(splicer.encode(PROMPT))


def test_labels_take_a_space_where_the_prompt_ends_in_a_word(splicer: Splicer) -> None:
    texts = {}
    for prompt in ("Answer:", "Answer: ", "Answer\n", "It is (", PROMPT):
        end = encoded(splicer, ["yes", "no"], prompt)
        root = splicer.encode(prompt)[: end.num_root]
        for label, leaf in zip(("yes", "no"), end.trie.leaves, strict=True):
            whole = splicer.tokenizer.decode([*root, *leaf.tokens], skip_special_tokens=False)
            assert splicer.encode(whole) == [*root, *leaf.tokens]  # what the tokenizer makes of prompt and label together
            texts[prompt, label] = whole.removeprefix(prompt)
    assert texts["Answer:", "yes"] == " yes" and texts["Answer: ", "yes"] == texts["Answer\n", "no"][:0] + "yes"
    assert texts["It is (", "no"] == "no" and texts[PROMPT, "no"] == "no"
    assert separator("", False) == "" and separator("x", True) == ""


def test_255_options_share_their_first_letters(splicer: Splicer) -> None:
    end = encoded(splicer, letter_labels(255))
    assert len(end.trie.leaves) == 255
    assert end.trie.num_rows <= 1 + 10  # the prompt's row, and one for each first letter of AA .. JU


def test_labels_that_the_tokenizer_cannot_tell_apart_are_refused(splicer: Splicer) -> None:
    with pytest.raises(DecisionError, match=r"question 'x': the tokenizer gives the labels 'a b' and 'a▁b' the same tokens"):
        encoded(splicer, ["a b", "a▁b"])  # the word marker is what a space becomes


def test_a_label_that_begins_another_ends_with_the_turn(splicer: Splicer) -> None:
    end = encoded(splicer, ["no", "no way", "yes"])
    tokens = {leaf.option: leaf.tokens for leaf in end.trie.leaves}
    assert tokens[0][-1] == END and tokens[1][: len(tokens[0]) - 1] == tokens[0][:-1] and END not in tokens[1] and END not in tokens[2]
    with pytest.raises(DecisionError, match="the label 'no' begins the label 'no way', and nothing ends it here"):
        encoded(splicer, ["no", "no way"], end=None)


def test_two_texts_of_one_option_count_together_and_never_twice(splicer: Splicer) -> None:
    end = encoded(splicer, [["yes", "yes, it is"], ["no", "No"]])
    assert [leaf.option for leaf in end.trie.leaves] == [0, 1, 1]  # "yes, it is" is a part of "yes"


def test_mass_and_logits_that_are_no_numbers() -> None:
    assert LabelScores([math.log(0.25), math.log(0.5)], True).label_mass == pytest.approx(0.75)
    assert LabelScores([3.0], False).label_mass is None
    trie = LabelTrie((Leaf(0, (1,)), Leaf(1, (2,))), 2)
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(DecisionError, match="no finite number"):
            trie.score([{0: ({1: 0.0, 2: bad}, None)}])
