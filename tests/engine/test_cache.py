"""The cache's status document, a new size at run time, and reset, on tiny-e with real K/V."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine import cache as cache_module
from lastrow.engine.llm import LLM
from lastrow.kv.pool import KVPool
from lastrow.models.config import ConfigError

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16, "kv_cache_memory_bytes": 1_000_000}
# tiny-e in fp32: one full owner of 1 head of 64 and four sliding ones of 1 head of 32, K and V of 4 bytes
FULL, SLIDING = 2 * 64 * 4, 4 * 2 * 32 * 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def greedy(llm: LLM, rows: list[dict[str, Any]]) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=len(row["output_ids"])) for row in rows]
    outputs = llm.generate([{"prompt_token_ids": row["prompt_ids"]} for row in rows], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def rows(heldout: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in heldout if row["task"] == "tool_call"][:3]


def test_status_says_who_owns_and_who_reads_and_what_the_bytes_hold(rows: list[dict[str, Any]]) -> None:
    llm = LLM("tiny-e", **SMALL | {"kv_cache_memory_bytes": 3_000_000, "max_num_seqs": 16})  # room for all three prompts at once
    greedy(llm, rows)
    greedy(llm, rows)
    status = llm.cache_status()
    assert json.loads(json.dumps(status)) == status
    # assets/tiny-e/README.md: 5 owners; sliding layers 5-8 read layer 3, full layer 9 reads layer 4
    assert [(o["layer"], o["group"], o["read_by"]) for o in status["owners"]] == [
        (0, "sliding", []), (1, "sliding", []), (2, "sliding", []), (3, "sliding", [5, 6, 7, 8]), (4, "full", [9]),
    ]  # fmt: skip
    assert status["groups"]["full"]["layers"] == [4] and status["groups"]["sliding"]["layers"] == [0, 1, 2, 3]
    assert status["groups"]["full"]["bytes_per_token"] == FULL and status["groups"]["sliding"]["bytes_per_token"] == SLIDING
    for group in status["groups"].values():
        assert group["total"] == group["free"] + group["in_use"] and group["in_use"] == 0 and group["cached"] > 0
    blocks = sum((g["total"] + 1) * 16 * g["bytes_per_token"] for g in status["groups"].values())
    assert status["pool_bytes"] == blocks <= status["kv_cache_memory_bytes"] == 3_000_000
    assert status["formats"]["float32"]["full_tokens"] == 16 * status["groups"]["full"]["total"]
    # 8 bits and a scale of 4 bytes for each head: 68 instead of 256 bytes, 36 instead of 128
    assert status["formats"]["int8_per_token_head"]["full"] == 2 * 68 and status["formats"]["fp8_per_token_head"]["sliding"] == 4 * 2 * 36
    cached = sum((len(row["prompt_ids"]) - 1) // 16 * 16 for row in rows)
    assert status["prefix_cache"]["hits"] >= cached and status["prefix_cache"]["hit_rate"] > 0


@pytest.mark.parametrize("form", ["auto", "int8_per_token_head"])
def test_rebuilding_changes_the_size_and_nothing_else(form: str, rows: list[dict[str, Any]]) -> None:
    llm = LLM("tiny-e", **SMALL, kv_cache_dtype=form)
    before = greedy(llm, rows)
    hits = llm.cache_status()["prefix_cache"]
    for size in (3_000_000, 900_000):
        llm.rebuild_cache(size)
        status, pool = llm.cache_status(), llm.engine.runner.pool
        assert pool.num_bytes == status["pool_bytes"] <= size < status["pool_bytes"] + 16 * (FULL + SLIDING)
        assert [g["total"] for g in status["groups"].values()] == [p.num_usable_blocks for p in llm.engine.scheduler.kv.pools]
        assert all(g["cached"] == 0 and g["free"] == g["total"] for g in status["groups"].values())
        assert status["prefix_cache"] == hits  # totals since the start go on
        assert greedy(llm, rows) == before
        hits = llm.cache_status()["prefix_cache"]
        llm.engine.scheduler.kv.check_integrity([])
    # the log's line and the pool agree
    held = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:tokens|in windows)", llm.engine.cache.plan.summary())]
    assert held == [16 * g["total"] for g in llm.cache_status()["groups"].values()]


def test_a_drafter_reads_the_new_pool(rows: list[dict[str, Any]]) -> None:
    """The assistant reads the target's last owners. Over a pool that is gone or of another size its drafts would be nobody's."""
    llm = LLM("tiny-e", **SMALL, speculative_config={"model": "tiny-e-assistant", "num_speculative_tokens": 3, "adaptive": False})
    before, stats = greedy(llm, rows), llm.engine.runner.speculator.stats
    accepted = stats.num_accepted_tokens
    assert accepted > 10
    llm.rebuild_cache(2_000_000)
    assert llm.engine.runner.speculator.proposer.pool is llm.engine.runner.pool
    assert greedy(llm, rows) == before and stats.num_accepted_tokens == 2 * accepted


def test_a_size_that_does_not_fit_leaves_the_old_one(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("tiny-e", **SMALL)
    before, pool = greedy(llm, rows), llm.engine.runner.pool
    for size, message in (
        (0, "a positive number of bytes"),
        (100, "hold no K/V block"),
        (1 << 60, "bytes for the pool, the old one included"),
    ):
        with pytest.raises(ConfigError, match=message):
            llm.rebuild_cache(size)
        assert llm.engine.runner.pool is pool
    sizes = []

    class ShortOfMemory(KVPool):
        def __init__(self, config: Any, budget: Any, *options: Any) -> None:
            sizes.append(budget.num_full_blocks)
            if len(sizes) == 1:
                raise RuntimeError("out of memory")
            super().__init__(config, budget, *options)

    monkeypatch.setattr(cache_module, "KVPool", ShortOfMemory)
    with pytest.raises(ConfigError, match="out of memory; the old size is in place again"):
        llm.rebuild_cache(2_000_000)
    assert llm.engine.runner.pool.num_bytes == pool.num_bytes
    assert greedy(llm, rows) == before


def test_nothing_is_taken_from_a_request_that_runs(rows: list[dict[str, Any]]) -> None:
    llm = LLM("tiny-e", **SMALL)
    before = greedy(llm, rows)
    stream = llm.stream({"prompt_token_ids": rows[0]["prompt_ids"]}, SamplingParams(temperature=0, max_tokens=len(rows[0]["output_ids"])))
    next(stream)
    for call in (llm.reset_prefix_cache, lambda: llm.rebuild_cache(2_000_000)):
        with pytest.raises(ValueError, match="1 requests are not finished"):
            call()
    assert list(stream)[-1].outputs[0].token_ids == before[0]
    llm.reset_prefix_cache()
    assert all(group["cached"] == 0 for group in llm.cache_status()["groups"].values())
    again = llm.generate({"prompt_token_ids": rows[0]["prompt_ids"]}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0]
    assert again.num_cached_tokens == 0


def test_the_cache_salt_of_a_prompt_keeps_tenants_apart(rows: list[dict[str, Any]]) -> None:
    llm = LLM("tiny-e", **SMALL)
    ids, params = rows[0]["prompt_ids"], SamplingParams(temperature=0, max_tokens=1)

    def cached(**more: Any) -> int:
        return llm.generate({"prompt_token_ids": ids, **more}, params, use_tqdm=False)[0].num_cached_tokens

    whole = (len(ids) - 1) // 16 * 16
    assert cached(cache_salt="a") == 0 and cached() == 0 and cached(cache_salt="") == 0
    assert cached(cache_salt="a") == cached() == cached(cache_salt="") == whole
    assert cached(cache_salt="b") == 0
    with pytest.raises(ValueError, match="cache_salt is 7: a text is needed"):
        cached(cache_salt=7)
    off = LLM("tiny-e", **SMALL, enable_prefix_caching=False)
    for _ in range(2):
        assert off.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].num_cached_tokens == 0
