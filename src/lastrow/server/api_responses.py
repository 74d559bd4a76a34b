"""/v1/responses: OpenAI's Responses API over a chat, without state. Text, function tools, reasoning, streaming events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError

from lastrow.server.api_chat import ChatRun, prepare_chat
from lastrow.server.http import EventStream, event, json_response, while_connected
from lastrow.server.output_parser import ToolCallDelta
from lastrow.server.protocol import ChatCompletionRequest, ResponsesRequest, what_is_wrong
from lastrow.server.state import ApiError, ServerState, as_api_error, new_id

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def to_chat(request: ResponsesRequest) -> ChatCompletionRequest:
    """The same request as a chat completion. Raises ApiError for what would need state or another server."""
    for name in ("previous_response_id", "background"):
        if getattr(request, name):
            raise ApiError(400, f"{name} is not supported: responses are not stored here, send the whole input", param=name)
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    for i, item in enumerate(items):
        _add_item(messages, item, f"input[{i}]")
    choice = request.tool_choice
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise ApiError(400, f"tool_choice.type is {choice.get('type')!r}: function is needed", param="tool_choice")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "tools": [_tool(tool, i) for i, tool in enumerate(request.tools or ())] or None,
        "tool_choice": choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": (request.text or {}).get("format"),
        "reasoning_effort": (request.reasoning or {}).get("effort"),
        "max_completion_tokens": request.max_output_tokens,
    }
    if "message.output_text.logprobs" in (request.include or ()) or request.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    for name in ("temperature", "top_p", "top_k", "seed", "stop", "chat_template_kwargs", "priority", "cache_salt"):
        fields[name] = getattr(request, name)
    try:
        return ChatCompletionRequest(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        message, name = what_is_wrong(error.errors())
        raise ApiError(400, message, param=name) from None


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(400, f"tools[{index}].type is {tool.get('type')!r}: only functions can be called here", param="tools")
    return {"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}}


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role", "user"), "content": _text(item.get("content"), where)})
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "type": "function", "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        last = messages[-1] if messages else {}
        # Calls of one turn stand in one message, together with the text or thought before them.
        if last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"), where)})
    elif kind == "reasoning":
        thought = _text(item.get("content") or item.get("summary") or [], where)
        messages.append({"role": "assistant", "content": None, "reasoning_content": thought})
    else:
        raise ApiError(400, f"{where}.type is {kind!r}: message, function_call, function_call_output or reasoning is needed", param="input")


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for i, part in enumerate(content if isinstance(content, list) else [content]):
        if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ApiError(400, f"{where}.content[{i}] is of type {kind!r}: only text is supported", param="input")
        parts.append(part["text"])
    return "".join(parts)


class ResponsesRun:
    """One response: a chat with one choice, written as items."""

    def __init__(self, state: ServerState, request: ResponsesRequest, chat: ChatRun) -> None:
        self.state = state
        self.request = request
        self.chat = chat
        self.id = self.chat.id = new_id("resp_")
        self.created = int(time.time())
        self._sequence = 0

    async def answer(self) -> dict[str, Any]:
        async with aclosing(self.chat.steps()) as steps:
            async for _ in steps:
                pass
        return self._response(self._items())

    @property
    def is_cut(self) -> bool:
        """Whether max_output_tokens ended it, in the middle of its last item."""
        return self.chat.choices[0].finish_reason == "length"

    def _items(self) -> list[dict[str, Any]]:
        choice = self.chat.choices[0]
        message = self.chat.whole(choice)["message"]
        items: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            items.append(_reasoning(new_id("rs_"), message["reasoning_content"]))
        if message["content"] is not None and (message["content"] or not message.get("tool_calls")):
            logprobs = [self.chat.logprob(entry) for entry in choice.logprobs]
            items.append(_message(new_id("msg_"), message["content"], logprobs))
        for call in message.get("tool_calls") or ():
            items.append(_call(new_id("fc_"), call["id"], call["function"]["name"], call["function"]["arguments"]))
        if self.is_cut and items:
            items[-1]["status"] = "incomplete"
        return items

    def _response(self, items: list[dict[str, Any]], status: str | None = None, error: dict[str, Any] | None = None) -> dict[str, Any]:
        request, choice = self.request, self.chat.choices[0]
        cut = self.is_cut
        made: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": request.model or self.state.model_name,
            "status": status or ("incomplete" if cut else "completed"),
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut and status is None else None,
            "output": items,
            "usage": None,
        }
        for name, default in (("instructions", None), ("parallel_tool_calls", True), ("tool_choice", "auto"), ("tools", [])):
            value = getattr(request, name)
            made[name] = default if value is None else value
        for name in ("temperature", "top_p", "max_output_tokens", "metadata", "reasoning", "text"):
            made[name] = getattr(request, name)
        if choice.finished:
            made["usage"] = self._usage()
        return self.chat.with_timings(made)

    def _usage(self) -> dict[str, Any]:
        usage = self.chat.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    # ------------------------------------------------------------------------------------------------ streams
    def _event(self, kind: str, **fields: Any) -> bytes:
        made = event({"type": kind, "sequence_number": self._sequence, **fields}, kind)
        self._sequence += 1
        return made

    async def events(self) -> AsyncGenerator[bytes]:
        items = _ItemStream(self)
        started = False
        try:
            async with aclosing(self.chat.steps()) as steps:
                async for choice, delta, output in steps:
                    if not started:
                        started = True
                        yield self._event("response.created", response=self._response([], "in_progress"))
                        yield self._event("response.in_progress", response=self._response([], "in_progress"))
                    if delta.reasoning and self.chat.plan.include_reasoning:
                        yield items.reasoning(delta.reasoning)
                    if delta.content:
                        entries = output.logprobs or [] if self.chat.request.logprobs else []
                        yield items.content(delta.content, [self.chat.logprob(entry) for entry in entries])
                    for call in delta.tool_calls:
                        yield items.call(call)
                    if choice.finished:
                        if not items.done and not items.is_open:
                            yield items.content("", [])
                        yield items.close("incomplete" if self.is_cut else "completed")
        except Exception as error:
            if not started:
                raise
            told = as_api_error(error).body()["error"]
            yield self._event("response.failed", response=self._response(items.done, "failed", {"code": "server_error", **told}))
            return
        kind = "response.incomplete" if self.is_cut else "response.completed"
        yield self._event(kind, response=self._response(items.done))


class _ItemStream:
    """Opens, fills and closes output items in order; each method returns the events it causes."""

    def __init__(self, run: ResponsesRun) -> None:
        self._run = run
        self._item: dict[str, Any] | None = None
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self.done: list[dict[str, Any]] = []

    @property
    def is_open(self) -> bool:
        return self._item is not None

    @property
    def _index(self) -> int:
        return len(self.done)

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": self._index}

    def _open(self, item: dict[str, Any], part: dict[str, Any] | None) -> bytes:
        closed = self.close()
        self._item, self._text, self._logprobs = item, "", []
        made = closed + self._run._event("response.output_item.added", output_index=self._index, item=item)
        if part is not None:
            made += self._run._event("response.content_part.added", **self._place(), content_index=0, part=part)
        return made

    def _is(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    def reasoning(self, text: str) -> bytes:
        made = b""
        if not self._is("reasoning"):
            item = {**_reasoning(new_id("rs_"), ""), "status": "in_progress", "content": []}
            made = self._open(item, {"type": "reasoning_text", "text": ""})
        self._text += text
        return made + self._run._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)

    def content(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        made = b""
        if not self._is("message"):
            item = {**_message(new_id("msg_"), "", []), "status": "in_progress", "content": []}
            made = self._open(item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        self._text += text
        self._logprobs += logprobs
        fields = {**self._place(), "content_index": 0, "delta": text, "logprobs": logprobs}
        return made + (self._run._event("response.output_text.delta", **fields) if text else b"")

    def call(self, delta: ToolCallDelta) -> bytes:
        made = b""
        if delta.id is not None:
            item = {**_call(new_id("fc_"), delta.id, delta.name or "", ""), "status": "in_progress"}
            made = self._open(item, None)
        self._text += delta.arguments
        if not delta.arguments:
            return made
        return made + self._run._event("response.function_call_arguments.delta", **self._place(), delta=delta.arguments)

    def close(self, status: str = "completed") -> bytes:
        """End the open item."""
        item, text, run = self._item, self._text, self._run
        if item is None:
            return b""
        place = self._place()
        if item["type"] == "function_call":
            final = _call(item["id"], item["call_id"], item["name"], text)
            made = run._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        elif item["type"] == "reasoning":
            final = _reasoning(item["id"], text)
            made = run._event("response.reasoning_text.done", **place, content_index=0, text=text)
            made += run._event("response.content_part.done", **place, content_index=0, part=final["content"][0])
        else:
            final = _message(item["id"], text, self._logprobs)
            made = run._event("response.output_text.done", **place, content_index=0, text=text, logprobs=self._logprobs)
            made += run._event("response.content_part.done", **place, content_index=0, part=final["content"][0])
        final["status"] = status
        made += run._event("response.output_item.done", output_index=self._index, item=final)
        self.done.append(final)
        self._item = None
        return made


def _reasoning(item_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "status": "completed", "summary": [], "content": content}


def _message(item_id: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def _call(item_id: str, call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "status": "completed",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def add_routes(routes: APIRouter, state: ServerState) -> None:
    @routes.post("/v1/responses")
    async def responses(request: ResponsesRequest, http: Request) -> Response:
        state.check(request)
        state.check_queue()
        chat = to_chat(request)
        run = ResponsesRun(state, request, await prepare_chat(state, chat, lambda: ChatRun(state, chat)))
        if request.stream:
            return EventStream(run.events(), end=b"")
        return json_response(await while_connected(http.receive, run.answer()))
