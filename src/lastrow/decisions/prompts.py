"""Prompts: a jinja file makes the user's turn, the checkpoint's chat template the rest. Rendered once per question, not once per state:
the state is put in as text afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from lastrow.chat_template import ChatTemplate
from lastrow.decisions.questions import DecisionError, Question
from lastrow.tokenizer import Tokenizer

STATE, DOCUMENT = "LASTROW_STATE_STANDS_HERE", "LASTROW_DOCUMENT_STANDS_HERE"


def built_in(name: str) -> str:
    """Source of assets/prompts/{name}.jinja."""
    return (files("lastrow") / "assets" / "prompts" / f"{name}.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class PromptParts:
    """A prompt is before + state + after."""

    before: str
    after: str


class PromptWriter:
    """template: jinja source or a file's path; None: the built-in one. chat: write it as a user's turn in the checkpoint's chat format,
    with the generation prompt; without it the template's text is the whole prompt (behind <bos>).

    Raises DecisionError or TokenizerError for a template that is no jinja or refuses."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | Path | None = None,
        *,
        name: str = "question",
        chat: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.source = template_source(template) or built_in(name)
        self._template = ChatTemplate(self.source)
        self._kwargs = dict(chat_template_kwargs or {})
        if self._kwargs.get("enable_thinking"):
            raise DecisionError("enable_thinking: a decision is read at the first token of the answer, so thinking must be off")
        if chat and not tokenizer.has_chat_template:
            raise DecisionError(f"{tokenizer.path}: no chat template; decide with chat=False and a prompt template that writes all of it")

    @property
    def settings(self) -> list[Any]:
        """What decides the prompts, but for the tokenizer (JSON data)."""
        return [self.source, self.chat, self._kwargs]

    @property
    def end_token(self) -> int | None:
        """What ends an answer in this format."""
        return self.tokenizer.special_ids.get("turn_end") if self.chat else None

    def question(self, question: Question, instructions: str | None, where: str) -> PromptParts:
        """The prompt of one question around its state."""
        options = [{"label": option.surfaces[0], "text": option.text, "description": option.description} for option in question.options]
        asked = {"type": question.type, "text": question.text, "name": question.name, "scheme": question.scheme, "options": options}
        before, after = self._split(self._render(instructions, state=STATE, question=asked), STATE, where)
        if not after:
            raise DecisionError(f"{where}: the prompt template ends with the state; the question must stand behind it")
        return PromptParts(before, after)

    def rank(self, query: str, instructions: str | None) -> tuple[str, str]:
        """(text before a document, text behind it); the query is in one of them."""
        text = self._render(instructions, query=STATE, document=DOCUMENT)
        before, after = self._split(text, DOCUMENT, "rank")
        self._split(text, STATE, "rank")
        return before.replace(STATE, query), after.replace(STATE, query)

    def _render(self, instructions: str | None, **variables: Any) -> str:
        if instructions is not None and not isinstance(instructions, str):
            raise DecisionError(f"instructions is {instructions!r}: a text is needed")
        text = self._template.render([], add_generation_prompt=False, instructions=instructions, **variables).strip()
        if not self.chat:
            return self.tokenizer.without_bos(text)
        messages = [{"role": "system", "content": instructions}] if instructions else []
        messages.append({"role": "user", "content": text})
        kwargs = {"enable_thinking": False, **self._kwargs}
        # <bos> is put in front as a token, exactly once.
        return self.tokenizer.without_bos(self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))

    def _split(self, text: str, mark: str, where: str) -> tuple[str, str]:
        if text.count(mark) != 1:
            name = "state" if mark == STATE and where != "rank" else "query and the document"
            raise DecisionError(f"{where}: the prompt template writes the {name} {text.count(mark)} times, once and unchanged is needed")
        before, _, after = text.partition(mark)
        return before, after


def template_source(template: str | Path | None) -> str | None:
    """A template's source: a Path, or a text without braces, names a file. Raises DecisionError."""
    if template is None:
        return None
    if not isinstance(template, (str, Path)):
        raise DecisionError(f"prompt_template is {template!r}: a jinja file, or its text, is needed")
    if isinstance(template, str) and "{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DecisionError(f"prompt template {template}: not readable ({error})") from None
