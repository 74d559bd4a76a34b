"""Grammars in Gemma's own call syntax: a JSON schema becomes Lark rules whose strings stand between quote tokens.

    <|tool_call>call:NAME{key:value,...}<tool_call|>

Keys are bare and sorted as the chat template sorts them, strings stand between `<|"|>` tokens without escaping, everything else is
written as in JSON without white space (spec section 6.4). What a rule cannot hold is either refused (a schema that is wrong) or
left to the coercion of the parser (`format`, `uniqueItems`, ...).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

CALL_START, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
NUMBER_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ANY_RULES = r"""
any: str | num | "true" | "false" | "null" | "{" any_pairs? "}" | "[" any_items? "]"
any_pairs: KEY ":" any ("," KEY ":" any)*
any_items: any ("," any)*
str: quote TEXT? quote
quote: <|"|>
num: %json {"type":"number"}
KEY: /[A-Za-z_][A-Za-z0-9_.$-]{0,63}/
TEXT: /(?s:.+)/
"""


class SchemaError(ValueError):
    """A JSON schema (or other constraint) that cannot be used; the message names the place."""


def tool_call_rules(tools: Sequence[tuple[str, Mapping[str, Any] | None]], multiple: bool, prefix: str = "call") -> str:
    """Lark rules whose rule `{prefix}s` is one call, or with `multiple` one or more, of the given tools.

    tools: (name, parameters schema or None). Raises SchemaError."""
    if not tools:
        raise SchemaError("tools is empty: a forced call needs at least one tool")
    rules = _Rules(prefix)
    calls: list[str] = []
    for index, (name, schema) in enumerate(tools):
        where = f"tools[{index}].function.parameters"
        body = rules.schema(schema or {"type": "object", "properties": {}}, schema or {}, where, top=True)
        calls.append(f"{CALL_START} {literal('call:' + name)} {body} {CALL_END}")
    repeat = "+" if multiple else ""
    return f"{prefix}s: {prefix}{repeat}\n{prefix}: " + "\n  | ".join(calls) + "\n" + rules.text() + ANY_RULES


def literal(text: str) -> str:
    """`text` as a Lark string; Lark has no empty string literal of its own, an empty group stands for it."""
    return json.dumps(text, ensure_ascii=False) if text else '""'


class _Rules:
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lines: list[str] = []
        self._refs: dict[tuple[int, str], str] = {}

    def text(self) -> str:
        return "".join(line + "\n" for line in self._lines)

    def _add(self, body: str) -> str:
        name = f"{self._prefix}_r{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def schema(self, schema: Any, root: Any, where: str, top: bool = False) -> str:
        """Name (or expression in parentheses) of a rule for one value. top: the arguments object itself, which must be an object."""
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise SchemaError(f"{where} is {schema!r}: a JSON schema object is needed")
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), root, where)
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            if not isinstance(values, list) or not values:
                raise SchemaError(f"{where}.enum is {values!r}: a list of at least one value is needed")
            return self._add(" | ".join(_constant(value, where) for value in values))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._union(schema, key, root, where)
        if "allOf" in schema:
            schema = _merged(schema, where)
        return self._typed(schema, root, where, top)

    def _union(self, schema: Mapping[str, Any], key: str, root: Any, where: str) -> str:
        options = schema[key]
        if not isinstance(options, list) or not options:
            raise SchemaError(f"{where}.{key} is {options!r}: a list of at least one schema is needed")
        base = {k: v for k, v in schema.items() if k not in ("anyOf", "oneOf", "description", "title", "default", "nullable")}
        choices = [
            self.schema({**base, **option} if isinstance(option, Mapping) else option, root, f"{where}.{key}[{i}]")
            for i, option in enumerate(options)
        ]
        return self._add(" | ".join(choices + (['"null"'] if schema.get("nullable") else [])))

    def _typed(self, schema: Mapping[str, Any], root: Any, where: str, top: bool) -> str:
        kinds = schema.get("type")
        if kinds is None:
            kinds = "object" if top or "properties" in schema else "array" if "items" in schema else list(TYPES)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds:
            raise SchemaError(f"{where}.type is {kinds!r}: one of {', '.join(TYPES)} or a list of them is needed")
        kinds = [str(kind).lower() for kind in kinds]
        for kind in kinds:
            if kind not in TYPES:
                raise SchemaError(f"{where}.type is {kind!r}: one of {', '.join(TYPES)} is needed")
        if top and kinds != ["object"]:
            raise SchemaError(f"{where}.type is {schema.get('type')!r}: arguments are an object")
        if set(kinds) == set(TYPES):
            return "any"
        choices = [self._one(kind, schema, root, where) for kind in kinds]
        if schema.get("nullable") and "null" not in kinds:
            choices.append('"null"')
        return choices[0] if len(choices) == 1 else self._add(" | ".join(choices))

    def _one(self, kind: str, schema: Mapping[str, Any], root: Any, where: str) -> str:
        if kind == "string":
            return self._string(schema, where)
        if kind in ("integer", "number"):
            limits = {key: schema[key] for key in NUMBER_LIMITS if key in schema}
            return self._add("%json " + json.dumps({"type": kind, **limits}))
        if kind == "boolean":
            return '("true" | "false")'
        if kind == "null":
            return '"null"'
        return self._array(schema, root, where) if kind == "array" else self._object(schema, root, where)

    def _string(self, schema: Mapping[str, Any], where: str) -> str:
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        for key, value in (("minLength", low), ("maxLength", high)):
            if value is not None and (not isinstance(value, int) or value < 0):
                raise SchemaError(f"{where}.{key} is {value!r}: an integer of at least 0 is needed")
        pattern = schema.get("pattern")
        if pattern is not None:
            if not isinstance(pattern, str):
                raise SchemaError(f"{where}.pattern is {pattern!r}: a regular expression is needed")
            return self._add(f"quote /{_regex(pattern)}/ quote")
        if not low and high is None:
            return "str"
        if high is not None and high < low:
            raise SchemaError(f"{where}.maxLength is {high}: at least minLength={low} is needed")
        bounds = f"{{{low},{'' if high is None else high}}}"
        return self._add(f"quote /(?s:.{bounds})/ quote")

    def _array(self, schema: Mapping[str, Any], root: Any, where: str) -> str:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        for key, value in (("minItems", low), ("maxItems", high)):
            if value is not None and (not isinstance(value, int) or value < 0):
                raise SchemaError(f"{where}.{key} is {value!r}: an integer of at least 0 is needed")
        if high is not None and high < low:
            raise SchemaError(f"{where}.maxItems is {high}: at least minItems={low} is needed")
        if "prefixItems" in schema:
            items = [self.schema(item, root, f"{where}.prefixItems[{i}]") for i, item in enumerate(schema["prefixItems"])]
            return self._add('"[" ' + ' "," '.join(items) + ' "]"')
        item = self.schema(schema.get("items", True), root, f"{where}.items")
        if high == 0:
            return '("[" "]")'
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        return self._add(f'"[" {item} {more} "]"' + ("" if low else ' | "[" "]"'))

    def _object(self, schema: Mapping[str, Any], root: Any, where: str) -> str:
        properties = schema.get("properties")
        if properties is not None and not isinstance(properties, Mapping):
            raise SchemaError(f"{where}.properties is {properties!r}: an object of schemas is needed")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{where}.required is {required!r}: a list of property names is needed")
        if missing := [name for name in required if properties is not None and name not in properties]:
            raise SchemaError(f"{where}.required names {missing[0]!r}, which properties does not declare")
        if not properties:
            extra = schema.get("additionalProperties", "properties" not in schema)
            if extra is False:
                return '("{" "}")'
            value = self.schema(extra, root, f"{where}.additionalProperties")
            return self._add(f'"{{" (KEY ":" {value} ("," KEY ":" {value})*)? "}}"')
        first, rest = '""', '""'
        for key in sorted(properties, key=str.lower, reverse=True):
            pair = f"{literal(key + ':')} {self.schema(properties[key], root, f'{where}.properties.{key}')}"
            optional = key not in required
            first, rest = (
                self._add(f"{pair} {rest}" + (f" | {first}" if optional else "")),
                self._add(f'"," {pair} {rest}' + (f" | {rest}" if optional else "")),
            )
        return self._add(f'"{{" {first} "}}"')

    def _reference(self, ref: str, root: Any, where: str) -> str:
        known = self._refs.get((id(root), ref))
        if known is not None:
            return known
        target = root
        if not ref.startswith("#"):
            raise SchemaError(f"{where}.$ref is {ref!r}: only references inside the schema (#/...) are followed")
        for part in ref[1:].strip("/").split("/") if ref != "#" else []:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or part not in target:
                raise SchemaError(f"{where}.$ref is {ref!r}: the schema has no such place")
            target = target[part]
        name = self._refs[(id(root), ref)] = f"{self._prefix}_d{len(self._refs)}"
        body = self.schema(target, root, ref)
        if body == name:
            raise SchemaError(f"{where}.$ref is {ref!r}: it refers to itself")
        self._lines.append(f"{name}: {body}")
        return name


def _constant(value: Any, where: str) -> str:
    """One fixed value in Gemma's syntax."""
    if isinstance(value, str):
        return f"(quote {literal(value)} quote)" if value else "(quote quote)"
    if isinstance(value, Mapping):
        pairs = [f"{literal(str(key) + ':')} {_constant(value[key], where)}" for key in sorted(value, key=lambda k: str(k).lower())]
        return '("{" ' + ' "," '.join(pairs) + ' "}")'
    if isinstance(value, list):
        return '("[" ' + ' "," '.join(_constant(item, where) for item in value) + ' "]")'
    return literal(json.dumps(value))


def _merged(schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    """allOf of object schemas, taken together: properties and required of all parts."""
    merged: dict[str, Any] = {k: v for k, v in schema.items() if k != "allOf"}
    for part in schema["allOf"]:
        if not isinstance(part, Mapping):
            raise SchemaError(f"{where}.allOf holds {part!r}: JSON schema objects are needed")
        for key, value in part.items():
            if key == "properties":
                merged[key] = {**merged.get(key, {}), **value}
            elif key == "required":
                merged[key] = [*merged.get(key, []), *value]
            else:
                merged.setdefault(key, value)
    return merged


def _regex(pattern: str) -> str:
    """A JSON schema pattern, which may match anywhere, as a Lark regex, which must match the whole."""
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern[1 if start else 0 : len(pattern) - 1 if end else len(pattern)]
    body = ("" if start else "(?s:.*)") + f"({body})" + ("" if end else "(?s:.*)")
    return body.replace("\\/", "/").replace("/", "\\/")
