"""Drafts for tiny-e, by its own assistant and by n-grams: outputs are transformers' greedy ones, and acceptance is real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastrow import LLM, SamplingParams
from lastrow.engine.spec_decode import allowed_drafts
from lastrow.engine.structured_output import GrammarBackend
from lastrow.models.config import ConfigError
from lastrow.tokenizer import Tokenizer

ASSISTANT = {"model": "tiny-e-assistant", "num_speculative_tokens": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
TASKS = ("chat", "multiturn", "tool_call", "tool_answer", "decide", "json", "think", "retrieval", "prose", "recite")
SMALL: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def spread(heldout: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two held-out prompts of each task: the first and the tenth."""
    return [row for row in heldout if row["task"] in TASKS and row["id"] in (0, 9)]


def generate(spec: dict[str, Any] | None, rows: list[dict[str, Any]], **options: Any) -> tuple[LLM, list[list[int]]]:
    llm = LLM("tiny-e", **(SMALL | options), speculative_config=spec)
    params = [SamplingParams(temperature=0.0, max_tokens=len(row["output_ids"])) for row in rows]
    return llm, [out.outputs[0].token_ids for out in llm.generate([row["prompt_ids"] for row in rows], params)]


def stats(llm: LLM):
    return llm.engine.runner.speculator.stats


def test_greedy_outputs_are_those_of_transformers_with_either_proposer(spread: list[dict[str, Any]]) -> None:
    expected = [row["output_ids"] for row in spread]
    llm, outputs = generate(ASSISTANT | {"adaptive": False}, spread)
    assert outputs == expected
    assert stats(llm).mean_accepted_length >= 2.2
    llm, outputs = generate(NGRAM, spread)
    assert outputs == expected
    assert stats(llm).num_accepted_tokens > 20


def test_8_bit_keys_and_values_give_the_same_with_and_without_drafts(spread: list[dict[str, Any]]) -> None:
    rows = [row for row in spread if row["task"] in ("tool_call", "json", "think")]
    _, plain = generate(None, rows, kv_cache_dtype="int8_per_token_head")
    llm, outputs = generate(ASSISTANT, rows, kv_cache_dtype="int8_per_token_head")
    assert outputs == plain
    assert stats(llm).mean_accepted_length > 2


def test_samples_and_logprobs_are_bit_identical_to_plain_decoding(spread: list[dict[str, Any]]) -> None:
    """A verified row is a row like any other: the same bits, whatever is drafted around it, because drafts turn batch_invariant on."""
    rows = [row for row in spread if row["task"] in ("chat", "json", "prose")]
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=24, logprobs=2, repetition_penalty=1.1, presence_penalty=0.2)
        for i in range(len(rows))
    ]
    prompts = [row["prompt_ids"] for row in rows]
    plain = LLM("tiny-e", **SMALL, batch_invariant=True).generate(prompts, params)
    drafted = LLM("tiny-e", **SMALL, speculative_config=ASSISTANT).generate(prompts, params)
    for a, b in zip(plain, drafted, strict=True):
        assert b.outputs[0].token_ids == a.outputs[0].token_ids
        assert b.outputs[0].logprobs == a.outputs[0].logprobs


def test_in_a_small_pool_forks_grammars_and_cached_prompts_stay_bit_identical(spread: list[dict[str, Any]]) -> None:
    """Everything at once: completions of one prompt, grammars that are recomputed after a preemption, prompts in chunks of 48 tokens
    beside decodes, and the last prompts again, found in the prefix cache."""
    pytest.importorskip("llguidance")
    rows = [row for row in spread if row["task"] in ("chat", "multiturn", "decide", "json") and len(row["prompt_ids"]) < 150]
    prompts = [row["prompt_ids"] for row in rows]
    fields: list[dict[str, Any]] = [
        {"n": 3, "temperature": 1.0, "seed": 5, "ignore_eos": True},
        {"structured_outputs": {"regex": "[A-Z][a-z]+( [a-z]+){4,8}[.]"}, "temperature": 1.0, "seed": 1, "n": 2},
        {"temperature": 0.0, "presence_penalty": 0.7, "bad_words": [" the", "and the"], "logprobs": 2, "ignore_eos": True},
        {
            "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}},
            "temperature": 0.0,
        },
    ]
    params = [SamplingParams(max_tokens=20 + 5 * (i % 4), **fields[i % 4]) for i in range(len(rows))]
    said = []
    options: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16, "batch_invariant": True}
    small = options | {"kv_cache_memory_bytes": 400_000, "max_num_batched_tokens": 48}
    for more in (options, small | {"speculative_config": ASSISTANT | {"adaptive": False}}, small | {"speculative_config": NGRAM}):
        llm = LLM("tiny-e", **more)
        answers = [*llm.generate(prompts, params), *llm.generate(prompts[-2:], params[-2:])]
        said.append([[(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in answer.outputs] for answer in answers])
        counters, cached = llm.engine.scheduler.counters, llm.engine.scheduler.kv.prefix_cache_stats.hits
        assert cached > 0 and (counters.preemptions > 0) == (more is not options)
        assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in llm.engine.scheduler.kv.pools)
        assert more is options or stats(llm).num_accepted_tokens > 20
    assert said[1] == said[0] and said[2] == said[0]


def test_a_grammar_holds_through_drafts() -> None:
    """Drafts that the grammar forbids fall; those it allows stand, and the matcher is where the output is."""
    pytest.importorskip("llguidance")
    prompt = "<|turn>user\nWhat is the capital of Norway?<turn|>\n<|turn>model\n"
    wishes = [
        {"regex": "The capital of Norway is [A-Z][a-z]+[.]"},
        {"regex": "[0-9]{3}-[0-9]{3}-[0-9]{3}-[0-9]{3}"},
        {"choice": ["Oslo is it.", "Rome"]},
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=wish) for wish in wishes]
    plain = LLM("tiny-e", **SMALL).generate([prompt] * 3, params)
    for spec in (ASSISTANT, NGRAM):
        llm = LLM("tiny-e", **SMALL, speculative_config=spec | {"adaptive": False})
        assert llm.engine.runner.speculator.grammars is llm.engine.runner.grammars  # drafts end where these forbid them
        drafted = llm.generate([prompt] * 3, params)
        assert [out.outputs[0].text for out in drafted] == [out.outputs[0].text for out in plain]
        assert stats(llm).num_draft_tokens > stats(llm).num_accepted_tokens > 0


def test_drafts_end_where_the_grammar_forbids_them(tiny_e: Path) -> None:
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer(tiny_e)
    matcher = GrammarBackend(tokenizer).matcher({"regex": "The capital of Norway is (Oslo|Rome)[.]"})
    right, wrong = (tokenizer.encode(text, add_bos=False) for text in ("The capital of Norway is Oslo.", "The capital of Norway is Paris."))
    agree = next(i for i, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b)
    for known in range(agree + 1):
        assert allowed_drafts(matcher, right[:known], right[known:]) == right[known:]
        allowed = allowed_drafts(matcher, right[:known], wrong[known:])
        assert right[known:agree] == allowed[: agree - known] and len(allowed) < len(wrong) - known
        assert matcher.num_tokens == 0
    assert allowed_drafts(matcher, wrong, right) == []


def test_a_stream_of_several_tokens_a_step_ends_as_the_whole_answer(spread: list[dict[str, Any]]) -> None:
    row = next(row for row in spread if row["task"] == "json")
    llm = LLM("tiny-e", **SMALL, speculative_config=ASSISTANT)
    seen = [
        out.outputs[0].token_ids
        for out in llm.stream({"prompt_token_ids": row["prompt_ids"]}, SamplingParams(temperature=0, max_tokens=200))
    ]
    assert seen[-1] == row["output_ids"] and all(ids == row["output_ids"][: len(ids)] for ids in seen)
    assert len(seen) < len(row["output_ids"])


def test_what_is_no_assistant_of_this_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_type is 'gemma4': an assistant's is gemma4_assistant or gemma4_unified_assistant"):
        LLM("tiny-e", **SMALL, speculative_config={"model": "tiny-e"})
    with pytest.raises(ConfigError, match="model_type is 'gemma4_assistant': a drafter; give its target"):
        LLM("tiny-e-assistant", **SMALL)
    with pytest.raises(ConfigError, match="vocab_size of the assistant is 4096, the target needs 32768"):
        LLM("x", load_format="dummy", shape="e2b-eighth", **SMALL, speculative_config=ASSISTANT)
