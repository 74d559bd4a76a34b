"""What an engine will take, before anything is loaded: weights, one step's activations, K/V blocks."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from lastrow.config import EngineConfig
from lastrow.engine.footprint import activation_bytes, kv_bytes_of_card, ple_table_bytes, weight_bytes
from lastrow.kv.layout import KVBudget, KVLayout, divide_budget
from lastrow.models.config import ConfigError, Gemma4Config

CPU_KV_BYTES = 2 << 30  # most that the K/V pool of a CPU takes unless asked for more
CPU_RAM_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes by purpose. kv_bytes is the budget, of which `budget` makes whole blocks. max_num_seqs, max_num_batched_tokens: the step
    planned for. host_bytes: weights in host memory, which the device does not hold."""

    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    layout: KVLayout
    budget: KVBudget
    max_num_seqs: int
    max_num_batched_tokens: int
    host_bytes: int = 0

    def summary(self) -> str:
        """One line for the log."""
        host = f" ({_gib(self.host_bytes)} more in host memory)" if self.host_bytes else ""
        return (
            f"weights {_gib(self.weight_bytes)}{host}, activations {_gib(self.activation_bytes)}, K/V {_gib(self.kv_bytes)}: "
            f"{self.budget.full_tokens:,} tokens with full attention, {self.budget.sliding_tokens:,} in windows"
        )

    def resized(self, kv_bytes: int) -> MemoryForecast:
        """The same plan with kv_bytes for K/V. Raises ConfigError when they hold no block of each group."""
        try:
            budget = divide_budget(self.layout, kv_bytes, self.budget.block_size, self.max_num_seqs, self.max_num_batched_tokens)
        except ValueError as error:
            raise ConfigError(f"kv_cache_memory_bytes is {kv_bytes:,}: {error}") from None
        return replace(self, kv_bytes=kv_bytes, budget=budget)


def forecast(
    engine: EngineConfig,
    config: Gemma4Config,
    dtype: str,
    device: torch.device,
    max_model_len: int,
    drafter_bytes: int = 0,
    num_drafts: int = 0,
) -> MemoryForecast:
    """The memory plan of options with their device defaults filled in; drafter_bytes: weights beside the model's; num_drafts: most that
    a request has in one step, each with a row of logits.

    Raises ConfigError, naming the flags to change, when no request of two blocks would fit."""
    step_tokens, block_size = engine.max_num_batched_tokens, engine.block_size
    if step_tokens is None or block_size is None:
        raise ValueError("max_num_batched_tokens or block_size is None: fill in the device's defaults first (EngineConfig.for_device)")
    layout = KVLayout.of(config, engine.kv_cache_dtype, dtype)
    weights = weight_bytes(config, dtype, engine.embed_weights) + drafter_bytes
    host = ple_table_bytes(config, dtype) if engine.embed_weights == "host" else 0
    activations = activation_bytes(config, dtype, step_tokens, min(step_tokens, engine.max_num_seqs * (1 + num_drafts)))
    if engine.kv_cache_memory_bytes is not None:
        kv, flag = engine.kv_cache_memory_bytes, f"kv_cache_memory_bytes is {engine.kv_cache_memory_bytes:,}"
        room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else ram_bytes()
        if weights + activations + kv > room:
            raise ConfigError(
                f"{flag}: with weights ({_gib(weights)}) and activations ({_gib(activations)}) that is more than the {_gib(room)} "
                f"{'free on the card' if device.type == 'cuda' else 'of memory here'}; lower it or leave it out"
            )
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        kv = kv_bytes_of_card(total, engine.gpu_memory_utilization, total - free, weights, activations)
        flag = f"gpu_memory_utilization={engine.gpu_memory_utilization} of {_gib(total)}, {_gib(total - free)} of it taken already"
        if kv <= 0:
            raise ConfigError(
                f"weights need {_gib(weights)} and activations {_gib(activations)}, and {flag} leaves nothing for K/V: raise "
                "gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, or use embed_weights=host"
            )
    else:
        kv = cpu_kv_bytes(layout, engine.max_num_seqs, step_tokens, block_size, max_model_len)
        flag = f"{_gib(kv)} is the default on a CPU"
    try:
        budget = divide_budget(layout, kv, block_size, engine.max_num_seqs, step_tokens)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    return MemoryForecast(weights, activations, kv, layout, budget, engine.max_num_seqs, step_tokens, host)


def cpu_kv_bytes(layout: KVLayout, max_num_seqs: int, step_tokens: int, block_size: int, max_model_len: int) -> int:
    """Room for one request of max_model_len and max_num_seqs of one window, at most 2 GiB and a quarter of the RAM.

    Pages that no request touches cost nothing: the pool is zero memory of the operating system."""
    window = layout.sliding_window + block_size
    tokens = max_model_len + max_num_seqs * window
    sliding = max_num_seqs * window + step_tokens
    wanted = layout.full_bytes_per_token * tokens + layout.sliding_bytes_per_token * sliding
    return min(wanted, CPU_KV_BYTES, int(ram_bytes() * CPU_RAM_SHARE))


def ram_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 4 * CPU_KV_BYTES


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
