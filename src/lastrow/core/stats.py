"""Counters: of a request, of the scheduler, of the cache. Standard library only; nothing here decides anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastrow.core.kv_cache_manager import KVCacheManager


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the monotonic clock; None until it happened. tokens: rows given to and run by the layers after the cut.

    rows_given counts every scheduled token (recomputed ones again), rows_computed those of them whose row was wanted."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    rows_given: int = 0
    rows_computed: int = 0

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class PrefixCacheStats:
    """queries: prompt tokens looked up, hits: those found. A request counts once, at its first admission; forks do not count."""

    requests: int = 0
    queries: int = 0
    hits: int = 0

    def record(self, num_tokens: int, num_hits: int) -> None:
        self.requests += 1
        self.queries += num_tokens
        self.hits += num_hits

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    steps: int = 0
    scheduled_tokens: int = 0
    scheduled_rows: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    forked_tokens: int = 0
    finished_requests: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """One moment, made by `Scheduler.stats()`. kv_usage: share of the (full, sliding) group's blocks that requests hold, 0..1.

    num_scheduled_tokens, num_decodes: of the latest step. num_waiting includes forks that wait for their parent."""

    num_running: int
    num_waiting: int
    num_scheduled_tokens: int
    num_decodes: int
    kv_usage: tuple[float, float]
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int


def cache_status(manager: KVCacheManager) -> dict[str, Any]:
    """The cache as a JSON-ready document with stable keys. Per group: total = in_use + free; cached: blocks that a hit could
    use, in use or free; the null block is not counted."""
    prefix = manager.prefix_cache_stats
    groups: dict[str, Any] = {}
    for name, pool in zip(("full", "sliding"), manager.pools, strict=True):
        groups[name] = {
            "total": pool.num_usable_blocks,
            "free": pool.num_free_blocks,
            "in_use": pool.num_usable_blocks - pool.num_free_blocks,
            "cached": pool.num_cached_blocks,
            "usage": pool.usage,
        }
    return {
        "block_size": manager.config.block_size,
        "sliding_window": manager.config.sliding_window if manager.config.has_sliding else None,
        "enable_prefix_caching": manager.enable_prefix_caching,
        "groups": groups,
        "prefix_cache": {
            "requests": prefix.requests,
            "queries": prefix.queries,
            "hits": prefix.hits,
            "hit_rate": prefix.hit_rate,
        },
    }
