"""LLMEngine: requests in, RequestOutputs out, one step at a time.

On CUDA one step stays in flight: step n+1 is scheduled and launched before the tokens of step n are read, its inputs taking them
on the device. Where the scheduler needs the tokens first (penalties, grammars, bad words) it says so by leaving the request out."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from struct import Struct
from struct import error as StructError
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from lastrow.core.output import EngineCoreOutput, RequestOutput, SchedulerOutput
from lastrow.core.request import FinishReason, Request
from lastrow.core.sampling_params import SamplingParams
from lastrow.core.scheduler import Scheduler
from lastrow.core.stats import cache_status
from lastrow.engine.cache import EngineCache, status_document
from lastrow.engine.model_runner import ModelRunner, StepHandle
from lastrow.engine.output_processor import OutputProcessor, RequestGroup
from lastrow.engine.sampling_state import Grammar, contradiction
from lastrow.engine.structured_output import GrammarBackend
from lastrow.models.config import ConfigError
from lastrow.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")
IDLE_STEPS = 3  # empty steps in a row, nothing in flight, before the watchdog speaks: one may pass while blocks change hands


def _one_at_a_time(method: Callable[Concatenate[LLMEngine, P], T]) -> Callable[Concatenate[LLMEngine, P], T]:
    @wraps(method)
    def locked(self: LLMEngine, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


def _c_ints(ids: list[int]) -> array[int]:
    """ids as C ints. Raises TypeError for what is no integer, OverflowError past 32 bits. struct takes half the time of array."""
    try:
        return array("i", Struct(f"{len(ids)}i").pack(*ids))
    except StructError:
        return array("i", ids)


class EngineStuck(RuntimeError):
    """Requests run, nothing is in flight, and the scheduler finds nothing to do: a fault of the engine, not of the request."""


class LLMEngine:
    """scheduler, runner and tokenizer (None: token ids only) behind one door. Threads may share it through add_request, step_for and abort.

    stop_token_ids: what ends an answer unless ignore_eos. seed: from which requests without a seed get theirs.
    async_scheduling: keep one step in flight (default: on CUDA). cache: what can rebuild the pool (None: nothing can)."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: int,
        stop_token_ids: Iterable[int] = (),
        seed: int = 0,
        async_scheduling: bool | None = None,
        priority_scheduling: bool = True,
        cache: EngineCache | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.stop_token_ids = frozenset(stop_token_ids)
        self.outputs = OutputProcessor(tokenizer)
        self.depth = int(runner.device.type == "cuda" if async_scheduling is None else async_scheduling)
        self.priority_scheduling = priority_scheduling
        self.cache = cache
        self.max_model_len = scheduler.config.max_model_len  # as configured; a server lowers the scheduler's to what a small pool holds
        self._seed = seed
        self._num_requests = 0
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._kept: dict[str, RequestOutput] = {}
        self._lock = threading.RLock()
        self._idle_steps = 0
        self._grammars: GrammarBackend | None = None

    # ------------------------------------------------------------------------------------------------------ requests
    @_one_at_a_time
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        stream: bool = False,
        prompt_rows: Sequence[int] | None = None,
        label_token_ids: Sequence[int] | None = None,
        fork_of: str | None = None,
        fork_num_tokens: int = 0,
        is_kept: bool = False,
        same_params: bool = False,
    ) -> None:
        """Queue a request. Raises ValueError, in one line, for whatever can never be answered.

        priority: lower runs earlier. stream: `step` returns its output every time it grows, else once, at its end.
        label_token_ids: logits of these ids at prompt_rows (default: the last one), and nothing is sampled; with
        params.logprobs set, the logsumexp over the vocabulary, too. With params.prompt_logprobs, prompt_rows are the rows whose next
        token's logprob is wanted (default: all). fork_of, fork_num_tokens: see Scheduler.add_request.
        With n > 1 the completions share the prompt's K/V. is_kept: a list of ids stays as it is until the request ends, so that it is
        not copied; the garbage collector visits every id of every copy. same_params: the request before had these params and labels, too,
        and they have not changed since: they need no other look."""
        if request_id in self.outputs.groups:
            raise ValueError(f"request {request_id}: a request with this id is not finished yet")
        if priority and not self.priority_scheduling:
            raise ValueError(f"request {request_id}: priority is {priority}, but scheduling_policy is 'fcfs': start with priority")
        if isinstance(prompt_token_ids, np.ndarray):
            ids = prompt_token_ids.tolist()
        else:
            ids = prompt_token_ids if is_kept and type(prompt_token_ids) is list else list(prompt_token_ids)
        buffer = self._check_prompt(request_id, ids, self._shared_tokens(fork_of, fork_num_tokens))
        if not same_params:
            self._check_params(request_id, params, label_token_ids)
        arrival = time.monotonic() if arrival_time is None else arrival_time
        requests = [
            self._request(request_id, i, ids, params, prompt_rows, label_token_ids, priority, cache_salt, arrival, buffer)
            for i in range(params.n)
        ]
        grammars = {request.request_id: self._grammar(request) for request in requests} if params.structured_outputs else None
        self._num_requests += 1
        self.scheduler.add_request(requests[0], fork_of, fork_num_tokens)
        if grammars:
            self.runner.grammars.update(grammars)
        for request in requests[1:]:
            if len(ids) > 1:
                self.scheduler.add_request(request, requests[0].request_id, len(ids) - 1)
            else:
                self.scheduler.add_request(request)
        self.outputs.add(RequestGroup(request_id, prompt, stream), requests)

    def between_steps(self) -> AbstractContextManager[Any]:
        """No other thread schedules a step inside: for forks, which share nothing with a parent whose last part is scheduled."""
        return self._lock

    def _request(
        self, request_id: str, index: int, ids: list[int], params: SamplingParams, prompt_rows: Sequence[int] | None,
        label_token_ids: Sequence[int] | None, priority: int, cache_salt: str | None, arrival: float, buffer: array[int],
    ) -> Request:  # fmt: skip
        stops = self._stop_ids(params)
        rows: Sequence[int] = () if prompt_rows is None else prompt_rows
        labels = None if label_token_ids is None else tuple(label_token_ids)
        if not params.is_greedy:
            params = replace(params, seed=self._request_seed(params, index))
        if labels is None and params.max_tokens == 0 and params.logprob_token_ids:
            labels, params = tuple(params.logprob_token_ids), replace(params, logprobs=0)
        if labels is not None:
            rows = [len(ids) - 1] if prompt_rows is None and labels else rows
        elif params.prompt_logprobs is not None and index == 0:
            rows = range(len(ids) - 1) if prompt_rows is None else prompt_rows
        name = request_id if params.n == 1 else f"{index}_{request_id}"
        return Request(name, ids, params, stops, rows, labels, priority, cache_salt, arrival, buffer)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        stops = frozenset() if params.ignore_eos else self.stop_token_ids
        return stops | frozenset(params.stop_token_ids) if params.stop_token_ids else stops

    def prepare_grammars(self) -> GrammarBackend | None:
        """The compiler of structured outputs, made once (about a second for a large vocabulary); None without a tokenizer."""
        if self._grammars is None and self.tokenizer is not None:
            self._grammars = GrammarBackend(self.tokenizer, self.vocab_size)
        return self._grammars

    def _grammar(self, request: Request) -> Grammar:
        backend = self.prepare_grammars()
        if backend is None:
            raise ValueError(f"request {request.request_id}: structured_outputs needs a tokenizer, and this model has none")
        params = request.sampling_params
        matcher = backend.matcher(params.structured_outputs, request.prompt_token_ids)
        if params.allowed_token_ids is not None and not np.isin(matcher.allowed_token_ids(), params.allowed_token_ids).any():
            raise ValueError(
                f"request {request.request_id}: no token can be the first: structured_outputs begins with none of allowed_token_ids; "
                "leave one of the two out"
            )
        return matcher

    def _request_seed(self, params: SamplingParams, index: int) -> int:
        if params.seed is not None:
            return (params.seed + index) % 2**64
        # Far apart for neighbouring engine seeds; the uniform's hash does the rest.
        return (self._seed * 0x9E3779B97F4A7C15 + (self._num_requests << 16) + index) % 2**64

    def _shared_tokens(self, fork_of: str | None, count: int) -> array[int]:
        """The first tokens of a fork, from its parent; whether they are the fork's the scheduler compares."""
        parent = None if fork_of is None else self.scheduler.requests.get(fork_of)
        if parent is None or parent.prompt_buffer is None or not 0 < count <= len(parent.prompt_buffer):
            return array("i")
        return parent.prompt_buffer[:count]

    def _check_prompt(self, request_id: str, ids: list[int], shared: array[int]) -> array[int]:
        """The prompt as C ints; shared: the first of them. Raises ValueError, in one line, for what can never be answered."""
        if not ids:
            raise ValueError(f"request {request_id}: the prompt is empty, at least one token is needed")
        try:
            own = _c_ints(ids[len(shared) :] if shared else ids)
        except TypeError:
            raise ValueError(f"request {request_id}: prompt_token_ids must be a flat list of 32-bit integers") from None
        except OverflowError:
            own = array("i", (-1,))
        if len(own) and np.maximum.reduce(np.frombuffer(own, np.uint32)) >= self.vocab_size:  # a negative id is large without its sign
            self._need_ids(request_id, "the prompt", ids)
        return shared + own if shared else own

    def _check_params(self, request_id: str, params: SamplingParams, labels: Sequence[int] | None) -> None:
        """Raises ValueError, in one line, for what can never be answered."""
        for name in ("logprob_token_ids", "allowed_token_ids", "stop_token_ids", "logit_bias"):
            if named := getattr(params, name):
                self._need_ids(request_id, name, named)
        if labels:
            self._need_ids(request_id, "label_token_ids", labels)
        if wrong := self._contradiction(params, labels):
            raise ValueError(f"request {request_id}: {wrong}")

    def _need_ids(self, request_id: str, name: str, values: Iterable[int]) -> None:
        wrong = [i for i in values if not 0 <= i < self.vocab_size]
        if wrong:
            raise ValueError(f"request {request_id}: {name} holds {wrong[:3]}: token ids from 0 to {self.vocab_size - 1} are needed")

    def _contradiction(self, params: SamplingParams, labels: Sequence[int] | None) -> str | None:
        """What in a request can never be answered, and why."""
        if self.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    return f"{name} needs a tokenizer, and a model with dummy weights has none"
        if labels is not None and params.n != 1:
            return f"n is {params.n}: label_token_ids samples nothing, so n must be 1"
        if params.max_tokens == 0:
            if params.logprob_token_ids and labels is None and params.prompt_logprobs is not None:
                return "logprob_token_ids with max_tokens=0 and prompt_logprobs: ask in two requests"
            if params.n != 1:
                return f"n is {params.n} with max_tokens=0: there is one answer"
        if labels is None and params.max_tokens != 0:
            return contradiction(params, self._stop_ids(params), self.vocab_size, self.runner.sampler.encode)
        return None

    @_one_at_a_time
    def abort(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests in any state and give their blocks back. Returns their last outputs; unknown ids are ignored."""
        last = []
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            self._kept.pop(request_id, None)
            members, output = self.outputs.abort(request_id)
            self.scheduler.abort_requests(members)
            self._forget_grammars(members)
            if output is not None:
                last.append(output)
        return last

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests or bool(self._in_flight)

    # ------------------------------------------------------------------------------------------------------ the cache
    def cache_status(self) -> dict[str, Any]:
        """The document of GET /v1/cache/status: blocks by group, prefix hits, formats, and who owns K/V and who reads it."""
        blocks = cache_status(self.scheduler.kv)
        return blocks if self.cache is None else status_document(blocks, self.cache.status(self.runner.pool))

    def reset_prefix_cache(self) -> None:
        """Forget the K/V of finished requests. Raises ValueError while a request is not finished."""
        self._need_idle("the prefix cache is reset")
        self.scheduler.kv.reset_prefix_cache()

    def rebuild_cache(self, kv_cache_memory_bytes: int) -> None:
        """Another size for the K/V pool, empty. Captured graphs are captured again. Raises ValueError while a request is not finished
        (step() until has_unfinished_requests is False), ConfigError for a size that does not fit; the old one then stays."""
        if self.cache is None:
            raise ValueError("this engine was put together by hand: its pool cannot be rebuilt")
        if kv_cache_memory_bytes <= 0:
            raise ConfigError(f"kv_cache_memory_bytes is {kv_cache_memory_bytes}: a positive number of bytes is needed")
        self._need_idle("the pool is rebuilt")
        self._launch()  # nothing is scheduled: finished requests leave the runner
        self.cache.rebuild(self.scheduler, self.runner, kv_cache_memory_bytes)

    def _need_idle(self, what: str) -> None:
        if self.has_unfinished_requests:
            raise ValueError(f"{len(self.scheduler.requests) or 'some'} requests are not finished: {what} when none is left")

    # ------------------------------------------------------------------------------------------------------ steps
    def step(self) -> list[RequestOutput]:
        """Launch the next step and read the oldest one in flight. Returns outputs of requests that stream or ended.

        Raises EngineStuck, naming a request, when nothing can make progress."""
        outputs: list[RequestOutput] = []
        while self._in_flight and self.scheduler.drafts_wait:
            # since the last step a prompt has come: it shares its step with those whose drafts are in flight, and cannot follow them
            outputs += self._read_oldest()
        launched = self._launch()
        if not launched and not self._in_flight:
            self._watch()
            return outputs
        keep = self._steps_in_flight if launched else len(self._in_flight) - 1
        while len(self._in_flight) > keep:
            outputs += self._read_oldest()
        return outputs

    @_one_at_a_time
    def step_for(self, mine: Set[str] | Mapping[str, object]) -> list[RequestOutput]:
        """`step` for one of several readers that take turns: outputs of the requests in `mine`, first those that another reader's
        steps brought. Of a request that streams, only the newest output is kept for its reader."""
        if ready := [request_id for request_id in self._kept if request_id in mine]:
            return [self._kept.pop(request_id) for request_id in ready]
        outputs: list[RequestOutput] = []
        for output in self.step():
            if output.request_id in mine:
                outputs.append(output)
            else:
                self._kept[output.request_id] = output
        return outputs

    @_one_at_a_time
    def is_open(self, request_id: str) -> bool:
        """True while a request runs or its last output waits for its reader's `step_for`."""
        return request_id in self.outputs.groups or request_id in self._kept

    @property
    def _steps_in_flight(self) -> int:
        """Steps that may stay unread: none while drafts are wanted that the next step cannot find on the device."""
        speculator = self.runner.speculator
        waits = speculator is not None and speculator.is_drafting and not self.scheduler.drafts_follow
        return 0 if waits else self.depth

    @_one_at_a_time
    def launch_ahead(self, behind: int = 0, max_tokens: int | None = None) -> SchedulerOutput | None:
        """Launch a step, of at most max_tokens, without reading one, where the device works by itself and no more than `behind` steps are
        in flight. The prompts' last tokens and the forks go with the next step, which so reads the weights behind the cut once for all.
        Returns the step, None if there is none."""
        if not self.depth or len(self._in_flight) > behind or not self._launch(True, max_tokens):
            return None
        return self._in_flight[-1][0]

    def _launch(self, holds_back: bool = False, max_tokens: int | None = None) -> bool:
        scheduled = self.scheduler.schedule(holds_back, max_tokens)
        handle = self.runner.execute(scheduled)
        if scheduled.is_empty:
            return False
        if handle.proposals is not None:
            self.scheduler.expect_drafts(handle.proposals.coming)
        self._in_flight.append((scheduled, handle))
        self._idle_steps = 0
        return True

    def _read_oldest(self) -> list[RequestOutput]:
        scheduled, handle = self._in_flight.popleft()
        news = self.scheduler.update_from_output(scheduled, handle.result())
        if self.runner.grammars:
            self._end_failed_grammars(news)
        results, stopped = self.outputs.process(news)
        for request_id, stop in stopped:
            self.scheduler.finish_request(request_id, FinishReason.STOP, stop)
        if self.runner.grammars:
            self._forget_grammars([output.request.request_id for output in news if output.request.is_finished])
        return results

    def _end_failed_grammars(self, news: Sequence[EngineCoreOutput]) -> None:
        """A request whose grammar cannot go on ends with the reason; the others of its batch go on."""
        for output in news:
            grammar = self.runner.grammars.get(output.request.request_id)
            if grammar is not None and grammar.failure is not None:
                output.finish_reason, output.stop_reason = FinishReason.ERROR, grammar.failure
                self.scheduler.finish_request(output.request.request_id, FinishReason.ERROR, grammar.failure)

    def _watch(self) -> None:
        if not self.scheduler.has_unfinished_requests:
            self._idle_steps = 0
            return
        self._idle_steps += 1
        if self._idle_steps >= IDLE_STEPS:
            request = next(iter(self.scheduler.requests.values()))
            raise EngineStuck(
                f"request {request.request_id} ({request.status.value}, {request.num_computed_tokens} of {request.num_tokens} tokens "
                f"computed) and {len(self.scheduler.requests) - 1} others make no progress: nothing is scheduled, nothing in flight"
            )

    def _forget_grammars(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.runner.grammars.pop(request_id, None)
