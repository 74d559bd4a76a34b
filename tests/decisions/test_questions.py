"""Questions as data: what is accepted, and the one line that every mistake gets."""

from __future__ import annotations

from typing import Any

import pytest

from lastrow.decisions.questions import MAX_CHOICES, MAX_QUESTIONS, DecisionError, content_text, letter_labels, parse_questions

ASK = {"type": "predicate", "instructions": "Is it spam?"}


def choice(*choices: Any, **more: Any) -> dict[str, Any]:
    return {"type": "choice", "instructions": "Which?", "choices": list(choices), **more}


def test_the_three_types() -> None:
    made = parse_questions(
        [
            ASK,
            choice("a", {"value": True, "description": "the boolean"}, "true", name="pick"),
            {"type": "score", "instructions": [{"type": "input_text", "text": "How much?"}], "levels": ["low", {"label": "high"}, 7]},
        ]
    )
    assert [q.type for q in made] == ["predicate", "choice", "score"]
    assert [o.value for o in made[0].options] == [True, False] and made[0].options[0].surfaces == ("yes", "Yes")
    # a boolean and a text that reads like it are different values
    assert [o.value for o in made[1].options] == ["a", True, "true"] and made[1].name == "pick"
    assert [o.surfaces for o in made[1].options] == [("A",), ("B",), ("C",)]
    assert [(o.value, o.text) for o in made[2].options] == [(0, "low"), (1, "high"), (2, "7")]
    assert parse_questions({"pick": choice("a", "b")})[0].name == "pick"
    # YAML's true and false are booleans
    assert [o.description for o in parse_questions([{**ASK, "criteria": {True: "junk", False: "mail"}}])[0].options] == ["junk", "mail"]
    assert parse_questions(made) == made


def test_255_choices_and_200_questions_are_accepted_and_letters_stay_distinct() -> None:
    many = parse_questions([choice(*(f"option {i}" for i in range(MAX_CHOICES)))] * MAX_QUESTIONS)
    assert len(many) == 200 and len(many[0].options) == 255
    for count in (2, 26, 27, 255):
        labels = letter_labels(count)
        assert len(set(labels)) == count and not any(a != b and b.startswith(a) for a in labels for b in labels)


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], "there are 0 questions: 1 to 200"),
        ([ASK] * 201, "there are 201 questions: 1 to 200"),
        ("Is it spam?", "questions is a str: a list"),
        ([7], "questions[0] is a int"),
        ([{"type": "noul", "instructions": "x"}], "questions[0].type is 'noul': one of predicate, choice, score"),
        ([{"type": "predicate"}], "questions[0].instructions is None: a text"),
        ([{**ASK, "instructions": "  "}], "questions[0].instructions is empty"),
        ([{**ASK, "choices": ["a"]}], "questions[0].choices is not known for a predicate"),
        ([{**ASK, "name": ""}], "questions[0].name is ''"),
        ([{**ASK, "name": "x"}, ASK, {**ASK, "name": "x"}], "questions[2].name is 'x', which questions[0] has already"),
        ([choice("a")], "questions[0].choices has 1 entries: 2 to 255"),
        ([choice(*map(str, range(256)))], "questions[0].choices has 256 entries: 2 to 255"),
        ([choice("a", "b", " a")], "questions[0].choices[2] is 'a', which questions[0].choices[0] is already"),
        ([choice(True, False, True)], "choices[2] is 'true', which questions[0].choices[0] is already"),
        ([choice("a", "")], "questions[0].choices[1] is empty"),
        ([choice("a", 7)], "questions[0].choices[1] is 7: a text or a boolean"),
        ([choice("a", {"value": "b", "weight": 1})], "choices[1].weight is not known"),
        ([{"type": "choice", "instructions": "x", "choices": "ab"}], "choices is 'ab': a list"),
        ([{"type": "score", "instructions": "x", "levels": ["low", "low"]}], "levels[1] is 'low', which"),
        ([choice("a", "b", labels="roman")], "questions[0].labels is 'roman': one of letters, digits, words"),
        ([choice("a", "b", labels=["x"])], "questions[0].labels is ['x']"),
        ([choice("a", "b", labels=["x", " "])], "questions[0].labels[1] is ' '"),
        ([choice("a", "b", name="team", labels=["x", []])], "questions[0] (team).labels[1] is []"),
        ([choice("a", "b", labels=[1, 2])], "questions[0].labels[0] is 1: a text"),
        ([{**ASK, "labels": [True, False]}], "questions[0].labels[0] is True: a text"),
        ([choice({"value": "a", 1: "x", "y": "z"}, "b")], "questions[0].choices[0].1 is not known"),
        ([{"type": "score", "instructions": "x", "levels": [{"label": "a", 1: "x", "y": "z"}, "b"]}], "levels[0].1 is not known"),
        ([{**ASK, "criteria": {"maybe": "x"}}], "questions[0].criteria"),
        ([{**ASK, "instructions": [{"type": "input_image", "image_url": "data:"}]}], "is of type 'input_image'"),
    ],
)
def test_bad_questions_get_one_clear_line(questions: Any, message: str) -> None:
    with pytest.raises(DecisionError) as raised:
        parse_questions(questions)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_texts_of_states() -> None:
    assert content_text("x", "state") == "x"
    assert content_text({"a": [1, "ü"]}, "state") == '{"a": [1, "ü"]}'
    parts = [{"type": "input_text", "text": "x"}, {"type": "input_json", "data": {"a": 1}}]
    assert content_text(parts, "state") == 'x\n{"a": 1}'
    for bad in (None, 7, float("nan"), {"a": float("nan")}, {"a": object()}, [{"type": "input_json", "data": 3}]):
        with pytest.raises(DecisionError, match="state"):
            content_text(bad, "state")
