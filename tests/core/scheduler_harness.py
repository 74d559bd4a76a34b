"""A fake device for the scheduler: the KV pools as a dictionary, a language model as a hash of the token history.

The value that belongs into the slot of position p is a hash of (salt, tokens 0..p). Every scheduled token writes its slots, copies
are applied, and every slot that a scheduled query may read is compared with the right value; so a wrong hit, a block given away too
early, a missing copy or another tenant's block is seen at the first read. The next token is a function of the same hash, so a
request's output is known beforehand (`expected_output`) whatever the scheduling did."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Sequence

from lastrow.core.kv_cache_manager import KVCacheConfig, KVCacheManager
from lastrow.core.limits import SchedulerConfig
from lastrow.core.output import FULL_GROUP, SLIDING_GROUP, EngineCoreOutput, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from lastrow.core.request import FinishReason, Request
from lastrow.core.sampling_params import SamplingParams
from lastrow.core.scheduler import Scheduler

VOCAB = 4


def history_hashes(salt: str | None, tokens: Sequence[int]) -> list[int]:
    """Entry p: what a correct K/V at position p depends on."""
    value, out = zlib.crc32(repr(salt).encode()), []
    for token in tokens:
        value = hash((value, token))
        out.append(value)
    return out


def next_token(history: int) -> int:
    return hash((history, 7919)) % VOCAB


def expected_output(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """The output of the request alone, by the definition of the stop rules."""
    tokens, params = list(request.prompt_token_ids), request.sampling_params
    if request.label_token_ids is not None or params.max_tokens == 0:
        return [], FinishReason.LENGTH
    output: list[int] = []
    while True:
        output.append(next_token(history_hashes(request.cache_salt, tokens + output)[-1]))
        if output[-1] in request.stop_token_ids and len(output) >= params.min_tokens:
            return output, FinishReason.STOP
        if len(output) == params.max_tokens or len(tokens) + len(output) == max_model_len:
            return output, FinishReason.LENGTH


class FakeRunner:
    """Runs steps in the order given. draft_rate: how often a proposed token is a random one (0: no drafts at all)."""

    def __init__(self, config: KVCacheConfig, rng: random.Random, num_drafts: int = 0) -> None:
        self.config, self.rng, self.num_drafts = config, rng, num_drafts
        self.memory: dict[tuple[int, int, int], int] = {}
        self.tokens: dict[Request, list[int]] = {}
        self.drafts: dict[Request, list[int]] = {}
        self.rows_seen: dict[Request, set[int]] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        result = ModelRunnerOutput()
        parts = [self._placed(part) if part.follows else part for part in step.scheduled]
        plans = [(part, self._hashes(part)) for part in parts]
        # The two halves may be two forwards or one: decode parts must be right before the others have run, and after.
        self._forward(plans[: step.num_decodes])
        self._forward(plans[step.num_decodes :])
        for part, hashes in plans:
            self._check_reads(part, hashes)
            self._head(part, hashes, result)
        return result

    def _placed(self, part: ScheduledRequest) -> ScheduledRequest:
        """A part that follows drafts in flight, where it really is."""
        request, count = part.request, len(part.draft_token_ids)
        assert part.sample and part.num_tokens == 1 + count and list(part.rows) == list(range(part.start, part.end))
        assert set(request.token_ids(part.start, part.end)) == {-1}, "the host cannot know these tokens"
        start = len(self.tokens[request]) - 1
        assert start <= part.start, "the part begins behind its last possible position"
        return part._replace(start=start, rows=range(start, start + 1 + count), draft_token_ids=self.drafts[request][:count])

    def _hashes(self, part: ScheduledRequest) -> list[int]:
        request = part.request
        tokens = self.tokens.setdefault(request, list(request.prompt_token_ids))
        host = request.token_ids(part.start, part.end)
        device = (tokens + list(part.draft_token_ids))[part.start : part.end]
        assert len(device) == part.num_tokens, "a part goes beyond the tokens that exist"
        assert all(h in (-1, d) for h, d in zip(host, device, strict=True)), "a wrong token is fed"
        return history_hashes(request.cache_salt, tokens[: part.end] + list(part.draft_token_ids))[: part.end]

    def _forward(self, plans: list[tuple[ScheduledRequest, list[int]]]) -> None:
        written: set[tuple[int, int, int]] = set()
        for part, hashes in plans:
            for position in range(part.start, part.end):
                for group in self._groups():
                    slot = self._slot(part, group, position)
                    assert slot not in written, "two tokens of one step write the same slot"
                    written.add(slot)
                    self.memory[slot] = hashes[position]
        copies = [copy for part, _ in plans for copy in part.copies]
        assert not {(g, s) for g, s, _, _ in copies} & {(g, d) for g, _, d, _ in copies}, "copies of one step depend on each other"
        values = [[self.memory.get((g, source, i)) for i in range(tokens)] for g, source, _, tokens in copies]
        for (group, _, destination, tokens), row in zip(copies, values, strict=True):
            for i in range(tokens):
                assert (group, destination, i) not in written, "a copy overwrites what the step has written"
                self.memory[group, destination, i] = row[i]  # type: ignore[assignment]
        for part, hashes in plans:
            self._check_reads(part, hashes)

    def _groups(self) -> list[int]:
        return [g for g in (FULL_GROUP, SLIDING_GROUP) if self.config.has_group[g]]

    def _slot(self, part: ScheduledRequest, group: int, position: int) -> tuple[int, int, int]:
        block = part.block_ids[group][position // self.config.block_size]
        assert block != 0, f"position {position} of {part.request.request_id} has no block in group {group}"
        return group, block, position % self.config.block_size

    def _check_reads(self, part: ScheduledRequest, hashes: list[int]) -> None:
        """Every slot that a query at start .. end-1 may read."""
        for group in self._groups():
            first = 0 if group == FULL_GROUP else max(0, part.start - self.config.sliding_window + 1)
            for position in range(first, part.end):
                have = self.memory.get(self._slot(part, group, position))
                assert have == hashes[position], f"{part.request.request_id}: group {group} position {position} holds a wrong K/V"

    def _head(self, part: ScheduledRequest, hashes: list[int], result: ModelRunnerOutput) -> None:
        request, rows = part.request, list(part.rows)
        name, asked = request.request_id, [row for row in request.prompt_rows if part.start <= row < part.end]
        tokens = self.tokens[request]
        assert part.sample == (request.samples and part.end >= len(tokens))
        last = list(range(len(tokens) - 1, part.end)) if part.sample else []
        assert rows == sorted(set(asked) | set(last)), f"{name}: rows {rows}, wanted {asked} and {last}"
        if asked:
            result.label_logits[name] = {row: ([float(hashes[row])], None) for row in asked}
        if not part.sample:
            return
        new: list[int] = []
        for i, row in enumerate(last):
            new.append(next_token(hashes[row]))
            if i < len(part.draft_token_ids) and part.draft_token_ids[i] != new[-1]:
                break
        tokens += new
        result.sampled_token_ids[name] = new
        if self.num_drafts:
            draft: list[int] = []
            for _ in range(self.rng.randint(0, self.num_drafts)):
                right = next_token(history_hashes(request.cache_salt, tokens + draft)[-1])
                draft.append(right if self.rng.random() < 0.6 else self.rng.randrange(VOCAB))
            result.draft_token_ids[name] = self.drafts[request] = draft


class Harness:
    """Scheduler, fake device and up to `depth` steps whose results have not been delivered. Checks everything after every step."""

    def __init__(
        self, kv: KVCacheConfig, config: SchedulerConfig, *, caching: bool = True, depth: int = 0, num_drafts: int = 0, seed: int = 0
    ) -> None:
        self.kv_config, self.config, self.depth = kv, config, depth
        self.manager = KVCacheManager(kv, enable_prefix_caching=caching)
        self.scheduler = Scheduler(config, self.manager)
        self.runner = FakeRunner(kv, random.Random(seed), num_drafts)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.coming: deque[dict[str, list[int]]] = deque()
        self.num_followed = 0
        self.outputs: dict[Request, list[int]] = {}
        self.rows: dict[Request, dict[int, float]] = {}
        self.finished: dict[Request, FinishReason] = {}
        self.last: SchedulerOutput = SchedulerOutput([])
        self.num_added = 0

    def request(self, prompt: list[int], **kw: object) -> Request:
        params = {k: kw.pop(k) for k in ("max_tokens", "min_tokens", "repetition_penalty") if k in kw}
        if params.get("max_tokens") == 0:
            params["prompt_logprobs"] = 0
        self.num_added += 1
        name = str(kw.pop("request_id", f"r{self.num_added}"))
        return Request(name, list(prompt), SamplingParams(**params), arrival_time=float(self.num_added // 2), **kw)  # type: ignore[arg-type]

    def add(self, request: Request, fork_of: str | None = None, fork_num_tokens: int = 0) -> Request:
        self.scheduler.add_request(request, fork_of, fork_num_tokens)
        self.outputs[request], self.rows[request] = [], {}
        self.check()
        return request

    def fits(self, request: Request) -> bool:
        """By brute force: can the request be computed alone in the empty pools?"""
        room = self.config.max_model_len - request.num_prompt_tokens
        if request.samples and room < 1:
            return False
        most = request.num_prompt_tokens
        if request.samples:
            wanted = request.sampling_params.max_tokens
            most += min(room, room if wanted is None else wanted) - 1
        size, window = self.kv_config.block_size, self.kv_config.sliding_window
        full = len({p // size for p in range(most)})
        sliding = max(len({k // size for k in range(max(0, p - window + 1), p + 1)}) for p in range(most))
        return most <= self.config.max_model_len and (
            (not self.kv_config.has_full or full <= self.kv_config.num_full_blocks - 1)
            and (
                not self.kv_config.has_sliding
                or (sliding if self.config.enable_chunked_prefill else full) <= self.kv_config.num_sliding_blocks - 1
            )
        )

    def schedule(self, holds_back: bool = False, max_tokens: int | None = None) -> SchedulerOutput:
        running_at_first = set(self.scheduler.running)
        running_before = [r for r in self.scheduler.running if r.num_inflight_tokens]
        step = self.scheduler.schedule(holds_back, max_tokens)
        self.last = step
        assert all(r.request_id not in step.preempted for r in running_before), "a request with tokens in flight was preempted"
        parts = step.scheduled
        assert sum(p.num_tokens for p in parts) <= min(max_tokens or 1 << 30, self.config.max_num_batched_tokens)
        assert len({p.request.request_id for p in parts}) == len(parts)
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        assert all(p.num_tokens == 1 and p.sample and not p.copies for p in parts[: step.num_decodes])
        prefills = [p for p in parts if not (p.sample and p.num_tokens == 1 + len(p.draft_token_ids))]
        assert len(prefills) <= self.config.prefill_limit
        if not self.config.enable_chunked_prefill:
            assert all(p.end >= p.request.num_known_tokens for p in parts), "a prompt was cut although chunking is off"
        elif holds_back:
            others = [p for p in parts[step.num_decodes :] if p.request not in running_at_first]
            assert not any(p.sample and p.num_tokens > 1 for p in others), "the last token of a prompt was not held back"
        ends = [(p.end, p.request.num_prompt_tokens + self.config.max_output_tokens(p.request)) for p in parts if p.request.samples]
        assert all(end < most for end, most in ends), "a token is computed that nobody can get"
        self.num_followed += sum(part.follows for part in parts)
        if parts:
            self.in_flight.append((step, self.runner.execute(step)))
            self._expect_drafts(*self.in_flight[-1])
        self.check()
        return step

    def _expect_drafts(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """What an engine does whose drafter works on the device, where no sampling needs the host."""
        sampled = [part.request for part in step.scheduled if part.sample and part.request.request_id in result.draft_token_ids]
        coming = {}
        if self.depth and not any(request.sampling_params.needs_output_history for request in sampled):
            coming = {r.request_id: [-1] * len(result.draft_token_ids[r.request_id]) for r in sampled}
        self.scheduler.expect_drafts(coming)
        self.coming.append(coming)

    def deliver(self) -> list[EngineCoreOutput]:
        step, result = self.in_flight.popleft()
        for name, drafts in self.coming.popleft().items():
            drafts[:] = result.draft_token_ids[name][: len(drafts)]
        outputs = self.scheduler.update_from_output(step, result)
        for output in outputs:
            request = output.request
            assert request not in self.finished, "output after the end"
            self.outputs[request] += output.new_token_ids
            self.rows[request] |= {row: logits[0] for row, (logits, _) in (output.label_logits or {}).items()}
            if output.finish_reason is not None:
                self._finish(request, output.finish_reason)
        self.check()
        return outputs

    def _finish(self, request: Request, reason: FinishReason) -> None:
        tokens, want = expected_output(request, self.config.max_model_len)
        assert (self.outputs[request], reason) == (tokens, want), f"{request.request_id}: wrong output"
        assert request.output_token_ids == tokens and request.is_finished and request.finish_reason is reason
        hashes = history_hashes(request.cache_salt, request.prompt_token_ids)
        assert self.rows[request] == {row: float(hashes[row]) for row in request.prompt_rows}, "a wanted row is missing or wrong"
        self.finished[request] = reason

    def step(self, holds_back: bool = False, max_tokens: int | None = None) -> None:
        """What an engine does: keep at most `depth` steps in flight besides the one being scheduled."""
        step = self.schedule(holds_back, max_tokens)
        if step.is_empty and not self.in_flight:
            assert not self.scheduler.has_unfinished_requests, "nothing runs, nothing is in flight, requests wait"
        while self.in_flight and (len(self.in_flight) > self.depth or step.is_empty):
            self.deliver()
            if step.is_empty:
                break

    def end(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        assert self.scheduler.finish_request(request.request_id, reason) is request
        want, _ = expected_output(request, self.config.max_model_len)
        assert request.output_token_ids == want[: len(request.output_token_ids)]
        self.finished[request] = reason
        self.check()

    def check(self) -> None:
        self.manager.check_integrity(self.scheduler.requests.values())

    def drain(self, limit: int = 3000) -> None:
        """Liveness: everything ends, and every block comes back."""
        while self.scheduler.has_unfinished_requests or self.in_flight:
            self.step()
            limit -= 1
            assert limit > 0, "requests do not finish"
        assert not self.scheduler.running and not self.scheduler.num_waiting
        for pool in self.manager.pools:
            assert pool.num_free_blocks == pool.num_usable_blocks, "blocks are lost"
