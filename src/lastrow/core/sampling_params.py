"""Sampling parameters with vLLM's names, defaults and meanings. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, cast

MAX_LOGPROBS = 128


@dataclass(slots=True)
class SamplingParams:
    """How one request is sampled. Raises ValueError on construction, naming the field, its value and what would be right.

    n: completions per prompt. temperature 0 is greedy. top_k 0 or -1: off. top_p, min_p in [0, 1].
    seed: the same seed gives the same tokens whatever shares the batch.
    stop: strings that end the output (cut off unless include_stop_str_in_output). stop_token_ids: in addition to the model's.
    max_tokens: None is up to max_model_len; 0 is allowed when only prompt_logprobs are wanted.
    logprobs: top-k logprobs per output token (the sampled token's is always added). prompt_logprobs: the same per prompt token.
    logprob_token_ids: report the logprobs of exactly these ids instead of the top k.
    logit_bias: token id -> added to its logit. allowed_token_ids: every other id is masked. bad_words: never produced.
    structured_outputs: grammar constraint, see engine/structured_output.py.
    Masks that leave no id for the first token are refused when the request arrives. Where that happens later, bad_words and min_tokens
    give way to allowed_token_ids, and these to structured_outputs."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: Any = field(default=None)

    def __post_init__(self) -> None:
        _check_types(self)
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = [] if self.stop_token_ids is None else list(self.stop_token_ids)
        self.bad_words = [self.bad_words] if isinstance(self.bad_words, str) else list(self.bad_words or [])
        self.logit_bias = {int(k): float(v) for k, v in (self.logit_bias or {}).items()}
        self.top_k = 0 if self.top_k in (-1, 0) else self.top_k
        self._check()

    def _check(self) -> None:
        def need(ok: bool, name: str, right: str) -> None:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}: {right}")

        need(self.n >= 1, "n", "at least 1 is needed")
        need(0.0 <= self.temperature <= 100.0, "temperature", "0 (greedy) or a positive number up to 100 is needed")
        need(0.0 < self.top_p <= 1.0, "top_p", "a number in (0, 1] is needed")
        need(self.top_k >= 0, "top_k", "0 or -1 (off) or a positive integer is needed")
        need(0.0 <= self.min_p <= 1.0, "min_p", "a number in [0, 1] is needed")
        need(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "a number in [-2, 2] is needed")
        need(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "a number in [-2, 2] is needed")
        need(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "a positive number up to 100 is needed")
        need(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "an integer of at most 64 bits is needed")
        need(self.min_tokens >= 0, "min_tokens", "0 or more is needed")
        need(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "None or at least 0 is needed")
        need(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", f"at most max_tokens={self.max_tokens} is needed")
        need(
            self.max_tokens != 0 or self.prompt_logprobs is not None or self.logprob_token_ids is not None,
            "max_tokens",
            "0 needs prompt_logprobs or logprob_token_ids, else there is nothing to return",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            need(value is None or -1 <= value <= MAX_LOGPROBS, name, f"None, -1 (all) or 0 to {MAX_LOGPROBS} is needed")
        need(all(s for s in self.stop or ()), "stop", "an empty stop string would end every output at once")
        need(all(s for s in self.bad_words or ()), "bad_words", "an empty word cannot be kept out")
        need(all(-100.0 <= v <= 100.0 for v in (self.logit_bias or {}).values()), "logit_bias", "values in [-100, 100] are needed")
        need(self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "allowed_token_ids", "an empty list allows nothing")
        need(
            self.logprob_token_ids is None or 0 < len(self.logprob_token_ids) <= MAX_LOGPROBS,
            "logprob_token_ids",
            f"1 to {MAX_LOGPROBS} ids are needed",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def needs_output_history(self) -> bool:
        """True when sampling a token needs the values of the tokens before it on the host (no step may be in flight)."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.bad_words or self.structured_outputs
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and value is not True and value is not False


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and value is not True and value is not False


def _is_id_list(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping) and all(map(_is_integer, cast("Any", value)))


def _is_text_list(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(item, str) for item in cast("Any", value))


def _is_bias(value: Any) -> bool:
    """JSON brings the ids as texts."""
    if not isinstance(value, Mapping):
        return False
    entries = cast("Mapping[Any, Any]", value).items()
    return all((_is_integer(k) or (isinstance(k, str) and k.isdecimal())) and _is_number(v) for k, v in entries)


_NONE = type(None)
# names, types taken at a glance, what else is taken (numpy's numbers, for instance), in words
_KINDS: tuple[tuple[str, tuple[type, ...], Callable[[Any], bool], str], ...] = (
    ("temperature top_p min_p presence_penalty frequency_penalty repetition_penalty", (float, int), _is_number, "a number"),
    ("n top_k min_tokens", (int,), _is_integer, "an integer"),
    ("seed max_tokens logprobs prompt_logprobs", (_NONE, int), _is_integer, "None or an integer"),
    ("stop_token_ids allowed_token_ids logprob_token_ids", (_NONE,), _is_id_list, "a list of token ids"),
    ("stop bad_words", (_NONE, str), _is_text_list, "a list of texts"),
    ("ignore_eos include_stop_str_in_output skip_special_tokens", (bool,), lambda value: False, "True or False"),
    ("logit_bias", (_NONE,), _is_bias, "a mapping from token ids to numbers"),
)
_TYPES = [(name, types, fits, right) for names, types, fits, right in _KINDS for name in names.split()]
_VALUES: Callable[[SamplingParams], tuple[Any, ...]] = attrgetter(*(name for name, *_ in _TYPES))


def _check_types(params: SamplingParams) -> None:
    """Raises ValueError for a field that holds something of another kind. In front of every request: so most take one look."""
    for value, (name, types, fits, right) in zip(_VALUES(params), _TYPES, strict=True):
        if type(value) not in types and not fits(value):
            raise ValueError(f"{name} is {value!r}: {right} is needed")
