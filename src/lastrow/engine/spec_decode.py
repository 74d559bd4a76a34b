"""Speculative decoding: which drafts stand, how many to ask for, and the loop from one step's tokens to the next step's drafts.

A step computes k + 1 rows of a request: its newest token and k drafts. The target samples a token at every row by the random number
of that row's output index; drafts stand as long as they are what the target sampled (`accept`). A draft x is a point mass, so this is
the rejection rule of Leviathan et al. (2023) and Chen et al. (2023): x stands with probability p(x), and what stands in its place
otherwise is p without x. Because the number belongs to the index, a seed gives the same tokens with and without drafts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from lastrow.core.request import Request
from lastrow.core.stats import SpecDecodeStats
from lastrow.engine.inputs import InputBatch, StepInputs
from lastrow.engine.proposers import DraftRows, Proposer
from lastrow.engine.sampling_state import Grammar
from lastrow.engine.transfer import upload

PRIOR_RATE, PRIOR_WEIGHT = 0.6, 4.0  # what is believed of the first request, and how many tested drafts outweigh a belief
FORGET = 0.85  # weight of older verifications at each new one: about the last seven count
SHARED_FORGET = 0.99
ROW_COST = 0.007
"""One more row of the target as a share of a decode step that only reads weights: E2B in bf16 on an H200, 4.6 GFLOP a row at
650 TFLOP/s against 1 ms."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # tokens without drafts before one more try, doubled while it does not pay


def accept(sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The tokens that stand, at least one. sampled[i] was sampled by the target behind drafts[:i], so it stands as long as every draft
    before it was what the target sampled there."""
    for i, draft in enumerate(drafts):
        if sampled[i] != draft:
            return list(sampled[: i + 1])
    return list(sampled[: len(drafts) + 1])


def allowed_drafts(grammar: Grammar, output: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The drafts before the first that the grammar forbids behind `output`: no row is spent on what cannot stand. The grammar is left
    where it was."""
    before = grammar.num_tokens
    allowed: list[int] = []
    if all(grammar.accept(token) for token in output[before:]):
        for draft in drafts:
            if not grammar.accept(draft):
                break
            allowed.append(draft)
    grammar.rollback(grammar.num_tokens - before)
    return allowed


def expected_tokens(rate: float, drafts: int) -> float:
    """Tokens that one verification of `drafts` drafts brings on average when each stands with probability `rate` if those before it do."""
    return sum(rate**i for i in range(drafts + 1))


def best_length(rate: float, cost: float, most: int) -> int:
    """Drafts per step, 0 to `most`, with the most tokens per time; cost: time of one more draft (proposed and verified) as a share of a
    step without drafts. 0 where drafting does not pay."""
    return max(range(most + 1), key=lambda k: (expected_tokens(rate, k) / (1.0 + cost * k), -k))


@lru_cache(maxsize=256)
def _lengths_by_rate(cost: float, most: int) -> tuple[int, ...]:
    """`best_length` at the rates 0, 0.01 .. 1."""
    return tuple(best_length(percent / 100, cost, most) for percent in range(101))


def cost_of_draft(own: float, num_requests: int) -> float:
    """The `cost` of `best_length` when num_requests decode together: a step takes 1 + ROW_COST * requests, and one more draft for each
    of them adds a row of the target and `own`, the proposer's share."""
    rows = ROW_COST * num_requests
    return round((own + rows) / (1.0 + rows), 2)


class AcceptanceRate:
    """Share of tested drafts that stood, recent ones weighing more; the prior fades with them. A draft behind a rejected one was not
    tested."""

    def __init__(self, forget: float, prior: float) -> None:
        self.forget = forget
        self._stood, self._tested = PRIOR_WEIGHT * prior, PRIOR_WEIGHT

    def observe(self, drafted: int, stood: int) -> None:
        self._stood = self._stood * self.forget + stood
        self._tested = self._tested * self.forget + stood + (stood < drafted)

    @property
    def value(self) -> float:
        return self._stood / self._tested


class DraftLength:
    """How many drafts one request asks for: the best number for its acceptance; after a pause, one more try where that is 0."""

    def __init__(self, most: int, prior: float, adaptive: bool = True) -> None:
        self.most, self.adaptive = most, adaptive
        self.rate = AcceptanceRate(FORGET, prior)
        self._pause = FIRST_PAUSE
        self._resume_at = 0
        self._tokens = 0
        self.num_switched_off = 0

    def wanted(self, cost: float) -> int:
        """Drafts to ask for now; 0 during a pause."""
        if not self.adaptive:
            return self.most
        return 0 if self._tokens < self._resume_at else max(1, self._best(cost))

    def _best(self, cost: float) -> int:
        return _lengths_by_rate(cost, self.most)[round(100 * self.rate.value)]

    def observe(self, drafted: int, stood: int, tokens: int, cost: float) -> None:
        """A step brought `tokens` tokens; `stood` of its `drafted` drafts are among them."""
        is_paused = self._tokens < self._resume_at  # drafts that were in flight when the pause began do not begin another
        self._tokens += tokens
        if not drafted:
            return
        self.rate.observe(drafted, stood)
        if self._best(cost) > 0:
            self._pause = FIRST_PAUSE
        elif self.adaptive and not is_paused:
            self._resume_at = self._tokens + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self.num_switched_off += 1


@dataclass(slots=True)
class PendingDrafts:
    """Drafts of one step on their way: `finish` gives the proposals for the tokens that stood.

    tensor [S, K]: drafts made on the device, None where the proposer works on the host. coming: by request id, `Request.coming_drafts`
    where the next step may verify them unread; empty where it may not."""

    speculator: Speculator
    rows: DraftRows
    tensor: torch.Tensor | None
    coming: dict[str, list[int]]

    def finish(self, tokens: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """tokens: what stood of every request in the step. Counts it and returns the next drafts by request id."""
        proposals: dict[str, list[int]] = {}
        made = None if self.tensor is None else self.tensor.tolist()
        for i, (request, drafts) in enumerate(zip(self.rows.requests, self.rows.drafts, strict=True)):
            if request.is_finished:  # aborted meanwhile: forgotten already
                continue
            new = _until_stop(request, tokens[request.request_id])
            self.speculator.count(request, drafts, new)
            length = self.rows.lengths[i]
            if length and new[-1] not in request.stop_token_ids:
                found = self.speculator.proposer.finish(request, new, None if made is None else made[i], length)
                grammar = self.speculator.grammars.get(request.request_id)
                if grammar is not None:
                    found = allowed_drafts(grammar, [*request.output_token_ids, *new], found)
                if found:
                    proposals[request.request_id] = found
                coming = self.coming.get(request.request_id, [])
                coming[:] = found[: len(coming)]
        return proposals


class Speculator:
    """A proposer, each request's draft length, and the counts. num_speculative_tokens: most drafts of one step. grammars: by request id,
    what drafts must follow.

    simulated_acceptance: for measuring costs only, keep each draft with this probability, whatever the target says."""

    def __init__(
        self,
        proposer: Proposer,
        num_speculative_tokens: int,
        inputs: InputBatch,
        adaptive: bool = True,
        simulated_acceptance: float | None = None,
    ) -> None:
        self.proposer = proposer
        self.inputs = inputs
        self.most = num_speculative_tokens
        self.adaptive = adaptive
        self.simulated_acceptance = simulated_acceptance
        self.grammars: Mapping[str, Grammar] = {}
        self.stats = SpecDecodeStats()
        self._coin = random.Random(0)
        self._shared = AcceptanceRate(SHARED_FORGET, PRIOR_RATE)
        self._lengths: dict[str, DraftLength] = {}
        self._cost = proposer.cost

    def length_of(self, request: Request) -> DraftLength:
        length = self._lengths.get(request.request_id)
        if length is None:
            length = DraftLength(self.most, self._shared.value, self.adaptive)
            self._lengths[request.request_id] = length
        return length

    @property
    def is_drafting(self) -> bool:
        """Whether some running request asks for drafts now: then the next step needs this one's tokens on the host first."""
        return any(length.wanted(self._cost) for length in self._lengths.values())

    def start(self, step: StepInputs, hidden: torch.Tensor, sampled: torch.Tensor, may_follow: bool = False) -> PendingDrafts | None:
        """Behind a step's sampling: hidden [R, H] of its wanted rows, sampled [n] of its sampled rows. Does not wait for the device.
        may_follow: whether the next step can sample without what the host learns of this one."""
        rows, first = DraftRows(), 0
        self._cost = cost_of_draft(self.proposer.cost, len(step.parts))
        while first < len(step.sample_parts):
            part_index = step.sample_parts[first]
            part = step.parts[part_index]
            params, known = part.request.sampling_params, len(part.request.output_token_ids)
            room = self.most + 1 if params.max_tokens is None else params.max_tokens - known - 2
            length = max(0, min(self.length_of(part.request).wanted(self._cost), room))
            rows.add(part, int(step.slots[part_index]), first, int(step.sample_positions[first]), length)
            first += 1 + len(part.draft_token_ids)
        if not rows.requests:
            return None
        hidden = hidden if step.sample_rows is None else hidden[step.sample_rows]
        made = self.proposer.start(rows, hidden, sampled)
        coming: dict[str, list[int]] = {}
        if may_follow and made is not None:
            coming = {request.request_id: [-1] * length for request, length in zip(rows.requests, rows.lengths, strict=True)}
        return PendingDrafts(self, rows, made, coming)

    def simulate(self, step: StepInputs, sampled: torch.Tensor) -> torch.Tensor:
        """sampled [n] with drafts in the place of what the target sampled, each with probability simulated_acceptance (None: none)."""
        rate, row, kept = self.simulated_acceptance, 0, list[tuple[int, int, int, int]]()
        if rate is None:
            return sampled
        while row < len(step.sample_parts):
            part_index = step.sample_parts[row]
            part, slot = step.parts[part_index], int(step.slots[part_index])
            drafts = [-1] * len(part.draft_token_ids) if part.follows else part.draft_token_ids
            kept += [(row + i, draft, slot, 1 + i) for i, draft in enumerate(drafts) if self._coin.random() < rate]
            row += 1 + len(drafts)
        if not kept:
            return sampled
        index, value, slots, column = upload(np.array(kept).T, sampled.device)
        value = torch.where(value < 0, self.inputs.coming[slots, column].long(), value)
        return sampled.index_copy(0, index, value.to(sampled.dtype))

    def count(self, request: Request, drafts: Sequence[int], tokens: Sequence[int]) -> None:
        """tokens: what the step that verified `drafts` brought, cut at a stop token. Drafts behind that token count as not stood."""
        drafted = len(drafts)
        stood = next((i for i, (a, b) in enumerate(zip(drafts, tokens, strict=False)) if a != b), min(drafted, len(tokens)))
        length = self.length_of(request)
        off = length.num_switched_off
        length.observe(drafted, stood, len(tokens), self._cost)
        if drafted:
            self._shared.observe(drafted, stood)
            self.stats.record(drafted, stood, len(tokens))
        else:
            self.stats.num_plain_steps += 1
        self.stats.num_switched_off += length.num_switched_off - off

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget finished requests; ids that are not known are ignored."""
        for request_id in request_ids:
            self._lengths.pop(request_id, None)
            self.proposer.drop(request_id)


def _until_stop(request: Request, tokens: list[int]) -> list[int]:
    """`tokens` up to the one that ends the request, as the scheduler cuts them."""
    known, least = len(request.output_token_ids), request.sampling_params.min_tokens
    for i, token in enumerate(tokens):
        if token in request.stop_token_ids and known + i + 1 >= least:
            return tokens[: i + 1]
    return tokens
