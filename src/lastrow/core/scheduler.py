"""Who runs in the next step: continuous batching, chunked prefill, priorities, preemption by recompute, forks.

`schedule()` may be called again before the results of earlier steps have arrived: it counts what those steps will have computed
(num_computed_tokens) and sampled (num_inflight_tokens), and the next decode part then carries token id -1. Where the part in flight
verifies drafts, it counts them as if all stood, until the results say how many did (`ScheduledRequest.follows`)."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from lastrow.core.kv_cache_manager import NO_HIT, KVCacheManager, PrefixHit
from lastrow.core.limits import SchedulerConfig, check_fork, check_request
from lastrow.core.order import insert, insert_all, order
from lastrow.core.output import EngineCoreOutput, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from lastrow.core.request import FinishReason, Request, RequestStatus
from lastrow.core.stats import SchedulerCounters, SchedulerStats


@dataclass(slots=True)
class _Step:
    """A step being put together. complete: requests without output whose last part is in it. reserved: running decodes that have not
    had their token yet; prefill leaves room for them.
    holds_back, holds_forks: see `Scheduler.schedule`."""

    budget: int
    prefills_left: int
    reserved: int = 0
    decodes: list[ScheduledRequest] = field(default_factory=list[ScheduledRequest])
    others: list[ScheduledRequest] = field(default_factory=list[ScheduledRequest])
    complete: list[Request] = field(default_factory=list[Request])
    preempted: list[str] = field(default_factory=list[str])
    stuck: bool = False
    holds_back: bool = False
    holds_forks: bool = False


class Scheduler:
    """Requests wait (sorted by priority, then arrival), run, and finish. Running requests are served in the same order; when
    blocks run out, the last of them gives its blocks back and is recomputed later."""

    def __init__(self, config: SchedulerConfig, kv_manager: KVCacheManager) -> None:
        self.config = config
        self.kv = kv_manager
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.counters = SchedulerCounters()
        self._parked: dict[str, list[tuple[Request, int]]] = {}
        self._parent_of: dict[str, str] = {}
        self._forked: dict[str, Request] = {}
        self._finished_ids: list[str] = []
        self._unread: set[Request] = set()  # all computed by steps scheduled so far, nothing held, results to come
        self._follows = False
        self._num_added = 0
        self._last_step = (0, 0)

    # -- coming and going --------------------------------------------------------------------------------------------------

    def add_request(self, request: Request, fork_of: str | None = None, fork_num_tokens: int = 0) -> None:
        """Queues a request. fork_of: a request whose first fork_num_tokens tokens this one shares instead of computing them; it
        waits until they are computed (in the same step at the earliest), and is an ordinary request if the parent ends before, or
        if its last part is scheduled already and it samples nothing.
        Raises ValueError, naming the limit, if the request can never run."""
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id}: a request with this id is not finished yet")
        check_request(request, self.config, self.kv)
        parent = None
        if fork_of is not None:
            parent = self.requests.get(fork_of)
            if parent is None:
                raise ValueError(f"request {request.request_id}: the request {fork_of} it forks from is unknown or finished")
            check_fork(request, parent, fork_num_tokens)
        request.arrival_index = self._num_added
        self._num_added += 1
        self.requests[request.request_id] = request
        if parent is not None and parent.num_computed_tokens < fork_num_tokens:
            self._parked.setdefault(parent.request_id, []).append((request, fork_num_tokens))
            self._parent_of[request.request_id] = parent.request_id
        else:
            if parent is not None:
                self._fork(parent, request, fork_num_tokens)
            insert(self.waiting, request)

    def finish_request(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT, stop_reason: int | str | None = None
    ) -> Request | None:
        """Ends a request in any state and frees its blocks; tokens of it that still arrive are dropped. None if unknown."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        unread = request in self._unread
        if unread:
            self._unread.remove(request)
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request_id in self._parent_of:
            siblings = self._parked[self._parent_of.pop(request_id)]
            siblings[:] = [fork for fork in siblings if fork[0] is not request]
        else:
            del self.waiting[bisect_left(self.waiting, order(request), key=order)]
        self._forked.pop(request_id, None)
        if parked := self._parked.pop(request_id, None):
            for child, _ in parked:
                del self._parent_of[child.request_id]
            insert_all(self.waiting, [child for child, _ in parked])
        if not unread:
            self.kv.free(request)
            self._finished_ids.append(request_id)
        request.status, request.finish_reason, request.stop_reason = RequestStatus.FINISHED, reason, stop_reason
        request.num_inflight_tokens = 0
        request.metrics.finished_time = time.monotonic()
        self.counters.finished_requests += 1
        return request

    def abort_requests(self, request_ids: Iterable[str]) -> list[Request]:
        """Ends those of the requests that are not finished yet."""
        return [request for request_id in request_ids if (request := self.finish_request(request_id)) is not None]

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._parent_of)

    def stats(self) -> SchedulerStats:
        prefix = self.kv.prefix_cache_stats
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=self.num_waiting,
            num_scheduled_tokens=self._last_step[0],
            num_decodes=self._last_step[1],
            kv_usage=(self.kv.pools[0].usage, self.kv.pools[1].usage),
            prefix_cache_queries=prefix.queries,
            prefix_cache_hits=prefix.hits,
            num_preemptions=self.counters.preemptions,
        )

    def use_kv_manager(self, kv_manager: KVCacheManager) -> None:
        """Go on with other blocks and an empty cache; the prefix cache's counters go on, too. Raises ValueError while a request is
        not finished."""
        if self.requests:
            raise ValueError(f"{len(self.requests)} requests are not finished: their blocks cannot be taken away")
        kv_manager.prefix_cache_stats = self.kv.prefix_cache_stats
        self.kv = kv_manager

    # -- one step ----------------------------------------------------------------------------------------------------------

    def schedule(self, holds_back: bool = False, max_tokens: int | None = None) -> SchedulerOutput:
        """The next step. Empty while requests are unfinished only if steps are in flight whose results must come first. max_tokens: a
        smaller limit than max_num_batched_tokens for this step.

        holds_back: leave the last token of every prompt that is admitted to the step after this one. Its row is the only one that
        the layers behind the cut compute, so a step of such prompts is none for them. Forks wait, too, where other requests can go
        on: a step without them copies no blocks, and later they come together."""
        most = self.config.max_num_batched_tokens
        step = _Step(most if max_tokens is None else min(max_tokens, most), self.config.prefill_limit)
        step.holds_back = step.holds_forks = holds_back and self.config.enable_chunked_prefill
        self._follows = self.drafts_follow
        self._schedule_running(step)
        if not step.stuck and not step.preempted:
            self._schedule_waiting(step)
            if step.holds_forks and not step.decodes and not step.others:
                step.holds_forks = False
                self._schedule_waiting(step)
        parts = step.decodes + step.others
        self.kv.end_step(part.request for part in parts)
        finished, self._finished_ids = self._finished_ids, []
        self._let_go(step.complete)
        output = SchedulerOutput(parts, len(step.decodes), step.preempted, finished)
        self._last_step = (output.total_num_scheduled_tokens, output.num_decodes)
        if parts:
            self.counters.steps += 1
            self.counters.scheduled_tokens += self._last_step[0]
            self.counters.scheduled_rows += sum(len(part.rows) for part in parts)
            self.counters.decode_tokens += self._last_step[1]
        return output

    def _let_go(self, complete: list[Request]) -> None:
        """Requests of which only the results are missing make room for the next step's: blocks and slots are written again by later
        steps only, which come later on the device, too."""
        if not complete:
            return
        self._unread.update(complete)
        self.running = [request for request in self.running if request not in self._unread]
        for request in complete:
            self.kv.free(request)
            self._finished_ids.append(request.request_id)

    def expect_drafts(self, coming: dict[str, list[int]]) -> None:
        """What the step scheduled last proposes on the device for the next one, by request id: see `Request.coming_drafts`."""
        for request_id, drafts in coming.items():
            self.requests[request_id].coming_drafts = drafts

    @property
    def drafts_follow(self) -> bool:
        """Whether the next step may go on behind drafts that the host has not seen: where every running request can join it, because
        otherwise the model would run once for some of them and once for the others, and nobody has a prompt to compute or could begin
        one. Those that may have got their last token must sit the step out: where they are more than half, it waits, or two halves would
        take turns."""
        if self.waiting and len(self.running) < self.config.max_num_seqs:
            return False
        out = 0
        for request in self.running:
            if request.coming_drafts is not None:
                out += self._room_behind_drafts(request) <= 0
            elif request.num_inflight_tokens or request.num_tokens - request.num_computed_tokens != 1:
                return False
        return 2 * out <= len(self.running)

    @property
    def drafts_wait(self) -> bool:
        """Whether drafts are in flight that the next step may not go on behind: without the host it leaves their requests out."""
        return any(request.coming_drafts is not None for request in self.running) and not self.drafts_follow

    def _room_behind_drafts(self, request: Request) -> int:
        """Tokens that the request may still get when all its drafts in flight stand."""
        in_flight = 1 + request.num_computed_tokens - request.num_known_tokens
        return self.config.max_output_tokens(request) - len(request.output_token_ids) - in_flight

    def _num_to_compute(self, request: Request) -> tuple[int, int]:
        """(tokens, of which drafts) a running request could compute now; (0, 0) while it must wait for tokens in flight."""
        if request.coming_drafts is not None and request.num_inflight_tokens:
            drafts = min(len(request.coming_drafts), self._room_behind_drafts(request) - 1)
            return (1 + drafts, drafts) if self._follows and drafts >= 0 else (0, 0)
        tokens = max(0, request.num_tokens - request.num_computed_tokens)
        if not request.samples or tokens == 0:
            return tokens, 0
        left = self.config.max_output_tokens(request) - len(request.output_token_ids) - request.num_inflight_tokens
        if request.num_inflight_tokens:
            return (0, 0) if left <= 0 or request.sampling_params.needs_output_history else (tokens, 0)
        drafts = min(len(request.draft_token_ids), left - 1) if tokens == 1 else 0
        return tokens + drafts, drafts

    def _waits(self, request: Request) -> bool:
        """Whether tokens of the request are in flight, and not its last one: a reader waits for the next."""
        return 0 < request.num_inflight_tokens < self.config.max_output_tokens(request) - len(request.output_token_ids)

    def _schedule_running(self, step: _Step) -> None:
        work = [(request, *self._num_to_compute(request)) for request in self.running]
        decodes = [tokens for request, tokens, drafts in work if request.samples and tokens - drafts == 1]
        step.reserved = len(decodes)
        bound = self.config.max_prefill_tokens_while_decoding
        # a prompt's last token alone is a decode for the kernels, but nobody waits for its next one yet
        answers = any(
            (tokens or self._waits(request)) and request.num_computed_tokens >= len(request.prompt_token_ids) for request, tokens, _ in work
        )
        if answers and bound is not None:
            step.budget = min(step.budget, sum(decodes) + bound)
        for request, tokens, drafts in work:
            is_decode = request.samples and tokens - drafts == 1
            step.reserved -= is_decode
            if tokens == 0 or request.status is not RequestStatus.RUNNING:
                continue
            limit = min(tokens, step.budget - step.reserved)
            if limit <= 0 or (not is_decode and step.prefills_left == 0):
                continue
            self.kv.trim(request)
            while (fit := self.kv.num_fit(request, limit)) == 0 and self._make_room(request, step):
                pass
            if fit == 0:
                # Going on with later requests would only let them take what this one waits for.
                step.stuck = True
                return
            self._add_part(request, fit, step, self._take_drafts(request, fit - 1) if drafts else [])

    @staticmethod
    def _take_drafts(request: Request, most: int) -> list[int]:
        if request.coming_drafts is None:
            return request.draft_token_ids[:most]
        del request.coming_drafts[most:]
        return request.coming_drafts

    def _make_room(self, request: Request, step: _Step) -> bool:
        """Frees blocks for a running request: those kept for forks that have not started, else those of the last request after
        it that has nothing in flight (a step in flight still brings a token for the others)."""
        if self._release_fork():
            return True
        for victim in reversed(self.running):
            if victim is request:
                break
            if victim.num_inflight_tokens == 0 and victim.num_computed_tokens < victim.num_tokens:
                self._preempt(victim, step)
                return True
        return False

    def _preempt(self, request: Request, step: _Step) -> None:
        self.running.remove(request)
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.draft_token_ids, request.coming_drafts = [], None
        request.num_preemptions += 1
        request.metrics.num_preemptions += 1
        self.counters.preemptions += 1
        step.preempted.append(request.request_id)
        insort(self.waiting, request, key=order)

    def _schedule_waiting(self, step: _Step) -> None:
        passed_over: list[Request] = []
        chunked = self.config.enable_chunked_prefill
        while self.waiting and step.budget > 0 and step.prefills_left > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            holds = self.kv.holds_blocks(request)
            if holds and (self.kv.must_wait(request) or (step.holds_forks and self.kv.is_unstarted_fork(request))):
                passed_over.append(self.waiting.pop(0))
                continue
            hit = NO_HIT if holds else self.kv.match_prefix(request)
            tokens = request.num_tokens - (request.num_computed_tokens if holds else hit.num_tokens)
            limit = min(tokens - 1 if step.holds_back and tokens > 1 and request.samples else tokens, step.budget)
            fit = self.kv.num_fit(request, limit, hit)
            if limit < tokens and not chunked:
                break
            if fit == 0 or (fit < tokens and (not chunked or not self.kv.can_complete(request, hit, chunked))):
                if not self.running and self._release_fork():
                    continue
                break
            self.waiting.pop(0)
            self._admit(request, hit, holds)
            self._add_part(request, fit, step)
        insert_all(self.waiting, passed_over)

    def _admit(self, request: Request, hit: PrefixHit, holds: bool) -> None:
        first_time = request.metrics.first_scheduled_time is None
        if not holds:
            self.kv.admit(request, hit)
            if first_time and self.kv.enable_prefix_caching:
                self.kv.prefix_cache_stats.record(request.num_tokens, hit.num_tokens)
        self._forked.pop(request.request_id, None)
        if first_time:
            request.num_cached_tokens = request.num_computed_tokens
            request.metrics.first_scheduled_time = time.monotonic()
        request.status = RequestStatus.RUNNING
        insert(self.running, request)

    def _add_part(self, request: Request, num_tokens: int, step: _Step, drafts: list[int] | None = None) -> None:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        first_of_fork = self.kv.is_unstarted_fork(request)
        copies = self.kv.allocate(request, num_tokens)
        known = request.num_tokens
        sample = request.samples and end >= known
        rows: list[int] = []
        if request.prompt_rows:
            rows += request.prompt_rows[bisect_left(request.prompt_rows, start) : bisect_left(request.prompt_rows, end)]
        if sample:
            rows += range(max(known - 1, rows[-1] + 1) if rows else max(known - 1, start), end)
        follows = request.coming_drafts is not None
        part = ScheduledRequest(request, start, num_tokens, rows, sample, self.kv.block_ids(request), copies, drafts or (), follows)
        request.num_computed_tokens = end
        request.num_inflight_tokens += sample
        request.draft_token_ids, request.coming_drafts = [], None
        request.metrics.rows_given += num_tokens
        request.metrics.rows_computed += len(rows)
        step.budget -= num_tokens
        if sample and num_tokens == 1 and not first_of_fork:
            step.decodes.append(part)
        else:
            step.others.append(part)
        step.prefills_left -= not (sample and num_tokens - len(part.draft_token_ids) == 1)
        if not request.samples and end == request.num_prompt_tokens:
            step.complete.append(request)
        self._fork_ready(request)

    # -- forks -------------------------------------------------------------------------------------------------------------

    def _fork_ready(self, parent: Request) -> None:
        """Lets the forks go whose tokens the parent has computed, those of the part just scheduled included."""
        parked = self._parked.get(parent.request_id)
        if not parked:
            return
        ready = [fork for fork in parked if fork[1] <= parent.num_computed_tokens]
        if not ready:
            return
        parked[:] = [fork for fork in parked if fork[1] > parent.num_computed_tokens]
        for child, num_tokens in ready:
            del self._parent_of[child.request_id]
            self._fork(parent, child, num_tokens)
        insert_all(self.waiting, [child for child, _ in ready])

    def _fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        if self.kv.fork(parent, child, num_tokens):
            self._forked[child.request_id] = child
            self.counters.forked_tokens += num_tokens

    def _release_fork(self) -> bool:
        """Takes the blocks from the last fork that has not started; it becomes an ordinary waiting request."""
        if not self._forked:
            return False
        child = max(self._forked.values(), key=order)
        del self._forked[child.request_id]
        self.kv.free(child)
        child.num_computed_tokens = 0
        return True

    # -- results -----------------------------------------------------------------------------------------------------------

    def update_from_output(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Takes in one step's results, steps in the order they were scheduled. Results for requests that have ended meanwhile
        are dropped. One entry per request that got something: tokens, prompt logprobs, label logits, or its end."""
        outputs: list[EngineCoreOutput] = []
        for part in step.scheduled:
            request = part.request
            if self.requests.get(request.request_id) is not request:
                continue
            output = EngineCoreOutput(request)
            output.prompt_logprobs = result.prompt_logprobs.get(request.request_id)
            output.label_logits = result.label_logits.get(request.request_id)
            if part.sample:
                self._take_tokens(part, result, output)
            elif not request.samples and part.end == request.num_prompt_tokens:
                output.finish_reason = FinishReason.LENGTH
            if output.finish_reason is not None:
                self.finish_request(request.request_id, output.finish_reason, output.stop_reason)
            if output.new_token_ids or output.prompt_logprobs or output.label_logits or output.finish_reason is not None:
                outputs.append(output)
        return outputs

    def _take_tokens(self, part: ScheduledRequest, result: ModelRunnerOutput, output: EngineCoreOutput) -> None:
        request = part.request
        tokens = result.sampled_token_ids[request.request_id]
        if not 1 <= len(tokens) <= 1 + len(part.draft_token_ids):
            raise ValueError(
                f"request {request.request_id}: {len(tokens)} sampled tokens for a part with {len(part.draft_token_ids)} drafts, "
                f"1 to {1 + len(part.draft_token_ids)} are possible"
            )
        request.num_inflight_tokens -= 1
        # Rejected drafts were computed for nothing: their slots are written again.
        request.num_computed_tokens -= 1 + len(part.draft_token_ids) - len(tokens)
        now = time.monotonic()
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        request.metrics.last_token_time = now
        for token in tokens:
            request.output_token_ids.append(token)
            output.new_token_ids.append(token)
            self._check_stop(request, token, output)
            if output.finish_reason is not None:
                break
        self.counters.generated_tokens += len(output.new_token_ids)
        logprobs = result.logprobs.get(request.request_id)
        output.new_logprobs = None if logprobs is None else logprobs[: len(output.new_token_ids)]
        if request.num_inflight_tokens == 0:  # else the next part is under way, with these drafts or without
            request.draft_token_ids, request.coming_drafts = result.draft_token_ids.get(request.request_id, []), None

    def _check_stop(self, request: Request, token: int, output: EngineCoreOutput) -> None:
        count = len(request.output_token_ids)
        if token in request.stop_token_ids and count >= request.sampling_params.min_tokens:
            output.finish_reason = FinishReason.STOP
            output.stop_reason = token if token in (request.sampling_params.stop_token_ids or ()) else None
        elif count >= self.config.max_output_tokens(request):
            output.finish_reason = FinishReason.LENGTH
