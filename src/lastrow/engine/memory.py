"""What an engine will take, before anything is loaded: weights, one step's activations, K/V blocks."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from lastrow.config import EngineConfig
from lastrow.engine.model_runner import LOGIT_ROWS_BYTES
from lastrow.engine.sampler import MAX_ELEMENTS
from lastrow.kv.layout import DTYPE_BYTES, KVBudget, KVLayout, divide_budget
from lastrow.models.config import ConfigError, Gemma4Config
from lastrow.weights.names import expected_shapes

CPU_KV_BYTES = 2 << 30  # most that the K/V pool of a CPU takes unless asked for more
CPU_RAM_SHARE = 0.25
SLACK = 1.25  # on activations: what the allocator rounds up and loses between tensors
SAMPLER_BYTES = 40  # of temporaries per logit that is sampled with a filter
GRAPH_BYTES = 1 << 29  # CUDA context, library workspaces and graph pools


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes by purpose. kv_bytes is the budget, of which `budget` makes whole blocks. max_num_batched_tokens: the step planned for."""

    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    layout: KVLayout
    budget: KVBudget
    max_num_batched_tokens: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes

    def summary(self) -> str:
        """One line for the log."""
        return (
            f"weights {_gib(self.weight_bytes)}, activations {_gib(self.activation_bytes)}, K/V {_gib(self.kv_bytes)}: "
            f"{self.budget.full_tokens:,} tokens with full attention, {self.budget.sliding_tokens:,} in windows"
        )


def weight_bytes(config: Gemma4Config, dtype: str) -> int:
    """Bytes of every tensor the model uses in `dtype` (decoys of sharing layers not counted)."""
    return DTYPE_BYTES[dtype] * sum(math.prod(shape) for shape in expected_shapes(config).values())


def activation_bytes(config: Gemma4Config, dtype: str, num_tokens: int, num_seqs: int) -> int:
    """Peak of one step over num_tokens rows of which num_seqs are sampled: the widest layer, the per-layer inputs before the cut,
    logits and the sampler's temporaries, and one chunk of prompt-logprob rows."""
    layers = range(config.num_hidden_layers)
    attention = max((config.num_attention_heads * 3 + config.layer_kv_heads(i) * 4) * config.layer_head_dim(i) for i in layers)
    mlp = 3 * max(config.layer_intermediate_size(i) for i in layers)
    ple = 2 * config.cut * config.hidden_size_per_layer_input
    per_token = DTYPE_BYTES[dtype] * (6 * config.hidden_size + max(attention, mlp) + ple)
    logits = num_seqs * config.vocab_size
    sampler = 4 * logits + SAMPLER_BYTES * min(logits, MAX_ELEMENTS)
    return int(SLACK * num_tokens * per_token) + sampler + 2 * LOGIT_ROWS_BYTES


def forecast(
    engine: EngineConfig, config: Gemma4Config, dtype: str, device: torch.device, max_model_len: int, drafter_bytes: int = 0
) -> MemoryForecast:
    """The memory plan of options with their device defaults filled in; drafter_bytes: weights beside the model's.

    Raises ConfigError, naming the flags to change, when no request of two blocks would fit."""
    step_tokens, block_size = engine.max_num_batched_tokens, engine.block_size
    if step_tokens is None or block_size is None:
        raise ValueError("max_num_batched_tokens or block_size is None: fill in the device's defaults first (EngineConfig.for_device)")
    layout = KVLayout.of(config, engine.kv_cache_dtype, dtype)
    weights = weight_bytes(config, dtype) + drafter_bytes
    activations = activation_bytes(config, dtype, step_tokens, engine.max_num_seqs)
    if engine.kv_cache_memory_bytes is not None:
        kv, flag = engine.kv_cache_memory_bytes, f"kv_cache_memory_bytes is {engine.kv_cache_memory_bytes:,}"
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        kv = int(total * engine.gpu_memory_utilization) - (total - free) - weights - activations - GRAPH_BYTES
        flag = f"gpu_memory_utilization={engine.gpu_memory_utilization} of {_gib(total)}, {_gib(total - free)} of it taken already"
        if kv <= 0:
            raise ConfigError(
                f"weights need {_gib(weights)} and activations {_gib(activations)}, and {flag} leaves nothing for K/V: raise "
                "gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs"
            )
    else:
        kv = cpu_kv_bytes(layout, engine.max_num_seqs, step_tokens, block_size, max_model_len)
        flag = f"{_gib(kv)} is the default on a CPU"
    try:
        budget = divide_budget(layout, kv, block_size, engine.max_num_seqs, step_tokens)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    return MemoryForecast(weights, activations, kv, layout, budget, step_tokens)


def cpu_kv_bytes(layout: KVLayout, max_num_seqs: int, step_tokens: int, block_size: int, max_model_len: int) -> int:
    """Room for one request of max_model_len and max_num_seqs of one window, at most 2 GiB and a quarter of the RAM.

    Pages that no request touches cost nothing: the pool is zero memory of the operating system."""
    window = layout.sliding_window + block_size
    tokens = max_model_len + max_num_seqs * window
    sliding = max_num_seqs * window + step_tokens
    wanted = layout.full_bytes_per_token * tokens + layout.sliding_bytes_per_token * sliding
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 4 * CPU_KV_BYTES
    return min(wanted, CPU_KV_BYTES, int(ram * CPU_RAM_SHARE))


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
