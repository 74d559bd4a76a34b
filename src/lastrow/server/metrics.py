"""Prometheus metrics. Names that vLLM has are vLLM's, prefix and all, so its dashboards work; what only lastrow has is `lastrow:`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lastrow.core.stats import SpecDecodeStats
from lastrow.server import wire

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class _EngineCollector(Collector):
    """What the engine reports, read when somebody scrapes."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        s, model = self._metrics.stats, [self._metrics.model_name]

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric(model, value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric(model, value)
            return family

        yield gauge("vllm:num_requests_running", "Requests in the running batch.", s.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled.", s.num_waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Share of the K/V blocks in use, 1 is all (the fuller group).", max(s.kv_usage))
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prefix_cache_queries)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", s.prefix_cache_hits)
        yield counter("vllm:num_preemptions", "Requests that gave their blocks back and were recomputed.", s.num_preemptions)
        yield counter("lastrow:rows_given", "Rows given to the model: tokens of all steps.", s.rows_given)
        yield counter("lastrow:rows_computed", "Rows that the layers after the cut computed.", s.rows_computed)
        yield counter("lastrow:graph_steps", "Steps that replayed a captured graph.", s.graph_steps)
        yield counter("lastrow:graph_misses", "Steps that ran without a captured graph.", s.eager_steps)
        yield gauge("lastrow:engine_up", "1 while the engine can take requests.", float(self._metrics.engine_up))
        groups = GaugeMetricFamily("lastrow:kv_free_blocks", "Free K/V blocks by group.", labels=["model_name", "group"])
        for name, free in zip(("full", "sliding"), s.kv_free_blocks, strict=True):
            groups.add_metric([self._metrics.model_name, name], free)
        yield groups
        if s.spec_decode is not None:
            yield from self._spec_decode(s.spec_decode)

    def _spec_decode(self, s: SpecDecodeStats) -> Iterator[Metric]:
        """Drafts: what vLLM counts, and what its dashboards divide, done."""
        model = self._metrics.model_name
        for name, text, value in (
            ("vllm:spec_decode_num_drafts", "Steps of a request that verified drafts.", s.num_drafts),
            ("vllm:spec_decode_num_draft_tokens", "Drafts that were verified.", s.num_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Drafts that stood.", s.num_accepted_tokens),
            ("lastrow:spec_decode_switched_off", "Times that drafting paused because it did not pay.", s.num_switched_off),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([model], value)
            yield counter
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that stood, by position.", labels=["model_name", "position"]
        )
        rate = GaugeMetricFamily(
            "lastrow:spec_decode_acceptance_rate", "Share of the drafts at a position that stood.", labels=["model_name", "position"]
        )
        for position, (count, share) in enumerate(zip(s.num_accepted_tokens_per_pos, s.acceptance_rates, strict=True)):
            accepted.add_metric([model, str(position)], count)
            rate.add_metric([model, str(position)], share)
        yield accepted
        yield rate
        length = GaugeMetricFamily("lastrow:spec_decode_mean_accepted_length", "Tokens that a verification brought.", labels=["model_name"])
        length.add_metric([model], s.mean_accepted_length)
        yield length


class ServerMetrics:
    """All of one server's metrics, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.stats = wire.Stats()
        self.engine_up = False
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(self))
        # Children with the model's name, once: looking one up costs as much as counting.
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of started requests.").labels(model_name)
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache.").labels(model_name)
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.").labels(model_name)
        self._success = self._counter("vllm:request_success", "Finished requests by reason.", "finished_reason")
        self._refused = self._counter("lastrow:requests_refused", "Requests refused, by HTTP status.", "status")
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Mean time between the tokens of a request.", SECONDS)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", SECONDS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", SECONDS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.", SECONDS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "From the first token to the last.", SECONDS)
        self._iteration = self._histogram("vllm:iteration_tokens_total", "Tokens of one step.", TOKENS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets).labels(self.model_name)

    def take_stats(self, stats: wire.Stats) -> None:
        self.stats = stats
        for tokens in stats.step_tokens:
            self._iteration.observe(tokens)

    def request_started(self, num_prompt_tokens: int) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)

    def request_refused(self, status: int) -> None:
        self._refused.labels(self.model_name, str(status)).inc()

    def request_finished(self, reason: str, num_tokens: int, num_cached_tokens: int, timings: wire.Timings | None) -> None:
        """One completion has ended, or was left by its client (reason abort)."""
        self._success.labels(self.model_name, reason).inc()
        self._generation_tokens.inc(num_tokens)
        self._cached_tokens.inc(num_cached_tokens)
        if timings is None or timings.scheduled is None:
            return
        self._queue.observe(max(0.0, timings.scheduled - timings.arrival))
        if timings.first_token is None or timings.last_token is None:
            return
        self._ttft.observe(timings.first_token - timings.arrival)
        self._prefill.observe(timings.first_token - timings.scheduled)
        self._decode.observe(timings.last_token - timings.first_token)
        self._e2e.observe(timings.last_token - timings.arrival)
        if num_tokens > 1:
            self._itl.observe((timings.last_token - timings.first_token) / (num_tokens - 1))

    def render(self) -> bytes:
        return generate_latest(self.registry)
