"""One tool call in Gemma's syntax, `call:NAME{key:value,...}`, read piece by piece into the JSON of its arguments.

Text outside strings comes as characters, the quote as an event: what stands between two quote tokens is never looked at. Values
follow the tool's JSON schema where it declares a type (`ValueSchema`); numbers keep their spelling. Source: spec section 6.4.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEADER = re.compile(r"\s*call:\s*([^\s{}:,\"']+)\s*")
JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NEAR_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
WORD_TYPE = {"true": "boolean", "false": "boolean", "null": "null"}
MAX_REFERENCES = 16


class MalformedCall(ValueError):
    """The text is no call; nothing of it can be trusted."""


class ValueSchema:
    """The declared types of one place in the arguments. types None: nothing is declared there."""

    def __init__(self, schema: Any, root: Any) -> None:
        self._root = root
        self._parts = _alternatives(schema, root)
        types: set[str] = set()
        for part in self._parts:
            types |= _declared_types(part)
        self.types = types or None

    def allows(self, kind: str) -> bool:
        """True when a value of this JSON type may stand here, or nothing is declared."""
        return self.types is None or kind in self.types or (kind == "integer" and "number" in self.types)

    def child(self, key: str) -> ValueSchema:
        for part in self._parts:
            properties = part.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return ValueSchema(properties[key], self._root)
        for part in self._parts:
            if isinstance(part.get("additionalProperties"), Mapping):
                return ValueSchema(part["additionalProperties"], self._root)
        return ValueSchema({}, self._root)

    def item(self, index: int) -> ValueSchema:
        for part in self._parts:
            prefix = part.get("prefixItems")
            if isinstance(prefix, list) and index < len(prefix):
                return ValueSchema(prefix[index], self._root)
            if "items" in part:
                return ValueSchema(part["items"], self._root)
        return ValueSchema({}, self._root)


def _alternatives(schema: Any, root: Any, depth: int = 0) -> list[Mapping[str, Any]]:
    """The schema and what its $ref, anyOf, oneOf and allOf lead to, flat."""
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return []
    parts: list[Mapping[str, Any]] = [schema]
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        target = root
        for name in [part for part in ref[1:].split("/") if part]:
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        parts += _alternatives(target, root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            parts += _alternatives(option, root, depth + 1)
    return parts


def _declared_types(part: Mapping[str, Any]) -> set[str]:
    kinds = part.get("type")
    types = {kinds.lower()} if isinstance(kinds, str) else {str(kind).lower() for kind in kinds} if isinstance(kinds, list) else set()
    if not types:
        values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
        types = {_json_type(value) for value in values}
    return types | {"null"} if types and part.get("nullable") else types


def _json_type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    for kind, name in ((str, "string"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def quoted_value(text: str, schema: ValueSchema) -> str:
    """JSON of a string that was written between quotes, where the schema declares no string."""
    stripped = text.strip()
    if schema.allows("string"):
        return json.dumps(text, ensure_ascii=False)
    word = WORDS.get(stripped) or WORDS.get(stripped.lower())
    if word is not None and schema.allows(WORD_TYPE[word]):
        return word
    if schema.allows("integer") and (number := _number(stripped)) is not None:
        return number
    if stripped[:1] in ("{", "[") and schema.allows("object" if stripped[0] == "{" else "array"):
        try:
            json.loads(stripped)
            return stripped
        except json.JSONDecodeError:
            pass
    return json.dumps(text, ensure_ascii=False)


def bare_value(text: str, schema: ValueSchema) -> str:
    """JSON of a value written without quotes. A number keeps its spelling where JSON allows that."""
    word = WORDS.get(text)
    number = _number(text)
    only_text = schema.types is not None and schema.allows("string")
    if word is not None and (word == "null" or not only_text or schema.allows(WORD_TYPE[word])):
        return word
    if number is not None and (not only_text or schema.allows("integer")):
        return number
    return json.dumps(text, ensure_ascii=False)


def _number(text: str) -> str | None:
    if JSON_NUMBER.fullmatch(text):
        return text
    if not NEAR_NUMBER.fullmatch(text):
        return None
    # +5, .5, 5. and 007: numbers to a person, none to JSON.
    sign = "-" if text.startswith("-") else ""
    mantissa, mark, exponent = text.lstrip("+-").replace("E", "e").partition("e")
    whole, point, fraction = mantissa.partition(".")
    return sign + (whole.lstrip("0") or "0") + (f".{fraction or '0'}" if point else "") + mark + exponent


class _State(enum.Enum):
    HEADER = enum.auto()
    KEY = enum.auto()
    QUOTED_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    BARE = enum.auto()
    JSON_STRING = enum.auto()
    STRING = enum.auto()
    AFTER = enum.auto()
    DONE = enum.auto()


@dataclass(slots=True)
class _Container:
    is_object: bool
    schema: ValueSchema
    count: int = 0


class CallParser:
    """Reads one call. `text` and `quote` return the JSON that became certain (empty until the header is complete).

    schemas: tool name -> parameters schema. name: set when the header is complete. done: the arguments' last brace was read.
    Raises MalformedCall."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._state = _State.HEADER
        self._buffer = ""
        self._stack: list[_Container] = []
        self._place = ValueSchema({}, {})
        self._streams = False
        self._escaped = False
        self.name: str | None = None

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def in_string(self) -> bool:
        """Between two quote tokens: every other token is text there."""
        return self._state in (_State.STRING, _State.QUOTED_KEY)

    def string(self, text: str) -> str:
        """Text between two quotes."""
        if self._state is _State.STRING and self._streams:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._buffer += text
        return ""

    def quote(self) -> str:
        """The quote token: a string begins or ends."""
        if self._state is _State.STRING:
            self._state = _State.AFTER
            return '"' if self._streams else quoted_value(self._take(), self._place)
        if self._state is _State.QUOTED_KEY:
            self._state = _State.COLON
            return ""
        if self._state is _State.KEY and not self._buffer.strip():
            self._buffer = ""
            self._state = _State.QUOTED_KEY
            return ""
        if self._state is _State.VALUE:
            out = self._begin_item()
            self._state = _State.STRING
            self._streams = self._place.allows("string")
            return out + ('"' if self._streams else "")
        raise MalformedCall("a quote where no string can begin")

    def text(self, text: str) -> str:
        """Characters outside strings."""
        return "".join(self._character(c) for c in text)

    def _take(self) -> str:
        taken, self._buffer = self._buffer, ""
        return taken

    def _character(self, c: str) -> str:
        match self._state:
            case _State.HEADER:
                return self._header(c)
            case _State.KEY:
                return self._key(c)
            case _State.COLON:
                if c == ":":
                    return self._end_key()
            case _State.VALUE:
                return self._value(c)
            case _State.BARE:
                if c in ",}]":
                    self._state = _State.AFTER
                    return bare_value(self._take().strip(), self._place) + self._after(c)
                self._buffer += c
                return ""
            case _State.JSON_STRING:
                return self._json_string(c)
            case _State.AFTER:
                return self._after(c)
            case _:
                pass
        if not c.isspace():
            raise MalformedCall(f"{c!r} after {self._state.name.lower()}")
        return ""

    def _header(self, c: str) -> str:
        if c != "{":
            self._buffer += c
            return ""
        match = HEADER.fullmatch(self._take())
        if match is None:
            raise MalformedCall("no call:NAME before the brace")
        self.name = name = str(match.group(1))
        root = self._schemas.get(name) or {}
        self._push(True, ValueSchema(root, root))
        return "{"

    def _push(self, is_object: bool, schema: ValueSchema) -> None:
        self._stack.append(_Container(is_object, schema))
        self._state = _State.KEY if is_object else _State.VALUE

    def _key(self, c: str) -> str:
        if c == ":":
            return self._end_key()
        if c == "}" and not self._buffer.strip():
            return self._close(c)
        if c in "{}[],":
            raise MalformedCall(f"{c!r} inside a key")
        self._buffer += c
        return ""

    def _end_key(self) -> str:
        quoted = self._state is _State.COLON
        key = self._take()
        key = key if quoted else key.strip()
        if len(key) >= 2 and key[0] == key[-1] == '"' and not quoted:
            key = key[1:-1]
        if not key and not quoted:
            raise MalformedCall("a value without a key")
        top = self._stack[-1]
        self._place = top.schema.child(key)
        self._state = _State.VALUE
        comma = "," if top.count else ""
        top.count += 1
        return f"{comma}{json.dumps(key, ensure_ascii=False)}:"

    def _begin_item(self) -> str:
        """The comma before an array's item, and the item's schema."""
        top = self._stack[-1]
        if top.is_object:
            return ""
        self._place = top.schema.item(top.count)
        top.count += 1
        return "," if top.count > 1 else ""

    def _value(self, c: str) -> str:
        if c.isspace():
            return ""
        if c == "]" and not self._stack[-1].is_object:
            return self._close(c)
        if c in ",:}]":
            raise MalformedCall(f"{c!r} where a value is needed")
        out = self._begin_item()
        if c in "{[":
            self._push(c == "{", self._place)
            return out + c
        self._state = _State.JSON_STRING if c == '"' else _State.BARE
        self._escaped = False
        self._buffer = c
        return out

    def _json_string(self, c: str) -> str:
        """A string in ordinary quotes: not the model's syntax, but seen."""
        self._buffer += c
        if self._escaped or c != '"':
            self._escaped = c == "\\" and not self._escaped
            return ""
        self._state = _State.AFTER
        written = self._take()
        try:
            text = json.loads(written, strict=False)
        except json.JSONDecodeError:
            text = written[1:-1]
        return quoted_value(text, self._place)

    def _after(self, c: str) -> str:
        if c.isspace():
            return ""
        if c == ",":
            self._state = _State.KEY if self._stack[-1].is_object else _State.VALUE
            return ""
        if c in "}]":
            return self._close(c)
        raise MalformedCall(f"{c!r} after a value")

    def _close(self, c: str) -> str:
        if self._stack[-1].is_object != (c == "}"):
            raise MalformedCall(f"{c!r} closes what was not opened")
        self._stack.pop()
        self._state = _State.AFTER if self._stack else _State.DONE
        return c
