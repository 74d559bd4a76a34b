"""`lastrow bench kv`: issue 6 on one card. Formats of the K/V cache against each other, the per-layer table in host memory against the
card's, a first token behind a cached beginning, a long prompt in chunks, what the formats change in logits, bytes of the pool.

All engines hold the same dummy weights, in one process; arms are interleaved. Parts may be left out."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lastrow.config import EngineConfig
from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.build import build_engine, choose_device, choose_dtype, load_model
from lastrow.engine.cuda_graphs import GraphBuckets
from lastrow.engine.engine import LLMEngine
from lastrow.engine.transfer import pin
from lastrow.harness import kv_accuracy, prefix_bench
from lastrow.harness.records import Ratio, Record, environment, interleave, machine, markdown_table, values_of
from lastrow.kv.layout import KVLayout, divide_budget
from lastrow.kv.pool import KVPool
from lastrow.models.config import ConfigError
from lastrow.models.gemma4 import Gemma4Model
from lastrow.models.shapes import named_shape

FORMATS = {"auto": "auto", "int8": "int8_per_token_head", "fp8": "fp8_per_token_head"}
PARTS = {
    "formats": "decode rate of many streams over long contexts, by K/V format",
    "table": "per-layer table in host memory: cost in prefill and decoding, bytes saved, tokens equal",
    "prefix": "first token behind a cached beginning",
    "long": "one prompt as long as the model's positions, in chunks",
    "accuracy": "what the formats change in log probabilities",
    "capacity": "bytes of a pool against the closed form",
}
TARGETS = {"int8": 1.25}  # issue 6; by bytes 1.45 is the limit


@dataclass(frozen=True)
class KVBench:
    """streams: requests that decode at once. context: their tokens when decoding is timed. steps: of one timed window. prefill: prompts
    and tokens of the table's prefill. short: prompt tokens of its decodes. prefix: shared tokens and whole prompt. long: tokens of the
    long prompt; chunks: tokens of its steps. kv_bytes: of each engine's pool. cases: parts to run."""

    shape: str = "e2b"
    cases: tuple[str, ...] = tuple(PARTS)
    rounds: int = 6
    streams: int = 64
    context: int = 7936
    steps: int = 10
    prefill: tuple[int, int] = (16, 1024)
    short: int = 128
    prefix: tuple[int, int] = (4096, 4500)
    long: int = 131_072
    chunks: tuple[int, int] = (65_536, 8_192)
    kv_bytes: int = 8 << 30
    seed: int = 0
    buckets: GraphBuckets = field(
        default_factory=lambda: GraphBuckets((128, 512, 5120, 8192, 16384), (1, 64), (512, 8192, 131_072), ())
    )  # fmt: skip

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.cases) - set(PARTS)):
            raise ConfigError(f"case {unknown[0]!r} is not known: one of {', '.join(PARTS)} is needed")
        if self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}: at least 1 is needed")


class Engines:
    """Engines over one set of weights, made when they are asked for."""

    def __init__(self, bench: KVBench) -> None:
        self.bench = bench
        self.options = EngineConfig(
            shape=bench.shape, load_format="dummy", max_num_seqs=bench.streams, max_model_len=bench.long, seed=bench.seed,
            max_num_batched_tokens=max(bench.chunks), kv_cache_memory_bytes=bench.kv_bytes,
        )  # fmt: skip
        self.device = choose_device(self.options.device)
        self.dtype = choose_dtype(self.options.dtype, self.device)
        self.config = named_shape(bench.shape)
        self.model = load_model(self.options, self.config, None, getattr(torch, self.dtype), self.device, bench.long)
        self.table_bytes: dict[str, int] = {}
        self._on_host = self._with_table_on_host() if "table" in bench.cases else None
        self._made: dict[str, LLMEngine] = {}
        self._generator = torch.Generator().manual_seed(bench.seed)

    def get(self, name: str) -> LLMEngine:
        """`auto`, `int8`, `fp8`, or `host`: auto with the per-layer table in host memory."""
        if name not in self._made:
            model = self.model if name != "host" else self._on_host
            options = replace(self.options, kv_cache_dtype=FORMATS.get(name, "auto"), embed_weights="host" if name == "host" else "device")
            self._made[name] = build_engine(options, model, self.bench.buckets)
            gc.collect()
            gc.freeze()  # as LLM does
        return self._made[name]

    def _with_table_on_host(self) -> Gemma4Model:
        """The same model with a copy of its table on the host; counts what the card gains when the table leaves it. Before any graph
        is captured: the table on the card moves."""
        weights, cuda = self.model.weights, self.device.type == "cuda"
        table = weights.ple_table
        assert table is not None, "the bench is for shapes with per-layer embeddings"
        before = torch.cuda.memory_allocated() if cuda else 0
        host = pin(table.cpu()) if cuda else table.clone()
        if cuda:
            # off the card, counted, and back for the arm that keeps it there
            weights.ple_table = None
            del table
            self.table_bytes["measured"] = before - torch.cuda.memory_allocated()
            weights.ple_table = host.to(self.device)
        self.table_bytes["closed_form"] = host.numel() * host.element_size()
        return Gemma4Model(self.config, replace(weights, ple_table=host), self.model.ops, self.bench.long)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return torch.randint(3, self.config.vocab_size, (count, length), generator=self._generator).tolist()


# ------------------------------------------------------------------------------------------------------------ requests
class Streams:
    """Requests that decode side by side on one engine, stopped and continued at will."""

    def __init__(self, engine: LLMEngine, prompts: Sequence[list[int]], tokens: int) -> None:
        self.engine = engine
        self.ids = [f"stream-{i}" for i in range(len(prompts))]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for name, ids in zip(self.ids, prompts, strict=True):
            engine.add_request(name, ids, params)
        while min(len(engine.scheduler.requests[name].output_token_ids) for name in self.ids) < 2:
            engine.step()

    def window(self, steps: int) -> dict[str, Any]:
        """`steps` decode steps of all streams; the caller waits for the device before and after."""
        for _ in range(steps):
            self.engine.step()
        return {"tokens": steps * len(self.ids)}

    def end(self) -> None:
        self.engine.abort(self.ids)
        settle(self.engine)


def settle(engine: LLMEngine) -> None:
    """Finish what runs; the finished requests' slots are free afterwards."""
    while engine.has_unfinished_requests:
        engine.step()
    engine.step()


def answers(engine: LLMEngine, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Greedy tokens of all prompts, nothing cached before or kept after."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    said: dict[str, list[int]] = {}
    for i, ids in enumerate(prompts):
        engine.add_request(str(i), ids, params)
    while engine.has_unfinished_requests:
        said |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step()}
    settle(engine)
    engine.reset_prefix_cache()
    return [said[str(i)] for i in range(len(prompts))]


def decode_rows(engines: Engines, names: dict[str, str], streams: int, context: int, part: str) -> list[dict[str, Any]]:
    """Interleaved windows of decode steps; names: arm -> engine. Two arms of one engine continue the same streams."""
    bench = engines.bench
    count = bench.steps * (bench.rounds + 1) * len(names) + 16  # the most that one engine's streams may be asked for
    prompts = engines.prompts(streams, context)
    running = {name: Streams(engines.get(name), prompts, count) for name in dict.fromkeys(names.values())}
    arms = {arm: lambda name=name: running[name].window(bench.steps) for arm, name in names.items()}
    rows = interleave(arms, bench.rounds, part=part, streams=streams)
    for of in running.values():
        of.end()
        of.engine.reset_prefix_cache()
    return [row | {"tok_s": round(row["tokens"] / row["seconds"], 1)} for row in rows]


# --------------------------------------------------------------------------------------------------------------- parts
def run_formats(engines: Engines) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    bench = engines.bench
    names = {"auto": "auto", "int8": "int8", "fp8": "fp8", "auto again": "auto"}
    rows = decode_rows(engines, names, bench.streams, bench.context, "formats")
    result = {name: over(rows, name, "auto") for name in names}
    full, sliding = ({n: getattr(KVLayout.of(engines.config, f, engines.dtype), f"{g}_bytes_per_token") for n, f in FORMATS.items()}
                     for g in ("full", "sliding"))  # fmt: skip
    return rows, {"streams": bench.streams, "context": bench.context, "arms": result, "bytes_per_token": {"full": full, "sliding": sliding}}


def run_table(engines: Engines) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    bench = engines.bench
    host, device = engines.get("host"), engines.get("auto")
    same = engines.prompts(8, 64)
    equal = answers(host, same, 16) == answers(device, same, 16)
    count, length = bench.prefill
    prompts = engines.prompts(count, length)
    arms = {"device": device, "host": host, "device again": device}
    rows = interleave({arm: lambda e=e: {"tokens": len(answers(e, prompts, 1)) * length} for arm, e in arms.items()}, bench.rounds,
                      warm_ups=2, part="table", streams=0)  # fmt: skip
    result = {f"prefill {count} x {length}": {arm: over(rows, arm, "device") for arm in arms}}
    for streams in (1, bench.streams):
        more = decode_rows(engines, {"device": "auto", "host": "host", "device again": "auto"}, streams, bench.short, "table")
        rows += more
        result[f"decode, {streams} streams"] = {arm: over(more, arm, "device") for arm in arms}
    return rows, {"tokens_equal": equal, "bytes": engines.table_bytes, "arms": result}


def run_prefix(engines: Engines) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    shared, prompt = engines.bench.prefix
    bench = prefix_bench.PrefixBench(engines.bench.shape, shared, prompt, engines.bench.rounds, seed=engines.bench.seed)
    rows = prefix_bench.measure(prefix_bench.Runner(bench, engines.get("auto")))
    return [row | {"part": "prefix"} for row in rows], {"shared": shared, "prompt": prompt, **prefix_bench.summarize(rows)}


def run_long(engines: Engines) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The prompt's last row is scored, no token sampled: the prompt alone fills the model's positions."""
    bench, engine = engines.bench, engines.get("auto")
    cuda = engines.device.type == "cuda"
    (prompt,) = engines.prompts(1, bench.long)
    limits = engine.scheduler.config

    def read(chunk: int) -> dict[str, Any]:
        engine.scheduler.config = replace(limits, max_num_batched_tokens=chunk)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        steps = engine.runner.stats.steps
        engine.add_request("long", prompt, SamplingParams(max_tokens=1, temperature=0), label_token_ids=[5, 6])
        outputs = []
        while not outputs:
            outputs = engine.step()
        ((row, _),) = (outputs[0].label_logits or {}).items()
        assert row == bench.long - 1, "the row that is scored is the last one"
        peak = torch.cuda.max_memory_allocated() - before if cuda else 0
        settle(engine)
        engine.reset_prefix_cache()
        return {"step_tokens": chunk, "steps": engine.runner.stats.steps - steps, "bytes_above": peak, "bytes_before": before}

    arms = {f"steps of {chunk:,}": lambda chunk=chunk: read(chunk) for chunk in dict.fromkeys(bench.chunks)}
    first = next(iter(arms))
    arms[f"{first} again"] = arms[first]
    rows = interleave(arms, max(2, bench.rounds // 2), part="long")
    engine.scheduler.config = limits
    plan = engine.cache.plan if engine.cache is not None else None
    result = {
        arm: {
            "seconds": statistics.median(values_of(rows, arm)),
            "tok_s": round(bench.long / statistics.median(values_of(rows, arm))),
            "bytes_above": max(values_of(rows, arm, "bytes_above")),
            "steps": values_of(rows, arm, "steps")[0],
        }
        for arm in arms
    }
    return rows, {"tokens": bench.long, "arms": result, "weight_bytes": plan.weight_bytes if plan else 0, "kv_bytes": bench.kv_bytes}


def run_accuracy(engines: Engines) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    prompts = kv_accuracy.random_prompts(engines.config.vocab_size, engines.bench.seed)
    result = {}
    for name, form in FORMATS.items():
        if name != "auto":
            tasks = list(kv_accuracy.compare(engines.model, form, prompts).values())
            result[form] = [kv_accuracy.as_row(task) for task in [*tasks, kv_accuracy.Accuracy.total(tasks)]]
    return [{"part": "accuracy", "format": form, **task} for form, tasks in result.items() for task in tasks], {"formats": result}


def run_capacity(engines: Engines) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A pool of each format for one budget: bytes that torch allocated against the closed form, and tokens it holds."""
    bench = engines.bench
    rows: list[dict[str, Any]] = []
    for name, form in FORMATS.items():
        layout = KVLayout.of(engines.config, form, engines.dtype)
        block = 64 if engines.device.type == "cuda" else 16
        budget = divide_budget(layout, bench.kv_bytes, block, bench.streams, max(bench.chunks))
        before = torch.cuda.memory_allocated() if engines.device.type == "cuda" else 0
        pool = KVPool(engines.config, budget, form, getattr(torch, engines.dtype), engines.device)
        allocated = torch.cuda.memory_allocated() - before if engines.device.type == "cuda" else pool.num_bytes
        closed = block * (
            budget.num_full_blocks * layout.full_bytes_per_token + budget.num_sliding_blocks * layout.sliding_bytes_per_token
        )  # fmt: skip
        rows.append({"part": "capacity", "format": name, "budget": bench.kv_bytes, "closed_form": closed, "tensors": pool.num_bytes,
                     "allocated": allocated, "full_tokens": budget.full_tokens, "window_tokens": budget.sliding_tokens})  # fmt: skip
        del pool
    return rows, {"rows": rows}


RUNNERS: dict[str, Callable[[Engines], tuple[list[dict[str, Any]], dict[str, Any]]]] = {
    "formats": run_formats, "table": run_table, "prefix": run_prefix, "long": run_long, "accuracy": run_accuracy, "capacity": run_capacity,
}  # fmt: skip


def over(rows: Sequence[dict[str, Any]], arm: str, base: str) -> dict[str, Any]:
    """Median rate of an arm and how many times that of `base` it is, by rounds."""
    ratio = Ratio.of(values_of(rows, base), values_of(rows, arm))
    rate = statistics.median(row["tokens"] / row["seconds"] for row in rows if row["arm"] == arm)
    return {"tok_s": round(rate, 1), "times": {"median": round(ratio.median, 4), "low": round(ratio.low, 4), "high": round(ratio.high, 4)}}


def run(bench: KVBench) -> dict[str, Any]:
    """Measure the parts. The report has stable keys."""
    start = time.perf_counter()
    engines = Engines(bench)
    parts: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    seconds: dict[str, float] = {"weights": round(time.perf_counter() - start, 1)}
    for part in bench.cases:
        start = time.perf_counter()
        made, parts[part] = RUNNERS[part](engines)
        rows += made
        seconds[part] = round(time.perf_counter() - start, 1)
    return {
        "bench": "kv",
        "environment": environment(
            shape=bench.shape, dtype=engines.dtype, rounds=bench.rounds, seed=bench.seed, kv_bytes=bench.kv_bytes, seconds=seconds
        ),
        "parts": parts,
        "rows": rows,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- output
def render(report: dict[str, Any]) -> str:
    return "\n\n".join(f"{PARTS[part]}\n\n{section(part, result)}" for part, result in report["parts"].items())


def section(part: str, r: dict[str, Any]) -> str:
    return {"formats": _formats, "table": _table, "prefix": _prefix, "long": _long, "accuracy": _accuracy, "capacity": _capacity}[part](r)


def _formats(r: dict[str, Any]) -> str:
    rows = [[arm, f"{of['tok_s']:,.0f}", str(Ratio(**of["times"]))] for arm, of in r["arms"].items()]
    value, asked = r["arms"]["int8"]["times"]["median"], TARGETS["int8"]
    verdict = f"int8 decodes {value:.2f} times as fast as auto; asked for {asked}: {'reached' if value >= asked else 'missed'}."
    head = f"{r['streams']} streams, {r['context']:,} tokens of context each; windows of decode steps only."
    return f"{head}\n\n{markdown_table(['format', 'tokens/s', 'times auto'], rows)}\n\n{verdict}"


def _table(r: dict[str, Any]) -> str:
    rows = [
        [case, *(f"{arms[arm]['tok_s']:,.0f}" for arm in ("device", "host")),
         *(f"{1 / arms[arm]['times']['median'] - 1:+.1%}" for arm in ("host", "device again"))]
        for case, arms in r["arms"].items()
    ]  # fmt: skip
    saved = r["bytes"].get("measured", r["bytes"]["closed_form"])
    said = "Greedy tokens of 8 prompts x 16 are equal." if r["tokens_equal"] else "GREEDY TOKENS DIFFER."
    columns = ["case", "table on the card, tokens/s", "on the host, tokens/s", "time with the host's", "null arm"]
    return f"{markdown_table(columns, rows)}\n\nThe card holds {saved / 1e9:.2f} GB less. {said}"


def _prefix(r: dict[str, Any]) -> str:
    rows = [[arm, f"{ms:.2f}", f"{r['min_ms'][arm]:.2f}"] for arm, ms in r["median_ms"].items()]
    cold = Ratio(**r["ratio"]["cold"])
    text = (
        f"{r['shared']:,} of {r['prompt']:,} tokens cached: the first token comes {cold} sooner, {r['token_ratio']:.2f} times fewer tokens."
    )
    return f"{markdown_table(['arm', 'median ms', 'least'], rows)}\n\n{text}"


def _long(r: dict[str, Any]) -> str:
    rows = [
        [arm, of["steps"], f"{of['seconds']:.2f}", f"{of['tok_s']:,}", f"{of['bytes_above'] / 1e9:.2f}",
         f"{(of['bytes_above'] + r['weight_bytes'] + r['kv_bytes']) / 1e9:.1f}"]
        for arm, of in r["arms"].items()
    ]  # fmt: skip
    columns = ["arm", "steps", "s", "tokens/s", "GB above weights, pool and graphs at the peak", "with weights and pool"]
    return f"One prompt of {r['tokens']:,} tokens.\n\n{markdown_table(columns, rows)}"


def _accuracy(r: dict[str, Any]) -> str:
    return "\n\n".join(f"`{form}` against auto, random tokens\n\n{kv_accuracy.table(tasks)}" for form, tasks in r["formats"].items())


def _capacity(r: dict[str, Any]) -> str:
    columns = ["format", "budget", "closed form", "tensors", "allocated", "tokens of full attention", "in windows"]
    keys = ("budget", "closed_form", "tensors", "allocated", "full_tokens", "window_tokens")
    return markdown_table(columns, [[row["format"], *(f"{row[key]:,}" for key in keys)] for row in r["rows"]])


def write_record(report: dict[str, Any], folder: Path) -> Path:
    """The record page and its raw rows under `folder`; returns the page's path."""
    env = report["environment"]
    summary = (
        f"Shape `{env['shape']}`, dummy weights, {env['dtype']}, {env.get('gpu', env['processor'])}. Several engines over one set of "
        f"weights in one process, arms interleaved, medians of {env['rounds']} rounds. Captured graphs are those that the parts need."
    )
    absent = [
        *(f"{PARTS[part]}: not in this run" for part in PARTS if part not in report["parts"]),
        "trained weights: what the formats change in answers is in docs/kv-cache.md, on tiny-e",
        "other cards, the server, several prefixes at once",
    ]
    record = Record(f"kv-{machine(env)}", "K/V economy", summary, env, report["rows"], absent)
    record.sections = [(PARTS[part][:1].upper() + PARTS[part][1:], section(part, result)) for part, result in report["parts"].items()]
    return record.write(folder)
