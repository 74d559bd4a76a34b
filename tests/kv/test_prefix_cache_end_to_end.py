"""The prefix cache under everything at once: every answer equals, to the last bit, that of an engine without a cache.

tiny-e's weights under a window of 16 tokens, blocks of 4, and a pool for two or three prompts: chunked prefill, preemption, forks, n > 1,
aborts, salts, resets and new pool sizes happen all the time. `batch_invariant` makes a row's bits a function of its tokens alone, so
"equal" needs no tolerance: a wrong block, window, salt or copy changes logprobs even where it changes no token. README.md lists the
mutants this kills."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lastrow.core.output import RequestOutput
from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.llm import LLM

WINDOW, BLOCK = 16, 4
SALTS = (None, None, None, None, "tenant a", "tenant b")
MOTIF = [301, 302, 303, 304]
BLOCKS = 40  # of both groups together, on average: 36 sliding ones and 46 full ones in fp32
# K and V of one full owner (head of 64) and four sliding ones (heads of 32): fp32, or a byte each and a scale of 4 bytes
TOKEN_BYTES = {"auto": 1536, "int8_per_token_head": 2 * 68 + 8 * 36, "fp8_per_token_head": 2 * 68 + 8 * 36}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tiny_e: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-e with a small window: another model, and a consistent one."""
    copy = tmp_path_factory.mktemp("model")
    for file in tiny_e.iterdir():
        if file.is_file() and file.name != "config.json":
            (copy / file.name).symlink_to(file)
    config = json.loads((tiny_e / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["sliding_window"] = WINDOW
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def make(folder: Path, form: str, **options: Any) -> LLM:
    return LLM(str(folder), kv_cache_dtype=form, batch_invariant=True, block_size=BLOCK, **options)


@dataclass(frozen=True)
class Asked:
    ids: tuple[int, ...]
    params: SamplingParams
    salt: str | None


class Prompts:
    """Prompts that begin alike: each goes on from a piece of an earlier one, with or without that one's answer."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.trunks = [[2, *(rng.randrange(256, 4096) for _ in range(length))] for length in (15, 31, 50)]
        self.texts: list[list[int]] = [*self.trunks]

    def next(self) -> list[int]:
        start = self.rng.choice(self.trunks if self.rng.random() < 0.5 else self.texts[-5:])
        keep = len(start) if self.rng.random() < 0.7 else self.rng.randint(1, len(start))
        text = start[: min(keep, 80)]
        if self.rng.random() < 0.3:  # the same blocks behind different beginnings
            text = text[: len(text) // BLOCK * BLOCK or len(text)] + MOTIF * self.rng.choice((1, 2, 5))
        text = text + [self.rng.randrange(256, 4096) for _ in range(self.rng.choice((0, 1, 3, 9)))]
        self.texts.append(text)
        return list(text)


def params_of(rng: random.Random) -> SamplingParams:
    params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 20), logprobs=1, ignore_eos=True)
    if rng.random() < 0.4:
        params = replace(params, temperature=1.0, seed=rng.randrange(1000))
    kind = rng.random()
    if kind < 0.15:
        return replace(params, n=2)
    return replace(params, prompt_logprobs=1) if kind < 0.25 else params


def signature(output: RequestOutput) -> list[Any]:
    """Everything that a wrong hit could change, floats included."""
    said = [(c.token_ids, c.cumulative_logprob, [{t: p.logprob for t, p in e.items()} for e in c.logprobs or ()]) for c in output.outputs]
    prompt = [None if e is None else {t: p.logprob for t, p in e.items()} for e in output.prompt_logprobs or ()]
    return [said, prompt]


class Walk:
    """Random requests to one engine until `count` have been asked; then all are let finish."""

    def __init__(self, llm: LLM, rng: random.Random, count: int) -> None:
        self.rng, self.count = rng, count
        self.engine = llm.engine
        self.block_bytes = BLOCK * TOKEN_BYTES[llm.config.kv_cache_dtype]
        self.prompts = Prompts(rng)
        self.asked: dict[str, Asked] = {}
        self.got: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()
        self.forks = self.rebuilds = 0
        self.is_draining = False
        self.cached: dict[str, int] = {}

    def run(self) -> None:
        while len(self.asked) < self.count or self.engine.has_unfinished_requests:
            self.event()
            for output in self.engine.step():
                if output.finished:
                    self.got[output.request_id] = output
                    self.prompts.texts.append([*output.prompt_token_ids, *output.outputs[0].token_ids])
            for name, request in self.engine.scheduler.requests.items():
                if request.metrics.first_scheduled_time is not None:  # what was cached is said once, also of a request that is preempted
                    assert self.cached.setdefault(name, request.num_cached_tokens) == request.num_cached_tokens
            if self.rng.random() < 0.2:
                self.engine.scheduler.kv.check_integrity(self.engine.scheduler.requests.values())

    def event(self) -> None:
        dice = self.rng.random()
        running = [name for name in self.asked if name in self.engine.scheduler.requests]
        if self.is_draining and not self.engine.has_unfinished_requests:
            self.is_draining = False
            self.engine.reset_prefix_cache() if self.rebuilds else self.rebuild()
        elif dice < 0.04 and running:
            name = self.rng.choice(running)
            self.engine.abort(name)
            self.aborted.add(name)
        elif not self.is_draining and len(self.asked) < self.count and dice < 0.7:
            for _ in range(self.rng.choice((1, 2, 3, 4))):
                if self.is_draining:
                    break
                self.ask(self.rng.choice(running) if running and self.rng.random() < 0.3 else None)

    def rebuild(self) -> None:
        self.engine.rebuild_cache((BLOCKS + self.rng.randint(-3, 4)) * self.block_bytes)
        self.rebuilds += 1

    def ask(self, parent: str | None) -> None:
        name, params, ids, salt = str(len(self.asked)), params_of(self.rng), self.prompts.next(), self.rng.choice(SALTS)
        fork: dict[str, Any] = {}
        source = self.engine.scheduler.requests.get(parent or "")
        if source is not None and source.num_known_tokens < 90:
            known = source.token_ids(0, source.num_known_tokens)
            ids, salt = [*known, *ids[1:6], 300], source.cache_salt
            fork = {"fork_of": parent, "fork_num_tokens": self.rng.randint(1, len(known))}
            params = replace(params, prompt_logprobs=None)
            self.forks += 1
        self.is_draining = (len(self.asked) + 1) % (self.count // 3) == 0  # a new size after a third of them, a reset after another
        self.asked[name] = Asked(tuple(ids), params, salt)
        self.engine.add_request(name, ids, params, cache_salt=salt, **fork)


@pytest.mark.parametrize(("form", "seed"), [("auto", 1), ("auto", 2), ("int8_per_token_head", 3), ("fp8_per_token_head", 4)])
def test_every_answer_is_that_of_an_engine_without_a_cache(folder: Path, form: str, seed: int) -> None:
    llm = make(folder, form, max_num_seqs=8, max_num_batched_tokens=24, kv_cache_memory_bytes=BLOCKS * BLOCK * TOKEN_BYTES[form])
    walk = Walk(llm, random.Random(seed), 45)
    walk.run()
    plain = make(folder, form, enable_prefix_caching=False)
    names = [name for name in walk.asked if name not in walk.aborted]
    expected = plain.generate([list(walk.asked[n].ids) for n in names], [walk.asked[n].params for n in names], use_tqdm=False)
    wrong = [name for name, output in zip(names, expected, strict=True) if signature(walk.got[name]) != signature(output)]
    assert not wrong, f"{len(wrong)} of {len(names)} answers differ from those without a cache: {wrong}"
    # the walk has been where it should be
    counters, prefix = llm.engine.scheduler.counters, llm.engine.scheduler.kv.prefix_cache_stats
    assert prefix.hit_rate > 0.1 and counters.preemptions > 0 and counters.forked_tokens > 0
    assert walk.forks > 3 and walk.aborted and walk.rebuilds
    assert 0 < sum(output.num_cached_tokens for output in walk.got.values()) <= prefix.hits + counters.forked_tokens
    assert all(output.num_cached_tokens == 0 for output in expected)


def test_a_hit_computes_the_rest_of_the_prompt_and_one_row(folder: Path) -> None:
    """Fast prefill on a hit: rows given are the tokens that were not cached, rows computed behind the cut the sampled ones."""
    llm = make(folder, "auto", max_num_batched_tokens=24, max_num_seqs=4)
    ids, params = [2, *range(300, 370)], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    stats = llm.engine.runner.stats
    for cached in (0, 68, 68):  # 71 tokens: 17 whole blocks hold 68 of the first 70
        given, computed = stats.rows_given, stats.rows_computed
        output = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
        assert output.num_cached_tokens == cached
        assert stats.rows_given - given == len(ids) - cached + 2 and stats.rows_computed - computed == 3
        assert output.metrics.rows_given == len(ids) - cached + 2 and output.metrics.rows_computed == 3


def test_tenants_of_one_text_get_the_same_answer_and_no_hit(folder: Path) -> None:
    llm = make(folder, "auto")
    ids, params = [2, *range(400, 460)], SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
    outputs = [
        llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, params, use_tqdm=False)[0] for salt in ("a", "b", None, "a", "b", None)
    ]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 60, 60, 60]
    assert all(signature(output) == signature(outputs[0]) for output in outputs)
