"""Requests of the prefill-only endpoints, and their questions and states in lastrow's form.

/v1/decisions: OpenAI's Decisions API (openai-python 3.57, types/decision_create_params.py). /v1/systemone: vLLM 0.33's. /v1/score: prompt
and choices, or SGLang's query and items, or vLLM's text pairs. /v1/rerank: vLLM's (Jina's and Cohere's)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from lastrow.decisions.questions import DecisionError, content_text
from lastrow.server.protocol import Int64, Request

Truncation = Literal["left", "right", "middle"]


class PrefillRequest(Request):
    """What all of these share. instructions: text of the system turn."""

    model: str | None = None
    instructions: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Int64 = 0
    cache_salt: str | None = None


class DecisionRequest(PrefillRequest):
    """diagnostics, truncate, calibration, instructions: lastrow's own (extra_body of the openai client)."""

    input: str | list[dict[str, Any]]
    questions: list[dict[str, Any]]
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    diagnostics: bool = False
    truncate: Truncation | None = None
    calibration: dict[str, Any] | None = None


class SystemOneRequest(PrefillRequest):
    state: Any
    questions: dict[str, dict[str, Any]]
    request_id: str | None = None
    truncate: Truncation | None = None
    calibration: dict[str, Any] | None = None


class ScoreRequest(PrefillRequest):
    """One of the three forms; see `form`."""

    prompt: str | list[int] | None = None
    choices: list[str] | list[list[int]] | None = None
    query: str | list[int] | None = None
    items: list[str] | list[list[int]] | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool = False
    item_first: bool = False
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None

    def form(self) -> str:
        """choices, items or pairs. Raises DecisionError when none is whole."""
        if self.prompt is not None and self.choices is not None:
            return "choices"
        if self.query is not None and self.items is not None and self.label_token_ids is not None:
            return "items"
        if self.text_1 is not None and self.text_2 is not None:
            return "pairs"
        raise DecisionError("give prompt and choices; or query, items and label_token_ids; or text_1 and text_2")

    def pairs(self) -> list[tuple[str, list[str]]]:
        """(query, documents) groups of text_1 and text_2: one with each, or one by one."""
        first = [self.text_1] if isinstance(self.text_1, str) else list(self.text_1 or ())
        second = [self.text_2] if isinstance(self.text_2, str) else list(self.text_2 or ())
        if not second:
            raise DecisionError("text_2 is empty: at least one text is needed")
        if len(first) == 1:
            return [(first[0], second)]
        if len(first) != len(second):
            raise DecisionError(f"text_1 has {len(first)} texts and text_2 has {len(second)}: one text_1, or as many of both, are needed")
        return [(a, [b]) for a, b in zip(first, second, strict=True)]


class RerankRequest(PrefillRequest):
    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool = True

    def texts(self) -> list[str]:
        return [
            doc if isinstance(doc, str) else doc["text"] if isinstance(doc.get("text"), str) else _no_text(i)
            for i, doc in enumerate(self.documents)
        ]


def _no_text(index: int) -> str:
    raise DecisionError(f"documents[{index}] has no text: a text, or {{'text': ...}}, is needed")


# ------------------------------------------------------------------------------------------------------ /v1/decisions
def decision_input(value: str | list[dict[str, Any]]) -> tuple[str, list[str]]:
    """(state, system texts) of `input`. One user message is its text; several items are a transcript. Raises DecisionError."""
    if isinstance(value, str):
        return value, []
    system: list[str] = []
    lines: list[tuple[str, str]] = []
    calls: dict[str, str] = {}
    for i, item in enumerate(value):
        where = f"input[{i}]"
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "message" and role in ("system", "developer"):
            system.append(content_text(item.get("content"), f"{where}.content"))
        elif kind == "message" and role in ("user", "assistant"):
            lines.append((role, _message_text(item.get("content"), f"{where}.content")))
        elif kind in ("function_call", "custom_tool_call"):
            argument = "arguments" if kind == "function_call" else "input"
            name, call_id = _text(item, "name", where), _text(item, "call_id", where)
            calls[call_id] = name
            lines.append(("tool call", f"{name}({_text(item, argument, where)})"))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call_id = _text(item, "call_id", where)
            if call_id not in calls:
                raise DecisionError(f"{where}.call_id is {call_id!r}: no call before it has this id")
            lines.append((f"output of {calls[call_id]}", content_text(item.get("output"), f"{where}.output")))
        else:
            raise DecisionError(f"{where} has the type {kind!r} and the role {role!r}: a message, a call or a call's output is needed")
    if not lines:
        raise DecisionError("input holds nothing to decide about: a user message at least is needed")
    if len(lines) == 1 and lines[0][0] == "user":
        return lines[0][1], system
    return "\n".join(f"{role}: {text}" for role, text in lines), system


def _message_text(content: Any, where: str) -> str:
    parts = content if isinstance(content, list) else []
    refusals = {i: part.get("refusal") for i, part in enumerate(parts) if isinstance(part, dict) and part.get("type") == "refusal"}
    if refusals:
        content = [{"type": "output_text", "text": refusals[i] or ""} if i in refusals else part for i, part in enumerate(parts)]
    return content_text(content, where)


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise DecisionError(f"{where}.{name} is {item.get(name)!r}: a text is needed")
    return item[name]


# ------------------------------------------------------------------------------------------------------ /v1/systemone
def systemone_question(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """A question of System One as the one of `decisions.questions` that it is. Raises DecisionError."""
    where = f"questions.{name}"
    if unknown := sorted(set(spec) - {"type", "instructions", "criteria"}):
        raise DecisionError(f"{where}.{unknown[0]} is not known: type, instructions and criteria are")
    kind, criteria = spec.get("type"), spec.get("criteria")
    made: dict[str, Any] = {"name": name, "instructions": spec.get("instructions")}
    if kind == "noul":
        return {**made, "type": "predicate", "criteria": criteria}
    if kind == "choice":
        if not isinstance(criteria, Mapping):
            raise DecisionError(f"{where}.criteria is {criteria!r}: a mapping of option names to descriptions or null is needed")
        return {**made, "type": "choice", "choices": [{"value": option, "description": about} for option, about in criteria.items()]}
    if kind == "score":
        if not isinstance(criteria, list):
            raise DecisionError(f"{where}.criteria is {criteria!r}: a list of levels, lowest first, is needed")
        return {**made, "type": "score", "levels": criteria}
    raise DecisionError(f"{where}.type is {kind!r}: choice, noul or score is needed")
