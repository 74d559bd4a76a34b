"""Issue 3, item 6: with batch_invariant every prompt has identical bits alone, in any batch, chunked, mixed and with all rows."""

from __future__ import annotations

import pytest
import torch

from lastrow.harness import invariance

pytestmark = pytest.mark.gpu


def test_64_prompts_of_1024_tokens_are_identical_in_every_pairing():
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(3, 262144, (64, 1024), generator=generator).tolist()
    options = {"shape": "e2b", "load_format": "dummy", "max_model_len": 2048, "max_num_seqs": 64, "kv_cache_memory_bytes": 8 << 30}
    result = invariance.run(options, prompts)
    print("\ninvariance:", result)
    assert result == dict.fromkeys(result, 64)
