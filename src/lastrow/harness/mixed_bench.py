"""`lastrow bench mixed`: the time between two tokens of streams that decode while prompts arrive (issue 3, item 5).

Arms are bounds on the prompt tokens of a step that also decodes (max_prefill_tokens_while_decoding); `alone` has no arrivals, `default`
is what the engine does unasked, `default again` is the null arm. Prompts arrive at fixed times, whether the engine keeps up or not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.llm import LLM
from lastrow.harness.records import Record, environment, interleave, markdown_table, values_of
from lastrow.models.config import ConfigError

TARGET_MS = 50.0
"""p99 of the time between two tokens that the default is meant to keep, with 16 streams and prompts of 4,096 tokens arriving: a reader
takes 200 to 300 words a minute, a token every 150 ms; a third of that does not stutter."""


@dataclass(frozen=True)
class MixedBench:
    """streams: requests that decode, of `short` prompt tokens. prompt: tokens of an arriving prompt, `rate` of them a second for
    `seconds`, `burst` at a time. bounds: values of max_prefill_tokens_while_decoding beside the default."""

    shape: str = "e2b"
    streams: int = 16
    short: int = 128
    prompt: int = 4096
    rate: float = 20.0
    burst: int = 4
    seconds: float = 1.5
    bounds: tuple[int, ...] = (2048, 4096, 8192, 16384)
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.rate <= 0 or self.seconds <= 0:
            raise ConfigError("at least one round, a positive rate and positive seconds are needed")


class Traffic:
    """One engine, streams that decode and prompts that arrive."""

    def __init__(self, bench: MixedBench) -> None:
        self.bench = bench
        self.engine = LLM(
            shape=bench.shape, load_format="dummy", max_num_seqs=64, max_model_len=max(8192, bench.prompt + 8), seed=bench.seed,
            enable_prefix_caching=False, kv_cache_memory_bytes=(8 << 30) if torch.cuda.is_available() else (256 << 20),
        ).engine  # fmt: skip
        self._limits = self.engine.scheduler.config
        self._generator = torch.Generator().manual_seed(bench.seed)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return torch.randint(3, self.engine.vocab_size, (count, length), generator=self._generator).tolist()

    def run(self, bound: int | None, arrivals: bool) -> dict[str, Any]:
        """ms between tokens of the streams (each gap of each stream), ms to the first token of the arriving prompts."""
        bench, engine = self.bench, self.engine
        engine.scheduler.config = replace(self._limits, max_prefill_tokens_while_decoding=bound)
        steady = SamplingParams(temperature=0, max_tokens=engine.max_model_len - bench.short, ignore_eos=True)
        once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        names = [f"stream-{i}" for i in range(bench.streams)]
        for name, ids in zip(names, self.prompts(bench.streams, bench.short), strict=True):
            engine.add_request(name, ids, steady)
        streams = [engine.scheduler.requests[name] for name in names]
        while min(len(request.output_token_ids) for request in streams) < 4:
            engine.step()
        count = int(bench.rate * bench.seconds) if arrivals else 0
        waiting = list(enumerate(self.prompts(count, bench.prompt)))[::-1]
        open_, first, gaps = {}, [], []
        start = time.perf_counter()
        seen = [(len(request.output_token_ids), start) for request in streams]
        while (now := time.perf_counter()) < start + bench.seconds or waiting or open_:
            while waiting and now >= (due := start + waiting[-1][0] // bench.burst * bench.burst / bench.rate):
                i, ids = waiting.pop()
                engine.add_request(f"prompt-{i}", ids, once)
                open_[f"prompt-{i}"] = due
            outputs = engine.step()
            now = time.perf_counter()
            first += [now - open_.pop(output.request_id) for output in outputs if output.request_id in open_]
            for i, request in enumerate(streams):
                have, since = seen[i]
                if len(request.output_token_ids) > have:
                    gaps.append(now - since)
                    seen[i] = (len(request.output_token_ids), now)
        elapsed = time.perf_counter() - start
        engine.abort(names)
        while engine.has_unfinished_requests:
            engine.step()
        engine.step()
        engine.scheduler.config = self._limits
        return {
            "bound": bound, "gaps": len(gaps), **percentiles("itl_ms", gaps), **percentiles("ttft_ms", first),
            "stream_tok_s": round(len(gaps) / elapsed, 1), "prompt_tok_s": round(count * bench.prompt / elapsed),
            "loop_s": round(elapsed, 3),
        }  # fmt: skip


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p99 and the largest, in ms; None of nothing."""
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        f"{name}_{key}": round(ordered[min(int(q * len(ordered)), len(ordered) - 1)] * 1e3, 3) if ordered else None for key, q in at.items()
    }


def run(bench: MixedBench) -> dict[str, Any]:
    """Measure. The report has stable keys."""
    start = time.perf_counter()
    traffic = Traffic(bench)
    ready = time.perf_counter() - start
    default = traffic.engine.scheduler.config.max_prefill_tokens_while_decoding
    arms: dict[str, Callable[[], dict[str, Any]]] = {
        "alone": lambda: traffic.run(default, False),
        "default": lambda: traffic.run(default, True),
        "default again": lambda: traffic.run(default, True),
        "no bound": lambda: traffic.run(None, True),
    }
    arms |= {f"bound {bound:,}": lambda bound=bound: traffic.run(bound, True) for bound in bench.bounds if bound != default}
    if default is None:
        del arms["no bound"]
    traffic.run(default, True)
    rows = interleave(arms, bench.rounds, warm_ups=0)
    graphs: Any = traffic.engine.runner.graphs
    return {
        "bench": "mixed",
        "environment": environment(
            shape=bench.shape, streams=bench.streams, stream_prompt=bench.short, arriving_prompt=bench.prompt, arrivals_a_second=bench.rate,
            burst=bench.burst,
            seconds=bench.seconds, default_bound=default, step_tokens=traffic.engine.scheduler.config.max_num_batched_tokens,
            rounds=bench.rounds, seed=bench.seed, start_seconds=round(ready, 1), graph_misses={} if graphs is None else dict(graphs.misses),
        ),
        "results": [summarize(rows, arm) for arm in arms],
        "rows": rows,
    }  # fmt: skip


def summarize(rows: Sequence[dict[str, Any]], arm: str) -> dict[str, Any]:
    """Medians over the rounds of each round's percentiles."""
    result: dict[str, Any] = {"arm": arm}
    for key in ("itl_ms_p50", "itl_ms_p99", "itl_ms_max", "ttft_ms_p50", "ttft_ms_p99", "stream_tok_s", "prompt_tok_s"):
        values = [value for value in values_of(rows, arm, key) if value is not None]
        result[key] = statistics.median(values) if values else None
    return result


# --------------------------------------------------------------------------------------------------------------- output
def render(report: dict[str, Any]) -> str:
    columns = [
        "arm",
        "ms between tokens: p50",
        "p99",
        "most",
        "ms to a prompt's first token: p50",
        "p99",
        "stream tokens/s",
        "prompt tokens/s",
    ]
    keys = ("itl_ms_p50", "itl_ms_p99", "itl_ms_max", "ttft_ms_p50", "ttft_ms_p99", "stream_tok_s", "prompt_tok_s")
    rows = [[r["arm"], *("-" if r[key] is None else f"{r[key]:,.1f}" for key in keys)] for r in report["results"]]
    return f"{markdown_table(columns, rows)}\n\n{_verdict(report)}"


def _verdict(report: dict[str, Any]) -> str:
    if report["environment"]["shape"] != "e2b":
        return ""
    p99 = next(r["itl_ms_p99"] for r in report["results"] if r["arm"] == "default")
    return f"p99 between two tokens by default: {p99:.1f} ms; target {TARGET_MS:.0f} ms: {'kept' if p99 <= TARGET_MS else 'missed'}."


def write_record(report: dict[str, Any], folder: Path) -> Path:
    """The record page and its raw rows under `folder`; returns the page's path."""
    env = report["environment"]
    summary = (
        f"Shape `{env['shape']}`, dummy weights, {env.get('gpu', env['processor'])}. {env['streams']} streams decode while prompts of "
        f"{env['arriving_prompt']:,} tokens arrive, {env['arrivals_a_second']:g} a second in bursts of {env['burst']} at fixed times; seen "
        f"by the reader of the engine's outputs. Medians of {env['rounds']} interleaved rounds. {_verdict(report)}"
    )
    absent = ["the server's part of the time", "other rates, bursts and lengths, long contexts", "trained weights"]
    record = Record(
        f"mixed-{'h200' if 'H200' in env.get('gpu', '') else 'cpu'}", "Decoding while prompts arrive", summary, env, report["rows"], absent
    )
    arms = "* `alone`: no prompt arrives\n* `default`, `default again`: the engine's default, and the null arm\n* `bound N`: " \
        "`max_prefill_tokens_while_decoding=N`"  # fmt: skip
    record.sections = [("Arms", arms), ("Results", render(report))]
    return record.write(folder)
