"""The engine process's own rules, without a process."""

from __future__ import annotations

import pytest

from lastrow import LLM, SamplingParams
from lastrow.models.config import ConfigError
from lastrow.server.engine_process import fit_length_to_pool


@pytest.mark.parametrize("memory", [1_200_000, 900_000])
def test_the_effective_length_is_the_longest_that_fits_the_pool(memory: int):
    """Exactly: a prompt of that length less one runs to its one token, and the scheduler refuses one token more."""
    llm = LLM(kv_cache_memory_bytes=memory)
    scheduler = llm.engine.scheduler
    asked = scheduler.config.max_model_len
    fit_length_to_pool(scheduler)
    length = scheduler.config.max_model_len
    # Whole blocks of 16 hold all tokens but the last sampled one.
    assert length == scheduler.kv.pools[0].num_usable_blocks * 16 + 1 < asked
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": [2] + [300] * (length - 2)}, params, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 1
    with pytest.raises(ValueError, match=str(length)):
        llm.generate({"prompt_token_ids": [2] + [300] * (length - 1)}, params, use_tqdm=False)


def test_a_pool_for_everything_changes_nothing_and_one_for_nothing_is_refused():
    llm = LLM()
    before = llm.engine.scheduler.config
    fit_length_to_pool(llm.engine.scheduler)
    assert llm.engine.scheduler.config is before
    for pool in llm.engine.scheduler.kv.pools:
        pool.num_blocks = 1
    with pytest.raises(ConfigError, match="kv-cache-memory-bytes"):
        fit_length_to_pool(llm.engine.scheduler)
