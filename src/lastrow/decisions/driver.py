"""Runs jobs on an engine of this process: enough of them at once to fill its steps, no more, and their results in order."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from lastrow.core.output import RequestOutput
from lastrow.decisions.plan import Job, Read, Unit
from lastrow.engine.engine import LLMEngine

T = TypeVar("T")
AHEAD = 2  # steps' worth of work that waits at the engine, so that it is never without
FIRST_STEP = 0.125  # of a step, that waits when the card begins
GROWTH = 1.5  # from step to step until they are whole, so that the next is queued before the card is done
RAMP_STEPS = 4  # steps in flight, at most, to which a smaller one is added
MAX_HELD = 4096  # results that may wait for an earlier one
_ids = itertools.count()


class _Open(Generic[T]):
    """A job whose units are at the engine."""

    def __init__(self, place: int, job: Job[T]) -> None:
        self.place, self.job = place, job
        self.ids: list[str] = []
        self.reads: dict[str, Read] = {}


@contextmanager
def _no_collections() -> Iterator[None]:
    """The cyclic garbage collector pauses. Queueing and reading thousands of units leaves no cycles, and a collection looks at every
    token id of every prompt: with 128 states of 20 questions that took as long as all else."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class JobDriver:
    """One engine, whose other readers use step_for, too."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        limits = engine.scheduler.config
        self._step_units, self._step_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        self._jobs: dict[str, _Open[Any]] = {}
        self._tokens: dict[str, int] = {}
        self._num_tokens = 0  # their sum
        self._waiting = (0, 0)  # units and tokens queued and, as far as is known here, in no step yet
        self._next_step = FIRST_STEP

    def run(self, jobs: Iterable[Job[T]]) -> Iterator[T | ValueError]:
        """Results in the jobs' order; in the place of a job that raised ValueError, the error. Takes jobs as the engine has room.
        Closing the iterator early ends what runs."""
        waiting = enumerate(jobs)
        done: dict[int, Any] = {}
        next_place, more = 0, True
        self._next_step = FIRST_STEP
        try:
            while more or self._jobs or done:
                with _no_collections():
                    more = more and self._fill(waiting, done)
                while next_place in done:
                    yield done.pop(next_place)
                    next_place += 1
                if self._jobs:
                    with _no_collections():
                        self._launched(self._step_units, self._step_tokens)
                        for output in self.engine.step_for(self._jobs):
                            self._take(output, done)
        finally:
            self.engine.abort(list(self._jobs))
            self._jobs.clear()
            self._tokens.clear()
            self._num_tokens = 0
            self._waiting = (0, 0)

    def _fill(self, waiting: Iterator[tuple[int, Job[Any]]], done: dict[int, Any]) -> bool:
        """Start jobs until a step's worth of work waits, launching smaller steps where the card has too little to do meanwhile: it begins
        with a part of a step, and they grow. False when there are no more jobs."""
        while self._has_room(len(done)):
            entry = next(waiting, None)
            if entry is None:
                return False
            self._advance(_Open(*entry), None, done)
            step = self.engine.launch_ahead(RAMP_STEPS) if self._next_step < 1.0 and self._waits_for(self._next_step) else None
            if step is not None:
                self._launched(len(step.scheduled), step.total_num_scheduled_tokens)
            elif self._waits_for(1.0):
                break
        return True

    def _waits_for(self, share: float) -> bool:
        """Whether this share of a step's work has been queued since the last launches."""
        units, tokens = self._waiting
        return units >= share * self._step_units or tokens >= share * self._step_tokens

    def _launched(self, most_units: int, most_tokens: int) -> None:
        units, tokens = self._waiting
        self._waiting = (max(0, units - most_units), max(0, tokens - most_tokens))
        self._next_step = min(1.0, GROWTH * self._next_step)

    def _has_room(self, held: int, steps: int = AHEAD) -> bool:
        """Whether less than `steps` steps' worth of work is at the engine, and not too many results wait for an earlier one."""
        units, tokens = len(self._jobs), self._num_tokens
        return not units or (units < steps * self._step_units and tokens < steps * self._step_tokens and held < MAX_HELD)

    def _advance(self, job: _Open[Any], reads: list[Read] | None, done: dict[int, Any]) -> None:
        """Give a job what it asked for and queue what it asks for next."""
        try:
            units = next(job.job) if reads is None else job.job.send(reads)
            while not units:
                units = job.job.send([])
            self._queue(job, units)
        except StopIteration as end:
            done[job.place] = end.value
        except ValueError as error:
            self._drop(job)
            done[job.place] = error

    def _queue(self, job: _Open[Any], units: list[Unit]) -> None:
        job.ids, job.reads = [f"read-{next(_ids)}" for _ in units], {}
        with self.engine.between_steps():
            for name, unit in zip(job.ids, units, strict=True):
                self.engine.add_request(
                    name, unit.prompt_token_ids, unit.params, prompt_rows=unit.prompt_rows, label_token_ids=unit.label_token_ids,
                    fork_of=None if unit.parent is None else job.ids[unit.parent], fork_num_tokens=unit.fork_num_tokens,
                    is_kept=True,
                )  # fmt: skip
                self._jobs[name] = job
                self._tokens[name] = unit.num_own_tokens
                self._num_tokens += unit.num_own_tokens
        self._waiting = (self._waiting[0] + len(units), self._waiting[1] + sum(unit.num_own_tokens for unit in units))

    def _drop(self, job: _Open[Any]) -> None:
        self.engine.abort([name for name in job.ids if self._jobs.pop(name, None) is not None])
        for name in job.ids:
            self._num_tokens -= self._tokens.pop(name, 0)

    def _take(self, output: RequestOutput, done: dict[int, Any]) -> None:
        job = self._jobs.get(output.request_id)
        if job is None or not output.finished:
            return
        del self._jobs[output.request_id]
        self._num_tokens -= self._tokens.pop(output.request_id)
        logprobs = {at: entry for at, entry in enumerate(output.prompt_logprobs or ()) if entry is not None}
        job.reads[output.request_id] = Read(
            output.label_logits or {}, logprobs, output.outputs[0].token_ids, output.num_cached_tokens
        )  # fmt: skip
        if len(job.reads) == len(job.ids):
            self._advance(job, [job.reads[name] for name in job.ids], done)
