"""Drafts verified through captured steps: the tokens of eager decoding. As in test_cuda_graphs.py a "graph" is the forward itself; what is
checked is which graph a step takes, and what one whose rows follow each other in a sequence computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from kernels.test_triton_ops import TINY, model
from lastrow.core.kv_cache_manager import KVCacheConfig, KVCacheManager
from lastrow.core.request import Request
from lastrow.core.sampling_params import SamplingParams
from lastrow.core.scheduler import Scheduler, SchedulerConfig
from lastrow.engine.cuda_graphs import CUDAGraphs, GraphBuckets, attention_tile_rows
from lastrow.engine.engine import LLMEngine
from lastrow.engine.model_runner import ModelRunner
from lastrow.engine.proposers import AssistantProposer
from lastrow.engine.spec_decode import Speculator
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kernels.triton_ops import TritonOps
from lastrow.kv.layout import KVBudget
from lastrow.kv.pool import KVPool

BLOCK, BLOCKS, SEQUENCES, DRAFTS = 16, 24, 3, 3


class Oracle:
    """Drafts what the request will say, each with a chance of being another token."""

    cost = 0.0

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = answers
        self.rng = random.Random(2)

    def start(self, rows, hidden, sampled) -> None:
        return None

    def finish(self, request: Request, new: list[int], made: None, length: int) -> list[int]:
        known = len(request.output_token_ids) + len(new)
        ahead = self.answers[int(request.request_id)][known : known + length]
        return [token if self.rng.random() < 0.7 else self.rng.randrange(97) for token in ahead]

    def drop(self, request_id: str) -> None: ...

    def drop_pool(self) -> None: ...


class Bigrams:
    """An assistant that says on the device what followed each token in `answers`, and something else now and then."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.following = torch.arange(97, dtype=torch.int32)
        for answer in answers:
            for token, after in pairwise(answer):
                self.following[token] = after

    def draft(self, token_ids, hidden, rows, pool, num_tokens: int) -> torch.Tensor:
        drafts = [self.following[token_ids.long()]]
        for _ in range(num_tokens - 1):
            drafts.append(self.following[drafts[-1].long()])
        drafts[-1] = torch.where(rows.positions % 3 == 0, drafts[-1] ^ 1, drafts[-1])
        return torch.stack(drafts, 1)


def itself(forward):
    return forward


def engine(ops, graphs: bool, answers: list[list[int]] | None = None, verifies: bool | None = None) -> LLMEngine:
    """answers: what an Oracle drafts from; verifies: captured for drafts (None: where there are some)."""
    m = model(ops, "cpu", torch.float32)
    pool = KVPool(TINY, KVBudget(BLOCKS, BLOCKS, BLOCK), "auto", torch.float32, torch.device("cpu"))
    runner = ModelRunner(m, pool, vocab_size=97, max_num_seqs=SEQUENCES, max_model_len=64, block_size=BLOCK)
    if graphs:
        runner.inputs.use_tiles(attention_tile_rows(m, pool))
        rows = (1, 8) if m.ops.name == "triton" else (1, 4, 16)
        made = CUDAGraphs(m, pool, runner.inputs, GraphBuckets((16, 64), rows, (64,), (64,)), answers is not None or bool(verifies), itself)
        made.warm_up()
        runner.use_graphs(made)
    if answers is not None:
        runner.speculator = Speculator(Oracle(answers), DRAFTS, runner.inputs, adaptive=False)
    blocks = KVCacheConfig(BLOCK, BLOCKS, BLOCKS, TINY.sliding_window)
    scheduler = Scheduler(SchedulerConfig(SEQUENCES, 64, 64), KVCacheManager(blocks, True))
    return LLMEngine(scheduler, runner, vocab_size=97)


def answers_of(e: LLMEngine, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """The later prompts come while the first one decodes."""
    said, waiting = {}, list(enumerate(prompts))
    while waiting or e.has_unfinished_requests:
        if waiting:
            i, prompt = waiting.pop(0)
            e.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        for output in e.step():
            said[int(output.request_id)] = output.outputs[0].token_ids
    return [said[i] for i in range(len(prompts))]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_decodes_and_verified_drafts_through_graphs_give_the_tokens_of_eager_steps(backend: str) -> None:
    rng = random.Random(0)
    lengths = (21, 5, 14) if backend == "reference" else (5, 3)  # the interpreter's time is its programs
    prompts = [[rng.randrange(97) for _ in range(n)] for n in lengths]
    tokens = 9 if backend == "reference" else 4
    expected = answers_of(engine(ReferenceOps(), graphs=False), prompts, tokens)
    for drafts in (None, expected) if backend == "reference" else (expected,):
        ops = ReferenceOps() if backend == "reference" else TritonOps(device="cpu", dtype=torch.float32)
        e = engine(ops, graphs=True, answers=drafts)
        assert answers_of(e, prompts, tokens) == expected
        graphs, stats = e.runner.graphs, e.runner.stats
        assert stats.eager == 0 and stats.graphs == stats.steps and not graphs.misses
        if drafts:
            assert e.runner.speculator.stats.num_accepted_tokens and stats.steps < tokens + len(prompts)


@pytest.mark.parametrize("backend, verifies", [("reference", True), ("triton", True), ("triton", False)])
def test_verifications_that_follow_each_other_through_graphs_give_the_tokens_of_eager_steps(backend: str, verifies: bool) -> None:
    """Graphs that were not captured for drafts have none that knows such a step's rows: it runs eagerly."""
    rng = random.Random(0)
    lengths, tokens = ((21, 5, 14), 16) if backend == "reference" else ((5, 3), 7)
    prompts = [[rng.randrange(97) for _ in range(n)] for n in lengths]
    expected = answers_of(engine(ReferenceOps(), graphs=False), prompts, tokens)
    ops = ReferenceOps() if backend == "reference" else TritonOps(device="cpu", dtype=torch.float32)
    e = engine(ops, graphs=True, verifies=verifies)
    e.depth = 1
    proposer = AssistantProposer(Bigrams(expected), e.runner.pool, e.runner.inputs)
    e.runner.speculator = Speculator(proposer, DRAFTS, e.runner.inputs, adaptive=False)
    follows, execute = [], e.runner.execute
    e.runner.execute = lambda out: follows.append([part.follows for part in out.scheduled]) or execute(out)
    assert answers_of(e, prompts, tokens) == expected
    stats = e.runner.stats
    assert e.runner.speculator.stats.num_accepted_tokens and sum(map(any, follows)) >= 2
    assert stats.eager == 0 if verifies else stats.eager > 0


def test_drafts_are_verified_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose rows are of one sequence stores all K/V before any row attends; without drafts there is none to spare for it."""
    monkeypatch.setattr("lastrow.kernels.triton_ops.MAX_DECODE_ROWS", 4)
    for verifies in (False, True):
        e = engine(TritonOps(device="cpu", dtype=torch.float32), graphs=False)
        graphs = CUDAGraphs(
            e.runner.model, e.runner.pool, e.runner.inputs, GraphBuckets((64,), (3, 5), (64,)), verifies, capture=lambda forward: lambda: ()
        )
        graphs.warm_up()
        assert set(graphs._every_row) == ({(3, 64), (5, 64)} if verifies else {(5, 64)})
        # many rows take three launches a layer in any case, and one graph serves decodes and drafts
        assert graphs._every_row[5, 64] is graphs._decode[5, 64]


def test_forks_copy_their_blocks_inside_a_graph() -> None:
    """Three completions of one prompt: two forks share its blocks and copy the last, partial one."""
    said = []
    for graphs in (False, True):
        e = engine(ReferenceOps(), graphs)
        for i, length in enumerate((21, 5)):
            params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=5, ignore_eos=True)
            e.add_request(str(i), [(5 * i + 3 * k) % 97 for k in range(length)], params)
        said.append({})
        while e.has_unfinished_requests:
            said[-1] |= {output.request_id: [o.token_ids for o in output.outputs] for output in e.step()}
        if graphs:
            assert e.runner.stats.eager == 0 and not e.runner.graphs.misses and e.runner.model.ops.counts["copy_tokens"] > 2
    assert said[0] == said[1] and len({tuple(ids) for ids in said[0]["0"]}) > 1
