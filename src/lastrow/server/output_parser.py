"""The model's output, token by token, into reasoning, content and tool calls. Streaming and not: the same code.

    <|channel>thought\\n ... \\n<channel|>   reasoning
    <|tool_call>call:NAME{...}<tool_call|>   a call, see call_parser.py
    anything else                            content

Marks are token ids, so a text that spells one is content. Splitting the stream elsewhere changes nothing. What is no call stays
readable: its raw text becomes content. Source: spec section 6.4, "Output parsing".
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lastrow.server.call_parser import CallParser, MalformedCall
from lastrow.tokenizer import IncrementalDetokenizer, Tokenizer

CHANNEL_NAME = "thought\n"


@dataclass(slots=True)
class ToolCallDelta:
    """id and name come with the first delta of a call only."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """What a push made certain. Falsy when that is nothing."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list[ToolCallDelta])

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


@dataclass(slots=True)
class ToolCall:
    """A complete call; arguments is JSON text."""

    id: str
    name: str
    arguments: str


class _Mode(enum.Enum):
    CONTENT = enum.auto()
    CHANNEL = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True)
class _CallBlock:
    """The call being read. ids: all of the block, for the case that it is none. id: set when its first delta went out."""

    parser: CallParser
    ids: list[int]
    broken: bool
    id: str | None = None
    arguments: str = ""

    @property
    def in_string(self) -> bool:
        return not self.broken and self.parser.in_string


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class OutputParser:
    """Parses one completion.

    tools: name -> parameters schema of the declared tools; None: a call is not asked for and stays text.
    in_reasoning: the prompt ends inside an open channel. new_id: makes call ids.

    reasoning, content: text so far. tool_calls: complete calls. A call that breaks off or is malformed is not among them: its raw text
    is appended to the content, also when a stream has already had its first deltas."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Mapping[str, Any] | None = None,
        in_reasoning: bool = False,
        skip_special_tokens: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._new_id = new_id
        ids = tokenizer.special_ids
        self._channel_start, self._channel_end = ids.get("channel_start", -1), ids.get("channel_end", -1)
        self._call_start, self._call_end = ids.get("tool_call_start", -1), ids.get("tool_call_end", -1)
        self._quote = ids.get("quote", -1)
        self._skip_special = skip_special_tokens
        self._text = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._mode = _Mode.CHANNEL if in_reasoning else _Mode.CONTENT
        self._in_channel_name = in_reasoning
        self._held = ""  # text that may turn out to be a border: blanks of the content, a thought's name or last line break
        self._call: _CallBlock | None = None
        self._num_calls = 0
        self._after_call = False
        self.reasoning = ""
        self.content = ""
        self.tool_calls: list[ToolCall] = []

    def push(self, ids: Iterable[int]) -> Delta:
        """Take further output ids."""
        delta = Delta()
        for token in ids:
            self._token(token, delta)
        return delta

    def finish(self) -> Delta:
        """The output has ended: what was held back."""
        delta = Delta()
        self._flush(delta)
        if self._call is not None:
            self._end_call(delta)
        elif self._mode is _Mode.CHANNEL and self._in_channel_name:
            self._add_reasoning(self._held, delta)
        elif self._mode is _Mode.CONTENT and not self.tool_calls:
            self._add_content(self._held, delta)
        self._held = ""
        return delta

    # -------------------------------------------------------------------------------------------- tokens
    def _token(self, token: int, delta: Delta) -> None:
        if self._call is not None:
            self._call_token(self._call, token, delta)
        elif token == self._channel_start:
            self._flush(delta)
            if self._mode is not _Mode.CHANNEL:
                self._mode, self._in_channel_name, self._held = _Mode.CHANNEL, True, ""
        elif token == self._channel_end:
            self._flush(delta)
            self._close_channel(delta)
        elif token == self._call_start:
            self._flush(delta)
            self._close_channel(delta)
            self._open_call()
        else:
            self._take_text(self._text.append([token]), delta)

    def _flush(self, delta: Delta) -> None:
        self._take_text(self._text.flush(), delta)

    def _take_text(self, text: str, delta: Delta) -> None:
        if not text:
            return
        if self._call is not None:
            parser = self._call.parser
            self._read_call(self._call, lambda: parser.string(text) if parser.in_string else parser.text(text), delta)
        elif self._mode is _Mode.CHANNEL:
            self._channel_text(text, delta)
        else:
            self._content_text(text, delta)

    # -------------------------------------------------------------------------------------------- channel
    def _close_channel(self, delta: Delta) -> None:
        if self._mode is not _Mode.CHANNEL:
            return
        if self._in_channel_name and self._held != CHANNEL_NAME.strip():
            self._add_reasoning(self._held, delta)
        self._mode, self._in_channel_name, self._held = _Mode.CONTENT, False, ""

    def _channel_text(self, text: str, delta: Delta) -> None:
        """The template writes one line break before the mark that closes the channel, so the last one is held back."""
        text, self._held = self._held + text, ""
        if self._in_channel_name:
            if text != CHANNEL_NAME and CHANNEL_NAME.startswith(text):
                self._held = text
                return
            text = text.removeprefix(CHANNEL_NAME)
            self._in_channel_name = False
        if text.endswith("\n"):
            text, self._held = text[:-1], "\n"
        self._add_reasoning(text, delta)

    def _add_reasoning(self, text: str, delta: Delta) -> None:
        self.reasoning += text
        delta.reasoning += text

    # -------------------------------------------------------------------------------------------- content
    def _content_text(self, text: str, delta: Delta) -> None:
        """Blanks before the first word, and after a call, are held: between marks they are no answer."""
        text, self._held = self._held + text, ""
        if not text.strip() and (not self.content or self._after_call):
            self._held = text
            return
        self._after_call = False
        self._add_content(text, delta)

    def _add_content(self, text: str, delta: Delta) -> None:
        self.content += text
        delta.content += text

    # -------------------------------------------------------------------------------------------- calls
    def _open_call(self) -> None:
        self._mode, self._held = _Mode.CALL, ""
        self._call = _CallBlock(CallParser(self._tools or {}), [self._call_start], broken=self._tools is None)
        self._text = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)

    def _call_token(self, block: _CallBlock, token: int, delta: Delta) -> None:
        ends = token in self._tokenizer.eos_token_ids
        mark = token in self._tokenizer.all_special_ids and token != self._quote
        if token == self._quote or mark:
            self._flush(delta)
        if ends or (mark and not block.in_string):
            if token == self._call_end:
                block.ids.append(token)
            self._end_call(delta)
            if not ends and token != self._call_end:
                self._token(token, delta)
            return
        block.ids.append(token)
        if token == self._quote:
            self._read_call(block, block.parser.quote, delta)
        else:
            self._take_text(self._text.append([token]), delta)

    def _read_call(self, block: _CallBlock, read: Callable[[], str], delta: Delta) -> None:
        """What the call's parser makes certain goes out. After a mistake the rest of the block is only collected."""
        if block.broken:
            return
        try:
            piece = read()
        except MalformedCall:
            block.broken = True
            return
        if block.parser.name is None:
            return
        if block.id is None:
            block.id = self._new_id()
            delta.tool_calls.append(ToolCallDelta(self._num_calls, block.id, block.parser.name))
        if piece:
            block.arguments += piece
            if not delta.tool_calls or delta.tool_calls[-1].index != self._num_calls:
                delta.tool_calls.append(ToolCallDelta(self._num_calls))
            delta.tool_calls[-1].arguments += piece

    def _end_call(self, delta: Delta) -> None:
        block, self._call = self._call, None
        assert block is not None
        self._mode, self._after_call = _Mode.CONTENT, True
        self._text = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=self._skip_special)
        self._num_calls += block.id is not None
        if block.id is not None and not block.broken and block.parser.done and block.parser.name is not None:
            self.tool_calls.append(ToolCall(block.id, block.parser.name, block.arguments))
        else:
            self._add_content(self._tokenizer.decode(block.ids, skip_special_tokens=False), delta)
