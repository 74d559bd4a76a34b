"""`lastrow bench prefix`: how much sooner the first token comes when most of a prompt is cached.

Arms, on one engine and interleaved: `hit` finds the shared tokens in the prefix cache, `cold` is the same prompt after a reset, `hit again`
is the null arm. Every prompt has a tail of its own, so that a hit is exactly the shared part. The time runs from add_request to the
first output, scheduler and sampling included."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.engine import LLMEngine
from lastrow.engine.llm import LLM
from lastrow.harness.records import Ratio, Record, environment, machine, markdown_table, rounds_order
from lastrow.models.config import ConfigError
from lastrow.progress import track

ARMS = {
    "hit": "the shared tokens are in the prefix cache",
    "cold": "nothing is cached: the whole prompt is computed",
    "hit again": "the null arm: `hit` once more",
}
TARGET = 6.0  # cold / hit asked for by issue 6 for 4,096 of 4,500 tokens of e2b-eighth on a CPU
WARM_UPS = 1


@dataclass(frozen=True)
class PrefixBench:
    """Options. shared: tokens that prompts have in common, prompt: their whole length. threads 0: torch's default."""

    shape: str = "e2b-eighth"
    shared: int = 4096
    prompt: int = 4500
    rounds: int = 8
    threads: int = 0
    kv_cache_dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.shared < self.prompt:
            raise ConfigError(f"shared is {self.shared} of prompt={self.prompt} tokens: fewer than the prompt, and at least 1, are needed")
        if self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}: at least 1 is needed")


class Runner:
    """One engine and prompts that begin alike."""

    def __init__(self, bench: PrefixBench, engine: LLMEngine | None = None) -> None:
        self.bench = bench
        self.engine = engine or LLM(
            load_format="dummy", shape=bench.shape, kv_cache_dtype=bench.kv_cache_dtype, seed=bench.seed, max_num_seqs=4,
            max_num_batched_tokens=max(8192, bench.prompt), max_model_len=bench.prompt + 16,
        ).engine  # fmt: skip
        self._rng = random.Random(bench.seed)
        self._vocabulary = self.engine.vocab_size
        self._shared = self._tokens(bench.shared)
        self._count = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, self._vocabulary) for _ in range(count)]

    def first_token(self, arm: str) -> dict[str, Any]:
        """One prompt of `arm`: milliseconds to its first token, cached tokens, rows given."""
        self.engine.reset_prefix_cache()
        if arm.startswith("hit"):
            self._ask()
        return self._ask()

    def _ask(self) -> dict[str, Any]:
        """A prompt with a new tail."""
        engine, ids = self.engine, self._shared + self._tokens(self.bench.prompt - self.bench.shared)
        self._count += 1
        start = time.perf_counter()
        engine.add_request(str(self._count), ids, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        outputs = []
        while not outputs:
            outputs = engine.step()
        ms = (time.perf_counter() - start) * 1e3
        metrics = outputs[0].metrics
        return {"ms": round(ms, 3), "cached": outputs[0].num_cached_tokens, "rows_given": metrics.rows_given if metrics else 0}


def run(bench: PrefixBench) -> dict[str, Any]:
    """Measure. Returns the report: stable keys for --json. Raises ConfigError, and RuntimeError when a hit found something else than
    the shared tokens' whole blocks."""
    import torch

    if bench.threads:
        torch.set_num_threads(bench.threads)
    runner = Runner(bench)
    model: Any = runner.engine.runner.model
    before = environment(
        shape=bench.shape, dtype=str(model.weights.embed.dtype).removeprefix("torch."), threads=torch.get_num_threads(),
        rounds=bench.rounds, seed=bench.seed, shared=bench.shared,
        prompt=bench.prompt, kv_cache_dtype=bench.kv_cache_dtype,
    )  # fmt: skip
    rows = measure(runner)
    before["load_average_after"] = environment()["load_average"]
    return {"bench": "prefix", "environment": before, "arms": ARMS, "results": summarize(rows), "rows": rows}


def measure(runner: Runner) -> list[dict[str, Any]]:
    """Rows {round, position, arm, ms, cached, rows_given}. Raises RuntimeError when a hit found something else than the shared tokens'
    whole blocks."""
    bench, block = runner.bench, runner.engine.scheduler.kv.config.block_size
    expected = {arm: bench.shared // block * block if arm.startswith("hit") else 0 for arm in ARMS}
    for arm in ARMS:
        for _ in range(WARM_UPS):
            runner.first_token(arm)
    rows: list[dict[str, Any]] = []
    for r, order in enumerate(track(rounds_order(list(ARMS), bench.rounds), "measuring")):
        for position, arm in enumerate(order):
            row = {"round": r, "position": position, "arm": arm, **runner.first_token(arm)}
            if row["cached"] != expected[arm] or row["rows_given"] != bench.prompt - expected[arm]:
                raise RuntimeError(f"arm {arm} found {row['cached']} cached tokens, {expected[arm]} were there: it measures something else")
            rows.append(row)
    return rows


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians and minima by arm, per-round ratios against `hit`, and the ratio of the tokens computed."""
    times = {arm: [row["ms"] for row in rows if row["arm"] == arm] for arm in ARMS}
    ratios = {arm: Ratio.of(times[arm], times["hit"]) for arm in ARMS if arm != "hit"}
    given = {row["arm"]: row["rows_given"] for row in rows}
    return {
        "median_ms": {arm: round(statistics.median(ms), 3) for arm, ms in times.items()},
        "min_ms": {arm: min(ms) for arm, ms in times.items()},
        "ratio": {arm: {"median": round(r.median, 4), "low": round(r.low, 4), "high": round(r.high, 4)} for arm, r in ratios.items()},
        "token_ratio": round(given["cold"] / given["hit"], 4),
    }


# --------------------------------------------------------------------------------------------------------------- output
def render(report: dict[str, Any]) -> str:
    """Medians, ratios and the verdict."""
    env, r = report["environment"], report["results"]
    rows = [
        [arm, f"{r['median_ms'][arm]:,.1f} (min {r['min_ms'][arm]:,.1f})", str(Ratio(**r["ratio"][arm])) if arm in r["ratio"] else "-"]
        for arm in report["arms"]
    ]
    head = f"{env['shape']}, prompts of {env['prompt']:,} tokens, {env['shared']:,} of them shared"
    return f"{head}\n\n{markdown_table(['arm', 'ms to the first token', 'arm / hit'], rows)}\n\n{_verdict(report)}"


def _verdict(report: dict[str, Any]) -> str:
    env, r = report["environment"], report["results"]
    cold, null = Ratio(**r["ratio"]["cold"]), Ratio(**r["ratio"]["hit again"])
    text = f"The first token comes {cold.median:.2f} times sooner; the tokens to compute are {r['token_ratio']:.2f} times fewer."
    if not cold.beyond(null):
        text += " Unresolved: the null arm spreads as far."
    elif (env["shape"], env["shared"], env["prompt"]) == ("e2b-eighth", 4096, 4500):
        text += f" Asked for {TARGET:.0f}x: {'reached' if cold.median >= TARGET else 'missed'}."
    return text


def write_record(report: dict[str, Any], folder: Path) -> Path:
    """The record page and its raw rows under `folder`; returns the page's path."""
    env = report["environment"]
    summary = (
        f"Shape `{env['shape']}`, dummy weights, {env['dtype']}, {env.get('gpu') or str(env['threads']) + ' threads'}. "
        f"Prompts of {env['prompt']:,} tokens of which "
        f"{env['shared']:,} are shared; {env['rounds']} interleaved rounds. {_verdict(report)}"
    )
    absent = [
        "other devices, 8-bit K/V (one run has one --kv-cache-dtype), several requests at once, eviction",
        "trained weights: the values of dummy weights do not change the work",
    ]
    record = Record(
        f"prefix-{machine(env)}",
        "First token behind a cached prefix",
        summary,
        env,
        report["rows"],
        absent,
    )
    record.sections = [
        ("Arms", "\n".join(f"* `{name}`: {text}" for name, text in report["arms"].items())),
        ("Time to the first token", render(report)),
        ("Correctness", "Every row says how many tokens were found and how many rows were computed; the run stops when they are not those "
         "expected. That answers equal those without a cache: tests/kv/test_prefix_cache_end_to_end.py."),
    ]  # fmt: skip
    return record.write(folder)
