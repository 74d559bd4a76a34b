"""`lastrow bench matrix`: whole requests through LLM.generate on one GPU, by case and arm (the method of vllm#60445).

bs prompts of random tokens, greedy, no end token; score = bs x (input + output) / latency of the whole batch, prefix caching off.
Arms run in one process, interleaved A B B A: the card is power-limited and drifts, so only neighbours compare. The measuring host
may lack matplotlib: `run` gives a report, `write_record` draws it elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.llm import LLM
from lastrow.harness.records import environment, rounds_order
from lastrow.harness.transformers_arm import TransformersArm
from lastrow.models.config import ConfigError
from lastrow.models.shapes import named_shape

WARM_UPS = 2
PREFILL_LIMITS = (615.0, 690.0)  # thousand tokens/s: E2B's matmuls before the cut alone, at the power cap and in bursts (kernel lab)
DECODE_LIMIT_MS = 1.06  # one decode step's weights at the card's copy bandwidth


@dataclass(frozen=True)
class Case:
    """`score`: "total" counts input and output tokens, "output" the output alone, "latency" is the batch latency in ms (lower is
    better). asked: what issue 3 asks for at least. others: published or measured by the issue for other engines."""

    name: str
    input_len: int
    output_len: int
    bs: int
    score: str
    asked: float
    aim: float
    others: dict[str, float] = field(default_factory=dict)


HF, STOCK, FAST = "transformers", "vLLM stock", "vLLM fast prefill"
CASES = (
    Case("prefill 16", 1024, 1, 16, "total", 470e3, 550e3, {HF: 70.9e3, STOCK: 141.8e3, FAST: 354.4e3}),
    Case("prefill 64", 1024, 1, 64, "total", 485e3, 560e3, {HF: 72.6e3, STOCK: 148.9e3, FAST: 392.4e3}),
    Case("balanced", 512, 4, 64, "total", 420e3, 470e3, {STOCK: 135.9e3, FAST: 269.5e3}),
    Case("decode-heavy", 128, 8, 64, "total", 210e3, 280e3, {STOCK: 79.5e3, FAST: 122.1e3}),
    Case("long context", 4096, 1, 16, "total", 440e3, 520e3, {HF: 56.1e3, STOCK: 139.9e3, FAST: 353.5e3}),
    Case("one stream", 128, 256, 1, "output", 540, 750, {HF: 28, STOCK: 309, FAST: 295}),
    Case("64 streams", 128, 256, 64, "output", 19e3, 30e3, {HF: 1650, STOCK: 12.4e3, FAST: 12.3e3}),
    Case("first token", 1024, 1, 1, "latency", 6.0, 3.5, {STOCK: 25.4, FAST: 29.4}),
)
ARMS = {
    "fast": "lastrow, the default: wanted rows only behind the cut",
    "null": "`fast` once more: what it differs by is noise",
    "full": "lastrow with every prompt row through every layer",
    "invariant": "lastrow with batch_invariant=True",
    "hf": "transformers (sdpa, eager) on the same weights and prompts",
}


@dataclass(frozen=True)
class MatrixBench:
    """Options of `lastrow bench matrix`. rounds: measured runs of each arm and case; the slow `hf` arm runs in the first only."""

    shape: str = "e2b"
    cases: tuple[str, ...] = tuple(case.name for case in CASES)
    arms: tuple[str, ...] = ("fast", "null", "full")
    rounds: int = 4
    seed: int = 0
    max_model_len: int = 8192

    def __post_init__(self) -> None:
        known = [case.name for case in CASES]
        if unknown := sorted(set(self.cases) - set(known)):
            raise ConfigError(f"case {unknown[0]!r} is not known: one of {', '.join(known)} is needed")
        if unknown := sorted(set(self.arms) - set(ARMS)):
            raise ConfigError(f"arm {unknown[0]!r} is not known: one of {', '.join(ARMS)} is needed")
        if "fast" not in self.arms or self.rounds < 1:
            raise ConfigError("the arm 'fast' and at least one round are needed")


Prompts = list[list[int]]
Arm = Callable[[Case, Prompts], None]


def build_arms(bench: MatrixBench) -> tuple[dict[str, Arm], dict[str, Any]]:
    """The arms and what building them showed: seconds of start-up by engine."""
    options = {"shape": bench.shape, "load_format": "dummy", "max_model_len": bench.max_model_len, "max_num_seqs": 64, "seed": bench.seed}
    options |= {"enable_prefix_caching": False, "kv_cache_memory_bytes": 8 << 30}
    start = time.perf_counter()
    llm = LLM(**options)
    notes: dict[str, Any] = {"start_seconds": {"fast": round(time.perf_counter() - start, 2)}, "engines": {"fast": llm}}
    arms: dict[str, Arm] = {"fast": lambda case, prompts: generate(llm, case, prompts)}
    if "null" in bench.arms:
        arms["null"] = arms["fast"]
    if "full" in bench.arms:
        arms["full"] = lambda case, prompts: generate_all_rows(llm, case, prompts)
    if "invariant" in bench.arms:
        start = time.perf_counter()
        fixed = LLM(**options, batch_invariant=True)
        notes["start_seconds"]["invariant"] = round(time.perf_counter() - start, 2)
        notes["engines"]["invariant"] = fixed
        arms["invariant"] = lambda case, prompts: generate(fixed, case, prompts)
    if "hf" in bench.arms:
        model: Any = llm.engine.runner.model
        arms["hf"] = TransformersArm(model.config, model.weights, model.ops.unpack_gate_up)
    return arms, notes


def params(case: Case) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=case.output_len, ignore_eos=True)


def generate(llm: LLM, case: Case, prompts: Prompts) -> None:
    outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params(case), use_tqdm=False)
    assert all(len(out.outputs[0].token_ids) == case.output_len for out in outs), "an arm that stops early is no arm"


def generate_all_rows(llm: LLM, case: Case, prompts: Prompts) -> None:
    """As `generate`, with every prompt row wanted: what engines without the cut compute."""
    for i, ids in enumerate(prompts):
        llm.engine.add_request(f"full-{i}", ids, params(case), prompt_rows=range(len(ids) - 1))
    left = len(prompts)
    while left:
        left -= sum(out.finished for out in llm.engine.step())


def measure(bench: MatrixBench, arms: dict[str, Arm], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Rows {case, input_len, output_len, bs, arm, round, position, latency_s, tok_s}."""
    generator = torch.Generator().manual_seed(bench.seed)
    vocabulary = named_shape(bench.shape).vocab_size
    rows: list[dict[str, Any]] = []
    for case in cases:
        quick = {name: arm for name, arm in arms.items() if name != "hf"}
        order = rounds_order(list(quick), bench.rounds)

        def fresh(case: Case = case) -> Prompts:
            return torch.randint(3, vocabulary, (case.bs, case.input_len), generator=generator).tolist()

        for arm in quick.values():
            for _ in range(WARM_UPS):
                arm(case, fresh())
        for r in range(bench.rounds):
            prompts = fresh()
            for position, name in enumerate(order[r]):
                rows.append(timed(case, name, r, position, quick[name], prompts))
        if "hf" in arms:
            arms["hf"](case, fresh())  # its first run of a length takes up to three times as long
            rows.append(timed(case, "hf", 0, len(quick), arms["hf"], fresh()))
    return rows


def timed(case: Case, name: str, round_: int, position: int, arm: Arm, prompts: Prompts) -> dict[str, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    arm(case, prompts)
    torch.cuda.synchronize()
    latency = time.perf_counter() - start
    tokens = case.bs * (case.input_len + case.output_len)
    return {
        "case": case.name, "input_len": case.input_len, "output_len": case.output_len, "bs": case.bs, "arm": name, "round": round_,
        "position": position, "latency_s": round(latency, 6), "tok_s": round(tokens / latency, 1),
    }  # fmt: skip


def score(case: Case, latency_s: float) -> float:
    """The figure the case is judged by."""
    if case.score == "latency":
        return latency_s * 1e3
    return case.bs * (case.output_len + (case.input_len if case.score == "total" else 0)) / latency_s


def share_of_limit(case: Case, latency_s: float) -> float:
    """Share of what the card allows: prompt tokens/s against the matmuls before the cut at the power cap, decode steps against
    the bytes of the weights. The two parts of a case add up to its shortest possible latency."""
    prefill = case.bs * case.input_len / (PREFILL_LIMITS[0] * 1e3)
    decode = (case.output_len - 1) * DECODE_LIMIT_MS * 1e-3
    return (prefill + decode) / latency_s


def run(bench: MatrixBench) -> dict[str, Any]:
    """Build and time the arms. Raises ConfigError without a GPU. The report has stable keys."""
    if not torch.cuda.is_available():
        raise ConfigError("lastrow bench matrix needs an NVIDIA GPU; on a CPU there is `lastrow bench prefill`")
    cases = [case for case in CASES if case.name in bench.cases]
    arms, notes = build_arms(bench)
    engines = notes.pop("engines")
    rows = measure(bench, arms, cases)
    return {
        "bench": "matrix",
        "environment": environment(
            gpu=torch.cuda.get_device_name(), shape=bench.shape, dtype="bfloat16", rounds=bench.rounds, seed=bench.seed, **notes
        ),
        "arms": {name: ARMS[name] for name in arms},
        "results": [summarize(case, rows) for case in cases],
        "graphs": {name: graph_use(llm) for name, llm in engines.items()},
        "rows": rows,
    }


def graph_use(llm: LLM) -> dict[str, Any]:
    """Steps by how they ran, and why some were not replayed."""
    runner = llm.engine.runner
    graphs: Any = runner.graphs
    misses = {} if graphs is None else dict(graphs.misses)
    return {"steps": runner.stats.steps, "replayed": runner.stats.graphs, "eager": runner.stats.eager, "misses": misses}


def summarize(case: Case, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians by arm for one case, with the spread of the null arm and what the issue asks for."""
    of_case = [row for row in rows if row["case"] == case.name]
    arms = dict.fromkeys(row["arm"] for row in of_case)
    medians = {arm: statistics.median(row["latency_s"] for row in of_case if row["arm"] == arm) for arm in arms}
    return {
        "case": case.name, "input_len": case.input_len, "output_len": case.output_len, "bs": case.bs, "score": case.score,
        "asked": case.asked, "aim": case.aim, "others": case.others,
        "latency_ms": {arm: round(s * 1e3, 3) for arm, s in medians.items()},
        "value": {arm: round(score(case, s), 1) for arm, s in medians.items()},
        "limit_share": round(share_of_limit(case, medians["fast"]), 3),
    }  # fmt: skip
