"""One row by numpy's layers (models/cpu_row.py) against torch's, fp32.

Tolerance. Both sum in fp32 in another order: over the shapes and steps below logits (up to 10) differ by at most 4.4e-5 and
stored K/V (up to 4) by 1.8e-5, measured. 4e-4 and 1.5e-4 leave a factor of eight."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lastrow.harness.direct import Chunk, DirectRunner
from lastrow.harness.reference import RANDOM_SHAPES, model_of, random_reference
from lastrow.kernels import matmul
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kernels.fixed_order_ops import FixedOrderReferenceOps
from lastrow.models.cpu_row import CPURow, Heads
from lastrow.models.gemma4 import Gemma4Model

pytest.importorskip("transformers")
LOGITS, STORED = 4e-4, 1.5e-4
WITH_EXPERTS = "26B-like, experts"
SHAPES = [name for name in RANDOM_SHAPES if name != WITH_EXPERTS]


def runners(name: str, **options: Any) -> tuple[DirectRunner, DirectRunner]:
    """The same model twice: one row as numpy computes it, and as the general path does."""
    reference, config = random_reference(RANDOM_SHAPES[name], seed=5)
    by_row, general = (model_of(reference, config) for _ in "ab")
    assert by_row.cpu_row is not None
    general.cpu_row = None
    first, second = (DirectRunner(model, 40, sequences=2, block_size=4, **options) for model in (by_row, general))
    return first, second


@pytest.mark.parametrize("amd", [True, False], ids=["amd", "intel"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_prompts_last_row_and_decoding(name: str, amd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences take turns, so that nothing may stay of the one before; the second begins with its first token alone."""
    monkeypatch.setattr(matmul, "is_amd", lambda: amd)
    got, expected = runners(name)
    ids = torch.randint(3, got.model.config.vocab_size, (2, 40)).tolist()
    steps = [Chunk(ids[0][:13], 0, [12], 0), Chunk(ids[1][:1], 0, [0], 1)]
    for n in range(20):
        steps += [Chunk([ids[0][13 + n]], 13 + n, [0], 0), Chunk([ids[1][1 + n]], 1 + n, [0], 1)]
    for step in steps:
        torch.testing.assert_close(got.logits([step]), expected.logits([step]), atol=LOGITS, rtol=0)
    for owner in got.model.config.owners:
        for a, b in zip(got.pool.reader(owner).tensors(), expected.pool.reader(owner).tensors(), strict=True):
            torch.testing.assert_close(a, b, atol=STORED, rtol=0)


@pytest.mark.parametrize("name", SHAPES)
def test_int8_keys_and_values(name: str) -> None:
    """What both read is the same; of what they store a value may fall on the other side of a rounding: one quantum, seldom."""
    got, expected = runners(name, kv_cache_dtype="int8_per_token_head")
    ids = torch.randint(3, got.model.config.vocab_size, (14,)).tolist()
    torch.testing.assert_close(got.all_logits(ids[:13], [12]), expected.all_logits(ids[:13], [12]), atol=LOGITS, rtol=0)
    for runner in (got, expected):
        runner.forward([Chunk(ids[13:], 13, [0])])
    for owner in got.model.config.owners:
        a, b = got.pool.reader(owner), expected.pool.reader(owner)
        for x, y in ((a.k, b.k), (a.v, b.v)):
            difference = (x.int() - y.int()).abs()
            assert int(difference.max()) <= 1 and float((difference > 0).float().mean()) < 0.01
        for scale, of in ((a.k_scale, b.k_scale), (a.v_scale, b.v_scale)):
            torch.testing.assert_close(scale, of, atol=STORED / 127, rtol=0)


def test_a_result_stays_what_it_was_in_the_next_step() -> None:
    got, _ = runners(SHAPES[0])
    first = got.forward([Chunk([5], 0, [0])])
    assert first is not None
    kept = first.clone()
    got.forward([Chunk([6], 1, [0])])
    assert torch.equal(first, kept)


def test_the_same_batch_again_reads_the_pool_again() -> None:
    results = []
    for runner in runners(SHAPES[0]):
        runner.forward([Chunk(range(3, 9), 0)])
        batch = runner.batch([Chunk([9], 6, [0])])
        runner.model.forward(batch, runner.pool)
        runner.forward([Chunk(range(23, 29), 0)])
        results.append(runner.model.forward(batch, runner.pool))
    torch.testing.assert_close(*results, atol=LOGITS, rtol=0)


def test_large_scores_and_empty_heads_stay_finite() -> None:
    got, expected = runners(SHAPES[0])
    for layer in got.model.weights.layers:  # which both models share
        layer.q_norm *= 100  # scores past 88, whose exponential fp32 does not hold
    ids = list(range(3, 16))
    scores = got.all_logits(ids, [12])
    torch.testing.assert_close(scores, expected.all_logits(ids, [12]), atol=LOGITS, rtol=0)
    assert bool(torch.isfinite(scores).all())
    assert not Heads(np.zeros(8, np.float32), 4).norm(None, 1e-6).any()


def test_experts_bf16_and_fixed_orders_take_the_general_path() -> None:
    reference, config = random_reference(RANDOM_SHAPES[WITH_EXPERTS], seed=5)
    assert model_of(reference, config).cpu_row is None
    reference, config = random_reference(RANDOM_SHAPES[SHAPES[0]], seed=5)
    weights = model_of(reference, config).weights
    assert Gemma4Model(config, weights, FixedOrderReferenceOps(), 40).cpu_row is None
    assert Gemma4Model(config, weights, ReferenceOps(), 40).cpu_row is not None
    reference = reference.bfloat16()
    assert model_of(reference, config).cpu_row is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copied_model_gives_the_same(duplicate: Any) -> None:
    got, general = runners(SHAPES[0])
    twin = duplicate(got.model)
    assert twin.cpu_row is not None and twin.cpu_row.model is twin and duplicate(general.model).cpu_row is None
    other = DirectRunner(twin, 40, sequences=2, block_size=4)
    for step in (Chunk([5], 0, [0]), Chunk([6], 1, [0])):
        assert torch.equal(got.logits([step]), other.logits([step]))


def test_infinite_weights_give_what_torch_gives_without_a_warning() -> None:
    got, general = runners(SHAPES[0])
    got.model.weights.layers[1].o[0, 0] = float("inf")  # which both models share
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [runner.logits([Chunk([5], 0, [0])]) for runner in (got, general)]
    assert not bool(torch.isfinite(results[0]).any())
    torch.testing.assert_close(*results, atol=LOGITS, rtol=0, equal_nan=True)


def test_one_row_that_copies_a_forks_block_takes_the_general_path() -> None:
    """max_num_seqs=1 with n=2 makes such steps: the copy is part of the forward, behind each owner's store."""
    for runner in runners(SHAPES[0]):
        runner.forward([Chunk(range(3, 9), 0)])
        batch = runner.batch([Chunk([9], 6, [0])])
        pairs = [(int(table[0, 1]), int(table[1, 0])) for table in batch.rows.block_tables]  # position 6 is the block's third
        full, sliding = (torch.tensor([[source, target, 0, 3]], dtype=torch.int32) for source, target in pairs)
        runner.model.forward(replace(batch, copies=(full, sliding)), runner.pool)
        for owner in runner.model.config.owners:
            source, target = pairs[runner.model.group(owner)]
            for t in runner.pool.reader(owner).tensors():
                assert bool(t[source, 2].any()) and torch.equal(t[target, :3], t[source, :3])


def test_which_steps_take_which_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way out of use would give the same numbers."""
    taken: list[range] = []
    run = CPURow.run_layers
    monkeypatch.setattr(CPURow, "run_layers", lambda self, layers, *rest: taken.append(layers) or run(self, layers, *rest))
    got, _ = runners(SHAPES[0])
    cut, layers = got.model.config.cut, got.model.config.num_hidden_layers
    for chunks, expected in (
        ([Chunk(range(3, 9), 0)], []),
        ([Chunk(range(9, 12), 6, [2])], [range(cut, layers)]),
        ([Chunk([12], 9, [0])], [range(layers)]),
        ([Chunk([13], 10)], []),
        ([Chunk([14, 15], 11, [0, 1])], []),
        ([Chunk([16], 13, [0]), Chunk([5], 0, [0], 1)], []),
        ([Chunk([17], 14), Chunk([6], 1, [0], 1)], [range(cut, layers)]),
    ):
        taken.clear()
        got.forward(chunks)
        assert taken == expected, chunks


STEPS = """
import time
import torch
from lastrow import LLM, SamplingParams
torch.set_num_threads(2)
llm = LLM("x", shape="e2b-eighth", load_format="dummy", dtype="float32", device="cpu", max_model_len=2048, max_num_seqs=1,
          kv_cache_memory_bytes=32_000_000)
for tokens in (100, 1500):
    times = []
    for _ in llm.stream({"prompt_token_ids": list(range(3, 3 + tokens))}, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)):
        times.append(time.perf_counter())
    print(sorted(b - a for a, b in zip(times[1:], times[2:]))[6])
"""


def test_a_row_that_sees_many_keys_does_not_wait_for_another_librarys_threads() -> None:
    """A product of 1,500 keys by numpy's BLAS made a step of 10 ms one of 70 and more: its threads and torch's took turns of 8 ms."""
    # one thread has none to wait for
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    made = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, env=environment)
    few, many = map(float, made.stdout.split())
    assert many < 4 * few, made.stdout
