"""LLMEngine: what is refused on arrival, aborts, streaming with stop strings, drafts, the watchdog, slots."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from engine import sampling_oracle as oracle
from engine.stub_engine import TEXTS, VOCAB, check_idle, stub_engine, stub_logits
from lastrow.core.output import SchedulerOutput
from lastrow.core.sampling_params import SamplingParams
from lastrow.decisions.driver import JobDriver
from lastrow.decisions.plan import LABELS, Job, Unit
from lastrow.engine.engine import EngineStuck
from lastrow.engine.output_processor import RequestGroup, find_stop, held_back

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([3, VOCAB], {}, rf"the prompt holds \[{VOCAB}\]: token ids from 0 to {VOCAB - 1} are needed"),
        ([3, -1], {}, r"the prompt holds \[-1\]"),
        ([[3, 4]], {}, "flat list of 32-bit integers"),
        (["a"], {}, "flat list of 32-bit integers"),
        ([3], {"logprob_token_ids": [99]}, r"logprob_token_ids holds \[99\]"),
        ([3], {"allowed_token_ids": [1, 40]}, r"allowed_token_ids holds \[40\]"),
        ([3], {"logit_bias": {77: 1.0}}, r"logit_bias holds \[77\]"),
        ([3], {"stop_token_ids": [-5]}, r"stop_token_ids holds \[-5\]"),
        ([3] * 64, {}, "the prompt has 64 tokens, max_model_len=64"),
        ([3] * 30, {"max_tokens": 30}, "need 15 blocks of the full group, the whole pool has 13"),
        ([3], {"max_tokens": 0, "prompt_logprobs": 1, "n": 2}, "n is 2 with max_tokens=0"),
        ([3], {"max_tokens": 0, "prompt_logprobs": 1, "logprob_token_ids": [1]}, "ask in two requests"),
        # "a" is token 0, " a" token 26; the model's stop ids are 1 and 2
        ([3], {"allowed_token_ids": [0, 26], "bad_words": ["a"]}, r"no token can be the first: .* \[0, 26\], bad_words"),
        ([3], {"allowed_token_ids": [1, 2], "min_tokens": 1}, r"no token can be the first: .* \[1, 2\], min_tokens=1 excludes stop ids"),
        (
            [3],
            {"allowed_token_ids": [0, 1, 26], "bad_words": ["a"], "min_tokens": 2},
            "bad_words .* and min_tokens=2 excludes .* allow one more id",
        ),
        ([3], {"min_tokens": 1, "stop_token_ids": list(range(VOCAB))}, rf"of the {VOCAB} ids of the vocabulary, min_tokens=1"),
        (
            [3],
            {"bad_words": list("abcdefghijklmn"), "min_tokens": 1, "stop_token_ids": list(range(14, 26))},
            "bad_words .* and min_tokens=1",
        ),
    ],
)
def test_what_can_never_be_answered_is_refused_on_arrival(prompt: list, options: dict, message: str) -> None:
    engine = stub_engine(full_blocks=14)
    with pytest.raises(ValueError, match=message) as error:
        engine.add_request("r", prompt, SamplingParams(**options))
    assert "\n" not in str(error.value) and "r" in str(error.value)
    check_idle(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [0, 26, 3], "bad_words": ["a"]},
        {"allowed_token_ids": [0], "bad_words": ["aa"]},  # what follows is nobody's concern before it does
        {"allowed_token_ids": [1, 2], "min_tokens": 1, "ignore_eos": True},  # then nothing is a stop id
        {"allowed_token_ids": [1, 2]},
        {"allowed_token_ids": [5, 7], "logit_bias": {5: -100.0, 7: -100.0}},  # a bias is no mask: the better of the two
    ],
    ids=str,
)
def test_masks_that_leave_something_are_taken(options: dict) -> None:
    engine = stub_engine()
    engine.add_request("r", [3], replace(GREEDY, **{"max_tokens": 1, "ignore_eos": False, **options}))
    (output,) = run(engine)
    assert output.outputs[0].token_ids[0] in options["allowed_token_ids"]
    # nothing is sampled: nothing to contradict
    engine.add_request("s", [3], replace(GREEDY, allowed_token_ids=[1], min_tokens=1, ignore_eos=False), label_token_ids=[4])
    run(engine)
    check_idle(engine)


def test_text_parameters_need_a_tokenizer() -> None:
    engine = stub_engine(tokenizer=False)
    for options in ({"stop": "x"}, {"bad_words": ["x"]}, {"structured_outputs": {"regex": "a"}}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} needs a tokenizer"):
            engine.add_request("r", [3], SamplingParams(**options))
    engine.add_request("r", [3], GREEDY)
    with pytest.raises(ValueError, match="not finished yet"):
        engine.add_request("r", [3], GREEDY)


def test_max_tokens_is_clipped_to_the_window() -> None:
    engine = stub_engine()
    engine.add_request("r", [3] * 60, replace(GREEDY, max_tokens=None))
    (output,) = run(engine)
    assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].finish_reason == "length"


def run(engine) -> list:
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_abort_at_any_moment_gives_everything_back(async_scheduling: bool) -> None:
    for moment in range(14):
        engine = stub_engine(async_scheduling=async_scheduling, max_num_batched_tokens=7)
        engine.add_request("a", list(range(3, 23)), GREEDY)
        engine.add_request("n", list(range(5, 20)), replace(GREEDY, n=3))
        engine.add_request("b", list(range(9, 15)), GREEDY)
        for _ in range(moment):
            engine.step()
        last = engine.abort(["a", "n", "unknown"])
        for output in last:
            assert output.finished and all(c.finish_reason is not None for c in output.outputs)
        rest = run(engine)
        assert not {"a", "n"} & {output.request_id for output in rest}
        check_idle(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stream_never_takes_text_back(async_scheduling: bool, include: bool) -> None:
    """Stop strings that end inside a token, begin in an earlier one, or almost come: what is shown only grows, and the end equals
    the text of the whole output up to the earliest stop string."""
    seen_stops = 0
    for seed in range(12):
        plain = SamplingParams(temperature=1.3, seed=seed, max_tokens=30, ignore_eos=True, skip_special_tokens=False)
        prompt = [seed + 3]
        ids: list[int] = []
        while len(ids) < 30:
            ids.append(oracle.next_token(stub_logits(prompt + ids), plain, prompt, ids, ()))
        text = "".join(TEXTS[i] for i in ids)
        stops = [text[11:14], text[5:7] + "?", "zzz"] if seed % 3 else ["zzz"]
        params = replace(plain, stop=stops, include_stop_str_in_output=include)
        place = min((at for s in stops if (at := text.find(s)) >= 0), default=None)
        stop = None if place is None else next(s for s in stops if text.startswith(s, place))
        expected = text if stop is None else text[: place + (len(stop) if include else 0)]

        engine = stub_engine(async_scheduling=async_scheduling)
        engine.add_request("s", prompt, params, stream=True)
        engine.add_request("w", prompt, params)
        shown, final = [""], {}
        for output in run(engine):
            if output.request_id == "s":
                assert output.outputs[0].text.startswith(shown[-1])
                shown.append(output.outputs[0].text)
            if output.finished:
                final[output.request_id] = output.outputs[0]
                assert output.request_id not in engine.scheduler.requests  # it stops running, too
        for completion in final.values():
            assert completion.text == expected
            assert completion.finish_reason == ("length" if stop is None else "stop") and completion.stop_reason == stop
        assert len(shown) > 2 and shown[-1] == expected
        seen_stops += stop is not None
        check_idle(engine)
    assert seen_stops >= 6


def test_find_stop_and_held_back() -> None:
    assert find_stop("abcabc", 3, ["ca", "bc"]) == (2, "ca")  # earliest place that reaches into the new text
    assert find_stop("abcabc", 3, ["bc", "ca"]) == (2, "ca")  # whatever the order of the list
    assert find_stop("abc", 3, ["abc"]) is None
    assert held_back("xxab", ["abc", "zz"]) == 2
    assert held_back("xxabc", ["abd"]) == 0
    assert held_back("aaa", ["aaaa"]) == 3


def test_metrics_and_rows_are_counted() -> None:
    engine = stub_engine(max_num_batched_tokens=8)
    engine.add_request("r", list(range(3, 23)), GREEDY)
    (output,) = run(engine)
    # 20 prompt tokens in chunks of 8, 8, 4: one wanted row; then 7 decodes
    assert (output.metrics.rows_given, output.metrics.rows_computed) == (27, 8)
    assert (engine.runner.stats.rows_given, engine.runner.stats.rows_computed, engine.runner.stats.steps) == (27, 8, 10)
    assert 0 <= output.metrics.time_in_queue <= output.metrics.time_to_first_token
    assert output.num_cached_tokens == 0
    engine.add_request("again", list(range(3, 23)), GREEDY)
    (again,) = run(engine)
    assert again.num_cached_tokens == 16 and again.outputs[0].token_ids == output.outputs[0].token_ids


def test_drafts_change_nothing_but_the_number_of_steps() -> None:
    """Random sampling included: a draft stands when it is what the target samples at its place."""
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True, logprobs=1)
    prompt = list(range(3, 12))
    ids: list[int] = []
    while len(ids) < 20:
        ids.append(oracle.next_token(stub_logits(prompt + ids), params, prompt, ids, ()))
    engine = stub_engine(max_num_batched_tokens=32)
    engine.add_request("d", prompt, params)
    engine.add_request("e", prompt[1:], GREEDY)
    steps, done = 0, {}
    while engine.has_unfinished_requests:
        for request in engine.scheduler.running:
            if request.request_id == "d" and request.output_token_ids:
                known = len(request.output_token_ids)
                request.draft_token_ids = [*ids[known : known + 2], (ids + [0] * 4)[known + 2] ^ 1]
        done |= {output.request_id: output.outputs[0] for output in engine.step()}
        steps += 1
    assert done["d"].token_ids == ids
    assert [next(iter(entry)) for entry in done["d"].logprobs] == ids
    assert steps == 8  # 1 + ceil(19 / 3)
    alone = stub_engine()
    alone.add_request("e", prompt[1:], GREEDY)
    assert run(alone)[0].outputs[0].token_ids == done["e"].token_ids
    check_idle(engine)


def test_the_watchdog_names_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stub_engine()
    engine.add_request("poor", [3, 4], GREEDY)
    monkeypatch.setattr(engine.scheduler, "schedule", lambda *_: SchedulerOutput([]))
    with pytest.raises(EngineStuck, match=r"request poor \(waiting, 0 of 2 tokens"):
        for _ in range(5):
            engine.step()


def test_a_seedless_request_repeats_with_the_engine_seed_and_its_number() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)

    def tokens() -> list[list[int]]:
        engine = stub_engine()
        for i in range(3):
            engine.add_request(str(i), [3], params)
        return [output.outputs[0].token_ids for output in sorted(run(engine), key=lambda o: o.request_id)]

    first = tokens()
    assert first == tokens() and len({tuple(t) for t in first}) == 3


def test_numpy_prompts_are_token_ids() -> None:
    engine = stub_engine()
    engine.add_request("a", np.array([3, 4, 5]), GREEDY)
    engine.add_request("b", [np.int32(3), np.int64(4), 5], GREEDY)
    a, b = run(engine)
    assert a.outputs[0].token_ids == b.outputs[0].token_ids and type(a.prompt_token_ids[0]) is int


def test_priority_needs_its_policy_and_decides_who_runs_first() -> None:
    engine = stub_engine(max_num_seqs=1)
    for name, priority in (("late", 5), ("normal", 0), ("first", -1)):
        engine.add_request(name, [3, 4], GREEDY, priority=priority)
    assert [output.request_id for output in run(engine)] == ["first", "normal", "late"]
    engine.priority_scheduling = False
    with pytest.raises(ValueError, match="priority is 1, but scheduling_policy is 'fcfs'"):
        engine.add_request("r", [3], GREEDY, priority=1)


def test_a_stream_of_n_completions_shows_all_of_them_each_time() -> None:
    engine = stub_engine(async_scheduling=True)
    engine.add_request("s", [3, 4, 5], SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True), stream=True)
    outputs = run(engine)
    assert all(len(output.outputs) == 2 for output in outputs) and [o.finished for o in outputs].count(True) == 1
    for before, after in pairwise(outputs):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
    assert [len(c.token_ids) for c in outputs[-1].outputs] == [6, 6]


def test_finished_requests_wait_for_no_garbage_collector() -> None:
    """Each holds its prompt, of which a collector looks at every id."""
    engine = stub_engine()
    gc.collect()
    gc.disable()
    try:
        for name in "abc":
            engine.add_request(name, [3, 4, 5, 6], replace(GREEDY, n=2))
        assert len(run(engine)) == 3
        engine.add_request("aborted", [3], GREEDY)
        engine.abort("aborted")
        assert not [thing for thing in gc.get_objects() if type(thing) is RequestGroup]
    finally:
        gc.enable()


def test_a_list_of_ids_may_change_behind_add_request() -> None:
    engine, ids = stub_engine(), [3, 4, 5, 6, 7]
    engine.add_request("r", ids, GREEDY)
    ids.clear()
    (output,) = run(engine)
    expected = [3, 4, 5, 6, 7]
    for _ in range(8):
        expected.append(oracle.next_token(stub_logits(expected), GREEDY, expected[:5], expected[5:], ()))
    assert output.prompt_token_ids + output.outputs[0].token_ids == expected


@pytest.mark.parametrize("max_num_seqs", [3, 30])
def test_jobs_that_fork_get_the_same_rows_with_steps_in_flight(max_num_seqs: int) -> None:
    labels = tuple(range(VOCAB))
    states = [[(7 * i + j) % VOCAB for j in range(10 + i % 3)] for i in range(12)]

    def job(state: list[int]) -> Job[list[list[float]]]:
        units = [Unit(state, LABELS, (), ())]
        units += [Unit([*state, t, t + 1], LABELS, [len(state) + 1], labels, 0, len(state)) for t in range(5)]
        reads = yield units
        return [read.label_logits[len(state) + 1][0] for read in reads[1:]]

    engine = stub_engine(async_scheduling=True, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, full_blocks=200, sliding_blocks=200)
    steps: list[int] = []
    execute = engine.runner.execute
    engine.runner.execute = lambda out: steps.append(out.total_num_scheduled_tokens) or execute(out)
    results = list(JobDriver(engine).run(job(state) for state in states))
    assert results == [[pytest.approx(stub_logits([*state, t, t + 1]).tolist()) for t in range(5)] for state in states]
    assert sum(steps) == sum(len(state) + 10 for state in states), "no state is computed twice"
    assert gc.isenabled()
    check_idle(engine)
