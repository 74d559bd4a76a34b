"""What passes between scheduler, runner and user. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lastrow.core.request import FinishReason, Request

FULL_GROUP, SLIDING_GROUP = 0, 1


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step: positions start .. start+num_tokens-1 are computed.

    rows: absolute positions (ascending, all inside this part) whose final hidden state is wanted. Empty for a chunk that
    is not the last and of which no prompt row is asked.
    sample: the last of `rows` is the row the next token is sampled from.
    block_ids: (full, sliding) block tables, indexed by position // block_size; entries of the sliding table that the window
    has passed are 0 (the null block). They are live lists: read them before the next schedule() call.
    copies: (group, source block, destination block, tokens) to copy after each layer's K/V store: a fork's last partial block."""

    request: Request
    start: int
    num_tokens: int
    rows: Sequence[int]
    sample: bool
    block_ids: tuple[list[int], list[int]]
    copies: Sequence[tuple[int, int, int, int]] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. Decode parts (num_tokens == 1 with a row wanted) come first, then prefill parts, each in scheduling order.

    preempted, finished: ids of requests whose runner state (slot) can be dropped before this step."""

    scheduled: list[ScheduledRequest]
    num_decodes: int = 0
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(part.num_tokens for part in self.scheduled)

    @property
    def is_empty(self) -> bool:
        return not self.scheduled


@dataclass(frozen=True, slots=True)
class Logprob:
    """logprob: natural log. rank: 1 for the most likely token. decoded_token: filled in by the output processor."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class ModelRunnerOutput:
    """Results of a step by request id: a row follows its request, never its place in the batch.

    sampled_token_ids: tokens produced (one for plain decoding, more with drafts).
    logprobs: per produced token, token id -> Logprob, for requests that ask.
    prompt_logprobs: prompt position -> token id -> Logprob for that position's token (position 0 never appears).
    label_logits: wanted row position -> softcapped fp32 logits of the request's label_token_ids, with the row's logsumexp
    over the whole vocabulary (None unless asked)."""

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[dict[int, Logprob]]] = field(default_factory=dict)
    prompt_logprobs: dict[str, dict[int, dict[int, Logprob]]] = field(default_factory=dict)
    label_logits: dict[str, dict[int, tuple[list[float], float | None]]] = field(default_factory=dict)


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the monotonic clock; None until it happened. tokens: rows given to and run by the layers after the cut."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    rows_given: int = 0
    rows_computed: int = 0

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt. Field names are vLLM's."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What `LLM.generate` returns per prompt. Field names are vLLM's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
