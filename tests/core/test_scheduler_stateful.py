"""Any order of arrivals, forks, steps, late results, aborts: every read is right, every output is the one the request gives alone,
every limit holds and every block comes back. The checks are the harness's."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from core.scheduler_harness import VOCAB, Harness
from lastrow.core.kv_cache_manager import KVCacheConfig
from lastrow.core.limits import SchedulerConfig
from lastrow.core.request import FinishReason, Request


def random_harness(rng: random.Random) -> Harness:
    """Small blocks, windows that are and are not multiples of them, pools that run out."""
    block_size = rng.choice([1, 2, 2, 3, 4])
    window = rng.choice([1, 2, 3, 4, 5, 8, 13])
    groups = rng.choice([(True, True)] * 6 + [(True, False), (False, True)])
    longest = rng.choice([12, 20, 32])
    whole = -(-longest // block_size)
    chunked = rng.random() < 0.8
    max_seqs = rng.choice([1, 2, 3, 5])
    needed = min(whole, 1 + (window + block_size - 2) // block_size) if chunked else whole
    kv = KVCacheConfig(
        block_size=block_size,
        num_full_blocks=1 + rng.choice([whole, whole + 1, whole + 3, 2 * whole, 4 * whole]),
        num_sliding_blocks=1 + rng.choice([needed, needed + 1, 2 * needed, 2 * whole, 4 * whole]),
        sliding_window=window,
        has_full=groups[0],
        has_sliding=groups[1],
    )
    tokens = rng.choice([max_seqs, max_seqs + 1, 6, 10, 40])
    config = SchedulerConfig(
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max(tokens, max_seqs, 0 if chunked else longest),
        max_model_len=longest,
        max_prefill_seqs=rng.choice([None, None, 1, 2]),
        max_prefill_tokens_while_decoding=rng.choice([None, None, 1, 5]),
        enable_chunked_prefill=chunked,
    )
    return Harness(
        kv,
        config,
        caching=rng.random() < 0.85,
        depth=rng.choice([0, 0, 1, 1, 2]),
        num_drafts=rng.choice([0, 0, 3]),
        seed=rng.getrandbits(30),
    )


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Prompts that share beginnings often."""
    stem = [(i * i) % VOCAB for i in range(longest)]
    cut = rng.randint(0, longest - 1)
    return (stem[:cut] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))] or [0])[: longest - 1]


def random_request(rng: random.Random, harness: Harness, prompt: list[int], first_row: int = 0, **kw: Any) -> Request:
    rows = sorted(rng.sample(range(first_row, len(prompt)), min(len(prompt) - first_row, rng.choice([0, 0, 0, 1, 2, 5]))))
    kind = rng.choice(["sample"] * 5 + ["labels", "no rows", "max_tokens 0"])
    kw |= {"max_tokens": rng.choice([1, 2, 5, 9, None]), "priority": rng.choice([0, 0, 0, -1, 1])}
    kw |= {"stop_token_ids": frozenset(rng.sample(range(VOCAB), rng.choice([0, 0, 1])))}
    if kind == "labels":
        kw |= {"label_token_ids": (1, 2)}
    elif kind == "no rows":
        kw |= {"label_token_ids": ()}
        rows = []
    elif kind == "max_tokens 0":
        kw |= {"max_tokens": 0}
    elif kw["max_tokens"] is None or kw["max_tokens"] > 2:
        kw |= {"min_tokens": rng.choice([0, 0, 3])}
    if rng.random() < 0.15:
        kw |= {"repetition_penalty": 1.5}
    return harness.request(prompt, prompt_rows=tuple(rows), **kw)


def add(rng: random.Random, harness: Harness) -> None:
    longest = harness.config.max_model_len
    salt = rng.choice([None, None, "", "a", "b"])
    request = random_request(rng, harness, random_prompt(rng, longest + 2), cache_salt=salt)
    _add_or_refuse(harness, request)


def add_fork(rng: random.Random, harness: Harness) -> None:
    parent = rng.choice(list(harness.scheduler.requests.values()))
    known = parent.prompt_token_ids + parent.output_token_ids
    shared = rng.randint(1, len(known))
    for _ in range(rng.choice([1, 1, 2, 4])):
        prompt = known[:shared] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
        request = random_request(rng, harness, prompt, shared, cache_salt=parent.cache_salt)
        _add_or_refuse(harness, request, parent.request_id, shared)


def _add_or_refuse(harness: Harness, request: Request, fork_of: str | None = None, shared: int = 0) -> None:
    if harness.fits(request):
        harness.add(request, fork_of, shared)
    else:
        with pytest.raises(ValueError, match=r"max_model_len|whole pool"):
            harness.scheduler.add_request(request, fork_of, shared)


def end(rng: random.Random, harness: Harness) -> None:
    request = rng.choice(list(harness.scheduler.requests.values()))
    harness.end(request, rng.choice([FinishReason.ABORT, FinishReason.STOP]))


class SchedulerMachine(RuleBasedStateMachine):
    """The order of events is hypothesis's; what a request looks like comes from a seed it draws."""

    harness: Harness

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.harness = random_harness(random.Random(seed))
        note(f"{self.harness.kv_config} {self.harness.config} depth={self.harness.depth}")

    @rule(seed=st.integers(0, 2**32))
    def add(self, seed: int) -> None:
        add(random.Random(seed), self.harness)

    @precondition(lambda self: self.harness.scheduler.requests)
    @rule(seed=st.integers(0, 2**32))
    def add_fork(self, seed: int) -> None:
        add_fork(random.Random(seed), self.harness)

    @rule(count=st.integers(1, 4), holds_back=st.booleans(), max_tokens=st.none() | st.integers(1, 12))
    def steps(self, count: int, holds_back: bool, max_tokens: int | None) -> None:
        for i in range(count):
            limit = max_tokens if i == 0 and self.harness.config.enable_chunked_prefill else None  # a whole prompt may not fit
            self.harness.step(holds_back and i == 0, limit)

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def deliver(self) -> None:
        self.harness.deliver()

    @precondition(lambda self: self.harness.scheduler.requests)
    @rule(seed=st.integers(0, 2**32))
    def end(self, seed: int) -> None:
        end(random.Random(seed), self.harness)

    @precondition(lambda self: not self.harness.scheduler.requests)
    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.manager.reset_prefix_cache()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=40)


@pytest.mark.parametrize("seed", range(10))
def test_random_walks_with_full_queues_read_only_right_blocks_and_end(seed: int) -> None:
    """Longer and more crowded than the state machine's runs: preemption and eviction all the time."""
    rng = random.Random(seed)
    for _ in range(40):
        harness = random_harness(rng)
        for _ in range(60):
            event = rng.random()
            if event < 0.25:
                add(rng, harness)
            elif event < 0.35 and harness.scheduler.requests:
                add_fork(rng, harness)
            elif event < 0.38 and harness.scheduler.requests:
                end(rng, harness)
            elif event < 0.45 and harness.in_flight:
                harness.deliver()
            else:
                harness.step(holds_back=event > 0.85)
        harness.drain()


def test_drafts_that_follow_each_other_read_only_right_blocks_and_end() -> None:
    """Steps in flight whose lengths only the device knows, in pools that run out."""
    rng = random.Random(3)
    followed = 0
    for _ in range(150):
        harness = random_harness(rng)
        harness.depth, harness.runner.num_drafts = rng.choice([1, 2]), rng.choice([1, 3, 6])
        for _ in range(25):
            for _ in range(rng.choice([0, 0, 0, 0, 0, 3])):
                add(rng, harness)
            if rng.random() < 0.05 and harness.scheduler.requests:
                end(rng, harness)
            harness.step()
        harness.drain()
        followed += harness.num_followed
    assert followed > 300
