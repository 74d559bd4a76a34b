"""A needle in the longest texts tiny-e can read, found through small chunks, in every K/V format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.llm import LLM
from lastrow.kv.layout import KV_CACHE_DTYPES

TURN_END = 106
CHUNK = 64


@pytest.mark.parametrize("form", KV_CACHE_DTYPES)
def test_a_record_is_found_at_the_longest_lengths_the_model_was_trained_for(heldout: list[dict[str, Any]], form: str) -> None:
    """tiny-e saw up to 1,024 tokens. Retrieval prompts of the held-out kind: those of 700 tokens and more as they are, and those whose
    context is a turn of its own with unseen prose between record and question, up to 1,000 tokens: 16 chunks, 8 windows. The answers
    are those that transformers gave for the held-out prompts, right or wrong; in the lengthened ones only right ones count."""
    torch.set_num_threads(1)
    retrieval = [row for row in heldout if row["task"] == "retrieval"]
    prose = [token for row in heldout if row["task"] == "prose" for token in row["prompt_ids"][1:]]
    as_they_are = [row for row in retrieval if len(row["prompt_ids"]) >= 700]
    prompts = [row["prompt_ids"] for row in as_they_are]
    own_turn = [row for row in retrieval if row["correct"] and row["prompt_ids"].count(TURN_END) == 2]
    for i, row in enumerate(own_turn):
        ids = row["prompt_ids"]
        end = ids.index(TURN_END)
        prompts.append(ids[:end] + prose[331 * i : 331 * i + 1000 - len(ids)] + ids[end:])
    assert len(as_they_are) == 16 and len(own_turn) >= 5 and max(map(len, prompts)) == 1000
    llm = LLM("tiny-e", kv_cache_dtype=form, max_num_batched_tokens=CHUNK, max_num_seqs=4)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    answers = [output.outputs[0].token_ids for output in outputs]
    assert answers == [row["output_ids"] for row in as_they_are + own_turn]
    assert all(output.metrics.rows_computed == len(output.outputs[0].token_ids) for output in outputs)
