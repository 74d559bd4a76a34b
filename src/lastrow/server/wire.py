"""Messages between the server and the engine process, encoded with msgpack. One message a step goes back, not one a token.

Times are seconds on the monotonic clock, which both processes share.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lastrow.core.sampling_params import SamplingParams
from lastrow.core.stats import SpecDecodeStats

# token id, logprob, rank (None where it was asked for by id)
TokenLogprob = tuple[int, float, int | None]


# ---------------------------------------------------------------------------------------------------- to the engine
class Add(msgspec.Struct, tag="add", array_like=True):
    """One request; the arguments of LLMEngine.add_request."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    prompt_rows: list[int] | None = None
    label_token_ids: list[int] | None = None
    fork_of: str | None = None
    fork_num_tokens: int = 0


class AddMany(msgspec.Struct, tag="add_many", array_like=True):
    """Requests that are added before the next step, in order: forks, whose parent must not end before they are there."""

    adds: list[Add]


class Abort(msgspec.Struct, tag="abort", array_like=True):
    request_ids: list[str]


class Call(msgspec.Struct, tag="call", array_like=True):
    """A question to the engine: cache_status, reset_prefix_cache, rebuild_cache or check_integrity."""

    call_id: int
    name: str
    arguments: dict[str, Any] = {}


class Stop(msgspec.Struct, tag="stop", array_like=True):
    pass


# ---------------------------------------------------------------------------------------------------- from the engine
class Timings(msgspec.Struct, array_like=True):
    """Of one finished request; see core.stats.RequestMetrics."""

    arrival: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    finished: float | None
    num_preemptions: int
    rows_given: int
    rows_computed: int


class Output(msgspec.Struct, array_like=True):
    """What one step brought for completion `index` of a request. token_ids, logprobs: new ones only, the stop token included.
    logprobs has one more at the end, of asked-for ids alone, where max_tokens is 0: the place behind the prompt.
    prompt_logprobs: position -> entries, the prompt's own token first. timings: with the first token and with the last."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: dict[int, list[TokenLogprob]] | None = None
    label_logits: dict[int, tuple[list[float], float | None]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    timings: Timings | None = None


class Stats(msgspec.Struct):
    """Totals since the engine's start, and the moment's numbers. kv_usage: (full, sliding) share of the blocks held. spec_decode: None
    where no drafts are made."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: tuple[float, float] = (0.0, 0.0)
    kv_free_blocks: tuple[int, int] = (0, 0)
    kv_total_blocks: tuple[int, int] = (0, 0)
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    generated_tokens: int = 0
    scheduled_tokens: int = 0
    steps: int = 0
    rows_given: int = 0
    rows_computed: int = 0
    graph_steps: int = 0
    eager_steps: int = 0
    spec_decode: SpecDecodeStats | None = None
    step_tokens: list[int] = msgspec.field(default_factory=list[int])  # tokens of the steps since the last message


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine can take requests. max_model_len: the effective one."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    pid: int


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    outputs: list[Output]
    stats: Stats | None = None


class Rejected(msgspec.Struct, tag="rejected", array_like=True):
    """add_request refused it: the request's fault, in one line."""

    request_id: str
    message: str


class Reply(msgspec.Struct, tag="reply", array_like=True):
    call_id: int
    value: Any = None
    error: str | None = None


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The engine cannot go on; its process ends."""

    message: str


ToEngine = Add | AddMany | Abort | Call | Stop
FromEngine = Ready | Outputs | Rejected | Reply | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
