"""Named cases of the scheduler: limits, rows, order, preemption, steps in flight, ends. test_scheduler_stateful.py searches at random."""

from __future__ import annotations

import pytest

from core.scheduler_harness import Harness, expected_output
from lastrow.core.kv_cache_manager import KVCacheConfig
from lastrow.core.limits import SchedulerConfig
from lastrow.core.output import ModelRunnerOutput, SchedulerOutput
from lastrow.core.request import FinishReason, Request, RequestStatus
from lastrow.core.sampling_params import SamplingParams
from lastrow.core.stats import cache_status


def make(
    full: int = 60, sliding: int = 60, block_size: int = 4, window: int = 8, depth: int = 0, num_drafts: int = 0, **kw: object
) -> Harness:
    config = SchedulerConfig(**({"max_num_seqs": 8, "max_num_batched_tokens": 200, "max_model_len": 100} | kw))  # type: ignore[arg-type]
    return Harness(KVCacheConfig(block_size, full, sliding, window), config, depth=depth, num_drafts=num_drafts)


def shape(step: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(part.request.request_id, part.start, part.num_tokens) for part in step.scheduled]


# -- limits ----------------------------------------------------------------------------------------------------------------


def test_a_prompt_of_max_model_len_minus_one_yields_one_token_and_a_longer_one_is_refused() -> None:
    harness = make(max_model_len=20)
    request = harness.add(harness.request([1] * 19, max_tokens=None))
    with pytest.raises(ValueError, match=r"request long: the prompt has 20 tokens, max_model_len=20 allows 19"):
        harness.add(harness.request([1] * 20, request_id="long"))
    harness.drain()
    assert len(request.output_token_ids) == 1 and request.finish_reason is FinishReason.LENGTH


def test_a_request_without_output_may_fill_max_model_len() -> None:
    harness = make(max_model_len=20)
    request = harness.add(harness.request([1] * 20, max_tokens=0, prompt_rows=tuple(range(19))))
    with pytest.raises(ValueError, match="21 tokens, max_model_len=20 allows 20"):
        harness.add(harness.request([1] * 21, max_tokens=0))
    harness.drain()
    assert request.output_token_ids == [] and request.finish_reason is FinishReason.LENGTH


def test_max_tokens_none_goes_up_to_max_model_len_and_a_larger_one_is_cut_there() -> None:
    harness = make(max_model_len=20)
    requests = [harness.add(harness.request([1] * 5, max_tokens=wanted)) for wanted in (None, 99, 15, 14)]
    harness.drain()
    assert [len(request.output_token_ids) for request in requests] == [15, 15, 15, 14]


def test_a_request_that_needs_the_whole_pool_runs_and_one_token_more_is_refused() -> None:
    """Block 4, 4 usable full blocks: 16 tokens with K/V, so 10 prompt and 7 output tokens (the last one has none)."""
    harness = make(full=1 + 4, sliding=1 + 3)
    harness.add(harness.request([1] * 10, max_tokens=7))
    with pytest.raises(ValueError, match=r"17 tokens .*need 5 blocks of the full group, the whole pool has 4"):
        harness.add(harness.request([1] * 10, max_tokens=8))
    harness.drain()


def test_the_sliding_group_needs_one_window_with_chunking_and_the_whole_prompt_without() -> None:
    with pytest.raises(ValueError, match=r"need 3 blocks of the sliding group, the whole pool has 2"):
        make(sliding=1 + 2).add(Request("r", [1] * 30, SamplingParams(max_tokens=9)))
    harness = make(sliding=1 + 3)
    harness.add(harness.request([1] * 30, max_tokens=9))
    harness.drain()
    whole = make(sliding=1 + 9, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match=r"need 10 blocks of the sliding group"):
        whole.add(whole.request([1] * 30, max_tokens=9))
    whole.add(whole.request([1] * 30, max_tokens=7))
    whole.drain()


def test_bad_requests_are_refused_with_the_reason_and_leave_no_trace() -> None:
    harness = make()
    parent = harness.add(harness.request([1, 2, 3], request_id="p", cache_salt="a"))
    for kw, fork, text in (
        ({"prompt": [], "request_id": "x"}, (), "the prompt is empty"),
        ({"prompt": [1], "request_id": "p"}, (), "this id is not finished"),
        ({"prompt": [1, 2], "prompt_rows": (1, 0)}, (), "ascending"),
        ({"prompt": [1, 2], "prompt_rows": (1, 1)}, (), "ascending"),
        ({"prompt": [1, 2], "prompt_rows": (0, 2)}, (), "ascending"),
        ({"prompt": [1, 2], "prompt_rows": (-1,)}, (), "ascending"),
        ({"prompt": [1, 2]}, ("gone", 1), "gone it forks from is unknown"),
        ({"prompt": [1, 2], "cache_salt": "a"}, ("p", 2), "1 to 1 is needed"),
        ({"prompt": [1, 2, 3, 0, 0], "cache_salt": "a"}, ("p", 4), "1 to 3 is needed"),
        ({"prompt": [1, 2, 3], "cache_salt": "a"}, ("p", 0), "1 to 2 is needed"),
        ({"prompt": [1, 2, 3]}, ("p", 2), "cache_salt of its parent"),
        ({"prompt": [1, 2, 3], "cache_salt": "a", "prompt_rows": (1,)}, ("p", 2), "inside the 2 shared tokens"),
        ({"prompt": [1, 3, 3], "cache_salt": "a"}, ("p", 2), "not those of its parent"),
    ):
        with pytest.raises(ValueError, match=text):
            harness.scheduler.add_request(harness.request(**kw), *fork)  # type: ignore[arg-type]
    assert list(harness.scheduler.requests.values()) == [parent] and harness.scheduler.num_waiting == 1
    harness.drain()


@pytest.mark.parametrize(
    ("kw", "text"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_prefill_seqs": 0}, "max_prefill_seqs is 0"),
        ({"max_num_batched_tokens": 7}, "at least max_num_seqs=8"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 99}, "at least max_model_len=100"),
    ],
)
def test_the_config_names_what_is_wrong(kw: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(**kw)  # type: ignore[arg-type]


# -- steps -----------------------------------------------------------------------------------------------------------------


def test_a_step_that_holds_back_leaves_the_last_token_of_every_prompt_to_the_next_one() -> None:
    harness = make(max_num_batched_tokens=30)
    for prompt in ([1] * 3, [2], [3] * 20):
        harness.add(harness.request(prompt, max_tokens=2))
    step = harness.schedule(holds_back=True)
    assert shape(step) == [("r2", 0, 1), ("r1", 0, 2), ("r3", 0, 19)] and [len(p.rows) for p in step.scheduled] == [1, 0, 0]
    harness.add(harness.request([4] * 5, max_tokens=2))
    step = harness.schedule()
    assert (step.num_decodes, shape(step)) == (3, [("r1", 2, 1), ("r2", 1, 1), ("r3", 19, 1), ("r4", 0, 5)])
    harness.drain()


def test_a_step_that_is_launched_ahead_fills_its_graph_and_leaves_a_full_one() -> None:
    """Four prompts of eight tokens, eight of 32 ahead: the rest is 24, and no graph is padded."""
    harness = make(max_num_batched_tokens=100)
    for first in range(4):
        harness.add(harness.request([first] * 8, max_tokens=1))
    assert shape(harness.schedule(holds_back=True, max_tokens=8)) == [("r1", 0, 7), ("r2", 0, 1)]
    assert shape(harness.schedule()) == [("r1", 7, 1), ("r2", 1, 7), ("r3", 0, 8), ("r4", 0, 8)]
    harness.drain()


def test_decodes_come_first_and_a_prompt_fills_the_rest_of_the_step() -> None:
    harness = make(max_num_batched_tokens=10)
    for prompt in ([1] * 3, [2] * 3):
        harness.add(harness.request(prompt, max_tokens=30))
    assert shape(harness.schedule()) == [("r1", 0, 3), ("r2", 0, 3)]
    harness.deliver()
    harness.add(harness.request([3] * 20, max_tokens=30, priority=-1))
    steps = []
    for _ in range(4):
        step = harness.schedule()
        steps.append((step.num_decodes, shape(step)[step.num_decodes :]))
        harness.deliver()
    assert steps == [(2, [("r3", 0, 8)]), (2, [("r3", 8, 8)]), (2, [("r3", 16, 4)]), (3, [])], (
        "first in order, yet decodes keep their token"
    )
    harness.drain()


def test_prefill_is_bounded_in_steps_that_decode_and_only_there() -> None:
    harness = make(max_num_batched_tokens=100, max_prefill_tokens_while_decoding=6)

    def step() -> list[tuple[str, int, int]]:
        scheduled = shape(harness.schedule())
        harness.deliver()
        return scheduled

    harness.add(harness.request([1] * 20, max_tokens=4, request_id="a"))
    assert step() == [("a", 0, 20)], "nothing decodes yet"
    harness.add(harness.request([2] * 10, max_tokens=2, request_id="b"))
    assert step() == [("a", 20, 1), ("b", 0, 6)]
    assert step() == [("a", 21, 1), ("b", 6, 4)]
    harness.drain()


def test_prompts_whose_last_tokens_were_held_back_bound_no_prefill() -> None:
    """Else a large batch, whose first step is launched ahead, would fall into pieces of the bound."""
    harness = make(max_num_batched_tokens=100, max_prefill_tokens_while_decoding=6)
    harness.add(harness.request([1] * 20, max_tokens=2, request_id="a"))
    assert shape(harness.schedule(holds_back=True)) == [("a", 0, 19)]
    harness.add(harness.request([2] * 10, max_tokens=2, request_id="b"))
    assert shape(harness.schedule()) == [("a", 19, 1), ("b", 0, 10)]
    harness.deliver()
    harness.drain()


def test_a_stream_whose_tokens_are_in_flight_bounds_prefill_and_its_last_token_does_not() -> None:
    """A penalty needs the token in flight, so the stream is not part of the step; its next token comes only behind it."""
    for most, chunk in ((4, 6), (1, 10)):
        harness = make(max_num_batched_tokens=100, max_prefill_tokens_while_decoding=6, depth=1)
        harness.add(harness.request([1] * 5, max_tokens=most, repetition_penalty=1.5, request_id="a"))
        assert shape(harness.schedule()) == [("a", 0, 5)]
        harness.add(harness.request([2] * 10, max_tokens=2, request_id="b"))
        assert shape(harness.schedule()) == [("b", 0, chunk)]
        harness.drain()


def test_at_most_max_prefill_seqs_prompts_share_a_step_and_chunks_count() -> None:
    harness = make(max_num_batched_tokens=10, max_prefill_seqs=1)
    for length in (14, 2, 2):
        harness.add(harness.request([1] * length, max_tokens=9))
    steps = []
    for _ in range(4):
        step = harness.schedule()
        steps.append(shape(step)[step.num_decodes :])
        harness.deliver()
    assert steps == [[("r1", 0, 10)], [("r1", 10, 4)], [("r2", 0, 2)], [("r3", 0, 2)]]
    harness.drain()


def test_a_prompt_is_never_cut_without_chunked_prefill() -> None:
    harness = make(max_num_batched_tokens=30, max_model_len=30, enable_chunked_prefill=False)
    for _ in range(3):
        harness.add(harness.request([1] * 14, max_tokens=3))
    assert shape(harness.schedule()) == [("r1", 0, 14), ("r2", 0, 14)]
    harness.drain()


def test_lower_priority_numbers_go_first_then_arrival() -> None:
    harness = make(max_num_seqs=1, max_num_batched_tokens=50)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -5), ("e", 0)):
        harness.add(harness.request([1, 2], request_id=name, priority=priority, max_tokens=1))
    order = []
    while harness.scheduler.has_unfinished_requests:
        order += [part.request.request_id for part in harness.schedule().scheduled]
        harness.deliver()
    assert order == ["d", "b", "e", "a", "c"]


def test_rows_are_the_wanted_ones_of_the_part_and_the_sampled_one() -> None:
    harness = make(max_num_batched_tokens=8)
    harness.add(harness.request([1] * 20, prompt_rows=(0, 7, 8, 18), max_tokens=2))
    rows = []
    for _ in range(4):
        step = harness.schedule()
        rows += [(list(part.rows), part.sample) for part in step.scheduled]
        harness.deliver()
    assert rows == [([0, 7], False), ([8], False), ([18, 19], True), ([20], True)]


def test_a_wanted_last_row_is_not_listed_twice() -> None:
    harness = make()
    harness.add(harness.request([1] * 5, prompt_rows=range(5), max_tokens=1))
    (part,) = harness.schedule().scheduled
    assert list(part.rows) == [0, 1, 2, 3, 4] and part.sample


@pytest.mark.parametrize(
    ("kw", "rows"),
    [
        ({"label_token_ids": ()}, []),
        ({"label_token_ids": (1, 2), "prompt_rows": (4,)}, [4]),
        ({"max_tokens": 0, "prompt_rows": (0, 1)}, [0, 1]),
        ({"max_tokens": 0}, []),
    ],
)
def test_requests_that_end_with_their_prompt_sample_nothing(kw: dict[str, object], rows: list[int]) -> None:
    harness = make()
    request = harness.add(harness.request([1] * 5, **kw))
    step = harness.schedule()
    assert [(list(part.rows), part.sample) for part in step.scheduled] == [(rows, False)] and step.num_decodes == 0
    (output,) = harness.deliver()
    assert output.finish_reason is FinishReason.LENGTH and output.new_token_ids == [] and request.is_finished
    harness.drain()


# -- steps in flight -------------------------------------------------------------------------------------------------------


def test_the_next_step_may_be_scheduled_before_the_last_ones_token_is_known() -> None:
    harness = make(depth=2)
    request = harness.add(harness.request([1, 2, 3], max_tokens=9))
    for i in range(3):
        (part,) = harness.schedule().scheduled
        assert (part.start, part.num_tokens) == ((0, 3), (3, 1), (4, 1))[i]
        if i:
            assert request.token_ids(part.start, part.end) == [-1]
    assert request.num_inflight_tokens == 3
    harness.deliver()
    assert request.token_ids(2, 5) == [3, request.output_token_ids[0], -1]
    harness.drain()


def test_no_step_is_scheduled_beyond_the_budget_in_flight() -> None:
    harness = make(depth=9, max_model_len=6)
    for kw in ({"max_tokens": 3}, {"max_tokens": None}):
        harness.add(harness.request([1, 2, 3], **kw))
    assert [len(harness.schedule().scheduled) for _ in range(4)] == [2, 2, 2, 0]
    harness.drain()


def test_a_request_that_needs_its_output_history_waits_for_every_token() -> None:
    harness = make(depth=9)
    harness.add(harness.request([1, 2], max_tokens=5, repetition_penalty=1.5))
    other = harness.add(harness.request([1, 2], max_tokens=5))
    assert [len(harness.schedule().scheduled) for _ in range(2)] == [2, 1]
    assert other.num_inflight_tokens == 2
    harness.deliver()
    assert len(harness.schedule().scheduled) == 2
    harness.drain()


def test_a_request_with_a_token_in_flight_is_not_preempted_and_the_step_stays_empty_until_it_arrives() -> None:
    harness = make(full=1 + 4, depth=1)
    first, second = (harness.add(harness.request([1] * 7, max_tokens=9)) for _ in range(2))
    assert len(harness.schedule().scheduled) == 2
    assert len(harness.schedule().scheduled) == 2, "the eighth token of each still has room"
    step = harness.schedule()
    assert step.is_empty and not step.preempted
    harness.deliver()
    assert harness.schedule().is_empty, "one of the two tokens of each is still in flight"
    harness.deliver()
    step = harness.schedule()
    assert step.preempted == [second.request_id] and [part.request for part in step.scheduled] == [first]
    assert second.status is RequestStatus.PREEMPTED and second.num_computed_tokens == 0 and len(second.output_token_ids) == 2
    harness.drain()
    assert second.num_preemptions == second.metrics.num_preemptions == harness.scheduler.stats().num_preemptions == 1


def test_a_preempted_request_keeps_its_tokens_and_recomputes_them_as_prompt() -> None:
    harness = make(full=1 + 6, sliding=1 + 6)
    requests = [harness.add(harness.request([i] * 7, max_tokens=10)) for i in range(3)]
    harness.drain()
    assert harness.scheduler.counters.preemptions > 0
    assert all(request.output_token_ids == expected_output(request, 100)[0] for request in requests)
    assert requests[0].num_preemptions == 0, "the first in order is never the victim"


def test_priority_decides_who_is_preempted() -> None:
    harness = make(full=1 + 6, sliding=1 + 6)
    late = harness.add(harness.request([1] * 7, max_tokens=10, priority=5))
    early = harness.add(harness.request([2] * 7, max_tokens=10, priority=0))
    middle = harness.add(harness.request([3] * 7, max_tokens=10, priority=3))
    harness.drain()
    assert early.num_preemptions == 0 and late.num_preemptions >= max(1, middle.num_preemptions)


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    harness = make(full=1 + 4, max_num_seqs=2)
    harness.add(harness.request([1] * 7, max_tokens=9))
    harness.add(harness.request([2] * 7, max_tokens=9))
    harness.step()
    urgent = harness.add(harness.request([3], max_tokens=1, priority=-1))
    while not harness.schedule().preempted:
        harness.deliver()
    assert len(harness.last.scheduled) == 1 and urgent.status is RequestStatus.WAITING
    harness.deliver()
    assert urgent in [part.request for part in harness.schedule().scheduled]
    harness.drain()


def test_later_requests_take_no_further_tokens_while_an_earlier_one_waits_for_their_blocks() -> None:
    harness = make(full=1 + 4, depth=2)
    first = harness.add(harness.request([1] * 7, max_tokens=9))
    second = harness.add(harness.request([2] * 5, max_tokens=9))
    harness.schedule()
    harness.schedule()
    assert harness.schedule().is_empty, "the second still has room for a token, but then could not be preempted for the first"
    harness.deliver()
    harness.deliver()
    assert [part.request for part in harness.schedule().scheduled] == [first] and second.num_preemptions == 1
    harness.drain()


def test_a_request_whose_last_result_is_in_flight_makes_room_and_is_not_preempted() -> None:
    harness = make(full=1 + 4, max_num_seqs=2, depth=2)
    first = harness.add(harness.request([1] * 7, max_tokens=9))
    harness.schedule()
    harness.deliver()
    done = harness.add(harness.request([2] * 5, label_token_ids=(), prompt_rows=[1, 4]))
    assert shape(harness.schedule()) == [("r1", 7, 1), ("r2", 0, 5)]
    harness.add(harness.request([3], label_token_ids=(), prompt_rows=[0]))
    step = harness.schedule()
    assert shape(step) == [("r1", 8, 1), ("r3", 0, 1)] and step.finished == ["r2"], "a block, a sequence and a slot were free"
    assert not done.is_finished
    harness.drain()
    assert done.is_finished and done.num_preemptions == 0 and first.num_preemptions == 0


def test_a_step_that_holds_back_leaves_the_forks_to_the_next_one() -> None:
    harness = make(max_num_batched_tokens=40)
    parents = [harness.add(harness.request([i] * 10, label_token_ids=())) for i in (1, 2)]
    for parent in parents:
        for tail in (3, 4):
            ids = [*parent.prompt_token_ids[:6], tail, tail]
            harness.add(harness.request(ids, label_token_ids=(), prompt_rows=[7]), parent.request_id, 6)
    assert shape(harness.schedule(holds_back=True)) == [("r1", 0, 10), ("r2", 0, 10)]
    harness.add(harness.request([5] * 3, label_token_ids=()))
    assert shape(harness.schedule(holds_back=True)) == [("r7", 0, 3)]
    assert shape(harness.schedule(holds_back=True)) == [(f"r{i}", 6, 2) for i in (3, 4, 5, 6)], "nothing else can go on"
    harness.drain()


def test_a_prompt_that_could_not_be_completed_now_is_not_begun() -> None:
    harness = make(full=1 + 8, max_num_batched_tokens=10)
    harness.add(harness.request([1] * 10, max_tokens=9))
    harness.schedule()
    harness.deliver()
    harness.add(harness.request([2] * 24, max_tokens=1))
    assert shape(harness.schedule()) == [("r1", 10, 1)], "24 tokens need 6 blocks, 5 are free"
    harness.drain()


# -- ends ------------------------------------------------------------------------------------------------------------------


def sampled(harness: Harness, tokens: list[int], **kw: object) -> Request:
    """A request to which the device answers with the given tokens, one a step."""
    request = harness.request([1], **kw)
    harness.scheduler.add_request(request)
    for token in tokens:
        step = harness.scheduler.schedule()
        harness.scheduler.update_from_output(step, ModelRunnerOutput(sampled_token_ids={request.request_id: [token]}))
        if request.is_finished:
            break
    return request


@pytest.mark.parametrize(
    ("kw", "want", "reason", "stop_reason"),
    [
        ({"stop_token_ids": frozenset({3})}, [1, 2, 3], FinishReason.STOP, None),
        ({"stop_token_ids": frozenset()}, [1, 2, 3, 2, 3], FinishReason.LENGTH, None),
        ({"stop_token_ids": frozenset({3}), "min_tokens": 3}, [1, 2, 3], FinishReason.STOP, None),
        ({"stop_token_ids": frozenset({3}), "min_tokens": 4}, [1, 2, 3, 2, 3], FinishReason.STOP, None),
        ({"max_tokens": 3, "stop_token_ids": frozenset({3})}, [1, 2, 3], FinishReason.STOP, None),
        ({"max_tokens": 2, "stop_token_ids": frozenset({3})}, [1, 2], FinishReason.LENGTH, None),
    ],
)
def test_stop_rules(kw: dict[str, object], want: list[int], reason: FinishReason, stop_reason: int | None) -> None:
    request = sampled(make(), [1, 2, 3, 2, 3], **({"max_tokens": 5} | kw))
    assert (request.output_token_ids, request.finish_reason, request.stop_reason) == (want, reason, stop_reason)


def test_stop_reason_is_the_token_only_if_the_user_named_it() -> None:
    harness = make()
    request = Request("r", [1], SamplingParams(stop_token_ids=[3]), stop_token_ids=frozenset({2, 3}))
    harness.scheduler.add_request(request)
    harness.scheduler.update_from_output(harness.scheduler.schedule(), ModelRunnerOutput(sampled_token_ids={"r": [3]}))
    assert request.stop_reason == 3 and request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    "state", ["waiting", "parked fork", "unstarted fork", "in prefill", "decoding", "in flight", "preempted", "done in flight"]
)
def test_abort_in_each_state_gives_every_block_back(state: str) -> None:
    harness = make(full=1 + 5, max_num_batched_tokens=9, depth=2)
    victim = harness.request([1] * 10, request_id="victim", max_tokens=10)
    if state == "parked fork":
        harness.add(harness.request([1] * 12, request_id="parent", max_tokens=2))
        harness.add(victim, "parent", 9)
    elif state == "unstarted fork":
        harness.add(harness.request([1] * 9, request_id="parent", max_tokens=2))
        harness.add(victim, "parent", 9)
        harness.schedule()
        assert harness.manager.holds_blocks(victim) and victim.status is RequestStatus.WAITING
    elif state == "preempted":
        harness.add(harness.request([2] * 7, max_tokens=9, priority=-1))
        harness.add(victim)
        while victim.status is not RequestStatus.PREEMPTED:
            harness.step()
    elif state == "done in flight":
        victim = harness.add(harness.request([1] * 9, request_id="victim", label_token_ids=()))
        harness.schedule()
    else:
        harness.add(victim)
        for _ in range({"waiting": 0, "in prefill": 1, "decoding": 3, "in flight": 3}[state]):
            harness.schedule()
        while state == "decoding" and harness.in_flight:
            harness.deliver()
    harness.end(victim)
    assert harness.scheduler.finish_request("victim") is None and not harness.manager.holds_blocks(victim)
    assert victim.finish_reason is FinishReason.ABORT
    assert "victim" in harness.schedule().finished and "victim" not in harness.schedule().finished
    harness.drain()


def test_tokens_that_arrive_after_the_end_are_dropped_even_if_the_id_is_used_again() -> None:
    harness = make(depth=1)
    harness.add(harness.request([1, 2], request_id="x", max_tokens=9))
    harness.schedule()
    harness.end(harness.scheduler.requests["x"])
    again = harness.add(harness.request([3, 3, 3], request_id="x", max_tokens=9))
    assert harness.deliver() == [] and again.output_token_ids == [] and again.num_inflight_tokens == 0
    harness.drain()


def test_the_forks_of_a_parent_that_ends_early_run_on_their_own() -> None:
    harness = make(max_num_batched_tokens=8)
    parent = harness.add(harness.request([1] * 20, max_tokens=2))
    child = harness.add(harness.request([1] * 18 + [2], max_tokens=2), parent.request_id, 18)
    harness.step()
    harness.end(parent)
    harness.drain()
    assert child.finish_reason is FinishReason.LENGTH and child.num_cached_tokens == 8, "what the parent left in the cache"


def test_forks_that_wait_give_their_blocks_to_a_request_that_runs() -> None:
    harness = make(full=1 + 6, max_num_seqs=1, max_num_batched_tokens=100, window=100, sliding=60)
    parent = harness.add(harness.request([1] * 10, max_tokens=8))
    child = harness.add(harness.request([1] * 6 + [2] * 3, max_tokens=2), parent.request_id, 6)
    harness.step()
    other = harness.add(harness.request([3] * 20, max_tokens=5, priority=-1))
    harness.end(parent)
    assert harness.manager.holds_blocks(child)
    harness.step()
    assert other.num_computed_tokens == 20 and not harness.manager.holds_blocks(child) and child.num_computed_tokens == 0
    harness.drain()


# -- drafts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rejected_drafts_are_computed_again_and_every_row_is_wanted(accepted: int) -> None:
    harness = make()
    request = harness.request([1, 2, 3], max_tokens=20)
    scheduler = harness.scheduler
    scheduler.add_request(request)
    first = ModelRunnerOutput(sampled_token_ids={"r1": [7]}, draft_token_ids={"r1": [5, 5, 5]})
    scheduler.update_from_output(scheduler.schedule(), first)
    step = scheduler.schedule()
    (part,) = step.scheduled
    assert (part.start, part.num_tokens, list(part.rows), list(part.draft_token_ids)) == (3, 4, [3, 4, 5, 6], [5, 5, 5])
    assert part.sample and scheduler.schedule().is_empty, "the next start is not known before the result"
    (output,) = scheduler.update_from_output(step, ModelRunnerOutput(sampled_token_ids={"r1": [5] * accepted + [6]}))
    assert output.new_token_ids == [5] * accepted + [6] and request.num_computed_tokens == 4 + accepted
    (part,) = scheduler.schedule().scheduled
    assert (part.start, part.num_tokens) == (4 + accepted, 1)


def test_drafts_stay_within_the_budget_and_tokens_after_a_stop_are_dropped() -> None:
    harness = make()
    request = harness.request([1, 2, 3], max_tokens=4, stop_token_ids=frozenset({9}))
    scheduler = harness.scheduler
    scheduler.add_request(request)
    first = ModelRunnerOutput(sampled_token_ids={"r1": [7]}, draft_token_ids={"r1": [5] * 8})
    scheduler.update_from_output(scheduler.schedule(), first)
    step = scheduler.schedule()
    assert step.scheduled[0].num_tokens == 3, "three tokens are left: two drafts and one more"
    with pytest.raises(ValueError, match="4 sampled tokens for a part with 2 drafts"):
        scheduler.update_from_output(step, ModelRunnerOutput(sampled_token_ids={"r1": [5] * 4}))
    (output,) = scheduler.update_from_output(step, ModelRunnerOutput(sampled_token_ids={"r1": [5, 9, 5]}))
    assert output.new_token_ids == [5, 9] and request.output_token_ids == [7, 5, 9] and request.finish_reason is FinishReason.STOP


# -- fairness and counters -------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    harness = make(full=1 + 20, max_num_seqs=3, max_num_batched_tokens=6)
    long = harness.add(harness.request([1] * 60, max_tokens=5))
    for _ in range(60):
        harness.add(harness.request([2] * 4, max_tokens=3))
        harness.step()
        if long.is_finished:
            break
    assert long.is_finished
    harness.drain()


def test_counters_and_metrics_add_up() -> None:
    harness = make(max_num_batched_tokens=8)
    request = harness.add(harness.request([1] * 20, max_tokens=3, prompt_rows=(15,)))
    harness.drain()
    scheduler, metrics = harness.scheduler, request.metrics
    counters = scheduler.counters
    # 8 + 8 + 4 prompt tokens, then two decodes; rows: the asked one, three sampled ones.
    assert (counters.steps, counters.scheduled_tokens, counters.scheduled_rows, counters.decode_tokens) == (5, 22, 4, 2)
    assert (metrics.rows_given, metrics.rows_computed, counters.generated_tokens, counters.finished_requests) == (22, 4, 3, 1)
    times = (metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time, metrics.finished_time)
    assert all(time is not None for time in times) and list(times) == sorted(times)  # type: ignore[type-var]
    assert metrics.time_in_queue is not None and metrics.time_to_first_token is not None
    harness.add(harness.request([1] * 20, max_tokens=3))
    harness.schedule()
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_scheduled_tokens, stats.num_decodes) == (1, 0, 4, 0)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40, 16)
    assert stats.kv_usage == pytest.approx((5 / 59, 3 / 59)), (
        "16 tokens hit: 4 full blocks and the 2 of the last window, one new block each"
    )
    status = cache_status(harness.manager)
    assert status["groups"]["full"]["in_use"] == 5 and status["groups"]["sliding"]["in_use"] == 3
    assert status["groups"]["full"]["total"] == status["groups"]["full"]["free"] + 5 == 59
    assert status["prefix_cache"] == {"requests": 2, "queries": 40, "hits": 16, "hit_rate": 0.4}
    harness.drain()
