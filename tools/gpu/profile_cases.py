"""Where one `LLM.generate` spends its time on a card, for cases of `lastrow bench matrix`: host phases, kernels, gaps, ceilings.

    PYTHONPATH=src python tools/gpu/profile_cases.py --out profile.json [CASE...]

For each case: walls of unprofiled runs; the same with the engine's methods timed (host milliseconds by phase, when the first launch and
the last result came); then one run under torch.profiler: kernels by time, the time with no kernel running, and the longest gaps. Cases
with long answers are cut to 32 tokens. The profiler inflates host parts, and kernels that overlap by programmatic dependent launch count
their waiting, so kernel times may add up to more than the wall. Prints Markdown; --out keeps every event."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lastrow.harness.matrix import CASES, Case, MatrixBench, build_arms, generate
from lastrow.harness.records import markdown_table
from lastrow.models.config import Gemma4Config

MATMUL_TFLOPS, COPY_TBS = 790.0, 4.3  # measured ceilings of an H200: bf16 matmul on random data, device-to-device copy
LONGEST = 32  # output tokens of a profiled run
PHASES = {
    "add requests": ("engine", "add_request"),
    "schedule": ("scheduler", "schedule"),
    "prepare inputs": ("inputs", "prepare"),
    "launch the forward": ("runner", "forward"),
    "sample and send": ("runner", "_sample"),
    "read results": ("engine", "_read_oldest"),
}


class Clock:
    """Host time inside the engine's methods, by phase; `marks`: when the first forward was launched and the last result was read."""

    def __init__(self, engine: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.marks: dict[str, float] = {}
        owners = {"engine": engine, "scheduler": engine.scheduler, "inputs": engine.runner.inputs, "runner": engine.runner}
        self._replaced = [(owners[owner], name) for owner, name in PHASES.values()]
        for phase, (owner, name) in PHASES.items():
            setattr(owners[owner], name, self._timed(phase, getattr(owners[owner], name)))

    def _timed(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                end = time.perf_counter()
                self.seconds[phase] += end - start
                if phase == "launch the forward":
                    self.marks.setdefault("first launch", end)
                self.marks["last result" if phase == "read results" else phase] = end

        return timed

    def stop(self) -> None:
        for owner, name in self._replaced:
            delattr(owner, name)  # the class's own method again


def host_phases(run: Callable[[], None], engine: Any) -> dict[str, float]:
    """Milliseconds by phase of one run. Reading results includes the wait for the card."""
    clock = Clock(engine)
    try:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        end = time.perf_counter()
    finally:
        clock.stop()
    made = {phase: clock.seconds[phase] for phase in PHASES}
    made |= {"until the first launch": clock.marks["first launch"] - start, "behind the last result": end - clock.marks["last result"]}
    return {name: round(seconds * 1e3, 3) for name, seconds in made.items()}


def trace(run: Callable[[], None]) -> list[tuple[float, float, str]]:
    """(start, duration, name) of everything that ran on the card, in microseconds, by start."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as made:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        made.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") in kinds)


def busy(events: list[tuple[float, float, str]]) -> dict[str, Any]:
    """Span, time with a kernel running, and the longest gaps (microseconds from the first event, length, what came then)."""
    begin = end = events[0][0]
    running, gaps = 0.0, []
    for start, duration, name in events:
        if start > end:
            gaps.append((round(start - end, 1), round(end - begin, 1), name[:60]))
        running += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return {"span_ms": (end - begin) / 1e3, "busy_ms": running / 1e3, "gaps_us": sorted(gaps, reverse=True)[:8]}


def by_kernel(events: list[tuple[float, float, str]]) -> list[dict[str, Any]]:
    total: dict[str, list[float]] = defaultdict(list)
    for _, duration, name in events:
        total[name[:60]].append(duration)
    of_all = sum(duration for _, duration, _ in events)
    rows = [
        {"kernel": name, "calls": len(times), "ms": sum(times) / 1e3, "mean_us": sum(times) / len(times), "share": sum(times) / of_all}
        for name, times in total.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def work(c: Gemma4Config, case: Case) -> dict[str, float]:
    """What a case must compute and read: floating-point operations of the matmuls before the cut, and bytes of the weights that each
    pass behind the cut and each decode step reads at least."""
    before, behind = 0, 0
    for i in range(c.num_hidden_layers):
        d, heads = c.layer_head_dim(i), c.num_attention_heads
        mlp = 3 * c.hidden_size * c.layer_intermediate_size(i)
        rest = 2 * heads * d * c.hidden_size + 3 * c.hidden_size * c.hidden_size_per_layer_input
        stored = 2 * c.layer_kv_heads(i) * d * c.hidden_size if c.owns_kv(i) else 0
        if i < c.cut:
            before += mlp + rest + stored
        else:
            behind += mlp + rest
            before += stored
    head = c.vocab_size * c.hidden_size
    return {"prefill_flop": 2.0 * before * case.bs * case.input_len, "behind_bytes": 2.0 * (behind + head),
            "decode_bytes": 2.0 * (before + behind + head) * (case.output_len - 1)}  # fmt: skip


def page(name: str, of: dict[str, Any]) -> str:
    rows = [
        [row["kernel"], row["calls"], f"{row['mean_us']:.1f}", f"{row['ms']:.2f}", f"{row['share']:.1%}"]
        for row in of["kernels"][:14]
    ]  # fmt: skip
    w, b = of["work"], of["card"]
    floor = w["prefill_flop"] / MATMUL_TFLOPS / 1e9 + (w["behind_bytes"] + w["decode_bytes"]) / COPY_TBS / 1e9
    lines = [
        f"## {name}",
        f"Wall {of['wall_ms']:.2f} ms (median of {of['runs']}); on the card from first to last event {b['span_ms']:.2f} ms, with a kernel "
        f"running {b['busy_ms']:.2f} ms (profiled run). At the ceilings ({MATMUL_TFLOPS:g} TFLOP/s, {COPY_TBS:g} TB/s) the matmuls before "
        f"the cut and the weights' bytes behind it take {floor:.2f} ms: {floor / of['wall_ms']:.0%} of the wall.",
        markdown_table(["kernel", "calls", "mean us", "ms", "share"], rows),
        "Host, ms: " + ", ".join(f"{phase} {ms:.2f}" for phase, ms in of["host_ms"].items()) + ".",
        "Longest gaps, us (at): " + ", ".join(f"{length:.0f} ({at:.0f}, before {then})" for length, at, then in b["gaps_us"]) + ".",
    ]
    return "\n\n".join(lines)


def measure(llm: Any, case: Case, runs: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    case = replace(case, output_len=min(case.output_len, LONGEST))

    def run() -> None:
        generate(llm, case, prompts)

    walls = []
    for i in range(runs + 2):
        prompts = torch.randint(3, llm.engine.vocab_size, (case.bs, case.input_len), generator=generator).tolist()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if i >= 2:
            walls.append(time.perf_counter() - start)
    events = trace(run)
    first = events[0][0]
    return {
        "wall_ms": statistics.median(walls) * 1e3, "runs": runs, "walls_ms": [round(wall * 1e3, 3) for wall in walls],
        "host_ms": host_phases(run, llm.engine), "card": busy(events), "kernels": by_kernel(events),
        "work": work(llm.engine.runner.model.config, case),
        "events": [(round(start - first, 1), round(duration, 1), name[:60]) for start, duration, name in events],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    bench = MatrixBench(cases=tuple(args.cases), arms=("fast",))
    _, notes = build_arms(bench)
    llm = notes["engines"]["fast"]
    made = {}
    for case in CASES:
        if case.name in bench.cases:
            made[case.name] = measure(llm, case, args.runs, bench.seed)
            print(page(case.name, made[case.name]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"start_seconds": notes["start_seconds"], "cases": made}), encoding="utf-8")


if __name__ == "__main__":
    main()
