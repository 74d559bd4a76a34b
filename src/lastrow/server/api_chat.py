"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from lastrow.server import wire
from lastrow.server.chat import ChatPlan, chat_limits, conversation_size
from lastrow.server.generation import ChatChoice, LogprobWriter, outputs_by_choice, timings, usage
from lastrow.server.http import EventStream, event, json_response, while_connected
from lastrow.server.output_parser import Delta, ToolCallDelta
from lastrow.server.protocol import ChatCompletionRequest, ChatFields
from lastrow.server.state import ApiError, ServerState, new_id

T = TypeVar("T")


class ChatRun:
    """One request on its way: its plan, its choices, and how they are written."""

    def __init__(self, state: ServerState, request: ChatCompletionRequest) -> None:
        max_tokens, logprobs = chat_limits(request)
        if request.stream and request.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs come with whole answers only: leave out stream", param="prompt_logprobs")
        self.state = state
        self.request = request
        self.plan: ChatPlan = state.planner.plan(request, max_tokens, logprobs)
        self.plan.prompt_ids = state.last_tokens(self.plan.prompt_ids, request.truncate_prompt_tokens)
        self.id = request.request_id or new_id("chatcmpl-")
        self.created = int(time.time())
        self.writer = LogprobWriter(state.tokenizer, bool(request.return_tokens_as_token_ids))
        self.choices = [self._choice(index) for index in range(self.plan.params.n)]
        self.prompt_logprobs: dict[int, list[wire.TokenLogprob]] = {}
        state.check_params(self.plan.prompt_ids, self.plan.params)

    def _choice(self, index: int) -> ChatChoice:
        plan, params = self.plan, self.plan.params
        parser = plan.parser(self.state.tokenizer)
        return ChatChoice(index, parser, plan.stops, params.include_stop_str_in_output, params.min_tokens, plan.hidden_stop_ids)

    async def steps(self) -> AsyncGenerator[tuple[ChatChoice, Delta, wire.Output]]:
        """Every output with what it adds; ends when all choices have."""
        request = self.request
        with self.state.admitted(len(self.choices)):
            outputs = self.state.generate(
                self.plan.prompt_ids, self.plan.params, self.id, self.choices, request.priority, request.cache_salt
            )  # fmt: skip
            async with aclosing(outputs_by_choice(outputs, self.choices, self.prompt_logprobs)) as steps:
                async for choice, output in steps:
                    yield choice, choice.take(output), output

    # ------------------------------------------------------------------------------------------------ whole answers
    async def answer(self) -> dict[str, Any]:
        async with aclosing(self.steps()) as steps:
            async for _ in steps:
                pass
        body = self._envelope("chat.completion", [self.whole(choice) for choice in self.choices])
        body["usage"] = self.usage()
        body["prompt_logprobs"] = self._prompt_logprobs()
        if self.request.return_token_ids:
            body["prompt_token_ids"] = self.plan.prompt_ids
        return self.with_timings(body)

    def whole(self, choice: ChatChoice) -> dict[str, Any]:
        """A finished choice of a whole answer."""
        parser = choice.parser
        # What stands behind a stop string in the content is not part of the answer.
        complete = [] if isinstance(choice.stop_reason, str) else parser.tool_calls
        calls = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in complete]
        content = choice.content or choice.show_something(self.plan.include_reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not (calls or parser.reasoning) else None}
        if self._echo:
            message["content"] = f"{self._echo}{message['content'] or ''}"
        if self.plan.include_reasoning and parser.reasoning:
            message["reasoning_content"] = parser.reasoning
        if calls:
            message["tool_calls"] = calls
        made: dict[str, Any] = {"index": choice.index, "message": message, "logprobs": None}
        if self.request.logprobs or self.request.logprob_token_ids:
            made["logprobs"] = {"content": [self.logprob(entry) for entry in choice.logprobs]}
        if self.request.return_token_ids:
            made["token_ids"] = choice.token_ids
        return {**made, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    @property
    def _echo(self) -> str:
        """What an answer with `echo` begins with: the assistant's message that it goes on from."""
        last = self.request.messages[-1] if self.request.echo else {}
        content = last.get("content")
        return content if last.get("role") == "assistant" and isinstance(content, str) else ""

    def logprob(self, entry: list[wire.TokenLogprob]) -> dict[str, Any]:
        return self.writer.chat(entry, self.request.top_logprobs or 0)

    def _prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        if self.request.prompt_logprobs is None:
            return None
        at = self.prompt_logprobs
        return [self.writer.prompt(at[i]) if i in at else None for i in range(len(self.plan.prompt_ids))]

    def usage(self) -> dict[str, Any]:
        tokens = sum(self._reasoning_tokens(choice.token_ids) for choice in self.choices)
        return usage(len(self.plan.prompt_ids), self.choices, tokens)

    def _reasoning_tokens(self, ids: list[int]) -> int:
        """Tokens of thoughts, their marks included."""
        special = self.state.tokenizer.special_ids
        inside, count = self.plan.in_reasoning, 0
        for token in ids:
            inside = inside or token == special.get("channel_start")
            count += inside
            inside = inside and token != special.get("channel_end")
        return count

    # ------------------------------------------------------------------------------------------------ streams
    async def events(self) -> AsyncGenerator[bytes]:
        options = self.request.stream_options
        started: set[int] = set()
        async with aclosing(self.steps()) as steps:
            async for choice, delta, output in steps:
                if choice.index not in started:
                    started.add(choice.index)
                    yield event(self._chunk(choice, {"role": "assistant", "content": self._echo}))
                if choice.finished:
                    delta.content += choice.show_something(self.plan.include_reasoning)
                change = self._change(delta)
                if change or choice.finished or output.logprobs:
                    chunk = self._chunk(choice, change, output)
                    if options is not None and options.continuous_usage_stats:
                        chunk["usage"] = self.usage()
                    yield event(self.with_timings(chunk) if choice.finished else chunk)
        if options is not None and options.include_usage:
            yield event(self.with_timings({**self._envelope("chat.completion.chunk", []), "usage": self.usage()}))

    def _change(self, delta: Delta) -> dict[str, Any]:
        change: dict[str, Any] = {}
        if delta.reasoning and self.plan.include_reasoning:
            change["reasoning_content"] = delta.reasoning
        if delta.content:
            change["content"] = delta.content
        if delta.tool_calls:
            change["tool_calls"] = [_call_change(call) for call in delta.tool_calls]
        return change

    def _chunk(self, choice: ChatChoice, change: dict[str, Any], output: wire.Output | None = None) -> dict[str, Any]:
        made: dict[str, Any] = {"index": choice.index, "delta": change, "logprobs": None, "finish_reason": None}
        if output is not None:
            if output.logprobs:
                made["logprobs"] = {"content": [self.logprob(entry) for entry in output.logprobs]}
            if self.request.return_token_ids:
                made["token_ids"] = output.token_ids
            if choice.finished:
                made |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return self._envelope("chat.completion.chunk", [made])

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        model = self.request.model or self.state.model_name
        return {"id": self.id, "object": kind, "created": self.created, "model": model, "choices": choices}

    def with_timings(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.state.settings.enable_timings_report and all(choice.finished for choice in self.choices):
            body["timings"] = timings(len(self.plan.prompt_ids), self.choices)
        return body


def _call_change(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


async def prepare_chat(state: ServerState, request: ChatFields, make: Callable[[], T]) -> T:
    """What `make` makes of a conversation. Raises ApiError before a conversation is read that can never fit."""
    size = conversation_size(request.messages)
    if request.truncate_prompt_tokens is None:
        state.check_room(size, len(request.messages))
    return await state.prepare(make, size)


def add_routes(routes: APIRouter, state: ServerState) -> None:
    @routes.post("/v1/chat/completions")
    async def chat_completions(request: ChatCompletionRequest, http: Request) -> Response:
        state.check(request)
        state.check_queue(request.n or 1)
        run = await prepare_chat(state, request, lambda: ChatRun(state, request))
        if request.stream:
            return EventStream(run.events())
        return json_response(await while_connected(http.receive, run.answer()))
