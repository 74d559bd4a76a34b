"""A chat request -> prompt ids, sampling parameters, constraint and parser settings. Nothing here runs the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.structured_output import GrammarBackend, StructuredOutputsParams, in_channel
from lastrow.server.output_parser import OutputParser
from lastrow.server.protocol import ChatCompletionRequest, ChatFields, Tool
from lastrow.tokenizer import Tokenizer


@dataclass(slots=True)
class ChatPlan:
    """A request that can be run. stops: searched in the content by the server, so they never end a thought or a call."""

    prompt_ids: list[int]
    params: SamplingParams
    tools: dict[str, Any] | None
    stops: list[str]
    include_reasoning: bool
    in_reasoning: bool
    hidden_stop_ids: frozenset[int] = field(default_factory=frozenset)

    def parser(self, tokenizer: Tokenizer) -> OutputParser:
        return OutputParser(tokenizer, self.tools, self.in_reasoning, self.params.skip_special_tokens)


class ChatPlanner:
    """Holds what all chats share. template_kwargs: --default-chat-template-kwargs; defaults: of generation_config."""

    def __init__(
        self, tokenizer: Tokenizer, grammars: GrammarBackend, defaults: Mapping[str, Any], template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.grammars = grammars
        self.defaults = defaults
        self.template_kwargs = dict(template_kwargs or {})
        self.chat_template = chat_template

    def plan(self, request: ChatFields, max_tokens: int | None, logprobs: int | None) -> ChatPlan:
        """Raises ValueError (SchemaError, TokenizerError among them) with what is wrong in the request."""
        tools, forced = chosen_tools(request)
        kwargs = self._template_kwargs(request)
        prompt_ids = self._render(request, tools, kwargs)
        thinking = bool(kwargs.get("enable_thinking"))
        constraint = request.constraint()
        if constraint and request.allowed_token_ids is not None:
            raise ValueError("allowed_token_ids cannot stand beside a structured output: the grammar says what is allowed")
        if forced is not None:
            if constraint:
                raise ValueError("tool_choice forces a call, so response_format or structured_outputs cannot hold: use tool_choice auto")
            constraint = {"tools": forced}
        elif constraint and tools:
            constraint["tools"] = _declared(tools)
        parallel = request.parallel_tool_calls is not False
        params = request.sampling_params(self.defaults, max_tokens=max_tokens, logprobs=logprobs)
        hidden: frozenset[int] = frozenset()
        if constraint:
            structured = StructuredOutputsParams.of({**constraint, "parallel_tool_calls": parallel, "reasoning": thinking})
            self.grammars.validate(structured)
            # A grammar's end is the end of the output, so an output that must go on cannot be asked for.
            params = replace(params, structured_outputs=structured, min_tokens=0)
        elif tools and not parallel:
            end = self.tokenizer.special_ids["tool_call_end"]
            hidden = frozenset({end}) - set(params.stop_token_ids or ())
            params = replace(params, stop_token_ids=[*(params.stop_token_ids or ()), end])
        ids = self.tokenizer.special_ids
        return ChatPlan(
            prompt_ids=prompt_ids,
            params=params,
            tools=dict(_declared(tools)) if tools else None,
            stops=list(params.stop or ()),
            include_reasoning=request.include_reasoning is not False,
            in_reasoning=in_channel(prompt_ids, ids.get("channel_start", -1), ids.get("channel_end", -1)),
            hidden_stop_ids=hidden,
        )

    def render(self, request: Any) -> list[int]:
        """Prompt ids alone, for /tokenize."""
        return self._render(request, request.tools or [], self._template_kwargs(request))

    def _template_kwargs(self, request: Any) -> dict[str, Any]:
        kwargs = dict(self.template_kwargs)
        effort = getattr(request, "reasoning_effort", None)
        if effort is not None:
            kwargs["enable_thinking"] = effort != "none"
        return {**kwargs, **(request.chat_template_kwargs or {})}

    def _render(self, request: Any, tools: list[Tool], kwargs: dict[str, Any]) -> list[int]:
        go_on = bool(request.continue_final_message)
        if go_on and request.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"):
            if name in kwargs:
                raise ValueError(f"chat_template_kwargs.{name}: this name is the server's own")
        ids = self.tokenizer.apply_chat_template(
            request.messages,
            tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=go_on,
            chat_template=request.chat_template or self.chat_template,
            **kwargs,
        )
        return list(ids)


def conversation_size(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters of the messages' contents."""
    contents = [message.get("content") for message in messages]
    parts = [part.get("text") for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return sum(len(text) for text in [*contents, *parts] if isinstance(text, str))


def chosen_tools(request: ChatFields) -> tuple[list[Tool], list[tuple[str, Any]] | None]:
    """(tools that the prompt declares, tools of which one must be called or None). Raises ValueError."""
    tools, choice = request.tools or [], request.tool_choice
    names = [tool.function.name for tool in tools]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"tools declares {sorted(repeated)[0]!r} twice: names must differ")
    if choice in (None, "auto"):
        return tools, None
    if choice == "none":
        return [], None
    if not tools:
        raise ValueError(f"tool_choice is {choice!r}, but tools is empty: declare at least one tool")
    if choice == "required":
        return tools, _declared(tools)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise ValueError(f"tool_choice names {name!r}: one of {', '.join(names)} is needed")
    return tools, [pair for pair in _declared(tools) if pair[0] == name]


def _declared(tools: list[Tool]) -> list[tuple[str, Any]]:
    return [(tool.function.name, tool.function.parameters) for tool in tools]


def chat_limits(request: ChatCompletionRequest) -> tuple[int | None, int | None]:
    """(max_tokens, logprobs) of a chat completion. Raises ValueError."""
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise ValueError("top_logprobs needs logprobs: true")
    if not request.logprobs:
        # Logprobs of exactly these ids are logprobs that were asked for.
        return max_tokens, 0 if request.logprob_token_ids else None
    return max_tokens, request.top_logprobs or 0
