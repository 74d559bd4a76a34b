"""On the card: the per-layer table in host memory, a new pool size under captured graphs, 8-bit K/V through a whole engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.llm import LLM

pytestmark = pytest.mark.gpu
SMALL = {"device": "cuda", "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024, "kv_cache_memory_bytes": 16_000_000}


def answers(llm: LLM, heldout: list[dict[str, Any]]) -> list[Any]:
    rows = [row for row in heldout if row["id"] < 3]
    params = [SamplingParams(temperature=0, max_tokens=len(row["output_ids"]), logprobs=1) for row in rows]
    outputs = llm.generate([row["prompt_ids"] for row in rows], params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_table_in_host_memory_gives_the_bits_of_one_on_the_card(heldout: list[dict[str, Any]], enforce_eager: bool) -> None:
    taken, said = [], []
    for place in ("device", "host"):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        llm = LLM("tiny-e", **SMALL, embed_weights=place, enforce_eager=enforce_eager, batch_invariant=True)
        taken.append(torch.cuda.memory_allocated() - before)
        table = llm.engine.runner.model.weights.ple_table
        assert table.is_cuda == (place == "device") and (table.is_cuda or table.is_pinned())
        said.append(answers(llm, heldout))
        if not enforce_eager:
            assert llm.engine.runner.stats.graphs > 0
        del llm, table
    assert said[0] == said[1]
    assert taken[0] - taken[1] >= 4096 * 10 * 32 * 2 - (1 << 20)  # the table, up to the allocator's rounding


@pytest.mark.parametrize("form", ["auto", "int8_per_token_head", "fp8_per_token_head"])
def test_graphs_read_the_new_pool(heldout: list[dict[str, Any]], form: str) -> None:
    drafts = {"speculative_config": {"model": "tiny-e-assistant", "num_speculative_tokens": 2}}
    for more in ({}, drafts):
        llm = LLM("tiny-e", **SMALL, kv_cache_dtype=form, batch_invariant=True, **more)
        before = answers(llm, heldout)
        for size in (32_000_000, 8_000_000):
            llm.rebuild_cache(size)
            assert answers(llm, heldout) == before
        assert llm.engine.runner.stats.graphs > 0
