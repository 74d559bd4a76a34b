"""`lastrow parity MODEL --logprobs`: log probabilities of the engine as it runs by default (graphs, wanted rows only, batches), against
transformers in fp32 and against all rows (issue 3, item 7).

Greedy answers with their 20 most likely tokens at every place; then both references read prompt and answer once, so no later token
depends on a near-tie. All rows: the same engine asked for the log probabilities of every prompt token."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lastrow.config import EngineConfig
from lastrow.core.output import Logprob
from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.llm import LLM
from lastrow.harness import reference
from lastrow.harness.kv_accuracy import RANDOM_LENGTHS, chosen
from lastrow.harness.parity import read_heldout
from lastrow.harness.records import Record, environment, machine, markdown_table
from lastrow.harness.transformers_arm import TransformersArm
from lastrow.models.config import ConfigError
from lastrow.models.shapes import named_shape
from lastrow.weights.resolve import resolve_model

TOP = 20
TOKENS = 16  # of each answer
COPIES = 4  # random prompts of each length


@dataclass
class Agreement:
    """places: output tokens compared; top1: those whose most likely token is the same. Differences are of log probabilities of the
    left side's TOP most likely tokens. unseen: of those, tokens that the right side's own TOP do not hold (all rows only)."""

    name: str
    places: int = 0
    top1: int = 0
    compared: int = 0
    mean_difference: float = 0.0
    max_difference: float = 0.0
    unseen: int = 0

    def add(self, left: Mapping[int, float], right: Mapping[int, float], best: int) -> None:
        """One place: log probabilities by token id; best: the right side's most likely token."""
        self.places += 1
        self.top1 += max(left, key=left.__getitem__) == best
        for token, value in left.items():
            if token not in right:
                self.unseen += 1
                continue
            difference = abs(value - right[token])
            self.compared += 1
            self.mean_difference += (difference - self.mean_difference) / self.compared
            self.max_difference = max(self.max_difference, difference) if difference == difference else float("nan")


def run(engine: EngineConfig, items: int | None = None, seed: int = 0) -> dict[str, Any]:
    """items: held-out prompts a task (default 2), for a checkpoint; a shape gets random prompts. Returns the report, stable keys for
    --json; `passed` is False where a difference is no number. Raises ConfigError or WeightsError."""
    if reference.transformers_version() is None:
        raise ConfigError("transformers is not installed, and it is what log probabilities are compared with: pip install transformers")
    options: dict[str, Any] = {name: getattr(engine, name) for name in engine.__dataclass_fields__}
    prompts = prompts_of(engine, 2 if items is None else items, seed)
    longest = max(map(len, prompts)) + TOKENS + 1
    pool: dict[str, Any] = (
        {"kv_cache_memory_bytes": 4 << 30} if torch.cuda.is_available() else {}
    )  # the reference needs the rest of the card
    llm = LLM(**options | pool | {"enable_prefix_caching": False, "max_model_len": longest, "max_num_seqs": 64})
    most = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=TOP)
    fast = [output.outputs[0] for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], most, use_tqdm=False)]
    texts = [[*ids, *out.token_ids] for ids, out in zip(prompts, fast, strict=True)]
    every = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=TOP)
    whole = llm.generate([{"prompt_token_ids": ids} for ids in texts], every, use_tqdm=False)
    sides = {
        "fast": [[plain(entry, TOP) for entry in out.logprobs or ()] for out in fast],
        "all rows": [
            [plain(entry, TOP) for entry in (out.prompt_logprobs or [])[len(ids) :]] for ids, out in zip(prompts, whole, strict=True)
        ],
    }  # fmt: skip
    runner = llm.engine.runner
    made = {
        name: Agreement(name) for name in ("fast against transformers fp32", "all rows against transformers fp32", "fast against all rows")
    }
    model: Any = runner.model
    theirs = transformers_fp32(engine, llm)
    for i, (ids, text) in enumerate(zip(prompts, texts, strict=True)):
        exact = tail_logprobs(theirs, text, len(ids))
        for side in ("fast", "all rows"):
            for place, entry in enumerate(sides[side][i]):
                row = exact[place]
                known = dict(zip(entry, row[torch.tensor(list(entry), device=row.device)].tolist(), strict=True))
                made[f"{side} against transformers fp32"].add(entry, known, int(row.argmax()))
        for left, right in zip(sides["fast"][i], sides["all rows"][i], strict=True):
            made["fast against all rows"].add(left, right, max(right, key=right.__getitem__))
    name = engine.shape or engine.model
    return {
        "parity": "logprobs",
        "environment": environment(
            model=name, dtype=str(model.weights.embed.dtype).removeprefix("torch."), device=str(runner.device), backend=model.ops.name,
            prompts=len(prompts), prompt_tokens=sum(map(len, prompts)), output_tokens=TOKENS, seed=seed,
            steps_replayed=runner.stats.graphs, steps_eager=runner.stats.eager,
        ),
        "checks": [asdict(agreement) for agreement in made.values()],
        "passed": all(a.max_difference == a.max_difference and a.places == len(prompts) * TOKENS for a in made.values()),
    }  # fmt: skip


def prompts_of(engine: EngineConfig, items: int, seed: int) -> list[list[int]]:
    if engine.shape is None:
        folder = resolve_model(engine.model, engine.revision)
        heldout = read_heldout(None, folder)
        if not heldout:
            raise ConfigError(f"no heldout.jsonl in {folder}: there are no prompts to compare with")
        return [d["prompt_ids"] for d in chosen(heldout, items)]
    rng, vocabulary = random.Random(seed), named_shape(engine.shape).vocab_size
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for length in RANDOM_LENGTHS for _ in range(COPIES)]


def plain(entry: Mapping[int, Logprob] | None, most: int) -> dict[int, float]:
    """The `most` likely tokens of a place, most likely first (an entry may hold the chosen token beyond them)."""
    ordered = sorted(((token, lp.logprob) for token, lp in (entry or {}).items()), key=lambda item: -item[1])
    return dict(ordered[:most])


def transformers_fp32(engine: EngineConfig, llm: LLM) -> Any:
    """The same weights in transformers, fp32, eager attention (exact sums, no TF32)."""
    model: Any = llm.engine.runner.model
    if engine.shape is None:
        return reference.load_reference(resolve_model(engine.model, engine.revision)).to(llm.engine.runner.device)
    return TransformersArm(model.config, model.weights, model.ops.unpack_gate_up, torch.float32, "eager").model


@torch.inference_mode()
def tail_logprobs(model: Any, text: Sequence[int], first: int) -> torch.Tensor:
    """Log probabilities [len(text) - first, V] of the tokens at first, first + 1, ..."""
    count = len(text) - first
    ids = torch.tensor([list(text[:-1])], device=model.device)
    return model(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0].float().log_softmax(-1)


# --------------------------------------------------------------------------------------------------------------- output
def render(report: dict[str, Any]) -> str:
    env = report["environment"]
    rows = [
        [c["name"], f"{c['top1'] / c['places']:.2%} of {c['places']:,}", f"{c['mean_difference']:.2e}", f"{c['max_difference']:.2e}",
         f"{c['compared']:,}"]
        for c in report["checks"]
    ]  # fmt: skip
    columns = ["", "the same most likely token", f"mean difference of the top {TOP}'s logprobs", "largest", "compared"]
    head = f"{env['model']}, {env['dtype']} on {env['device']} ({env['backend']}), {env['prompts']} prompts"
    verdict = "every number is finite" if report["passed"] else "NOT passed: a number is not finite or a place is missing"
    return f"{head}\n\n{markdown_table(columns, rows)}\n\n{verdict}"


def write_record(report: dict[str, Any], folder: Path) -> Path:
    """The record page and its rows under `folder`; returns the page's path."""
    env = report["environment"]
    summary = (
        f"`{env['model']}` in {env['dtype']}: {env['prompts']} prompts, {env['output_tokens']} greedy tokens each in one batch, "
        f"{env['steps_replayed']} steps replayed and {env['steps_eager']} eager. References read prompt and answer at once. "
        "In bf16 the scale of the embedding is rounded as the published model rounds it; the fp32 reference's is not."
    )
    record = Record(f"logprobs-{env['model']}-{machine(env)}", "Log probabilities in fast mode", summary, env, report["checks"], [
        "answers' usefulness; other lengths and batches", *(["trained weights"] if env["model"] != "tiny-e" else []),
    ])  # fmt: skip
    record.sections = [("Results", render(report))]
    return record.write(folder)
