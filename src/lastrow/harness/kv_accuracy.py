"""What storing K/V in 8 bits changes: answers of one model with `kv_cache_dtype` auto and with a format, on the same prompts.

Held-out prompts of a checkpoint (greedy answers and teacher-forced log probabilities along them), or, for a named shape with dummy
weights, random prompts (log probabilities only: nobody's answers)."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lastrow.config import EngineConfig
from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.build import choose_device, choose_dtype, load_model
from lastrow.engine.llm import LLM
from lastrow.harness.direct import DirectRunner
from lastrow.harness.parity import read_heldout
from lastrow.harness.records import markdown_table
from lastrow.models.config import ConfigError, from_file
from lastrow.models.gemma4 import Gemma4Model
from lastrow.models.shapes import named_shape
from lastrow.progress import track
from lastrow.weights.resolve import resolve_model

RANDOM_LENGTHS = (64, 256, 700, 1100)  # below, around and past the windows of the published shapes
RANDOM_ROWS = 64


@dataclass
class Accuracy:
    """One task. rows: predicted tokens compared. agree: whose most likely token is the same. kl: mean Kullback-Leibler divergence
    from auto's distribution, nats. mean_, max_difference: of the log probability of auto's most likely token and of the reference's.
    greedy_equal: prompts whose whole greedy answer is the same (of `prompts`; None: not generated)."""

    task: str
    prompts: int = 0
    rows: int = 0
    agree: int = 0
    kl: float = 0.0
    mean_difference: float = 0.0
    max_difference: float = 0.0
    greedy_equal: int | None = None
    finite: bool = True

    def add(self, got: torch.Tensor, expected: torch.Tensor, targets: torch.Tensor) -> None:
        """Logits [R, V] of one prompt in the format and in auto; targets [R]: the tokens that follow."""
        self.finite &= bool(torch.isfinite(got).all())
        p, q = expected.double().log_softmax(-1), got.double().log_softmax(-1)
        of = torch.stack((targets, expected.argmax(-1)), 1)
        difference = (q.gather(1, of) - p.gather(1, of)).abs()
        before, n = self.rows, len(got)
        self.prompts, self.rows = self.prompts + 1, before + n
        self.agree += int((got.argmax(-1) == expected.argmax(-1)).sum())
        self.kl += (float((p.exp() * (p - q)).sum(-1).mean()) - self.kl) * n / self.rows
        self.mean_difference += (float(difference.mean()) - self.mean_difference) * n / self.rows
        self.max_difference = max(self.max_difference, float(difference.max()))

    @staticmethod
    def total(parts: list[Accuracy]) -> Accuracy:
        whole = Accuracy("all")
        for part in parts:
            whole.prompts, whole.rows, whole.agree = whole.prompts + part.prompts, whole.rows + part.rows, whole.agree + part.agree
            whole.kl += (part.kl - whole.kl) * part.rows / whole.rows
            whole.mean_difference += (part.mean_difference - whole.mean_difference) * part.rows / whole.rows
            whole.max_difference = max(whole.max_difference, part.max_difference)
            whole.finite &= part.finite
            if part.greedy_equal is not None:
                whole.greedy_equal = (whole.greedy_equal or 0) + part.greedy_equal
        return whole


def run(engine: EngineConfig, items: int | None = None, seed: int = 0) -> dict[str, Any]:
    """Compare engine.kv_cache_dtype with auto. items: held-out prompts a task (None: all). Returns the report, stable keys for --json;
    `passed` is False when a number was not finite. Raises ConfigError or WeightsError for bad input."""
    if engine.kv_cache_dtype == "auto":
        raise ConfigError("kv_cache_dtype is 'auto': it is what the other formats are compared with")
    device = choose_device(engine.device)
    dtype = choose_dtype(engine.dtype, device)
    folder = None if engine.shape else resolve_model(engine.model, engine.revision)
    config = named_shape(engine.shape) if engine.shape else from_file(folder or "")
    prompts = random_prompts(config.vocab_size, seed) if folder is None else chosen(read_heldout(None, folder), items)
    if not prompts:
        raise ConfigError(f"no heldout.jsonl in {folder}: there are no prompts to compare with")
    longest = max(len(d["prompt_ids"]) + len(d["output_ids"]) for d in prompts)
    model = load_model(engine, config, folder, getattr(torch, dtype), device, longest)
    tasks = compare(model, engine.kv_cache_dtype, prompts, engine.block_size)
    if folder is not None:
        count_equal_answers(engine, prompts, tasks)
    rows = [*tasks.values(), Accuracy.total(list(tasks.values()))]
    return {
        "model": engine.shape or engine.model,
        "dtype": dtype,
        "device": str(device),
        "backend": model.ops.name,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "tasks": [as_row(row) for row in rows],
        "passed": all(row.finite for row in rows),
    }


def as_row(task: Accuracy) -> dict[str, Any]:
    return asdict(task) | {"top1_agreement": task.agree / task.rows}


def compare(model: Gemma4Model, form: str, prompts: list[dict[str, Any]], block_size: int | None = None) -> dict[str, Accuracy]:
    """By task, log probabilities along each prompt's output_ids with K/V in `form` and in auto. Prompts as `read_heldout` gives them."""
    longest = max(len(d["prompt_ids"]) + len(d["output_ids"]) for d in prompts)
    block = block_size or (64 if model.weights.embed.device.type == "cuda" else 16)
    plain, stored = (DirectRunner(model, longest, block_size=block, kv_cache_dtype=f) for f in ("auto", form))
    tasks: dict[str, Accuracy] = {}
    for d in track(prompts, f"comparing {form}"):
        ids, first = d["prompt_ids"] + d["output_ids"], len(d["prompt_ids"]) - 1
        expected, got = (runner.all_logits(ids[:-1], range(first, len(ids) - 1)) for runner in (plain, stored))
        targets = torch.tensor(d["output_ids"], device=got.device)
        tasks.setdefault(d["task"], Accuracy(d["task"])).add(got, expected, targets)
    return tasks


def chosen(heldout: list[dict[str, Any]], items: int | None) -> list[dict[str, Any]]:
    """The first `items` of each task, all with None."""
    taken: dict[str, int] = {}
    return [d for d in heldout if items is None or ((n := taken.get(d["task"], 0)) < items and not taken.update({d["task"]: n + 1}))]


def random_prompts(vocab_size: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = []
    for length in RANDOM_LENGTHS:
        ids = [rng.randrange(3, vocab_size) for _ in range(length)]
        rows.append({"task": f"{length} random tokens", "prompt_ids": ids[:-RANDOM_ROWS] or ids[:1], "output_ids": ids[-RANDOM_ROWS:]})
    return rows


def count_equal_answers(engine: EngineConfig, prompts: list[dict[str, Any]], tasks: dict[str, Accuracy]) -> None:
    """Greedy answers of whole engines with both formats."""
    answers = []
    for form in ("auto", engine.kv_cache_dtype):
        options = {name: getattr(engine, name) for name in engine.__dataclass_fields__ if name != "shape"}
        llm = LLM(**{**options, "kv_cache_dtype": form})
        params = [SamplingParams(temperature=0.0, max_tokens=len(d["output_ids"])) for d in prompts]
        outputs = llm.generate([{"prompt_token_ids": d["prompt_ids"]} for d in prompts], params)
        answers.append([output.outputs[0].token_ids for output in outputs])
        llm.shutdown()
    for d, plain, stored in zip(prompts, *answers, strict=True):
        task = tasks[d["task"]]
        task.greedy_equal = (task.greedy_equal or 0) + (plain == stored)


def render(report: dict[str, Any]) -> str:
    """The table, in Markdown."""
    head = f"{report['model']}, {report['dtype']} on {report['device']} ({report['backend']}): {report['kv_cache_dtype']} against auto"
    verdict = "every number is finite" if report["passed"] else "NOT passed: a number is not finite"
    return f"{head}\n\n{table(report['tasks'])}\n\n{verdict}"


def table(tasks: list[dict[str, Any]]) -> str:
    columns = ["task", "prompts", "greedy answers equal", "tokens", "top-1 agreement", "mean abs. diff. of logprob", "largest", "mean KL"]
    rows = [
        [
            t["task"], t["prompts"], "-" if t["greedy_equal"] is None else t["greedy_equal"], f"{t['rows']:,}",
            f"{t['top1_agreement']:.2%}", f"{t['mean_difference']:.4f}", f"{t['max_difference']:.3f}", f"{t['kl']:.1e}",
        ]
        for t in tasks
    ]  # fmt: skip
    return markdown_table(columns, rows)
