"""Counters: of a request, of the scheduler, of the cache. Standard library only; nothing here decides anything."""

from __future__ import annotations

from dataclasses import dataclass, field
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
class SpecDecodeStats:
    """Totals of speculative decoding. num_drafts: steps of a request that verified drafts; num_emitted_tokens: what those steps brought,
    cut at a stop token. Per position: drafts there, and those of them that stood. num_plain_steps: steps of a request without
    drafts (its first, a pause, nothing proposed). num_switched_off: times drafting paused because it did not pay."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_plain_steps: int = 0
    num_switched_off: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list[int])
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list[int])

    def record(self, drafted: int, stood: int, emitted: int) -> None:
        """One verification of `drafted` drafts."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += stood
        self.num_emitted_tokens += emitted
        for counts, count in ((self.num_draft_tokens_per_pos, drafted), (self.num_accepted_tokens_per_pos, stood)):
            counts.extend([0] * (drafted - len(counts)))
            for i in range(count):
                counts[i] += 1

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a verification brought: the drafts that stood and one more, less what a stop token cut off."""
        return self.num_emitted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rates(self) -> list[float]:
        """By position: share of the drafts there that stood (those behind a rejected one did not)."""
        counts = zip(self.num_accepted_tokens_per_pos, self.num_draft_tokens_per_pos, strict=True)
        return [stood / drafted for stood, drafted in counts]


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
