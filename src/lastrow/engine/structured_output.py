"""Grammar constraints on the output: JSON, JSON schema, regex, choice, Lark or GBNF grammar, forced tool calls.

The automaton is llguidance's; here are the request's parameters, the compiled form shared by equal requests, and one matcher a
request. A matcher follows its request: it never knows a row of the batch. While the model thinks nothing is constrained; the
grammar starts with the token after `<channel|>`.
"""

from __future__ import annotations

import enum
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lastrow.engine.tool_grammar import SchemaError, literal, tool_call_rules

if TYPE_CHECKING:
    from lastrow.tokenizer import Tokenizer

__all__ = ["GrammarBackend", "GrammarMatcher", "SchemaError", "StructuredOutputsParams"]

# One blank, or a line break with its indentation: without a bound a model can write blanks until max_tokens.
WHITESPACE = r"[ ]?|\n[ ]{0,24}"
MAX_COMPILED = 64
KINDS = ("json", "regex", "choice", "grammar", "json_object", "tools")
# What a request may bring, since these fields come from its JSON as they are: name, types, in words.
TYPES: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
    ("json", (str, Mapping, bool, int), "a JSON schema"),
    ("regex", str, "a text"),
    ("choice", Sequence, "a list of texts"),
    ("grammar", str, "a text"),
    ("json_object", bool, "true or false"),
    ("tools", Sequence, "a list of (name, parameters) pairs"),
    ("parallel_tool_calls", bool, "true or false"),
    ("disable_any_whitespace", bool, "true or false"),
    ("whitespace_pattern", str, "a text"),
    ("reasoning", bool, "true or false"),
)


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the output must look like; field names are vLLM's. Exactly one of json, regex, choice, grammar, json_object, or `tools`,
    which may also stand beside one of them (the output is then either). Raises SchemaError on construction.

    json: a JSON schema (object or text). grammar: Lark, or GBNF (recognised by `::=`). tools: (name, parameters schema) of
    the calls allowed, in Gemma's call syntax; parallel_tool_calls: more than one.
    whitespace_pattern, disable_any_whitespace: between JSON tokens; the default is one blank or a line break with up to 24 blanks.
    reasoning: the model may think before the grammar starts."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    tools: Sequence[tuple[str, Mapping[str, Any] | None]] | None = None
    parallel_tool_calls: bool = True
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    reasoning: bool = False

    def __post_init__(self) -> None:
        for name, types, right in TYPES:
            value = getattr(self, name)
            if value is not None and not isinstance(value, types):
                raise SchemaError(f"structured_outputs.{name} is {value!r}: {right} is needed")
        given = [kind for kind in KINDS if getattr(self, kind)]
        plain = [kind for kind in given if kind != "tools"]
        if not given or len(plain) > 1:
            raise SchemaError(f"structured_outputs has {', '.join(given) or 'nothing'}: exactly one of {', '.join(KINDS[:-1])} is needed")
        if self.choice is not None and (isinstance(self.choice, str) or not all(isinstance(c, str) and c for c in self.choice)):
            raise SchemaError(f"structured_outputs.choice is {self.choice!r}: a list of texts, none empty, is needed")
        pairs = [isinstance(tool, Sequence) and len(tool) == 2 and isinstance(tool[0], str) for tool in self.tools or ()]
        if isinstance(self.tools, str) or not all(pairs):
            raise SchemaError("structured_outputs.tools is no list of (name, parameters) pairs")

    @classmethod
    def of(cls, value: StructuredOutputsParams | Mapping[str, Any]) -> StructuredOutputsParams:
        """Params from a mapping with the same names. Raises SchemaError for a name that does not exist."""
        if isinstance(value, StructuredOutputsParams):
            return value
        if not isinstance(value, Mapping):
            raise SchemaError(f"structured_outputs is a {type(value).__name__}: an object with one of {', '.join(KINDS[:-1])} is needed")
        names = {item.name for item in fields(cls)}
        if unknown := sorted(set(value) - names):
            raise SchemaError(f"structured_outputs.{unknown[0]} is not known: one of {', '.join(KINDS[:-1])} is needed")
        return cls(**value)

    def to_lark(self) -> str:
        """The grammar in llguidance's Lark. Raises SchemaError; what only the compiler can see is raised by GrammarBackend."""
        if self.grammar is not None:
            if self.tools:
                raise SchemaError("structured_outputs.grammar cannot stand beside tools")
            return _lark(self.grammar)
        body = self._body()
        if not self.tools:
            return body
        calls = tool_call_rules(self.tools, self.parallel_tool_calls)
        if not body:
            return f"start: calls\n{calls}"
        return f"start: calls | answer\n{body.replace('start:', 'answer:', 1)}\n{calls}"

    def _body(self) -> str:
        if self.regex is not None:
            return "start: /" + self.regex.replace("\\/", "/").replace("/", "\\/") + "/"
        if self.choice:
            return "start: " + " | ".join(literal(c) for c in self.choice)
        if self.json is not None or self.json_object:
            return "start: %json " + json.dumps(self._schema())
        return ""

    def _schema(self) -> dict[str, Any]:
        schema: Any = {"type": "object"} if self.json is None else self.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except json.JSONDecodeError as error:
                raise SchemaError(f"structured_outputs.json is no JSON: {error}") from None
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise SchemaError(f"structured_outputs.json is a {type(schema).__name__}: a JSON schema object is needed")
        spaces: dict[str, Any] = {"whitespace_pattern": self.whitespace_pattern or WHITESPACE}
        if self.disable_any_whitespace:
            spaces = {"whitespace_flexible": False}
        extra = schema.get("x-guidance") or {}
        if not isinstance(extra, Mapping):
            raise SchemaError(f"structured_outputs.json.x-guidance is {extra!r}: an object is needed")
        # `format: date-time` and the like are kept; only keywords that llguidance does not know are passed over.
        return {**schema, "x-guidance": {"lenient": True, **spaces, **extra}}


class GrammarBackend:
    """Compiles grammars for one tokenizer. vocab_size: columns of the logits (at least the tokenizer's)."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            raise SchemaError("structured outputs need llguidance: pip install 'lastrow[server]'") from None

        self.vocab_size = max(vocab_size or 0, tokenizer.vocab_size)
        self.eos_token_ids = sorted(tokenizer.eos_token_ids)
        self.channel_start = tokenizer.special_ids.get("channel_start")
        self.channel_end = tokenizer.special_ids.get("channel_end")
        source = (tokenizer.path / "tokenizer.json").read_text(encoding="utf-8")
        self._tokenizer = LLTokenizer(source, n_vocab=self.vocab_size, eos_token=self.eos_token_ids)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()  # of _compiled: a server plans long requests in threads

    def validate(self, params: StructuredOutputsParams | Mapping[str, Any]) -> None:
        """Raises SchemaError for whatever `matcher` would refuse."""
        self._compile(StructuredOutputsParams.of(params).to_lark())

    def matcher(self, params: StructuredOutputsParams | Mapping[str, Any], prompt_token_ids: Sequence[int] = ()) -> GrammarMatcher:
        """A fresh matcher at the beginning of the output. prompt_token_ids: tells whether the prompt ends inside a thought.

        Raises SchemaError."""
        params = StructuredOutputsParams.of(params)
        compiled = self._compile(params.to_lark()).deep_copy()
        phase = Phase.GRAMMAR
        if params.reasoning and self.channel_start is not None and self.channel_end is not None:
            phase = Phase.THINKING if in_channel(prompt_token_ids, self.channel_start, self.channel_end) else Phase.START
        return GrammarMatcher(compiled, self, phase)

    def _compile(self, lark: str) -> Any:
        from llguidance import LLMatcher

        with self._lock:
            found = self._compiled.get(lark)
        if found is None:
            if (wrong := next((c for c in lark if "\ud800" <= c <= "\udfff"), None)) is not None:
                raise SchemaError(f"structured output: U+{ord(wrong):04X} is a lone surrogate, no Unicode text")
            found = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
            # Some mistakes show only when the first token is asked for: a rule that calls nothing but itself, for one.
            if found.is_error() or _mask(probe := found.deep_copy(), self.vocab_size) is None:
                raise SchemaError(f"structured output: {_first_line((found if found.is_error() else probe).get_error())}")
        with self._lock:
            self._compiled[lark] = found
            self._compiled.move_to_end(lark)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return found


class Phase(enum.Enum):
    START = "start"  # the model may open a thought or begin with the grammar
    THINKING = "thinking"
    GRAMMAR = "grammar"
    DONE = "done"  # an end token was accepted


class GrammarMatcher:
    """Where one request's output stands in its grammar. Made by GrammarBackend.matcher.

    failure: why the grammar could not go on (a rule that nothing can fulfil, or one that costs the library too much); the request
    has to end then."""

    def __init__(self, matcher: Any, backend: GrammarBackend, phase: Phase, history: Sequence[tuple[Phase, bool]] = ()) -> None:
        self.failure: str | None = None
        self._matcher = matcher
        self._backend = backend
        self._phase = phase
        self._history: list[tuple[Phase, bool]] = list(history)

    @property
    def num_tokens(self) -> int:
        """Tokens accepted since the beginning of the output."""
        return len(self._history)

    @property
    def is_constraining(self) -> bool:
        """False while the model thinks, when all but the end tokens is allowed."""
        return self._phase is not Phase.THINKING

    def accept(self, token: int) -> bool:
        """Go on by one sampled token. False, and nothing changed, when the grammar does not allow it here."""
        backend, phase = self._backend, self._phase
        if phase is Phase.DONE:
            return False
        consumed = False
        if phase is Phase.THINKING:
            if token in backend.eos_token_ids:
                return False
            after = Phase.GRAMMAR if token == backend.channel_end else Phase.THINKING
        elif phase is Phase.START and token == backend.channel_start:
            after = Phase.THINKING
        elif token in backend.eos_token_ids:
            if not self._matcher.is_accepting():
                return False
            after = Phase.DONE
        else:
            consumed = self._matcher.try_consume_tokens([token]) == 1
            if not consumed:
                return False
            after = Phase.GRAMMAR
        self._history.append((phase, consumed))
        self._phase = after
        return True

    def rollback(self, num_tokens: int) -> None:
        """Take the last `num_tokens` accepted tokens back (rejected drafts). Raises ValueError when there are not that many."""
        if num_tokens > len(self._history):
            raise ValueError(f"rollback of {num_tokens} tokens: only {len(self._history)} were accepted")
        if num_tokens <= 0:
            return
        taken = self._history[-num_tokens:]
        del self._history[-num_tokens:]
        consumed = sum(used for _, used in taken)
        if consumed and not self._matcher.rollback(consumed):
            raise RuntimeError(f"llguidance could not roll back: {self._matcher.get_error()}")
        self._phase = taken[0][0]

    def clone(self) -> GrammarMatcher:
        """An independent matcher at the same place."""
        return GrammarMatcher(self._matcher.deep_copy(), self._backend, self._phase, self._history)

    def fill_mask(self, row: NDArray[np.bool_]) -> None:
        """Set row [vocab_size] to True for every token that may come next and to False for all others.

        At least one token is allowed: where the grammar is complete, or has failed, the end tokens are."""
        backend = self._backend
        if row.dtype != np.bool_ or row.shape != (backend.vocab_size,):
            raise ValueError(f"mask row is {row.dtype} {row.shape}: bool ({backend.vocab_size},) is needed")
        if self._phase is Phase.THINKING:
            row.fill(True)
            row[backend.eos_token_ids] = False
            return
        allowed = None if self._phase is Phase.DONE or self.failure else _mask(self._matcher, backend.vocab_size)
        if allowed is None:
            if self._phase is not Phase.DONE and self.failure is None:
                self.failure = f"structured output: {_first_line(self._matcher.get_error())}"
            row.fill(False)
            row[backend.eos_token_ids] = True
            return
        row[:] = allowed
        if self._phase is Phase.START:
            row[backend.channel_start] = True

    def allowed_token_ids(self) -> NDArray[np.int64]:
        """Ids that `fill_mask` allows, ascending."""
        row = np.empty(self._backend.vocab_size, np.bool_)
        self.fill_mask(row)
        return np.flatnonzero(row)

    def is_terminated(self) -> bool:
        """True when the grammar is complete and only an end token can follow, or one has."""
        return self._phase is Phase.DONE or (self._phase is Phase.GRAMMAR and self._matcher.is_stopped())


def in_channel(token_ids: Sequence[int], start: int, end: int) -> bool:
    """Whether the last `<|channel>` of the ids is still open."""
    for token in reversed(token_ids):
        if token == end:
            return False
        if token == start:
            return True
    return False


def _mask(matcher: Any, vocab_size: int) -> NDArray[np.uint8] | None:
    """[vocab_size] of 0 and 1: what may come next; None when the matcher cannot say, which it then has an error for."""
    bits = np.empty((vocab_size + 31) // 32, np.int32)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    return None if matcher.is_error() else np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size]


def _lark(grammar: str) -> str:
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the converter raises whatever its parser met
        raise SchemaError(f"structured_outputs.grammar is no GBNF: {error}") from None


def _first_line(message: str) -> str:
    if "NoExtensionBias" in message:
        return "no token can follow: a rule of the grammar can never be fulfilled"
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    return " ".join(lines[:4])[:400] or "the grammar cannot be used"
