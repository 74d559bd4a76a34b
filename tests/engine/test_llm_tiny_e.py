"""LLM on the bundled checkpoint, against transformers' held-out outputs and against the model without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.llm import LLM
from lastrow.harness.direct import DirectRunner
from lastrow.models.config import ConfigError
from lastrow.tokenizer import TokenizerError

SMALL = {"max_num_seqs": 16, "max_num_batched_tokens": 192}  # prompts of up to 900 tokens then take several chunks
# fp32: chunking and batching change the order of sums; measured 2e-5 at most on these prompts
TOLERANCE = 2e-4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small lose time to a second thread
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-e", **SMALL)


@pytest.fixture(scope="module")
def by_task(heldout: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    tasks: dict[str, list[dict[str, Any]]] = {}
    for row in heldout:
        tasks.setdefault(row["task"], []).append(row)
    return tasks


def greedy(row: dict[str, Any], **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=len(row["output_ids"]), **options)


def test_greedy_tokens_equal_the_reference_batched_and_chunked(llm: LLM, by_task: dict[str, list[dict[str, Any]]]) -> None:
    rows = [row for rows in by_task.values() for row in rows[5:8]]
    outputs = llm.generate([{"prompt_token_ids": row["prompt_ids"]} for row in rows], [greedy(row) for row in rows], use_tqdm=False)
    assert len(by_task) == 12 and len(rows) == 36
    wrong = [(r["task"], r["id"]) for r, o in zip(rows, outputs, strict=True) if o.outputs[0].token_ids != r["output_ids"]]
    assert not wrong
    for row, output in zip(rows, outputs, strict=True):
        assert output.outputs[0].finish_reason == ("stop" if row["output_ids"][-1] in (1, 106, 50) else "length")
        assert output.outputs[0].text == llm.get_tokenizer().decode(row["output_ids"])


def test_a_step_starts_while_other_prompts_are_prepared(monkeypatch: pytest.MonkeyPatch, by_task: dict[str, list[dict[str, Any]]]) -> None:
    """As on a card, where a step stays in flight: the first one has LAUNCH_TOKENS tokens, no prompt's last one, and comes once the prompts
    that are left are worth it."""
    monkeypatch.setattr("lastrow.engine.llm.LAUNCH_TOKENS", 128)
    llm = LLM("tiny-e", max_num_batched_tokens=1024, enable_prefix_caching=False)
    llm.engine.depth = 1
    rows = sorted((row for rows in by_task.values() for row in rows), key=lambda row: len(row["prompt_ids"]))[:20]
    waiting, first = 0, 0
    while waiting < 128:
        waiting += len(rows[first]["prompt_ids"]) - 1
        first += 1
    schedule, seen = llm.engine.scheduler.schedule, []

    def watched(*args: Any) -> Any:
        step = schedule(*args)
        seen.append((step.total_num_scheduled_tokens, len(llm.engine.scheduler.requests), any(part.sample for part in step.scheduled)))
        return step

    monkeypatch.setattr(llm.engine.scheduler, "schedule", watched)
    assert len(rows) - first >= 8
    outputs = llm.generate([row["prompt_ids"] for row in rows], [greedy(row) for row in rows])
    assert [out.outputs[0].token_ids for out in outputs] == [row["output_ids"] for row in rows]
    assert seen[0] == (128, first, False) and seen[1][1] == len(rows)
    seen.clear()
    llm.generate([row["prompt_ids"] for row in rows[: first + 7]], [greedy(row) for row in rows[: first + 7]])
    assert seen[0][1] == first + 7, "with seven prompts left it does not pay"


def test_texts_are_encoded_while_the_first_of_them_run(monkeypatch: pytest.MonkeyPatch, by_task: dict[str, list[dict[str, Any]]]) -> None:
    monkeypatch.setattr("lastrow.engine.llm.LAUNCH_TOKENS", 128)
    monkeypatch.setattr("lastrow.engine.llm.TEXTS_AT_ONCE", 5)
    llm = LLM("tiny-e", max_num_batched_tokens=1024, enable_prefix_caching=False)
    llm.engine.depth = 1
    tokenizer, happened = llm.get_tokenizer(), []
    rows = sorted((row for rows in by_task.values() for row in rows), key=lambda row: len(row["prompt_ids"]))[:17]
    texts = [tokenizer.decode(row["prompt_ids"], skip_special_tokens=False) for row in rows]
    prompts = [text if i % 2 else {"prompt": text} for i, text in enumerate(texts)]
    expected = [tokenizer.encode(text) for text in texts]
    prompts[3] = {"prompt_token_ids": expected[3]}
    encode, execute = tokenizer.encode_batch, llm.engine.runner.execute
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: happened.append(len(texts)) or encode(texts))
    monkeypatch.setattr(llm.engine.runner, "execute", lambda step: happened.append("step") or execute(step))
    outputs = llm.generate(prompts, greedy(rows[0]), use_tqdm=False)
    assert happened[:5] == [4, 5, "step", 5, 2]
    assert [out.prompt_token_ids for out in outputs] == expected
    assert [out.prompt for out in outputs] == [None if i == 3 else text for i, text in enumerate(texts)]


def test_a_pool_too_small_for_all_preempts_and_changes_nothing(by_task: dict[str, list[dict[str, Any]]]) -> None:
    rows = [*by_task["prose"][:4], *by_task["recite"][:4]]
    # a block of 16 tokens takes 8 KiB in the full group and 16 KiB in the sliding one: 39 of each, and the eight need about 80
    small = LLM("tiny-e", **SMALL, kv_cache_memory_bytes=1_000_000, enable_prefix_caching=False)
    outputs = small.generate([row["prompt_ids"] for row in rows], [greedy(row) for row in rows], use_tqdm=False)
    assert small.engine.scheduler.counters.preemptions > 0
    assert [output.outputs[0].token_ids for output in outputs] == [row["output_ids"] for row in rows]
    for pool in small.engine.scheduler.kv.pools:
        assert pool.num_free_blocks == pool.num_usable_blocks


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_with_a_step_in_flight(
    llm: LLM, by_task: dict[str, list[dict[str, Any]]]
) -> None:
    rows = [*by_task["prose"][:3], *by_task["chat"][:3]]
    params = [SamplingParams(temperature=1.0, top_k=64, top_p=0.95, seed=i, max_tokens=24) for i in range(6)]
    prompts = [row["prompt_ids"] for row in rows]
    together = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    llm.engine.depth = 1
    try:
        backwards = [o.outputs[0].token_ids for o in llm.generate(prompts[::-1], params[::-1], use_tqdm=False)][::-1]
    finally:
        llm.engine.depth = 0
    alone = [llm.generate(p, q, use_tqdm=False)[0].outputs[0].token_ids for p, q in zip(prompts, params, strict=True)]
    assert together == alone == backwards
    other = llm.generate(prompts[0], replace(params[0], seed=99), use_tqdm=False)[0].outputs[0].token_ids
    assert other != together[0]


def test_prompt_logprobs_are_those_of_all_rows_chunked_and_behind_a_prefix_hit(llm: LLM, by_task: dict[str, list[dict[str, Any]]]) -> None:
    row = by_task["retrieval"][0]
    ids = row["prompt_ids"]
    assert len(ids) > SMALL["max_num_batched_tokens"]
    logits = DirectRunner(llm.engine.runner.model, len(ids)).all_logits(ids)
    expected = torch.log_softmax(logits.double(), -1)
    llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)  # fills the prefix cache
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3, logprobs=2)
    for p in (params, replace(params, max_tokens=0)):
        output = llm.generate({"prompt_token_ids": ids}, p, use_tqdm=False)[0]
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(ids)
        for at in range(1, len(ids)):
            entry = output.prompt_logprobs[at]
            assert entry[ids[at]].logprob == pytest.approx(float(expected[at - 1, ids[at]]), abs=TOLERANCE)
            best = expected[at - 1].topk(3)
            got = sorted((lp.logprob for lp in entry.values() if lp.rank <= 3), reverse=True)
            assert got == pytest.approx(best.values.tolist(), abs=TOLERANCE)
            assert entry[ids[at]].decoded_token == llm.get_tokenizer().token_text(ids[at])
        assert len(output.outputs[0].token_ids) == p.max_tokens
    hit = llm.generate({"prompt_token_ids": ids}, replace(params, prompt_logprobs=None), use_tqdm=False)[0]
    assert hit.num_cached_tokens > 0
    token = hit.outputs[0].token_ids[0]
    assert hit.outputs[0].logprobs[0][token].logprob == pytest.approx(float(expected[-1, token]), abs=TOLERANCE)
    assert hit.outputs[0].logprobs[0][token].rank == 1


def test_stop_strings_cross_token_borders_alike_streamed_and_not(llm: LLM, by_task: dict[str, list[dict[str, Any]]]) -> None:
    row = by_task["chat"][0]  # "Guyana is in South America."
    for stop, include, expected in (
        (["n South Am"], False, "Guyana is i"),
        (["n South Am"], True, "Guyana is in South Am"),
        (["uyan", "ana"], False, "G"),
        (["South America!"], False, "Guyana is in South America."),
    ):
        params = greedy(row, stop=stop, include_stop_str_in_output=include)
        whole = llm.generate(row["prompt_ids"], params, use_tqdm=False)[0].outputs[0]
        texts = [out.outputs[0].text for out in llm.stream(row["prompt_ids"], params)]
        assert whole.text == texts[-1] == expected
        assert all(b.startswith(a) for a, b in pairwise(texts))
        assert whole.stop_reason == (None if "!" in stop[0] else stop[0]) and whole.finish_reason == "stop"


def test_chat_renders_answers_and_streams(llm: LLM, by_task: dict[str, list[dict[str, Any]]]) -> None:
    rows = [row for task in ("chat", "tool_call", "think") for row in by_task[task][:2]]
    params = SamplingParams(temperature=0, max_tokens=200)
    for row in rows:
        c = row["conversation"]
        kwargs = {"enable_thinking": c["thinking"]}
        output = llm.chat(c["messages"], params, use_tqdm=False, tools=c["tools"], chat_template_kwargs=kwargs)[0]
        assert output.prompt_token_ids == row["prompt_ids"] and output.outputs[0].token_ids == row["output_ids"]
        last = list(llm.stream(c["messages"], params, tools=c["tools"], chat_template_kwargs=kwargs))[-1]
        assert last.finished and last.outputs[0].text == output.outputs[0].text
    call = next(row for row in by_task["tool_call"] if len(row["output_ids"]) > 24 and row["min_margin"] > 1)
    untold = llm.chat(call["conversation"]["messages"], use_tqdm=False, tools=call["conversation"]["tools"])[0].outputs[0]
    assert len(untold.token_ids) > 16 and untold.finish_reason == "stop"  # to the end of the turn, not to generate()'s 16 tokens
    both = llm.chat([row["conversation"]["messages"] for row in by_task["chat"][:2]], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in both] == [row["output_ids"] for row in by_task["chat"][:2]]


def test_closing_a_stream_aborts_its_request(llm: LLM, by_task: dict[str, list[dict[str, Any]]]) -> None:
    stream = llm.stream(by_task["prose"][0]["prompt_ids"], SamplingParams(temperature=0, max_tokens=48))
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests
    assert all(pool.usage == 0 for pool in llm.engine.scheduler.kv.pools)


def test_streams_and_calls_that_take_turns_each_get_all_of_theirs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10)
    texts = ["In the beginning", "And God said", "The king"]
    alone = [output.outputs[0].text for output in llm.generate(texts, params, use_tqdm=False)]
    first, second = llm.stream(texts[0], params), llm.stream(texts[1], params)
    parts = [[next(first)], [next(second)]]  # the second's steps bring outputs of the first, and the other way round
    (decision,) = llm.decide(
        ["I want my money back."], {"refund": {"type": "predicate", "instructions": "Is it about a refund?"}}, use_tqdm=False
    )
    (called,) = llm.generate(texts[2], replace(params, max_tokens=12), use_tqdm=False)  # by its end both streams have ended, too
    for stream, seen in zip((first, second), parts, strict=True):
        seen += list(stream)
    assert decision.error is None and called.outputs[0].text.startswith(alone[2])
    assert [seen[-1].finished for seen in parts] == [True, True]
    assert [seen[-1].outputs[0].text for seen in parts] == alone[:2]
    assert not llm.engine.has_unfinished_requests


def test_threads_that_share_an_llm_get_what_each_gets_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    texts = ["In the beginning", "And God said", "The king", "What is"]
    alone = [output.outputs[0].text for output in llm.generate(texts, params, use_tqdm=False)]

    def work(place: int) -> list[str]:
        if place % 2:
            return [list(llm.stream(texts[place], params))[-1].outputs[0].text for _ in range(3)]
        return [output.outputs[0].text for _ in range(3) for output in llm.generate(texts[place], params, use_tqdm=False)]

    with ThreadPoolExecutor(len(texts)) as pool:
        assert list(pool.map(work, range(len(texts)))) == [[text] * 3 for text in alone]


def test_a_stream_that_nobody_reads_ends_with_its_iterator(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    unread = llm.stream("In the beginning", params)
    assert llm.engine.has_unfinished_requests
    del unread
    assert not llm.engine.has_unfinished_requests
    kept = llm.stream("In the beginning", params)
    request_id = next(kept).request_id
    llm.generate("And God said", replace(params, max_tokens=40), use_tqdm=False)
    assert llm.engine.is_open(request_id)  # its last output waits for its reader
    kept.close()
    assert not llm.engine.is_open(request_id) and list(kept) == []


def test_a_checkpoint_that_does_not_sample_is_greedy_by_default(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.get_tokenizer(), "generation_config", {"do_sample": False, "temperature": 0.7, "top_k": None})
    defaults = llm.get_default_sampling_params()
    assert defaults.is_greedy and defaults.top_k == 0


@pytest.mark.parametrize("prompts", [None, 5, [None], [b"text"], {"prompt": None}, {"prompt_token_ids": None}])
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValueError, match=r"^a prompt is .* is needed$"):
        llm.generate(prompts, use_tqdm=False)


@pytest.mark.parametrize("params", [{"max_tokens": 1}, [None]])
def test_what_is_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(ValueError, match=r"a SamplingParams or a list of them is needed"):
        llm.generate(["a"], params, use_tqdm=False)


def test_text_prompts_get_one_bos_and_the_defaults_of_the_checkpoint(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.max_tokens) == (1.0, 64, 0.95, 16)
    outputs = llm.generate(["In the beginning", "<bos>In the beginning", {"prompt": "In the beginning"}], use_tqdm=False)
    assert len({tuple(o.prompt_token_ids) for o in outputs}) == 1 and outputs[0].prompt_token_ids.count(2) == 1
    assert outputs[0].prompt == "In the beginning" and all(len(o.outputs[0].token_ids) <= 16 for o in outputs)
    assert {1, 50, 106} <= llm.engine.stop_token_ids


def test_a_typed_bos_is_no_second_one(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    outputs = llm.generate(["In <bos>the beginning", "<bos>In<bos>"], params, use_tqdm=False)
    talks = [[{"role": "user", "content": text}] for text in ("<bos>", "On which continent <bos> is Nepal?")]
    outputs += llm.chat(talks, params, use_tqdm=False)
    outputs += list(llm.stream("<bos>In <bos>the", params))[-1:]
    for output in outputs:
        assert output.prompt_token_ids[0] == 2 and output.prompt_token_ids.count(2) == 1


def test_structured_outputs_hold_their_grammar(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=8, structured_outputs={"choice": ["blue whale", "red fox"]})
    outputs = llm.generate(["In the beginning", "And he said"], params, use_tqdm=False)
    assert all(o.outputs[0].text in ("blue whale", "red fox") for o in outputs)
    assert not llm.engine.runner.grammars


def test_allowed_ids_that_no_beginning_of_the_grammar_has_are_refused_on_arrival(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    blue, red = (llm.get_tokenizer().encode(word, add_bos=False)[0] for word in ("blue", "red"))
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs={"choice": ["blue whale"]}, allowed_token_ids=[red])
    with pytest.raises(ValueError, match="no token can be the first: structured_outputs begins with none of allowed_token_ids"):
        llm.generate("In the beginning", params, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests and not llm.engine.runner.grammars
    # a beginning that both allow, and then the grammar goes on alone
    params = replace(params, allowed_token_ids=[red, blue])
    assert llm.generate("In the beginning", params, use_tqdm=False)[0].outputs[0].text == "blue whale"


def test_a_grammar_that_cannot_go_on_ends_its_request_with_the_reason(llm: LLM) -> None:
    stuck = SamplingParams(temperature=0.0, structured_outputs={"grammar": 'start: "a" endless\nendless: endless'})
    bad, good = llm.generate(["x", "In the beginning"], [stuck, SamplingParams(temperature=0.0, max_tokens=8)], use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and "can never be fulfilled" in str(bad.outputs[0].stop_reason)
    assert good.outputs[0].finish_reason == "length" and not llm.engine.has_unfinished_requests


def test_a_failed_call_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate([[3, 4], {"prompt_token_ids": []}], SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate([[3], [4]], [SamplingParams()], use_tqdm=False)
    with pytest.raises(ValueError, match=r"'prompt': text} is needed"):
        llm.generate({"text": "x"}, use_tqdm=False)
    with pytest.raises(TokenizerError):
        llm.chat([], use_tqdm=False)
    assert not llm.engine.has_unfinished_requests


def test_a_named_shape_takes_token_ids_only() -> None:
    dummy = LLM(load_format="dummy", shape="e2b-eighth", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)
    output = dummy.generate(
        {"prompt_token_ids": [2, 5, 7, 9] * 20}, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False
    )
    assert len(output[0].outputs[0].token_ids) == 3
    with pytest.raises(ConfigError, match="no tokenizer: give prompt_token_ids"):
        dummy.generate("text", use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_modell_len": 5}, "max_modell_len"),
        ({"max_model_len": 5000}, "max_model_len is 5000: the model was made for 4096 positions"),
        ({"device": "cuda"}, "device is 'cuda': torch sees no GPU"),
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes is 1,000"),
    ],
)
def test_bad_options_name_the_flag(options: dict[str, Any], message: str) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("has a GPU")
    with pytest.raises(ConfigError, match=message):
        LLM("tiny-e", **options)
