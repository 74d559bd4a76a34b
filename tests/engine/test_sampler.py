"""The sampler alone: against numpy, by its statistics, and independent of what shares the batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine import sampling_oracle as oracle
from lastrow.core.request import Request
from lastrow.core.sampling_params import SamplingParams
from lastrow.engine import sampler as sampler_module
from lastrow.engine.sampler import Sampler, draw, inverse_cdf
from lastrow.engine.sampling_state import TokenCounts, bad_word_ids, uniforms

GRID = [
    {},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.8},
    {"top_k": 9, "min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.05, "temperature": 0.6},
    {"top_k": 12, "top_p": 0.5, "min_p": 0.02, "temperature": 1.7},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 1e-9},
]


def arrays(params: list[SamplingParams]) -> tuple[np.ndarray, ...]:
    return (
        np.array([p.temperature for p in params], np.float32),
        np.array([p.top_k for p in params], np.int64),
        np.array([p.top_p for p in params]),
        np.array([p.min_p for p in params], np.float32),
    )


def draw_many(logits: torch.Tensor, params: list[SamplingParams], numbers: np.ndarray) -> torch.Tensor:
    temperature, top_k, top_p, min_p = arrays(params)
    return draw(logits, temperature, np.minimum(top_k, logits.shape[1]), top_p, min_p, numbers)


@pytest.mark.parametrize("size", [37, 512, 1300])
def test_draws_equal_numpy_for_mixed_parameters(size: int) -> None:
    rng = np.random.default_rng(size)
    params = [SamplingParams(**GRID[i % len(GRID)]) for i in range(88)]
    logits = (3 * rng.standard_normal((88, size))).astype(np.float32)
    numbers = rng.random(88)
    got = draw_many(torch.from_numpy(logits), params, numbers).tolist()
    for row in range(88):
        ends = np.cumsum(oracle.probabilities(logits[row].astype(np.float64), params[row]))
        assert got[row] == np.searchsorted(ends, numbers[row] * ends[-1], side="right"), (row, params[row])


@pytest.mark.parametrize("options", GRID[:8], ids=str)
def test_draws_follow_the_distribution(options: dict) -> None:
    """Chi-square over 20,000 draws with the seeds 0, 1, 2, ...: p > 1e-4 (fixed seeds, so it cannot flicker)."""
    params = SamplingParams(**options)
    logits = np.random.default_rng(1).standard_normal(24).astype(np.float32) * 2
    count = 20_000
    numbers = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))
    got = draw_many(torch.from_numpy(np.tile(logits, (count, 1))), [params] * count, numbers).numpy()
    expected = oracle.probabilities(logits.astype(np.float64), params) * count
    seen = np.bincount(got, minlength=24)
    assert (seen[expected == 0] == 0).all()
    kept = expected > 0
    chi2 = float(((seen[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    # Wilson-Hilferty: chi2 is about k (1 - 2/9k + z sqrt(2/9k))^3; z = 3.72 leaves 1e-4
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi2 < limit


def test_uniforms_are_uniform_and_uncorrelated_along_seeds_and_indices() -> None:
    seeds, index = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200), indexing="ij")
    numbers = uniforms(seeds.ravel(), index.ravel()).reshape(200, 200)
    assert numbers.min() >= 0 and numbers.max() < 1
    # 40,000 numbers: a mean off by 4 sigma is 4 * 0.2887 / 200
    assert abs(numbers.mean() - 0.5) < 4 * 0.2887 / 200
    for a, b in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / 199  # 4 sigma of 39,800 pairs
    assert uniforms(np.array([2**63 + 5], np.uint64), np.array([7]))[0] == oracle.uniform(2**63 + 5, 7)


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(3)
    params = [SamplingParams(**GRID[i % len(GRID)]) for i in range(66)]
    # few distinct values, as bf16 logits have: ties at every border
    logits = torch.from_numpy(np.round(rng.standard_normal((66, 700)) * 3, 1).astype(np.float32))
    numbers = rng.random(66)
    together = draw_many(logits, params, numbers).tolist()
    order = rng.permutation(66)
    shuffled = draw_many(logits[order], [params[i] for i in order], numbers[order]).tolist()
    assert [together[i] for i in order] == shuffled
    alone = [int(draw_many(logits[i : i + 1], [params[i]], numbers[i : i + 1])) for i in range(66)]
    assert together == alone


def test_ties_at_the_border_are_all_kept_and_greedy_takes_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0, -5.0]])
    seen = set()
    for i in range(200):
        seen.add(int(draw_many(logits, [SamplingParams(top_k=3)], uniforms(np.array([i], np.uint64), np.array([0])))))
    assert seen == {1, 2, 3, 4, 5}
    sampler = Sampler(2, 7, "cpu")
    sampler.admit(0, Request("a", [1], SamplingParams(temperature=0)))
    assert sampler.sample(logits, np.array([0]), np.array([0]))[0].tolist() == [1]


def test_inverse_cdf_edges() -> None:
    weight = torch.zeros(3, 1000, dtype=torch.int64)
    weight[0, 999] = 1
    weight[1, [0, 512, 700]] = 5
    weight[2, [3, 4]] = torch.tensor([1, 2**58])
    numbers = torch.tensor([0.999999999, 1 / 3, 0.0], dtype=torch.float64)
    assert inverse_cdf(weight, numbers).tolist() == [999, 512, 3]
    top = torch.full((3,), 1 - 2.0**-53, dtype=torch.float64)
    assert inverse_cdf(weight, top).tolist() == [999, 700, 4]


def test_large_batches_are_drawn_in_chunks_with_their_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    sampler = Sampler(64, 50, "cpu")
    options = [{"temperature": 0.0}, *GRID]
    for slot in range(64):
        sampler.admit(slot, Request(str(slot), [1], SamplingParams(seed=slot, **options[slot % len(options)])))
    logits = torch.from_numpy((2 * rng.standard_normal((64, 50))).astype(np.float32))
    slots = rng.permutation(64)
    whole = sampler.sample(logits.clone(), slots, np.arange(64))[0]
    monkeypatch.setattr(sampler_module, "MAX_ELEMENTS", 50 * 7)
    assert sampler.sample(logits.clone(), slots, np.arange(64))[0].tolist() == whole.tolist()


def test_penalties_of_logits_of_both_signs_equal_numpy() -> None:
    """Greedy, so that one wrong sign changes tokens: of 200 rows, half are chosen among negative logits only."""
    rng = np.random.default_rng(5)
    sampler = Sampler(200, 12, "cpu")
    logits = rng.standard_normal((200, 12)).astype(np.float32) - np.where(np.arange(200) % 2, 4, 0)[:, None].astype(np.float32)
    expected = []
    for slot in range(200):
        params = SamplingParams(
            temperature=0, repetition_penalty=rng.uniform(0.5, 2.0), presence_penalty=rng.uniform(-1, 1),
            frequency_penalty=rng.uniform(-1, 1), logit_bias={int(rng.integers(12)): 1.0},
        )  # fmt: skip
        prompt, output = rng.integers(12, size=4).tolist(), rng.integers(12, size=slot % 5).tolist()
        request = Request(str(slot), prompt, params)
        request.output_token_ids += output
        sampler.admit(slot, request)
        expected.append(oracle.next_token(logits[slot], params, prompt, output, []))
    index = np.arange(200) % 5
    assert sampler.sample(torch.from_numpy(logits), np.arange(200), index)[0].tolist() == expected


def test_bad_words_are_tokenised_with_and_without_a_space() -> None:
    table = {"foo": [5], " foo": [6], "ab": [1, 2], " ab": [3, 2], "x": [9], " x": [4, 9]}
    # the spaced form counts only where it changes the first token and not the length (vLLM)
    assert bad_word_ids(["foo", " ab", "x"], table.__getitem__) == [[5], [6], [1, 2], [3, 2], [9]]
    with pytest.raises(ValueError, match="bad_words needs a tokenizer"):
        bad_word_ids(["foo"], None)


class OnlyTheseNext:
    """A grammar that allows the same ids at every place."""

    def __init__(self, *ids: int) -> None:
        self.ids, self.num_tokens = list(ids), 0

    def accept(self, token: int) -> bool:
        self.num_tokens += token in self.ids
        return token in self.ids

    def rollback(self, num_tokens: int) -> None:
        self.num_tokens -= num_tokens

    def fill_mask(self, row: np.ndarray) -> None:
        row.fill(False)
        row[self.ids] = True


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("options", "grammar", "right"),
    [
        ({"allowed_token_ids": [5, 6], "bad_words": ["x"]}, (), {6}),  # "x" is token 5
        ({"allowed_token_ids": [5], "bad_words": ["x"]}, (), {5}),
        ({"allowed_token_ids": [7], "min_tokens": 2}, (), {7}),  # 7 is the stop id
        ({"bad_words": ["x"], "min_tokens": 2}, (5, 7), {5, 7}),
        ({"bad_words": ["x"], "min_tokens": 2}, (5, 7, 8), {8}),
        ({"allowed_token_ids": [5, 6]}, (6, 8), {6}),
        ({"allowed_token_ids": [5, 6], "bad_words": ["x"]}, (5, 8), {5}),
        ({"allowed_token_ids": [5, 6]}, (7, 8), {7, 8}),
        ({"allowed_token_ids": [5, 6], "min_tokens": 2}, (7, 8), {8}),
        ({"bad_words": list("0123456789")}, (), set(range(1, 10))),
    ],
    ids=str,
)
def test_the_weaker_mask_gives_way_where_together_they_leave_nothing(options: dict, grammar: tuple, right: set, temperature: float) -> None:
    """Bad words and min_tokens before allowed_token_ids, these before the grammar. Token 0, which a row without any
    other would give, is the least likely; the rows beside it stay as they are."""
    table = {"x": [5], " x": [5]} | {str(i): [i] for i in range(10)} | {f" {i}": [i] for i in range(10)}
    sampler = Sampler(3, 10, "cpu", encode=table.__getitem__)
    logits = torch.from_numpy(np.random.default_rng(2).standard_normal((3, 10)).astype(np.float32))
    logits[:, 0] = -30.0
    params = SamplingParams(temperature=temperature, **options)
    for seed in range(20):
        beside = SamplingParams(temperature=1.0, seed=seed)
        sampler.admit(0, Request("a", [1], beside))
        sampler.admit(1, Request("m", [1], replace(params, seed=seed), frozenset({7})), OnlyTheseNext(*grammar) if grammar else None)
        sampler.admit(2, Request("b", [1], beside))
        got = sampler.sample(logits.clone(), np.arange(3), np.zeros(3, np.int64))[0].tolist()
        assert got[1] in right
        alone = [int(sampler.sample(logits[i : i + 1].clone(), np.array([i]), np.array([0]))[0]) for i in (0, 2)]
        assert [got[0], got[2]] == alone


def test_token_counts_grow_past_their_first_buffer() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 300, 2000).tolist()
    counts = TokenCounts()
    for end in (1, 2, 70, 71, 900, 2000):
        counts.update(tokens[:end])
        expected = np.bincount(tokens[:end], minlength=300)
        assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {i: n for i, n in enumerate(expected) if n}
