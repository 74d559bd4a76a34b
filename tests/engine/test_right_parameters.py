"""Every request gets its own parameters, masks, seeds and logprobs, whoever shares its steps (issue 2, item 6).

Random requests run through the whole engine over a model whose logits hash all tokens a row sees (stub_engine.py), in a pool so
small that requests are preempted, with late arrivals and aborts; each is compared with a one-request oracle in numpy."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from engine import sampling_oracle as oracle
from engine.stub_engine import EOS, TEXTS, VOCAB, check_idle, stub_engine, stub_logits
from lastrow.core.sampling_params import SamplingParams

# fp32 against float64 on logits of size up to about 12: the engine's logsumexp and differences carry a few ulp of 1e-6
TOLERANCE = 2e-5
LIMIT = 64


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value, otherwise, chance=0.3):
        return value if rng.random() < chance else otherwise

    max_tokens = rng.randint(1, 14)
    tokens = lambda n: rng.sample(range(VOCAB), n)  # noqa: E731
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 1.6]),
        top_k=maybe(rng.randint(1, 12), 0, 0.5),
        top_p=maybe(rng.uniform(0.3, 0.99), 1.0, 0.5),
        min_p=maybe(rng.uniform(0.01, 0.3), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0, 0.2),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0, 0.2),
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0, 0.2),
        seed=rng.getrandbits(63),
        stop=maybe([rng.choice("abcdefg"), rng.choice("hij") + rng.choice("klm")], None, 0.3),
        stop_token_ids=maybe(tokens(2), None),
        bad_words=maybe([rng.choice("abcdefghijklmn"), rng.choice("abc") + rng.choice("defgh")], None, 0.2),
        logit_bias=maybe({t: rng.uniform(-8, 8) for t in tokens(4)}, None),
        allowed_token_ids=maybe(tokens(20), None, 0.2),
        ignore_eos=rng.random() < 0.5,
        min_tokens=maybe(rng.randint(0, max_tokens), 0),
        max_tokens=max_tokens,
        logprobs=maybe(rng.choice([0, 1, 3, 7, -1]), None, 0.5),
        prompt_logprobs=maybe(rng.choice([0, 2, 5]), None, 0.3),
        logprob_token_ids=maybe(tokens(3), None, 0.15),
        include_stop_str_in_output=rng.random() < 0.3,
        skip_special_tokens=False,
    )


def bad_words(words: list[str] | None) -> list[list[int]]:
    """As written and with a space in front where that exists as one other first token."""
    found = []
    for word in words or ():
        ids = [TEXTS.index(c) for c in word]
        found.append(ids)
        if " " + word[0] in TEXTS:
            found.append([TEXTS.index(" " + word[0]), *ids[1:]])
    return found


def close(got, expected) -> None:
    assert next(iter(got)) == next(iter(expected)) and set(got) == set(expected)
    for token, (logprob, rank) in expected.items():
        assert got[token].logprob == pytest.approx(logprob, abs=TOLERANCE)
        assert got[token].rank == rank


def check(output, prompt: list[int], params: SamplingParams) -> None:
    stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else frozenset(EOS))
    limit = min(params.max_tokens, LIMIT - len(prompt))
    ids, text, reason, entries = oracle.generate(stub_logits, params, prompt, stops, TEXTS, bad_words(params.bad_words), limit)
    got = output.outputs[0]
    assert got.token_ids == ids
    assert got.text == text
    assert got.finish_reason == reason
    if params.logprobs is None and params.logprob_token_ids is None:
        assert got.logprobs is None
    else:
        assert len(got.logprobs) == len(ids)
        for mine, expected in zip(got.logprobs, entries, strict=True):
            close(mine, expected)
        total = sum(entry[token][0] for token, entry in zip(ids, entries, strict=True))
        assert got.cumulative_logprob == pytest.approx(total, abs=TOLERANCE * len(ids))
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
    for at in range(1, len(prompt)):
        close(output.prompt_logprobs[at], oracle.logprobs(stub_logits(prompt[:at]), prompt[at], params.prompt_logprobs, None))


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(8))
def test_each_request_gets_what_it_gets_alone(seed: int, async_scheduling: bool) -> None:
    rng = random.Random(seed)
    engine = stub_engine(
        full_blocks=18, sliding_blocks=15, max_num_batched_tokens=rng.choice([7, 16, 40]), async_scheduling=async_scheduling
    )
    engine.runner._logit_rows = rng.choice([3, 1000])  # rows of prompt logprobs that share one pass through the head
    stem = [rng.randrange(VOCAB) for _ in range(24)]
    waiting = {}
    for i in range(24):
        prompt = stem[: rng.randint(0, 24)] * (rng.random() < 0.5) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        waiting[f"r{i}"] = (prompt, random_params(rng))
    requests = dict(waiting)
    aborted, finished = set(), {}
    while waiting or engine.has_unfinished_requests:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                name, (prompt, params) = waiting.popitem()
                engine.add_request(name, prompt, params, priority=rng.choice([0, 0, 1]))
        if rng.random() < 0.05 and engine.outputs.groups:
            name = rng.choice(list(engine.outputs.groups))
            assert engine.abort(name)[0].outputs[0].finish_reason == "abort"
            aborted.add(name)
        for output in engine.step():
            assert output.finished
            finished[output.request_id] = output
    assert set(finished) | aborted == set(requests) and not set(finished) & aborted
    for name, output in finished.items():
        check(output, *requests[name])
    check_idle(engine)


def test_the_scenarios_preempt_and_reuse_prefixes() -> None:
    """The test above is worth its time only if its pool is small enough."""
    engine = stub_engine(full_blocks=18, sliding_blocks=15, async_scheduling=True)
    rng = np.random.default_rng(0)
    stem = rng.integers(0, VOCAB, 12).tolist()
    for i in range(12):
        prompt = stem + rng.integers(0, VOCAB, 4).tolist()
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.scheduler.counters.preemptions > 0
    assert engine.scheduler.kv.prefix_cache_stats.hits > 0


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_a_bad_word_gives_way_where_it_would_leave_no_token(async_scheduling: bool) -> None:
    """Two allowed ids and every pair of them a bad word: after the first token nothing is left, which was token 0. The requests beside
    it get what they get alone."""
    engine = stub_engine(async_scheduling=async_scheduling)
    pairs = [a + b for a in "ef" for b in "ef"]
    requests = {}
    for i, temperature in enumerate((0.0, 1.0, 0.0, 1.0)):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=6, ignore_eos=True, logprobs=1, skip_special_tokens=False)
        if i < 2:
            params = replace(params, allowed_token_ids=[4, 5], bad_words=pairs)
        requests[str(i)] = ([3 + i, 9], params)
        engine.add_request(str(i), *requests[str(i)])
    finished = {}
    while engine.has_unfinished_requests:
        finished |= {output.request_id: output for output in engine.step()}
    for name, output in finished.items():
        check(output, *requests[name])
    for name in "01":
        assert len(finished[name].outputs[0].token_ids) == 6 and set(finished[name].outputs[0].token_ids) <= {4, 5}
    check_idle(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_n_completions_share_the_prompt_and_differ_by_seed(async_scheduling: bool) -> None:
    engine = stub_engine(async_scheduling=async_scheduling, prefix_caching=False)
    prompt = list(range(3, 14))
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=8, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    engine.add_request("x", prompt, params)
    results = []
    while engine.has_unfinished_requests:
        results += engine.step()
    (output,) = results
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    for completion in output.outputs:
        ids: list[int] = []
        for _ in range(8):
            ids.append(oracle.next_token(stub_logits(prompt + ids), params, prompt, ids, EOS, seed=5 + completion.index))
        assert completion.token_ids == ids and len(completion.logprobs) == 8
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert len(output.prompt_logprobs) == len(prompt)
    # the prompt once, one more row for each of the 3 forks, and the 7 decodes of each
    assert engine.runner.stats.rows_given == len(prompt) + 3 + 4 * 7
    check_idle(engine)


@pytest.mark.parametrize("step_tokens", [7, 64])
def test_label_rows_read_only_their_labels_at_the_wanted_positions(step_tokens: int) -> None:
    engine = stub_engine(max_num_batched_tokens=step_tokens)
    prompts = {"a": list(range(3, 20)), "b": list(range(20, 35))}
    engine.add_request("a", prompts["a"], SamplingParams(max_tokens=1, logprobs=0), label_token_ids=[5, 9, 3])
    engine.add_request("b", prompts["b"], SamplingParams(max_tokens=1), label_token_ids=[5, 9, 3], prompt_rows=[4, 9, 14])
    engine.add_request("c", prompts["a"], SamplingParams(max_tokens=1), label_token_ids=[7])
    engine.add_request("d", prompts["a"], SamplingParams(temperature=0, max_tokens=2))
    done = {}
    while engine.has_unfinished_requests:
        done |= {output.request_id: output for output in engine.step()}
    for name, rows, labels in (("a", [16], [5, 9, 3]), ("b", [4, 9, 14], [5, 9, 3]), ("c", [16], [7])):
        prompt = prompts["b" if name == "b" else "a"]
        assert sorted(done[name].label_logits) == rows
        for row, (values, total) in done[name].label_logits.items():
            logits = stub_logits(prompt[: row + 1])
            assert values == logits[labels].tolist()
            if name == "a":
                assert total == pytest.approx(np.log(np.exp(logits.astype(np.float64)).sum()), abs=TOLERANCE)
            else:
                assert total is None
        assert done[name].outputs[0].token_ids == []
    check_idle(engine)


def test_logprob_token_ids_without_tokens_are_the_distribution_after_the_prompt() -> None:
    engine = stub_engine()
    prompt = list(range(3, 20))
    engine.add_request("a", prompt, SamplingParams(max_tokens=0, logprob_token_ids=[4, 8]))
    engine.add_request("b", prompt, SamplingParams(max_tokens=0, prompt_logprobs=3))
    done = {}
    while engine.has_unfinished_requests:
        done |= {output.request_id: output for output in engine.step()}
    assert engine.runner.stats.rows_computed == 1 + len(prompt) - 1  # nothing is computed for a token that nobody samples
    expected = oracle.logprobs(stub_logits(prompt), 4, None, [8])
    (entry,) = done["a"].outputs[0].logprobs
    assert {t: p.logprob for t, p in entry.items()} == pytest.approx({t: p for t, (p, _) in expected.items()}, abs=TOLERANCE)
    assert done["a"].outputs[0].token_ids == [] and done["b"].outputs[0].token_ids == []
    for at in range(1, len(prompt)):
        close(done["b"].prompt_logprobs[at], oracle.logprobs(stub_logits(prompt[:at]), prompt[at], 3, None))
    check_idle(engine)
