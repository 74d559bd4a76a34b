"""`lastrow bench speculative`: what drafts cost and what they bring to one stream, with dummy weights and forced acceptance.

Dummy weights accept nothing, so acceptance is SIMULATED: each draft stands with a given probability whatever the target says. Times
and numbers of tokens are real, the tokens are nobody's. Three engines: one without drafts, one with drafts as a user gets them, and
one with drafts and batch_invariant=False.

Two parts: single captured steps replayed back to back (a decode step, a verify step of k+1 rows, a draft step), and whole requests
through LLM.generate, arms interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.cuda_graphs import CUDAGraphs
from lastrow.engine.draft_graphs import DraftGraphs
from lastrow.engine.llm import LLM
from lastrow.harness.records import Ratio, Record, environment, interleave, machine, markdown_table, rounds_order, values_of
from lastrow.models.config import ConfigError

AIM = 1100.0  # output tokens/s of one stream at 3 accepted tokens a verification, issue 7
PLAIN, NULL, FAST = "plain", "plain again", ", batch_invariant=False"


@dataclass(frozen=True)
class SpeculativeBench:
    """drafts, rates: every pair is an arm. three: pairs chosen so that a verification brings 3 tokens on average."""

    shape: str = "e2b"
    drafts: tuple[int, ...] = (2, 3, 4)
    rates: tuple[float, ...] = (0.6, 0.7, 0.8)
    three: tuple[tuple[int, float], ...] = ((3, 0.8105), (4, 0.7367))
    prompt: int = 128
    output: int = 256
    rounds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.drafts or not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise ConfigError("at least one round and one number of drafts, and rates from 0 to 1 are needed")

    @property
    def pairs(self) -> list[tuple[int, float]]:
        return [*((k, rate) for k in self.drafts for rate in self.rates), *self.three]


class Stream:
    """One engine, one request at a time. options: LLM's, besides those of the bench."""

    def __init__(self, bench: SpeculativeBench, **options: Any) -> None:
        self.bench = bench
        self.llm = LLM(
            shape=bench.shape, load_format="dummy", max_model_len=1024, max_num_seqs=1, max_num_batched_tokens=1024,
            enable_prefix_caching=False, kv_cache_memory_bytes=1 << 30, seed=bench.seed, **options,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(bench.seed)
        self.ids = torch.randint(3, self.llm.engine.vocab_size, (bench.prompt,), generator=generator).tolist()

    def answer(self) -> dict[str, Any]:
        """One request: tokens a second from its first token on."""
        params = SamplingParams(temperature=0, max_tokens=self.bench.output, ignore_eos=True)
        (output,) = self.llm.generate([{"prompt_token_ids": self.ids}], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == self.bench.output, "an arm that stops early is no arm"
        metrics = output.metrics
        assert metrics is not None and metrics.last_token_time is not None and metrics.first_token_time is not None
        decoding = metrics.last_token_time - metrics.first_token_time
        return {"decode_tok_s": round((self.bench.output - 1) / decoding, 1), "tokens_per_verification": 1.0}


class DraftingStream(Stream):
    """A `Stream` with a drafter."""

    def __init__(self, bench: SpeculativeBench, **options: Any) -> None:
        most = max(k for k, _ in bench.pairs)
        config = {"model": "dummy", "num_speculative_tokens": most, "adaptive": False, "simulated_acceptance": 0.0}
        super().__init__(bench, speculative_config=config, **options)
        speculator = self.llm.engine.runner.speculator
        assert speculator is not None
        self.speculator = speculator

    def answer_with(self, drafts: int, rate: float) -> dict[str, Any]:
        """`answer` with `drafts` drafts a step, each standing with probability `rate`; also tokens a verification brought."""
        stats = self.speculator.stats
        before = stats.num_drafts, stats.num_emitted_tokens
        self.speculator.most, self.speculator.simulated_acceptance = drafts, rate
        row = self.answer()
        row["tokens_per_verification"] = round((stats.num_emitted_tokens - before[1]) / (stats.num_drafts - before[0]), 3)
        return row

    # ------------------------------------------------------------------------------------------------------ single steps
    @torch.inference_mode()
    def steps(self, context: int) -> dict[str, Callable[[], Any]]:
        """Captured steps by name, at `context` tokens; empty where nothing is captured."""
        runner: Any = self.llm.engine.runner
        graphs, drafter = runner.graphs, self.speculator.proposer.assistant  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(graphs, CUDAGraphs) or not isinstance(drafter, DraftGraphs):
            return {}
        made: dict[str, Callable[[], Any]] = {}
        draft, positions = drafter.step(1, context)
        positions.fill_(context - 1)
        inputs = runner.inputs
        for table in inputs.block_tables:
            table[0, : -(-context // inputs.block_size)] = torch.arange(1, 1 + -(-context // inputs.block_size))
        for name, rows in [("decode", 1), *((f"verify {k} drafts", k + 1) for k in range(1, 1 + max(self.bench.drafts)))]:
            replay, fields = graphs.whole_step(rows, context, follow=rows > 1)
            # the last tokens of slot 0's sequence, and behind them what stands for padding
            part = torch.tensor([0, context - rows, 0, context, 0, *(0 for _ in inputs.tile_rows)])
            end = torch.tensor([*inputs.padding_part(rows), *(-(-rows // size) for size in inputs.tile_rows)])

            # all steps read their fields in the same memory: filled when it is this one's turn
            def run(
                replay: Callable[[], Any] = replay, t: Any = fields.t, part: torch.Tensor = part, end: torch.Tensor = end
            ) -> Callable[[], Any]:
                parts = t["parts"].view(inputs.part_fields, -1)
                parts.copy_(end[:, None])
                parts[:, 0] = part
                t["ids"].zero_()
                t["row_slots"].fill_(inputs.null_slot)
                return replay

            made[name] = run
        made["draft"] = lambda: draft
        made["decode again"] = made["decode"]
        return made


@torch.inference_mode()
def time_steps(steps: dict[str, Callable[[], Any]], rounds: int, calls: int = 20) -> list[dict[str, Any]]:
    """Rows {round, step, ms}: `calls` replays back to back, interleaved."""
    rows: list[dict[str, Any]] = []
    cuda = torch.cuda.is_available()
    for number, order in enumerate(rounds_order(tuple(steps), rounds)):
        for name in order:
            replay = steps[name]()
            replay()
            start = time.perf_counter()
            if cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                begin.record()
                for _ in range(calls):
                    replay()
                end.record()
                torch.cuda.synchronize()
                ms = begin.elapsed_time(end) / calls
            else:
                for _ in range(calls):
                    replay()
                ms = (time.perf_counter() - start) * 1e3 / calls
            rows.append({"round": number, "step": name, "ms": round(ms, 4)})
    return rows


def run(bench: SpeculativeBench) -> dict[str, Any]:
    """Measure. The report has stable keys."""
    start = time.perf_counter()
    plain = Stream(bench)
    drafting = {"": DraftingStream(bench), FAST: DraftingStream(bench, batch_invariant=False)}
    ready = time.perf_counter() - start
    context = bench.prompt + bench.output // 2
    steps = {name + mode: step for mode, stream in drafting.items() for name, step in stream.steps(context).items()}
    step_rows = time_steps(steps, max(bench.rounds, 4)) if steps else []
    arms: dict[str, Callable[[], dict[str, Any]]] = {PLAIN: plain.answer, NULL: plain.answer}
    for mode, stream in drafting.items():
        arms |= {arm_name(k, rate) + mode: lambda s=stream, k=k, rate=rate: s.answer_with(k, rate) for k, rate in bench.pairs}
    rows = interleave(arms, bench.rounds)
    graphs: Any = drafting[""].llm.engine.runner.graphs
    return {
        "bench": "speculative",
        "environment": environment(
            shape=bench.shape, drafter="dummy weights of the published shape", acceptance="SIMULATED", prompt=bench.prompt,
            output=bench.output, context_of_steps=context, rounds=bench.rounds, seed=bench.seed, start_seconds=round(ready, 1),
            graph_misses={} if graphs is None else dict(graphs.misses),
        ),
        "steps": step_table(step_rows),
        "results": [summarize(rows, name) for name in arms],
        "rows": [*step_rows, *rows],
    }  # fmt: skip


def arm_name(drafts: int, rate: float) -> str:
    return f"{drafts} drafts, {rate:g}"


def step_table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median ms by step and its share of the fast kernels' decode step of the same round."""
    table = []
    base = [row["ms"] for row in sorted(rows, key=lambda row: row["round"]) if row["step"] == "decode" + FAST]
    for name in dict.fromkeys(row["step"] for row in rows):
        times = [row["ms"] for row in sorted(rows, key=lambda row: row["round"]) if row["step"] == name]
        table.append({"step": name, "ms": statistics.median(times), "of_a_decode_step": round(Ratio.of(times, base).median, 3)})
    return table


def summarize(rows: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    """decode_tok_s: from the first token on; tok_s: of the whole request, prompt included. ratio: over `plain`, by rounds."""
    output = statistics.median
    plain, times = values_of(rows, PLAIN), values_of(rows, arm)
    ratio = Ratio.of(plain, times)
    return {
        "arm": arm, "decode_tok_s": output(values_of(rows, arm, "decode_tok_s")), "ms": round(output(times) * 1e3, 2),
        "tokens_per_verification": round(statistics.mean(values_of(rows, arm, "tokens_per_verification")), 3),
        "ratio": {"median": round(ratio.median, 4), "low": round(ratio.low, 4), "high": round(ratio.high, 4)},
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- output
def render(report: dict[str, Any]) -> str:
    return "\n\n".join([_steps(report), _streams(report), _verdict(report)])


def _steps(report: dict[str, Any]) -> str:
    if not report["steps"]:
        return "Nothing is captured on this device: single steps were not timed."
    rows = [[s["step"], f"{s['ms']:.3f}", f"{s['of_a_decode_step']:.0%}"] for s in report["steps"]]
    return markdown_table(["one captured step, replayed back to back", "ms", f"of a decode step{FAST}"], rows)


def _streams(report: dict[str, Any]) -> str:
    rows = [
        [r["arm"], f"{r['tokens_per_verification']:.2f}", f"{r['decode_tok_s']:,.0f}", f"{r['ms']:,.1f}", str(Ratio(**r["ratio"]))]
        for r in report["results"]
    ]
    columns = [
        "drafts a step, simulated acceptance",
        "tokens a verification",
        "tokens/s from the first one on",
        "ms a request",
        "plain / arm",
    ]
    return markdown_table(columns, rows)


def _verdict(report: dict[str, Any]) -> str:
    near = sorted(report["results"], key=lambda r: -r["decode_tok_s"])
    near = [r for r in near if abs(r["tokens_per_verification"] - 3.0) < 0.15]
    if report["environment"]["shape"] != "e2b" or not near:
        return ""
    reached = "reached" if near[0]["decode_tok_s"] >= AIM else "missed"
    modes = [[r for r in near if (FAST in r["arm"]) == fast][:1] for fast in (False, True)]
    said = "; ".join(
        f"{r['decode_tok_s']:,.0f} tokens/s of one stream ({r['arm']}: {r['tokens_per_verification']:.2f})" for (r,) in filter(None, modes)
    )
    return f"About 3 tokens a verification: {said}; aim {AIM:,.0f}: {reached}. Acceptance is simulated."


def write_record(report: dict[str, Any], folder: Path) -> Path:
    """The record page and its raw rows under `folder`; returns the page's path."""
    env = report["environment"]
    summary = (
        f"Shape `{env['shape']}` and a drafter of the published shape, both with dummy weights. **Acceptance is simulated**: a draft "
        f"stands with the probability named, whatever the target says. One stream, {env['prompt']} tokens in, "
        f"{env['output']} out, greedy, medians of "
        f"{env['rounds']} interleaved rounds. {_verdict(report)}"
    )
    absent = [
        "acceptance: dummy weights have none. What a trained drafter accepts: docs/speculative-decoding.md, on tiny-e",
        "several streams, n-gram drafts, sampling other than greedy, a draft length that adapts",
    ]
    record = Record(
        f"speculative-{machine(env)}", "Speculative decoding of one stream, simulated acceptance", summary, env, report["rows"], absent
    )
    record.sections = [
        ("Arms", f"* `{PLAIN}`: an engine without drafts and the default options\n* `{NULL}`: the null arm\n"
         "* `K drafts, P`: K drafts a step, each standing with probability P while those before it stand; the default options, which with "
         f"drafts on a GPU are batch_invariant\n* `K drafts, P{FAST}`: the same with the fast kernels, whose greedy answers may part from "
         "plain decoding's"),
        ("Costs of single steps", _steps(report)),
        ("One stream", _streams(report)),
    ]  # fmt: skip
    return record.write(folder)
