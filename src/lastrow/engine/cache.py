"""The K/V cache of a built engine as one thing: what its status says, and a new size in place of the old one at run time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch

from lastrow.core.kv_cache_manager import KVCacheConfig, KVCacheManager
from lastrow.core.scheduler import Scheduler
from lastrow.engine.memory import MemoryForecast
from lastrow.engine.model_runner import ModelRunner
from lastrow.kv.layout import bytes_per_token_layer, divide_budget, layouts_by_format, readers
from lastrow.kv.pool import KVPool
from lastrow.models.config import ConfigError, Gemma4Config


def make_kv_manager(plan: MemoryForecast, enable_prefix_caching: bool) -> KVCacheManager:
    """The block manager over the blocks that `plan` bought."""
    layout, budget = plan.layout, plan.budget
    blocks = KVCacheConfig(
        block_size=budget.block_size,
        num_full_blocks=budget.num_full_blocks,
        num_sliding_blocks=budget.num_sliding_blocks,
        sliding_window=layout.sliding_window,
        has_full=bool(layout.full_layers),
        has_sliding=bool(layout.sliding_layers),
    )
    return KVCacheManager(blocks, enable_prefix_caching)


class EngineCache:
    """bind: called with the runner whenever it has got a new pool, to make what holds addresses of the pool: captured graphs, and
    the draft model's (None: nothing does)."""

    def __init__(
        self, config: Gemma4Config, plan: MemoryForecast, device: torch.device, bind: Callable[[ModelRunner], None] | None = None
    ) -> None:
        self.config = config
        self.plan = plan
        self.device = device
        self._bind = bind

    def new_pool(self, plan: MemoryForecast) -> KVPool:
        layout = plan.layout
        return KVPool(self.config, plan.budget, layout.kv_cache_dtype, getattr(torch, layout.dtype), self.device)

    def status(self, pool: KVPool) -> dict[str, Any]:
        """What the block manager does not know: bytes, formats, who owns K/V and who reads it. Stable keys, ready for JSON."""
        c, plan, layout = self.config, self.plan, self.plan.layout
        groups = {
            "full": (layout.full_layers, layout.full_bytes_per_token),
            "sliding": (layout.sliding_layers, layout.sliding_bytes_per_token),
        }
        of = readers(c)
        return {
            "kv_cache_dtype": layout.kv_cache_dtype,
            "dtype": layout.dtype,
            "kv_cache_memory_bytes": plan.kv_bytes,
            "pool_bytes": pool.num_bytes,
            "weight_bytes": plan.weight_bytes,
            "host_bytes": plan.host_bytes,
            "layers": {name: {"layers": list(layers), "bytes_per_token": cost} for name, (layers, cost) in groups.items()},
            "owners": [
                {
                    "layer": i,
                    "group": "full" if c.is_full(i) else "sliding",
                    "kv_heads": c.layer_kv_heads(i),
                    "head_dim": c.layer_head_dim(i),
                    "bytes_per_token": bytes_per_token_layer(c, i, layout.kv_cache_dtype, layout.dtype),
                    "read_by": of[i],
                }
                for i in c.owners
            ],
            "formats": {form: self._held(form) for form in layouts_by_format(c, layout.dtype)},
        }

    def _held(self, form: str) -> dict[str, Any]:
        """What the same bytes hold in another format."""
        plan, layout = self.plan, layouts_by_format(self.config, self.plan.layout.dtype)[form]
        try:
            budget = divide_budget(layout, plan.kv_bytes, plan.budget.block_size, plan.max_num_seqs, plan.max_num_batched_tokens)
            tokens = {"full_tokens": budget.full_tokens, "sliding_tokens": budget.sliding_tokens}
        except ValueError:
            tokens = {"full_tokens": 0, "sliding_tokens": 0}
        return {"full": layout.full_bytes_per_token, "sliding": layout.sliding_bytes_per_token, **tokens}

    def rebuild(self, scheduler: Scheduler, runner: ModelRunner, kv_cache_memory_bytes: int) -> None:
        """Give `runner` a pool of another size and `scheduler` its blocks. Nothing may run or be in flight. Counters go on.

        Raises ConfigError, with the old size in place, for a size that holds no block or that the memory does not have."""
        plan = self.plan.resized(kv_cache_memory_bytes)
        room = self._room(runner)
        if plan.budget.num_bytes(plan.layout) > room:
            raise ConfigError(
                f"kv_cache_memory_bytes is {kv_cache_memory_bytes:,}: there are {room:,} bytes for the pool, the old one included"
            )
        try:
            self._install(scheduler, runner, plan)
        except RuntimeError as error:  # out of memory is one, too
            self._install(scheduler, runner, self.plan)
            raise ConfigError(f"kv_cache_memory_bytes is {kv_cache_memory_bytes:,}: {error}; the old size is in place again") from None
        self.plan = plan

    def _room(self, runner: ModelRunner) -> int:
        """Bytes that a new pool may take when the old one is gone."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.device)[0] + runner.pool.num_bytes  # the old graphs' memory comes back for the new
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def _install(self, scheduler: Scheduler, runner: ModelRunner, plan: MemoryForecast) -> None:
        runner.drop_pool()
        gc.collect()  # graphs and pool refer to each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        runner.pool = self.new_pool(plan)
        if self._bind is not None:
            self._bind(runner)
        scheduler.use_kv_manager(make_kv_manager(plan, scheduler.kv.enable_prefix_caching))


def status_document(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The block manager's document and the cache's own; both have facts about the two groups."""
    groups = {name: {**base["groups"][name], **facts} for name, facts in more["layers"].items()}
    return {**base, **{key: value for key, value in more.items() if key != "layers"}, "groups": groups}
