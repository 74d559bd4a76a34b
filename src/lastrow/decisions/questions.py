"""Questions: what is asked about a state, and which answers there are. Standard library only."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_QUESTIONS, MAX_CHOICES = 200, 255
TYPES = ("predicate", "choice", "score")
SCHEMES = ("letters", "digits", "words")
YES, NO = ("yes", "Yes"), ("no", "No")
Value = str | bool | int


class DecisionError(ValueError):
    """A question, label or state that cannot be used; the message names the place and what would be right."""


@dataclass(frozen=True, slots=True)
class Option:
    """One allowed answer. value: what the caller gets back (score: the level's index). text: what the prompt shows.
    surfaces: label texts that count as this answer, the first being the one the prompt shows."""

    value: Value
    text: str
    surfaces: tuple[str, ...]
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a state.

    type: predicate (probability that a statement is true; its options are True and False), choice (one of several values) or score
    (ordered levels; the answer is the expected index, counted from 0). scheme: how answers are labelled in the prompt: letters A, B, ...
    (AA, AB, ... beyond 26), digits 1, 2, ..., words (the option's own text), or labels (given by the caller)."""

    type: str
    text: str
    options: tuple[Option, ...]
    name: str | None = None
    scheme: str = "letters"

    @property
    def is_predicate(self) -> bool:
        return self.type == "predicate"


def parse_questions(value: Any) -> tuple[Question, ...]:
    """Questions from a list of mappings in the shape of OpenAI's Decisions API (or of Question objects), or from a mapping of names to
    them.

    Keys: type, instructions (the question's text), name; choices (choice): values, or {value, description}; levels (score): labels, or
    {label, description}; labels: letters, digits, words, or a list with a text, or a list of texts, per option (predicate: yes, no).
    Raises DecisionError: no questions or more than 200, two of one name, and whatever is wrong with one of them."""
    if isinstance(value, Mapping):
        value = [_named(name, spec) for name, spec in value.items()]
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise DecisionError(f"questions is a {type(value).__name__}: a list of questions is needed")
    questions = tuple(_question(item, f"questions[{i}]") for i, item in enumerate(value))
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise DecisionError(f"there are {len(questions)} questions: 1 to {MAX_QUESTIONS} are needed")
    seen: dict[str, int] = {}
    for i, question in enumerate(questions):
        if question.name is not None and seen.setdefault(question.name, i) != i:
            raise DecisionError(f"questions[{i}].name is {question.name!r}, which questions[{seen[question.name]}] has already")
    return questions


def _named(name: Any, spec: Any) -> Any:
    if isinstance(spec, Question) or not isinstance(spec, Mapping):
        raise DecisionError(f"question {name!r} is a {type(spec).__name__}: a mapping with type and instructions is needed")
    return {**spec, "name": name}


def _question(item: Any, where: str) -> Question:
    if isinstance(item, Question):
        return item
    if not isinstance(item, Mapping):
        raise DecisionError(f"{where} is a {type(item).__name__}: a mapping with type and instructions is needed")
    kind = item.get("type", "choice" if "choices" in item else "score" if "levels" in item else "predicate")
    if kind not in TYPES:
        raise DecisionError(f"{where}.type is {kind!r}: one of {', '.join(TYPES)} is needed")
    name = item.get("name")
    if name is not None and (not isinstance(name, str) or not name):
        raise DecisionError(f"{where}.name is {name!r}: a text that is not empty is needed")
    where = where if name is None else f"{where} ({name})"
    allowed = {"type", "name", "instructions", "labels"} | {"predicate": {"criteria"}, "choice": {"choices"}, "score": {"levels"}}[kind]
    if unknown := [key for key in item if key not in allowed]:
        raise DecisionError(f"{where}.{unknown[0]} is not known for a {kind}: one of {', '.join(sorted(allowed))} is needed")
    text = content_text(item.get("instructions"), f"{where}.instructions").strip()
    if not text:
        raise DecisionError(f"{where}.instructions is empty: the question's text is needed")
    if kind == "predicate":
        entries = _predicate_entries(item.get("criteria"), where)
    elif kind == "choice":
        entries = _choices(item.get("choices"), f"{where}.choices")
    else:
        entries = _levels(item.get("levels"), f"{where}.levels")
    scheme, surfaces = _labels(item.get("labels"), kind, [text for _, text, _ in entries], where)
    options = tuple(Option(value, shown, tuple(s), about) for (value, shown, about), s in zip(entries, surfaces, strict=True))
    return Question(kind, text, options, name, scheme)


Entry = tuple[Value, str, str | None]


def _predicate_entries(criteria: Any, where: str) -> list[Entry]:
    if isinstance(criteria, Mapping):  # YAML's true and false are booleans
        criteria = {str(key).lower() if isinstance(key, bool) else key: value for key, value in criteria.items()}
    if criteria is not None and (not isinstance(criteria, Mapping) or set(criteria) - {"true", "false"}):
        raise DecisionError(f"{where}.criteria is {criteria!r}: a mapping with true and false, descriptions of both, is needed")
    about = {key: _description(value, f"{where}.criteria.{key}") for key, value in (criteria or {}).items()}
    return [(True, "yes", about.get("true")), (False, "no", about.get("false"))]


def _choices(value: Any, where: str) -> list[Entry]:
    entries: list[Entry] = []
    for i, item in enumerate(_option_list(value, where, 2, "choices")):
        spec = item if isinstance(item, Mapping) else {"value": item}
        if unknown := [key for key in spec if key not in ("value", "description")]:
            raise DecisionError(f"{where}[{i}].{unknown[0]} is not known: value and description are")
        chosen = spec.get("value")
        if not isinstance(chosen, (str, bool)):
            raise DecisionError(f"{where}[{i}] is {chosen!r}: a text or a boolean is needed")
        text = str(chosen).lower() if isinstance(chosen, bool) else chosen.strip()
        entries.append((chosen, text, _description(spec.get("description"), f"{where}[{i}].description")))
    return _distinct(entries, where, [(type(v).__name__, text) for v, text, _ in entries])


def _levels(value: Any, where: str) -> list[Entry]:
    entries: list[Entry] = []
    for i, item in enumerate(_option_list(value, where, 2, "levels")):
        spec = item if isinstance(item, Mapping) else {"label": item}
        if unknown := [key for key in spec if key not in ("label", "description")]:
            raise DecisionError(f"{where}[{i}].{unknown[0]} is not known: label and description are")
        label = spec.get("label")
        label = str(label) if isinstance(label, (int, float)) and not isinstance(label, bool) else label
        if not isinstance(label, str):
            raise DecisionError(f"{where}[{i}] is {label!r}: the level's text is needed")
        entries.append((i, label.strip(), _description(spec.get("description"), f"{where}[{i}].description")))
    return _distinct(entries, where, [text for _, text, _ in entries])


def _option_list(value: Any, where: str, least: int, name: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise DecisionError(f"{where} is {value!r}: a list of {least} to {MAX_CHOICES} {name} is needed")
    items = list(value)
    if not least <= len(items) <= MAX_CHOICES:
        raise DecisionError(f"{where} has {len(items)} entries: {least} to {MAX_CHOICES} are needed")
    return items


def _distinct(entries: list[Entry], where: str, keys: Sequence[Any]) -> list[Entry]:
    seen: dict[Any, int] = {}
    for i, ((_, text, _), key) in enumerate(zip(entries, keys, strict=True)):
        if not text:
            raise DecisionError(f"{where}[{i}] is empty: an option needs a text")
        if seen.setdefault(key, i) != i:
            raise DecisionError(f"{where}[{i}] is {text!r}, which {where}[{seen[key]}] is already: options must differ")
    return entries


def _description(value: Any, where: str) -> str | None:
    return None if value is None else content_text(value, where).strip() or None


# ------------------------------------------------------------------------------------------------------ labels
def _labels(value: Any, kind: str, texts: Sequence[str], where: str) -> tuple[str, list[tuple[str, ...]]]:
    """The scheme, and each option's label texts."""
    if value is None:
        value = "words" if kind == "predicate" else "letters"
    if value == "letters":
        return value, [(letters,) for letters in letter_labels(len(texts))]
    if value == "digits":
        return value, [(str(i + 1),) for i in range(len(texts))]
    if value == "words":
        return value, [YES, NO] if kind == "predicate" else [(text,) for text in texts]
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence) or len(value) != len(texts):
        raise DecisionError(f"{where}.labels is {value!r}: one of {', '.join(SCHEMES)}, or a list of {len(texts)} texts is needed")
    surfaces: list[tuple[str, ...]] = []
    for i, entry in enumerate(value):
        group = (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, (list, tuple)) else ()
        if not group or not all(isinstance(text, str) and text.strip() for text in group):
            raise DecisionError(f"{where}.labels[{i}] is {value[i]!r}: a text, or a list of texts, that is not empty is needed")
        surfaces.append(group)
    return "labels", surfaces


def letter_labels(count: int) -> list[str]:
    """A, B, ... for up to 26 options; AA, AB, ... for more, so that no label begins another."""
    letters = string.ascii_uppercase
    return list(letters[:count]) if count <= len(letters) else [a + b for a in letters for b in letters][:count]


# ------------------------------------------------------------------------------------------------------ texts
def content_text(value: Any, where: str) -> str:
    """The text of a state or an instruction: a text, OpenAI's content parts (input_text, input_json), or JSON data.

    Raises DecisionError for anything else, images among it."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes) and value and all(_is_part(part) for part in value):
        return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(value))
    if isinstance(value, (Mapping, list, tuple)):
        return json_text(value, where)
    raise DecisionError(
        f"{where} is {value!r}: a text is needed" if value is None else f"{where} is a {type(value).__name__}: a text is needed"
    )


def json_text(value: Any, where: str) -> str:
    """Compact JSON as models read it: ', ' and ': ', no escapes. Raises DecisionError for what JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DecisionError(f"{where} is no JSON: {error}") from None


def _is_part(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"].partition("_")[0] in ("input", "output", "text")


def _part_text(part: Mapping[str, Any], where: str) -> str:
    kind = part["type"]
    if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "input_json" and isinstance(part.get("data"), (Mapping, list)):
        return json_text(part["data"], f"{where}.data")
    raise DecisionError(f"{where} is of type {kind!r}: input_text with a text, or input_json with data, is needed (no images or audio)")
