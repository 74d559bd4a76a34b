"""Rendering of a checkpoint's jinja chat template. Same environment and same results as transformers' (tests compare byte by byte).

A template is foreign code: it runs in jinja's immutable sandbox and sees nothing but plain JSON data.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Names under which clients send a model's reasoning; templates read the first.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Marks where the final message ends. The trailing space shows whether the template trims message text.
OPEN_END = "LASTROW_FINAL_MESSAGE_ENDS_HERE "


class TokenizerError(ValueError):
    """A tokenizer file, template, text or conversation that cannot be used; the message says what, where and what would be right."""


class ChatTemplate:
    """A compiled template. Raises TokenizerError when `source` is no jinja."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._template = _compile(source)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Text of normalized `messages`. continue_final_message: ends inside the last message, with nothing after its text."""
        final = _open_final_message(messages) if continue_final_message else ""
        given = list(messages)
        try:
            text = self._template.render(
                messages=given,
                tools=None if tools is None else plain(tools, "tools"),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **plain(variables, "chat_template_kwargs"),
            )
        except TokenizerError:
            raise
        except Exception as error:  # foreign code: whatever it raises is its answer to this conversation
            raise TokenizerError(f"the chat template refuses this conversation: {error}") from None
        finally:
            given.clear()  # macros and their context are a cycle, which would keep the conversation until garbage is collected
        return _cut_at_mark(text, final) if continue_final_message else text


def normalize_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as plain dicts of fresh data: keys without value dropped, tool call arguments parsed, reasoning under every name.

    Raises TokenizerError naming the message and what is wrong with it."""
    if isinstance(messages, (str, bytes, Mapping)) or not messages:
        raise TokenizerError("messages is empty or no list: at least one {'role': ..., 'content': ...} is needed")
    return [_normalize(plain(message, f"messages[{i}]"), f"messages[{i}]") for i, message in enumerate(messages)]


def _normalize(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise TokenizerError(f"{where} is a {type(message).__name__}: a dict with role and content is needed")
    message = {key: value for key, value in message.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise TokenizerError(f"{where}.role is {message.get('role')!r}: system, user, assistant or tool is needed")
    for i, part in enumerate(message["content"] if isinstance(message.get("content"), list) else ()):
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise TokenizerError(f"{where}.content[{i}] is of type {kind!r}: only {{'type': 'text', 'text': ...}} parts are supported")
    for i, call in enumerate(message.get("tool_calls") or ()):
        _parse_arguments(call, f"{where}.tool_calls[{i}]")
    reasoning = next((message[key] for key in REASONING_FIELDS if message.get(key) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _parse_arguments(call: Any, where: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TokenizerError(f"{where} has no function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError as error:
            raise TokenizerError(f"{where}.function.arguments is no JSON ({error})") from None
    if arguments is not None and not isinstance(arguments, dict):
        raise TokenizerError(f"{where}.function.arguments is a {type(arguments).__name__}: a JSON object is needed")
    function["arguments"] = arguments or {}


def plain(value: Any, where: str) -> Any:
    """A fresh copy of `value` in JSON types; dataclasses, pydantic models and str, int or float subclasses are reduced to them."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, Mapping):
        return {plain(key, where): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name), f"{where}.{item.name}") for item in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return plain(dump(), where)
    raise TokenizerError(f"{where} is a {type(value).__name__}: JSON data is needed")


def _open_final_message(messages: list[dict[str, Any]]) -> str:
    """Append the mark to the last message's last text, in place; returns that text."""
    content = messages[-1].get("content")
    if isinstance(content, list) and content:
        final = content[-1]["text"]
        content[-1]["text"] = final + OPEN_END
        return final
    if not isinstance(content, str):
        raise TokenizerError("continue_final_message: the last message has no text to continue")
    messages[-1]["content"] = content + OPEN_END
    return content


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(OPEN_END.strip())
    if at < 0 or final.strip() not in text:
        raise TokenizerError("continue_final_message: the chat template does not write the last message's text")
    trims = text[at : at + len(OPEN_END)] != OPEN_END
    return text[:at].rstrip() if trims else text[:at]


# -------------------------------------------------------------------------------------------------- environment
class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: marks model text for training; renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` for templates without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` that refuses underscore names, by which a template could reach the interpreter's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self: namespace(self=...) is legal in a template
        values = dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(args[0], values)  # pyright: ignore[reportArgumentType]

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute may not begin with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """jinja's own filter escapes HTML signs, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda layout: datetime.now().strftime(layout),
        dict=_Dict(),
        namespace=_Namespace,
    )
    try:
        return environment.from_string(source)
    except jinja2.exceptions.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise TokenizerError(f"chat template, line {line}: {error}") from None
