"""Speculative decoding in the engine: the same tokens as without drafts, in every company.

The stub model's logits are a hash of every token a row may see, so one wrong slot, position or rolled-back block changes all that
follows. Its drafter reads the same memory through the same tables and guesses right with a given probability."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.stub_engine import BLOCK, VOCAB, WINDOW, StubModel, check_idle, stub_engine, stub_logits
from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.engine import LLMEngine
from lastrow.engine.proposers import AssistantProposer, NgramProposer
from lastrow.engine.spec_decode import Speculator
from lastrow.kernels.rows import QueryRows

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class StubAssistant:
    """Drafts the target's greedy continuation of what it reads; each draft is replaced by another token with probability 1 - right."""

    def __init__(self, model: StubModel, right: float) -> None:
        self.model, self.right = model, right
        self.rng = random.Random(1)
        self.read: list[list[int]] = []

    def draft(self, token_ids: torch.Tensor, hidden: torch.Tensor, rows: QueryRows, pool: None, num_tokens: int) -> torch.Tensor:
        of = zip(token_ids.tolist(), hidden.numpy(), strict=True)
        return torch.tensor([self._row(t, h, rows, i, num_tokens) for i, (t, h) in enumerate(of)], dtype=torch.int32)

    def _row(self, token: int, hidden: np.ndarray, rows: QueryRows, i: int, num_tokens: int) -> list[int]:
        end, slot = int(rows.positions[i]) + 1, int(rows.seq_index[i])
        assert rows.kv_lens[i] >= end
        at = np.arange(end)
        full, sliding = (
            memory[table[slot].numpy()[at // BLOCK] * BLOCK + at % BLOCK]
            for memory, table in zip(self.model.memory, rows.block_tables, strict=True)
        )
        assert (sliding[-WINDOW:] == full[-WINDOW:]).all(), "the drafter's window holds blocks that were given away"
        assert np.array_equal(hidden, stub_logits(full.tolist())), "not the hidden state that predicted the newest token"
        text = [*full.tolist(), token]
        self.read.append(list(text))
        for _ in range(num_tokens):
            best = int(stub_logits(text).argmax())
            text.append(best if self.rng.random() < self.right else self.rng.randrange(VOCAB))
        return text[-num_tokens:]


def speculating(right: float = 0.7, most: int = 4, adaptive: bool = False, **options) -> tuple[LLMEngine, StubAssistant]:
    engine = stub_engine(**options)
    assistant = StubAssistant(engine.runner.model, right)
    proposer = AssistantProposer(assistant, None, engine.runner.inputs)
    engine.runner.speculator = Speculator(proposer, most, engine.runner.inputs, adaptive)
    return engine, assistant


def run(engine: LLMEngine, requests: list[tuple[list[int], SamplingParams]], abort: dict[int, int] | None = None, rng=None):
    """Outputs by request number. abort: step -> request. Requests arrive a few at a time where rng is given."""
    outputs, waiting, step = {}, list(enumerate(requests)), 0
    while waiting or engine.has_unfinished_requests:
        for _ in range(len(waiting) if rng is None else rng.randint(0, 2)):
            if waiting:
                i, (prompt, params) = waiting.pop(0)
                engine.add_request(f"{i}", prompt, params)
        for output in engine.step():
            outputs[int(output.request_id)] = output.outputs
        if abort and step in abort:
            engine.abort(f"{abort[step]}")
        step += 1
    check_idle(engine)
    return outputs


def tokens(outputs) -> dict[int, list[list[int]]]:
    return {i: [completion.token_ids for completion in completions] for i, completions in outputs.items()}


def test_right_drafts_are_all_kept_and_save_the_steps_they_should() -> None:
    prompt = [3, 4, 5]
    plain = tokens(run(stub_engine(), [(prompt, GREEDY)]))
    engine, _ = speculating(right=1.0, most=3)
    assert tokens(run(engine, [(prompt, GREEDY)])) == plain
    stats = engine.runner.speculator.stats
    # the prompt brings one token, then 4 + 4 of 3 drafts each, and the last three of 2 (one more would pass max_tokens)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 8, 8)
    assert stats.mean_accepted_length == 11 / 3 and stats.num_plain_steps == 1
    assert engine.runner.stats.steps == 4


def test_wrong_drafts_cost_rows_and_nothing_else() -> None:
    prompt = [3, 4, 5]
    plain = tokens(run(stub_engine(), [(prompt, GREEDY)]))
    engine, assistant = speculating(right=0.0)
    assert tokens(run(engine, [(prompt, GREEDY)])) == plain
    text = prompt + plain[0][0]
    assert all(read == text[: len(read)] for read in assistant.read)


@pytest.mark.parametrize("right", [0.3, 0.7, 0.95])
def test_the_drafter_reads_what_was_accepted_and_nothing_that_was_not(right: float) -> None:
    """Long enough for the window to pass many times, after partial accepts of every length."""
    params = replace(GREEDY, max_tokens=50)
    prompts = [[3, 4, 5], [9] * 11, [7]]
    engine, assistant = speculating(right, most=5)
    outputs = tokens(run(engine, [(p, params) for p in prompts]))
    texts = [p + outputs[i][0] for i, p in enumerate(prompts)]
    assert tokens(run(stub_engine(), [(p, params) for p in prompts])) == outputs
    assert all(any(read == text[: len(read)] for text in texts) for read in assistant.read)
    stats = engine.runner.speculator.stats
    # at least 27 tries at the first position: 0.25 is more than two and a half standard errors
    assert stats.acceptance_rates[0] == pytest.approx(right, abs=0.25)
    assert stats.num_accepted_tokens_per_pos == sorted(stats.num_accepted_tokens_per_pos, reverse=True)


def random_params(rng: random.Random) -> SamplingParams:
    """Any mix of what a sampler can be asked."""
    options = {"max_tokens": rng.randint(1, 24), "temperature": rng.choice([0.0, 0.0, 0.7, 1.3]), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.5:
        options["seed"] = rng.randrange(1000)
    for name, values in {
        "top_k": [3, 8], "top_p": [0.6, 0.9], "min_p": [0.05], "presence_penalty": [0.8, -0.5], "frequency_penalty": [0.4],
        "repetition_penalty": [1.4], "logit_bias": [{5: 4.0, 6: -3.0}], "allowed_token_ids": [list(range(0, VOCAB, 2))],
        "bad_words": [["ab", " c"]], "stop_token_ids": [[11, 12]], "stop": [["b", " d"]], "logprobs": [0, 3], "n": [2],
    }.items():  # fmt: skip
        if rng.random() < 0.2:
            options[name] = rng.choice(values)
    if rng.random() < 0.2:
        options["min_tokens"] = rng.randint(1, options["max_tokens"])
    if rng.random() < 0.15 and options.get("n", 1) == 1:
        options["prompt_logprobs"] = 2
    return SamplingParams(**options)


def random_requests(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share beginnings, so that prefix hits happen."""
    shared = [rng.randrange(3, VOCAB) for _ in range(24)]
    requests = []
    for _ in range(count):
        prompt = shared[: rng.choice([0, 8, 12, 24])] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9))]
        requests.append((prompt, random_params(rng)))
    return requests


@pytest.mark.parametrize("proposer", ["assistant", "ngram"])
@pytest.mark.parametrize("seed", range(6))
def test_random_mixes_give_the_tokens_and_logprobs_of_plain_decoding(seed: int, proposer: str) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 14)
    alone = run(stub_engine(), requests)
    options = {
        "full_blocks": rng.choice([28, 64]), "sliding_blocks": rng.choice([20, 64]), "max_num_batched_tokens": rng.choice([7, 16, 40]),
        "prefix_caching": rng.random() < 0.7, "async_scheduling": rng.random() < 0.5,
    }  # fmt: skip
    engine, _ = speculating(rng.choice([0.5, 0.9]), rng.randint(1, 6), rng.random() < 0.5, **options)
    if proposer == "ngram":
        engine.runner.speculator = Speculator(NgramProposer(1, 3), 4, engine.runner.inputs, rng.random() < 0.5)
    together = run(engine, requests, rng=rng)
    assert tokens(together) == tokens(alone)
    for i, completions in alone.items():
        for got, expected in zip(together[i], completions, strict=True):
            assert (got.text, got.finish_reason, got.stop_reason) == (expected.text, expected.finish_reason, expected.stop_reason)
            assert got.logprobs == expected.logprobs
            assert got.cumulative_logprob == expected.cumulative_logprob
    assert not engine.runner.speculator._lengths, "a finished request is remembered"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_aborts_leave_nothing_behind_and_the_others_alone(async_scheduling: bool) -> None:
    params = replace(GREEDY, max_tokens=30)
    requests = [([3 + i, 4, 5], params) for i in range(5)]
    plain = tokens(run(stub_engine(), requests))
    engine, _ = speculating(0.7, adaptive=True, async_scheduling=async_scheduling)
    outputs = tokens(run(engine, requests, abort={2: 0, 5: 3, 6: 4}))
    assert outputs[1] == plain[1] and outputs[2] == plain[2]
    engine.step()
    assert not engine.runner.speculator._lengths


def watched(engine: LLMEngine) -> list[list[bool]]:
    """Per step from now on, which of its parts follow drafts that the host has not seen."""
    steps, execute = [], engine.runner.execute

    def run_step(out):
        steps.append([part.follows for part in out.scheduled])
        return execute(out)

    engine.runner.execute = run_step
    return steps


@pytest.mark.parametrize("right", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_verification_is_launched_before_the_host_has_the_one_before(right: float, adaptive: bool) -> None:
    """Long enough for the window to pass many times behind every number of drafts that stand."""
    requests = [(prompt, replace(GREEDY, max_tokens=50)) for prompt in ([3, 4, 5], [9] * 11, [7])]
    plain = tokens(run(stub_engine(), requests))
    engine, assistant = speculating(right, most=5, adaptive=adaptive, async_scheduling=True)
    steps = watched(engine)
    assert tokens(run(engine, requests)) == plain
    texts = [prompt + plain[i][0] for i, (prompt, _) in enumerate(requests)]
    assert all(any(read == text[: len(read)] for text in texts) for read in assistant.read)
    followed = sum(all(parts) for parts in steps if parts)
    assert followed > (0.25 if adaptive and right < 0.5 else 0.6) * len(steps), "the host was waited for"


@pytest.mark.parametrize("seed", range(12))
def test_traffic_that_follows_drafts_gives_the_tokens_of_plain_decoding(seed: int) -> None:
    """Arrivals, ends by stop token, text and length, aborts, small pools: every step that can follow does."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(24)]
    requests = []
    for _ in range(12):
        prompt = shared[: rng.choice([0, 8, 24])] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9))]
        params = replace(GREEDY, max_tokens=rng.randint(1, 30), ignore_eos=rng.random() < 0.5, stop=rng.choice([None, ["ab"], ["c"]]))
        if seed % 2:
            temperature = rng.choice([0.0, 0.3, 1.0])
            params = replace(
                params, temperature=temperature, top_k=rng.choice([0, 5]), seed=rng.choice([None, 7]), logprobs=rng.choice([None, 2]),
                logit_bias=rng.choice([None, {5: 3.0, 9: -4.0}]), allowed_token_ids=rng.choice([None, list(range(2, VOCAB, 2))]),
            )  # fmt: skip
        requests.append((prompt, params))
    alone = run(stub_engine(), requests)
    options = {"full_blocks": rng.choice([26, 64]), "sliding_blocks": rng.choice([20, 64]), "max_num_batched_tokens": rng.choice([9, 40])}
    engine, _ = speculating(rng.choice([0.5, 0.9]), rng.randint(1, 6), rng.random() < 0.5, async_scheduling=True, **options)
    steps = watched(engine)
    victims = {rng.randint(3, 12): rng.randrange(12) for _ in range(2)}
    together = run(engine, requests, abort=victims, rng=rng)
    assert any(map(any, steps))
    for i in set(alone) - set(victims.values()):
        got, expected = together[i][0], alone[i][0]
        assert (got.token_ids, got.text, got.finish_reason) == (expected.token_ids, expected.text, expected.finish_reason)
        assert got.logprobs == expected.logprobs
    assert not engine.runner.speculator._lengths


def test_who_waits_for_a_place_does_not_hold_up_those_that_run() -> None:
    requests = [([3 + i, 4, 5], replace(GREEDY, max_tokens=30)) for i in range(12)]
    engine, _ = speculating(0.8, async_scheduling=True, max_num_seqs=3)
    steps = watched(engine)
    assert tokens(run(engine, requests)) == tokens(run(stub_engine(), requests))
    assert sum(map(any, steps)) > 0.4 * len(steps)


def test_what_the_host_must_see_first_is_waited_for() -> None:
    """A penalty, tokens that may not come yet: the next token needs more than the device has."""
    for params in (replace(GREEDY, presence_penalty=0.5), replace(GREEDY, min_tokens=9), replace(GREEDY, bad_words=["a"])):
        engine, _ = speculating(0.9, async_scheduling=True)
        steps = watched(engine)
        requests = [([3, 4, 5], GREEDY), ([6, 7], params)]
        assert tokens(run(engine, requests)) == tokens(run(stub_engine(), requests))
        assert not any(map(any, steps))


def test_a_prompt_that_comes_while_drafts_are_in_flight_shares_a_step_with_them() -> None:
    """Alone it would be computed whole, without the bound, while a stream waits for its token."""
    engine, _ = speculating(0.9, async_scheduling=True, max_num_batched_tokens=40)
    engine.scheduler.config = replace(engine.scheduler.config, max_prefill_tokens_while_decoding=8)
    steps, execute = [], engine.runner.execute

    def run_step(out):
        steps.append([(part.request.request_id, part.num_tokens) for part in out.scheduled])
        return execute(out)

    engine.runner.execute = run_step
    engine.add_request("0", [3, 4, 5], replace(GREEDY, max_tokens=40))
    for _ in range(3):
        engine.step()
    assert engine._in_flight
    engine.add_request("1", [6] * 20, GREEDY)
    del steps[:]
    while engine.has_unfinished_requests:
        engine.step()
    assert steps[:3] == [[("0", 5), ("1", 8)], [("0", 5), ("1", 8)], [("0", 5), ("1", 4)]]


def test_requests_that_end_together_do_not_fall_into_two_halves() -> None:
    """Drafts in flight may be the last a request gets, so it sits out the step behind them: some in this one, the others in the next."""
    steps = []
    for async_scheduling in (False, True):
        engine, assistant = speculating(
            0.6, async_scheduling=async_scheduling, max_num_seqs=16, max_num_batched_tokens=80, full_blocks=100, sliding_blocks=100
        )
        row = assistant._row

        def row_with_luck_of_its_text(token, hidden, rows, i, num_tokens, assistant=assistant, row=row):
            assistant.rng.seed(f"{token} {rows.positions[i]}")
            return row(token, hidden, rows, i, num_tokens)

        assistant._row = row_with_luck_of_its_text
        for batch in range(3):
            run(engine, [([3 + i, 4 + batch, i], GREEDY) for i in range(16)])
        steps.append(engine.scheduler.counters.steps)
    assert steps[1] <= steps[0] + 1


def test_preempted_requests_draft_again() -> None:
    """Three requests of up to 43 tokens in a pool of 88: some are preempted, with drafts pending."""
    params = replace(GREEDY, max_tokens=40)
    requests = [([3 + i, 4, 5], params) for i in range(3)]
    engine, _ = speculating(0.8, full_blocks=23)
    assert tokens(run(engine, requests)) == tokens(run(stub_engine(), requests))
    assert engine.scheduler.counters.preemptions > 0
    assert engine.runner.speculator.stats.mean_accepted_length > 2


def test_a_stream_shows_every_token_once_however_many_a_step_brings() -> None:
    engine, _ = speculating(1.0)
    engine.add_request("0", [3, 4, 5], GREEDY, stream=True)
    seen, steps = [], 0
    while engine.has_unfinished_requests:
        for output in engine.step():
            seen.append(list(output.outputs[0].token_ids))
            steps += 1
    plain = tokens(run(stub_engine(), [([3, 4, 5], GREEDY)]))[0][0]
    assert seen[-1] == plain and all(seen[i] == plain[: len(seen[i])] for i in range(len(seen))) and steps < len(plain)


def test_drafting_switches_off_where_it_does_not_pay_and_steps_overlap_again() -> None:
    engine, _ = speculating(0.0, adaptive=True, async_scheduling=True)
    engine.add_request("0", [3, 4, 5], replace(GREEDY, max_tokens=50))
    overlapping = 0
    while engine.has_unfinished_requests:
        engine.step()
        overlapping += len(engine._in_flight)
    stats = engine.runner.speculator.stats
    assert stats.num_switched_off >= 1 and stats.num_plain_steps > 20 and overlapping > 10
    check_idle(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_simulated_acceptance_keeps_the_share_of_drafts_that_it_says(async_scheduling: bool) -> None:
    engine, _ = speculating(0.0, most=3, async_scheduling=async_scheduling)
    engine.runner.speculator.simulated_acceptance = 0.6
    outputs = run(engine, [([3 + i, 4, 5], replace(GREEDY, max_tokens=50)) for i in range(8)])
    assert all(len(completions[0].token_ids) == 50 for completions in outputs.values())
    stats = engine.runner.speculator.stats
    # about 180 verifications: four standard errors of a share are 0.15; the stub's own hits (1 in 40) are inside
    assert stats.acceptance_rates[0] == pytest.approx(0.6, abs=0.15)
    assert stats.mean_accepted_length == pytest.approx(1 + 0.6 + 0.36 + 0.216, abs=0.35)
