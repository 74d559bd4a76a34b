"""The chat template against transformers: same text, same ids."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from lastrow.tokenizer import Tokenizer, TokenizerError

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather, \"now\" <b>&</b> 'here'",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "array", "items": {"type": "integer"}},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
                "exact": {"type": "boolean", "nullable": True},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "now", "description": "The time"}}
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Zürich"},
    {"city": 'a "quoted", {braced}\nname', "days": [1, 2], "exact": None},
    {"city": "x", "where": {"lat": 1.5, "deep": {"er": [True, False, "z"]}}},
    {},
]
TEXTS = [
    "hi",
    "  trimmed  ",
    "ein Wörtchen 😀 ▁ ー\u0301",
    "",
    "line\n\nline\n",
    "<|turn>model\nfake<turn|>",
    "a<|channel>thought\nx<channel|>b",
]


def call(i: int, arguments: Any, name: str = "get_weather") -> dict[str, Any]:
    return {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}


def conversations() -> list[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """(name, messages, arguments of apply_chat_template): named cases, then random walks over everything a message can hold."""
    user = {"role": "user", "content": "Weather in Zürich?"}
    asked = {"role": "assistant", "content": None, "tool_calls": [call(0, ARGUMENTS[0])]}
    told = {"role": "tool", "tool_call_id": "call_0", "content": "12 C"}
    named: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
        ("one turn", [user], {}),
        ("no generation prompt", [user], {"add_generation_prompt": False}),
        ("system only", [{"role": "system", "content": "You are terse."}], {}),
        ("developer", [{"role": "developer", "content": "Be terse."}, user], {}),
        ("thinking", [user], {"enable_thinking": True}),
        (
            "thinking with system and tools",
            [{"role": "system", "content": "S"}, user],
            {"enable_thinking": True, "tools": [WEATHER, CLOCK]},
        ),
        ("tools", [user], {"tools": [WEATHER]}),
        ("tool call last", [user, asked], {"tools": [WEATHER]}),
        ("tool last", [user, asked, told], {"tools": [WEATHER]}),
        ("tool result, then user", [user, asked, told, user], {"tools": [WEATHER]}),
        ("tool result as data", [user, asked, {**told, "content": {"t": 1.5, "ok": True, "who": None}}], {"tools": [WEATHER]}),
        ("two results", [user, {**asked, "tool_calls": [call(0, {}), call(1, {}, "now")]}, told, {**told, "tool_call_id": "call_1"}], {}),
        ("unknown tool id", [user, asked, {**told, "tool_call_id": "gone"}], {}),
        ("assistant first", [{"role": "assistant", "content": "Hello."}, user], {}),
        ("assistant last", [user, {"role": "assistant", "content": "It is"}], {"add_generation_prompt": False}),
        ("continue", [user, {"role": "assistant", "content": "It is"}], {"continue_final_message": True}),
        ("continue, spaces", [user, {"role": "assistant", "content": "It is  "}], {"continue_final_message": True}),
        ("parts", [{"role": "user", "content": [{"type": "text", "text": " a"}, {"type": "text", "text": "b "}]}], {}),
        ("continue parts", [user, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}], {"continue_final_message": True}),
        ("reasoning", [user, {**asked, "reasoning_content": "Look it up."}, told], {"tools": [WEATHER]}),
        ("reasoning, other name", [user, {**asked, "reasoning": "Look it up."}, told], {"tools": [WEATHER]}),
        ("reasoning kept", [user, {"role": "assistant", "content": "x", "thinking": "y"}, user], {"preserve_thinking": True}),
    ]
    rng = random.Random(7)
    for n in range(60):
        messages: list[dict[str, Any]] = []
        for i in range(rng.randint(1, 7)):
            role = rng.choice(["user", "assistant", "tool"] + (["system"] if i == 0 else []))
            message: dict[str, Any] = {"role": role, "content": rng.choice(TEXTS)}
            if rng.random() < 0.3:
                message["content"] = [{"type": "text", "text": t} for t in rng.sample(TEXTS, 2)]
            if role == "assistant" and rng.random() < 0.6:
                message["tool_calls"] = [
                    call(j, rng.choice(ARGUMENTS), rng.choice(["get_weather", "now"])) for j in range(rng.randint(1, 2))
                ]
            if role == "assistant" and rng.random() < 0.5:
                message[rng.choice(["reasoning", "reasoning_content", "thinking"])] = "Because."
            if role == "tool":
                message["tool_call_id"] = f"call_{rng.randint(0, 2)}"
            messages.append(message)
        options: dict[str, Any] = {"enable_thinking": rng.random() < 0.5, "add_generation_prompt": rng.random() < 0.8}
        if rng.random() < 0.5:
            options["tools"] = [WEATHER, CLOCK]
        named.append((f"random {n}", messages, options))
    return named


@pytest.fixture(scope="module")
def ours(tiny_e: Path) -> Tokenizer:
    return Tokenizer(tiny_e)


@pytest.fixture(scope="module")
def oracle(tiny_e: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_e)


@pytest.mark.parametrize(("name", "messages", "options"), conversations(), ids=lambda value: value if isinstance(value, str) else "")
def test_text_and_ids_are_those_of_transformers(
    ours: Tokenizer, oracle: Any, name: str, messages: list[Any], options: dict[str, Any]
) -> None:
    theirs = {"add_generation_prompt": not options.get("continue_final_message"), **options}
    want = oracle.apply_chat_template(copy.deepcopy(messages), tokenize=False, **theirs)
    before = copy.deepcopy(messages)
    assert ours.apply_chat_template(messages, tokenize=False, **options) == want
    assert ours.apply_chat_template(messages, **options) == oracle.apply_chat_template(messages, return_dict=False, **theirs)
    assert messages == before, "the caller's messages were changed"


def test_control_tokens_typed_in_a_message_are_those_of_transformers_but_for_bos(ours: Tokenizer, oracle: Any) -> None:
    """The template writes them, so a text that holds them reads the same; <bos> alone has one place, at the beginning."""
    typed = [{"role": "user", "content": "a<turn|>\n<|turn>model\nb <|think|>"}]
    assert ours.apply_chat_template(typed) == oracle.apply_chat_template(typed, return_dict=False, add_generation_prompt=True)
    for content in ("<bos>", "<bos>x", "x<bos>y<bos>", [{"type": "text", "text": "<bos>"}]):
        talk = [{"role": "system", "content": "S<bos>"}, {"role": "user", "content": content}]
        ids = ours.apply_chat_template(talk)
        assert ids[0] == 2 and ids.count(2) == 1
        text = oracle.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        assert ours.decode(ids, skip_special_tokens=False) == text  # nothing that was typed is lost


def test_heldout_conversations_give_the_recorded_prompts(ours: Tokenizer, heldout: list[dict[str, Any]]) -> None:
    """Prompts were written when the model was trained, by another program than this one."""
    rows = [row for row in heldout if row.get("conversation")]
    assert len(rows) > 300
    for row in rows:
        talk = row["conversation"]
        text = ours.apply_chat_template(talk["messages"], talk["tools"], enable_thinking=bool(talk["thinking"]), tokenize=False)
        assert text == row["prompt"], (row["task"], row["id"])
        assert ours.encode(text) == row["prompt_ids"], (row["task"], row["id"])


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_as_json_text_render_like_the_object(ours: Tokenizer, arguments: dict[str, Any]) -> None:
    as_object = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call(0, arguments)]}]
    as_text = [as_object[0], {"role": "assistant", "tool_calls": [call(0, json.dumps(arguments))]}]
    assert ours.apply_chat_template(as_text) == ours.apply_chat_template(as_object)


PROBES = {
    "filters": "{{ messages | tojson }}|{{ {'a': '<é>'} | tojson(indent=2) }}|{{ tools | tojson(ensure_ascii=true) }}",
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n    {{ m.content }}\n  {% endif %}\n{% endfor %}\n x\n",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ bos_token }}{{ eos_token }}",
    "namespace and dict": "{% set n = namespace(self=1, x=dict(a=2)) %}{% set n.x = dict.fromkeys(['k']) %}{{ n.x }}{{ n.self }}",
    "missing": "{{ tools is none }}{{ documents is none }}{{ nothing is defined }}{{ enable_thinking }}",
    "date": "{{ strftime_now('%Y') }}",
    "keeps None content away": "{{ messages[1] | tojson }}",
}


@pytest.mark.parametrize("source", PROBES.values(), ids=PROBES)
def test_environment_is_that_of_transformers(ours: Tokenizer, oracle: Any, source: str) -> None:
    messages = [{"role": "user", "content": "<b>é</b>"}, {"role": "assistant", "content": None, "tool_calls": [call(0, {"a": 1})]}]
    want = oracle.apply_chat_template(messages, tokenize=False, chat_template=source, enable_thinking=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages, tokenize=False, chat_template=source) == want


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set n = namespace(_x=1) %}", "underscore"),
        ("{{ messages.append(1) }}", "unsafe|safely"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ 'a' + none }}", "refuses"),
        ("{% for %}", "line 1"),
    ],
)
def test_what_a_template_refuses_is_one_error(ours: Tokenizer, source: str, says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        ours.apply_chat_template([{"role": "user", "content": "x"}], chat_template=source)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ("hello", "messages is empty or no list"),
        (["hello"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\].role is None"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            r"messages\[0\].content\[0\] is of type 'image_url'",
        ),
        ([{"role": "assistant", "tool_calls": [call(0, "{broken")]}], r"tool_calls\[0\].function.arguments is no JSON"),
        ([{"role": "assistant", "tool_calls": [call(0, "[1]")]}], r"arguments is a list"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], r"tool_calls\[0\] has no function.name"),
        ([{"role": "user", "content": object()}], r"messages\[0\].content is a object"),
        ([{"role": "user", "content": "a\ud800"}], "lone surrogate"),
    ],
)
def test_wrong_messages_are_named(ours: Tokenizer, messages: Any, says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        ours.apply_chat_template(messages)


def test_continue_needs_text(ours: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="no text to continue"):
        ours.apply_chat_template([{"role": "assistant", "tool_calls": [call(0, {})]}], continue_final_message=True)


def test_template_in_the_tokenizer_config(tiny_e: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_e, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors", "chat_template.jinja"))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer(folder).apply_chat_template(messages)
    file.write_text(json.dumps({**config, "chat_template": "one"}))
    assert Tokenizer(folder).apply_chat_template(messages, tokenize=False) == "one"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    file.write_text(json.dumps({**config, "chat_template": named}))
    assert Tokenizer(folder).apply_chat_template(messages, tokenize=False) == "one"
    assert Tokenizer(folder).apply_chat_template(messages, [CLOCK], tokenize=False) == "two"
