"""The memory plan against numbers of the spec and against what torch really takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lastrow.config import EngineConfig
from lastrow.engine.memory import CPU_KV_BYTES, forecast, weight_bytes
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kv.pool import KVPool
from lastrow.models.config import ConfigError
from lastrow.models.shapes import named_shape
from lastrow.weights.dummy import dummy_weights

CPU = torch.device("cpu")


def options(**values: Any) -> EngineConfig:
    return EngineConfig(load_format="dummy", **values).for_device(on_gpu=False)


def test_weight_bytes_are_those_of_the_spec_and_of_the_tensors() -> None:
    # spec section 4.2: 4,628,569,379 text parameters of E2B without the decoys
    assert weight_bytes(named_shape("e2b"), "bfloat16") == 2 * 4_628_569_379
    shape = named_shape("e2b-eighth")
    weights = dummy_weights(shape, ReferenceOps.pack_gate_up, torch.float32, CPU)
    tensors = [weights.embed, weights.norm, weights.ple_table, weights.ple_model_projection, weights.ple_projection_norm]
    fields = ["qkv", "o", "q_norm", "k_norm", "gate_up", "down", "input_norm", "post_attention_norm", "pre_feedforward_norm"]
    fields += ["post_feedforward_norm", "scalar", "ple_gate", "ple_projection", "post_ple_norm"]
    tensors += [t for layer in weights.layers for name in fields if (t := getattr(layer, name)) is not None]
    assert weight_bytes(shape, "float32") == sum(t.numel() * 4 for t in tensors)


def test_explicit_bytes_win_and_the_pool_stays_within_them() -> None:
    shape = named_shape("e2b-eighth")
    engine = options(shape="e2b-eighth", kv_cache_memory_bytes=50_000_000, max_num_seqs=8)
    plan = forecast(engine, shape, "float32", CPU, 4096)
    pool = KVPool(shape, plan.budget, "auto", torch.float32)
    one_block = 16 * plan.layout.bytes_per_token
    assert 50_000_000 - one_block <= pool.num_bytes <= 50_000_000


def test_the_default_on_a_cpu_holds_one_longest_request_and_all_windows_up_to_a_cap() -> None:
    shape = named_shape("e2b-eighth")
    engine = options(shape="e2b-eighth", max_num_seqs=8)
    plan = forecast(engine, shape, "float32", CPU, 4096)
    assert plan.budget.full_tokens >= 4096 + 8 * shape.sliding_window
    assert plan.budget.sliding_tokens >= 8 * shape.sliding_window
    assert plan.kv_bytes < CPU_KV_BYTES
    big = forecast(options(shape="e2b"), named_shape("e2b"), "float32", CPU, 131_072)
    assert big.kv_bytes <= CPU_KV_BYTES and "K/V" in big.summary()


def test_every_draft_is_a_row_of_logits() -> None:
    """fp32 logits of a whole batch with 4 drafts each; no step has more rows than tokens."""
    engine, shape = options(shape="e2b", max_num_seqs=256), named_shape("e2b")
    plain, drafting = (forecast(engine, shape, "bfloat16", CPU, 4096, num_drafts=n).activation_bytes for n in (0, 4))
    assert drafting - plain == 4 * 256 * 4 * shape.vocab_size
    small = options(shape="e2b", max_num_seqs=256, max_num_batched_tokens=512)
    plain, drafting = (forecast(small, shape, "bfloat16", CPU, 4096, num_drafts=n).activation_bytes for n in (0, 4))
    assert drafting - plain == 256 * 4 * shape.vocab_size


def test_a_budget_for_nothing_names_the_flag() -> None:
    engine = options(shape="e2b", kv_cache_memory_bytes=100)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes is 100"):
        forecast(engine, named_shape("e2b"), "bfloat16", CPU, 4096)


def test_a_pool_larger_than_the_memory_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_memory_bytes is 1,000,000,000,000,000: .* of memory here; lower it or leave it out$"):
        forecast(options(kv_cache_memory_bytes=10**15), named_shape("e2b-eighth"), "float32", CPU, 4096)
