"""The model against transformers 5.24 in fp32 on random weights of every shape, and against itself on every path.

Tolerance. Random nets of ten layers grow rounding: over 7 shapes x 3 seeds x {eager, sdpa} at 53 tokens the largest logit difference
was 2.4e-4 (mean 4e-6, logits up to 10), about what transformers' own eager and sdpa differ by. 1e-3 leaves a factor of four; the
smallest of the wrong models below moves logits by more than 0.05."""

from __future__ import annotations

import random

import pytest
import torch

from lastrow.harness.direct import Chunk, DirectRunner
from lastrow.harness.reference import RANDOM_SHAPES, model_of, random_reference, reference_logits, state_from_weights, weights_from_state
from lastrow.kernels.dispatch import ReferenceOps

pytest.importorskip("transformers")
TOLERANCE = 1e-3
WINDOW, BLOCK = 6, 4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", RANDOM_SHAPES)
def test_logits_are_those_of_transformers(name: str, attention: str) -> None:
    for seed in (1, 2):
        reference, config = random_reference(RANDOM_SHAPES[name], seed, attention)
        runner = DirectRunner(model_of(reference, config), 160, block_size=BLOCK)
        for length in (1, 5, 6, 7, 53, 150):  # around the windows of 6 and 7, one odd length, one of several query chunks
            ids = torch.randint(3, config.vocab_size, (length,)).tolist()
            torch.testing.assert_close(runner.all_logits(ids), reference_logits(reference, ids), atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module", params=list(RANDOM_SHAPES))
def whole(request: pytest.FixtureRequest) -> tuple[DirectRunner, list[list[int]], list[torch.Tensor]]:
    """A runner with room for four sequences, four prompts, and the logits of all their rows computed alone and whole."""
    reference, config = random_reference(RANDOM_SHAPES[request.param], seed=3)
    model = model_of(reference, config)
    rng = random.Random(request.param)
    prompts = [[rng.randrange(3, config.vocab_size) for _ in range(n)] for n in (23, 6, 4, 1)]
    alone = [DirectRunner(model, 24, block_size=BLOCK).all_logits(ids) for ids in prompts]
    return DirectRunner(model, 24, sequences=4, block_size=BLOCK, seed=1), prompts, alone


Whole = tuple[DirectRunner, list[list[int]], list[torch.Tensor]]


def test_every_subset_of_rows_gives_what_all_rows_give(whole: Whole) -> None:
    runner, prompts, alone = whole
    ids, expected = prompts[0], alone[0]
    rng = random.Random(0)
    subsets = [[22], [0], [0, 22], list(range(23)), list(range(0, 23, 2)), [5, 6, 7]]
    subsets += [sorted(rng.sample(range(23), rng.randint(1, 23))) for _ in range(10)]
    for rows in subsets:
        torch.testing.assert_close(runner.all_logits(ids, rows), expected[rows], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("first", [1, BLOCK, WINDOW, WINDOW + 1, 13], ids=["one", "block", "window", "window+1", "13"])
def test_a_prefix_without_wanted_rows_then_the_rest(whole: Whole, first: int) -> None:
    runner, prompts, alone = whole
    ids = prompts[0]
    assert runner.forward([Chunk(ids[:first])]) is None
    rest = runner.logits([Chunk(ids[first:], first, range(23 - first))])
    torch.testing.assert_close(rest, alone[0][first:], atol=TOLERANCE, rtol=0)


def test_token_by_token_and_in_random_chunks(whole: Whole) -> None:
    runner, prompts, alone = whole
    ids = prompts[0]
    rng = random.Random(1)
    for sizes in ([1] * 23, [rng.randint(1, 6) for _ in range(23)]):
        start = 0
        for size in sizes:
            part = ids[start : start + size]
            if part:
                got = runner.logits([Chunk(part, start, [len(part) - 1])])
                torch.testing.assert_close(got[0], alone[0][start + len(part) - 1], atol=TOLERANCE, rtol=0)
            start += size


def test_a_batch_of_whole_prompts_chunks_and_decodes_gives_what_each_gives_alone(whole: Whole) -> None:
    """One forward mixes a decode, a middle chunk that wants no row, a last chunk and a whole prompt; sequences keep their own blocks."""
    runner, prompts, alone = whole
    runner.forward([Chunk(prompts[2][:3], sequence=2), Chunk(prompts[0][:9], sequence=0)])
    got = runner.logits(
        [
            Chunk(prompts[2][3:], 3, [0], sequence=2),
            Chunk(prompts[0][9:15], 9, [], sequence=0),
            Chunk(prompts[1], 0, [2, 5], sequence=1),
            Chunk(prompts[3], 0, [0], sequence=3),
        ]
    )
    expected = torch.stack([alone[2][3], alone[1][2], alone[1][5], alone[3][0]])
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
    last = runner.logits([Chunk(prompts[0][15:], 15, [7], sequence=0)])
    torch.testing.assert_close(last[0], alone[0][22], atol=TOLERANCE, rtol=0)


def test_a_negative_slot_writes_nothing_and_other_rows_are_untouched(whole: Whole) -> None:
    runner, prompts, alone = whole
    ids = prompts[0]
    runner.forward([Chunk(ids[:20])])
    batch = runner.batch([Chunk(ids[:2], 0)])
    for slots in batch.slots:
        slots.fill_(-1)
    runner.model.forward(batch, runner.pool)
    got = runner.logits([Chunk(ids[20:], 20, [2])])
    torch.testing.assert_close(got[0], alone[0][22], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [n for n in RANDOM_SHAPES if "experts" not in n])
def test_weights_survive_the_way_to_transformers_names_and_back(name: str) -> None:
    reference, config = random_reference(RANDOM_SHAPES[name])
    ops = ReferenceOps()
    original = reference.state_dict()
    state = state_from_weights(config, weights_from_state(config, original, ops.pack_gate_up))
    assert set(original) - set(state) == {"lm_head.weight"}
    assert all(torch.equal(tensor, original[key]) for key, tensor in state.items())
