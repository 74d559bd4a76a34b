"""What decides about drafts, without a model: which stand, how many to ask for, what an n-gram finds."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastrow.config import EngineConfig, SpeculativeConfig
from lastrow.core.stats import SpecDecodeStats
from lastrow.engine.proposers import NgramIndex
from lastrow.engine.sampler import draw
from lastrow.engine.sampling_state import uniforms
from lastrow.engine.spec_decode import FIRST_PAUSE, LONGEST_PAUSE, DraftLength, accept, best_length, cost_of_draft, expected_tokens
from lastrow.models.config import ConfigError

COST = 0.1
VOCAB, SAMPLES = 4, 8_000
CHI_SQUARE_999 = {15: 37.70, 2: 13.82, 1: 10.83}
"""99.9 % quantiles of the chi-square distribution by degrees of freedom (Abramowitz and Stegun, table 26.8)."""


def test_drafts_stand_up_to_the_first_that_the_target_did_not_sample() -> None:
    assert accept([5, 6, 7], [5, 6]) == [5, 6, 7]  # all, and one more
    assert accept([5, 9, 7], [5, 6]) == [5, 9]  # the second is replaced by what was sampled there
    assert accept([9, 6, 7], [5, 6]) == [9]
    assert accept([9], []) == [9]


# ------------------------------------------------------------------------------------------------- the distribution
def context_logits() -> torch.Tensor:
    """[VOCAB + 1, VOCAB]: logits of the first token, and of the second behind each first one."""
    return torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(3))


def sample(logits: torch.Tensor, numbers: np.ndarray, top_k: int = 0, temperature: float = 0.8) -> np.ndarray:
    n = len(numbers)
    shape = np.full(n, temperature, np.float32), np.full(n, top_k), np.ones(n), np.zeros(n, np.float32)
    return draw(logits, *shape, numbers).numpy()


def two_tokens(drafts: np.ndarray, rule=accept, top_k: int = 0) -> np.ndarray:
    """First two output tokens [SAMPLES, 2] of one step with one draft each, plus a plain step where the draft fell."""
    logits, seeds = context_logits(), np.arange(SAMPLES).astype(np.uint64)
    first = sample(logits[torch.zeros(SAMPLES, dtype=torch.long)], uniforms(seeds, np.zeros(SAMPLES)), top_k)
    second_number = uniforms(seeds, np.ones(SAMPLES))
    behind_draft = sample(logits[torch.from_numpy(drafts) + 1], second_number, top_k)
    tokens = [rule([int(a), int(b)], [int(d)]) for a, b, d in zip(first, behind_draft, drafts, strict=True)]
    again = sample(logits[torch.tensor([t[0] for t in tokens]) + 1], second_number, top_k)
    return np.array([t if len(t) == 2 else [t[0], int(b)] for t, b in zip(tokens, again, strict=True)])


def chi_square(tokens: np.ndarray, top_k: int = 0) -> float:
    """Of the 16 pairs against p(first) p(second | first)."""
    scaled = context_logits() / 0.8
    if top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k, -1).values[:, -1:], float("-inf"))
    p = scaled.double().softmax(-1)
    expected = (p[0][:, None] * p[1:]).flatten().numpy() * SAMPLES
    seen = np.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2)
    assert (seen[expected == 0] == 0).all()
    some = expected > 0
    return float(((seen[some] - expected[some]) ** 2 / expected[some]).sum())


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("drafter", ["always 0", "always 3", "any"])
def test_sampled_pairs_follow_the_target_whatever_is_drafted(drafter: str, top_k: int) -> None:
    drafts = np.random.default_rng(1).integers(0, VOCAB, SAMPLES) if drafter == "any" else np.full(SAMPLES, int(drafter[-1]))
    tokens = two_tokens(drafts, top_k=top_k)
    assert chi_square(tokens, top_k) < CHI_SQUARE_999[15]
    # and the same seed gives the same tokens as a run without drafts
    plain = two_tokens(np.full(SAMPLES, 1), rule=lambda sampled, drafts: sampled[:1], top_k=top_k)
    assert (tokens == plain).all()


def test_the_chi_square_sees_a_rule_that_keeps_every_draft() -> None:
    wrong = two_tokens(np.full(SAMPLES, 3), rule=lambda sampled, drafts: [*drafts, sampled[1]])
    assert chi_square(wrong) > 100 * CHI_SQUARE_999[15]


def test_it_is_the_rejection_rule_for_a_point_mass() -> None:
    """A draft x stands with probability p(x); in its place comes p without x, renormalised (Leviathan et al. 2023, section 2.3)."""
    draft, p = 2, (context_logits()[0] / 0.8).double().softmax(-1).numpy()
    first = two_tokens(np.full(SAMPLES, draft))[:, 0]
    stood = int((first == draft).sum())
    expected = np.array([p[draft], 1 - p[draft]]) * SAMPLES
    assert float(((np.array([stood, SAMPLES - stood]) - expected) ** 2 / expected).sum()) < CHI_SQUARE_999[1]
    others = [t for t in range(VOCAB) if t != draft]
    seen = np.array([(first == t).sum() for t in others])
    residual = p[others] / p[others].sum() * (SAMPLES - stood)
    assert float(((seen - residual) ** 2 / residual).sum()) < CHI_SQUARE_999[2]


# ------------------------------------------------------------------------------------------------- how many drafts
def test_expected_tokens_is_what_happens_on_average() -> None:
    rng, runs = random.Random(0), 40_000
    for rate, k in ((0.3, 2), (0.8, 4), (1.0, 3), (0.0, 5)):
        total = 0
        for _ in range(runs):
            stood = 0
            while stood < k and rng.random() < rate:
                stood += 1
            total += stood + 1
        assert total / runs == pytest.approx(expected_tokens(rate, k), abs=0.03)  # five standard errors of at most 1.2 / 200


def test_best_length_grows_with_acceptance_and_is_zero_where_drafts_cost_more_than_they_bring() -> None:
    lengths = [best_length(rate / 20, 0.1, 8) for rate in range(21)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] == 8
    assert best_length(0.09, 0.1, 4) == 0 and best_length(0.11, 0.1, 4) == 1  # one draft pays when its rate exceeds its cost


def test_a_full_batch_makes_drafts_dear() -> None:
    """Alone, a draft costs the proposer's time; in a batch that is bound by arithmetic, it costs what every row costs."""
    costs = [cost_of_draft(0.1, n) for n in (1, 16, 64, 256, 100_000)]
    assert costs == sorted(costs) and costs[0] == pytest.approx(0.11, abs=0.01) and costs[-1] == 1.0
    assert [best_length(0.6, cost, 4) for cost in costs] == sorted((best_length(0.6, cost, 4) for cost in costs), reverse=True)
    assert best_length(0.6, costs[0], 4) >= 2 and best_length(0.6, costs[-1], 4) == 0


def test_a_request_stops_drafting_where_it_does_not_pay_and_tries_again() -> None:
    length = DraftLength(4, prior=0.6)
    asked = []
    for _ in range(400):  # nothing ever stands: every step brings one token
        asked.append(length.wanted(COST))
        length.observe(asked[-1], 0, 1, COST)
    tries = [i for i, k in enumerate(asked) if k]
    pauses = [b - a - 1 for a, b in pairwise(tries) if b > a + 1]
    assert asked[0] == 3 and pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert length.num_switched_off == len(pauses) + 1 and sum(asked) < 40
    waited = 0
    while not length.wanted(COST):
        length.observe(0, 0, 1, COST)
        waited += 1
    assert waited <= LONGEST_PAUSE
    for _ in range(60):  # now everything stands
        length.observe(length.wanted(COST), length.wanted(COST), length.wanted(COST) + 1, COST)
    assert length.wanted(COST) == 4


@pytest.mark.parametrize("late", [1, 2])
def test_drafts_that_were_on_their_way_when_a_pause_began_begin_no_other(late: int) -> None:
    """The next number is asked for before a step's result is seen, one step before it, or two where drafts follow drafts."""
    length = DraftLength(4, prior=0.6)
    asked = [length.wanted(COST) for _ in range(late)]
    for step in range(300):
        asked.append(length.wanted(COST))
        length.observe(asked[step], 0, 1, COST)
    tries = [i for i, k in enumerate(asked) if k]
    pauses = [b - a - 1 for a, b in pairwise(tries) if b > a + 1]
    assert pauses[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert length.num_switched_off == len(pauses) + 1


def test_without_adaptation_the_number_stays() -> None:
    length = DraftLength(4, prior=0.6, adaptive=False)
    for _ in range(50):
        length.observe(4, 0, 1, COST)
    assert length.wanted(COST) == 4 and length.num_switched_off == 0


def test_stats_count_by_position() -> None:
    stats = SpecDecodeStats()
    for drafted, stood, emitted in ((4, 4, 5), (4, 0, 1), (2, 1, 2), (4, 2, 2)):  # the last one ended at a stop token
        stats.record(drafted, stood, emitted)
    assert stats.num_draft_tokens_per_pos == [4, 4, 3, 3] and stats.num_accepted_tokens_per_pos == [3, 2, 1, 1]
    assert stats.mean_accepted_length == 10 / 4 and stats.acceptance_rates == [3 / 4, 2 / 4, 1 / 3, 1 / 3]


# ------------------------------------------------------------------------------------------------- n-grams
def look_up(tokens: list[int], shortest: int, longest: int, length: int) -> list[int]:
    """The rule, spelled out: the longest run at the end that came before, its latest place, and the text as it goes on from there."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if len(tokens) > size and tokens[start : start + size] == tokens[-size:]:
                text, at = list(tokens), start + size
                for _ in range(length):
                    text.append(text[at])
                    at += 1
                return text[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(0, 2), st.integers(1, 6), st.data())
def test_ngram_index_finds_what_the_rule_says(tokens: list[int], shortest: int, more: int, length: int, data: st.DataObject) -> None:
    index, have = NgramIndex(shortest, shortest + more), 0
    while have < len(tokens):
        step = data.draw(st.integers(1, len(tokens) - have))
        index.extend(tokens[have : have + step])
        have += step
        assert index.propose(length) == look_up(tokens[:have], shortest, shortest + more, length)


# ------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"method": "eagle"}', "method is 'eagle': 'assistant' or 'ngram' is needed"),
        ('{"method": "assistant"}', "model is missing"),
        ('{"method": "ngram", "model": "x"}', "method 'ngram' has no model"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens is 0: 1 to 16"),
        ('{"method": "ngram", "tokens": 3}', "tokens is not known: one of method, model"),
        ('{"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 5}', "prompt_lookup_min is 6: at most prompt_lookup_max=5"),
        ('{"method": "ngram", "prompt_lookup_max": 0}', "prompt_lookup_max is 0: a positive integer"),
        ('{"model": "x", "prompt_lookup_max": 3}', "prompt_lookup_max is 3: only method 'ngram' looks anything up"),
        ('{"method": "ngram", "simulated_acceptance": 0.5}', "dummy or simulated drafts are for load_format=dummy"),
        ('{"model": "dummy"}', "dummy or simulated drafts are for load_format=dummy"),
        ('{"model": "x", "simulated_acceptance": 2}', "simulated_acceptance is 2: a probability"),
        ('{"model": "x", "simulated_acceptance": "half"}', "simulated_acceptance is 'half': a probability"),
        ('{"method": "ngram", "adaptive": "no"}', "adaptive is 'no': true or false"),
        ('{"method": []}', "method is []: 'assistant' or 'ngram' is needed"),
        ('{"model": 7}', "model is 7: a folder, a hub id"),
        ("{}", "is empty"),
        ("4", "is a int"),
        ("{", "is no JSON"),
    ],
)  # fmt: skip
def test_speculative_config_refuses_in_one_line(given: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(speculative_config=given)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "lookup"),
    [({}, (2, 5)), ({"prompt_lookup_max": 1}, (1, 1)), ({"prompt_lookup_max": 3}, (2, 3)), ({"prompt_lookup_min": 6}, (6, 6)),
     ({"prompt_lookup_min": 3}, (3, 5)), ({"prompt_lookup_min": 4, "prompt_lookup_max": 9}, (4, 9))],
)  # fmt: skip
def test_a_missing_end_of_the_lookup_moves_with_the_given_one(given: dict[str, int], lookup: tuple[int, int]) -> None:
    assert SpeculativeConfig(method="ngram", **given).prompt_lookup == lookup


def test_speculative_config_takes_vllms_words() -> None:
    config = EngineConfig(speculative_config={"model": "folder", "num_speculative_tokens": 3}).speculative
    assert config == SpeculativeConfig(method="assistant", model="folder", num_speculative_tokens=3)
    assert SpeculativeConfig.of('{"method": "mtp", "model": "folder"}').method == "assistant"
    assert SpeculativeConfig.of({"method": "ngram"}).num_speculative_tokens is None
