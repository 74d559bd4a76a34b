"""A request: its prompt, what is wanted of it, and how far it has come.

Standard library only. The scheduler owns the mutable fields; everything else reads them."""

from __future__ import annotations

import enum
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from lastrow.core.sampling_params import SamplingParams
from lastrow.core.stats import RequestMetrics


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are what the OpenAI API and vLLM report."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False, slots=True)
class Request:
    """One sequence. `n > 1` and forks are several requests.

    prompt_rows: positions of the prompt (ascending) whose final hidden state is wanted besides the sampled row: all but
    the last one for `prompt_logprobs`, label positions for decisions, none for plain generation.
    label_token_ids: when set, the head multiplies only these rows of the token table and nothing is sampled (an empty tuple:
    only the K/V is wanted, as for a state whose forks ask the questions).
    stop_token_ids: the effective set: the model's (unless ignore_eos) and sampling_params.stop_token_ids.
    num_computed_tokens: tokens whose K/V is in the pool or is being written by a step that has been scheduled.
    num_inflight_tokens: output tokens that a scheduled step will produce and whose values the host has not seen yet.
    draft_token_ids: proposals for the tokens after the last known one, checked by the next part.
    coming_drafts: stand-ins for the proposals that the sampled part in flight makes on the device, -1 each, and when the host has read them
    the proposals themselves: the same list, which the next part may carry before that. None: there are none.
    block_hashes: prefix hashes of the known tokens' whole blocks, extended by the KV cache manager as needed.
    arrival_index: order among equal arrival times, given by the scheduler.
    prompt_buffer: prompt_token_ids as C ints, which copy into a step's inputs without a loop."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    prompt_rows: Sequence[int] = ()
    label_token_ids: tuple[int, ...] | None = None
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = field(default_factory=time.monotonic)
    prompt_buffer: array[int] | None = None
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    output_token_ids: list[int] = field(default_factory=lambda: [])  # list[int]() takes eight times as long
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_inflight_tokens: int = 0
    num_preemptions: int = 0
    draft_token_ids: list[int] = field(default_factory=lambda: [])
    coming_drafts: list[int] | None = None
    block_hashes: list[bytes] = field(default_factory=lambda: [])
    arrival_index: int = 0
    metrics: RequestMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = RequestMetrics(arrival_time=self.arrival_time)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those in flight included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_inflight_tokens

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens whose ids the host has."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def samples(self) -> bool:
        """False for requests that end with their prompt: label rows or prompt logprobs only."""
        return self.label_token_ids is None and self.sampling_params.max_tokens != 0

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def token_ids(self, start: int, end: int) -> list[int]:
        """Ids at positions start..end-1; -1 where the id is still in flight (the device has it, the host does not)."""
        known = len(self.prompt_token_ids)
        ids = self.prompt_token_ids[start:end]
        if end > known:
            ids = ids + self.output_token_ids[max(start - known, 0) : end - known]
        return ids + [-1] * (end - start - len(ids))
