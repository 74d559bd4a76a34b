"""What passes between scheduler, runner and user. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lastrow.core.request import FinishReason, Request
from lastrow.core.stats import RequestMetrics

FULL_GROUP, SLIDING_GROUP = 0, 1


class ScheduledRequest(NamedTuple):
    """One request's part of a step: positions start .. start+num_tokens-1 are computed. A tuple: making a frozen dataclass takes five
    times as long, once per request and step.

    rows: absolute positions (ascending, all inside this part) whose final hidden state is wanted. Empty for a chunk that
    is not the last and of which no prompt row is asked.
    sample: the last of `rows` is the row the next token is sampled from.
    block_ids: (full, sliding) block tables, indexed by position // block_size; entries of the sliding table that the window
    has passed are 0 (the null block). They are live lists: read them before the next schedule() call.
    copies: (group, source block, destination block, tokens) to copy after each layer's K/V store: a fork's last partial block.
    No source is another copy's destination in the same step.
    draft_token_ids: proposed tokens at positions start+1 .. start+num_tokens-1, for which every row is wanted; the step yields
    the accepted ones and one more. `Request.token_ids` gives -1 there.
    follows: drafts of the request are in flight, and where the part begins depends on how many of them stand. Only the device knows: start
    and rows are the last positions that are possible, and the drafts are those of `Request.coming_drafts`."""

    request: Request
    start: int
    num_tokens: int
    rows: Sequence[int]
    sample: bool
    block_ids: tuple[list[int], list[int]]
    copies: Sequence[tuple[int, int, int, int]] = ()
    draft_token_ids: Sequence[int] = ()
    follows: bool = False

    @property
    def end(self) -> int:
        """The position after the part's last one."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. Decode parts (num_tokens == 1, sampled, nothing of what it reads is written in this step except its own token)
    come first, then the others, each in scheduling order. A fork's first part is never a decode part: its parent may be in the
    same step.

    preempted, finished: ids of requests whose runner state (slot) can be dropped before this step; of a request that samples nothing
    already while the results of its last part are on their way."""

    scheduled: list[ScheduledRequest]
    num_decodes: int = 0
    preempted: list[str] = field(default_factory=list[str])
    finished: list[str] = field(default_factory=list[str])

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(part.num_tokens for part in self.scheduled)

    @property
    def is_empty(self) -> bool:
        return not self.scheduled


@dataclass(slots=True)
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
    draft_token_ids: proposals for the next step.
    label_logits: wanted row position -> softcapped fp32 logits of the request's label_token_ids, with the row's logsumexp
    over the whole vocabulary (None unless asked)."""

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    logprobs: dict[str, list[dict[int, Logprob]]] = field(default_factory=dict[str, list[dict[int, Logprob]]])
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    prompt_logprobs: dict[str, dict[int, dict[int, Logprob]]] = field(default_factory=dict[str, dict[int, dict[int, Logprob]]])
    label_logits: dict[str, dict[int, tuple[list[float], float | None]]] = field(
        default_factory=dict[str, dict[int, tuple[list[float], float | None]]]
    )


@dataclass(slots=True)
class EngineCoreOutput:
    """What one step brought for one request, made by `Scheduler.update_from_output`.

    new_token_ids: already cut at the stop token, which is the last one. new_logprobs: one entry per new token, if asked.
    prompt_logprobs, label_logits: by position, as in ModelRunnerOutput; a position comes again after a preemption.
    stop_reason: the stop token when the user named it in stop_token_ids, None for the model's own."""

    request: Request
    new_token_ids: list[int] = field(default_factory=lambda: [])  # list[int]() takes eight times as long
    new_logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: dict[int, dict[int, Logprob]] | None = None
    label_logits: dict[int, tuple[list[float], float | None]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


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
    """What `LLM.generate` returns per prompt. Field names are vLLM's.

    label_logits: as in ModelRunnerOutput, for requests with label_token_ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    label_logits: dict[int, tuple[list[float], float | None]] | None = None
