"""`lastrow parity MODEL`: is what the engine computes what the model says, on every path?

Three kinds of check. Against transformers in fp32: the checkpoint's own logits and random models of seven shapes. Against itself:
wanted rows alone, chunks, batches and prefixes give what one whole prompt gives. Against recorded outputs: the engine's greedy
tokens for the held-out prompts beside the checkpoint. Logits are compared as well as tokens: a model can be wrong by a window's
edge and still say the same words (tests/models/test_wrong_models.py)."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lastrow.config import EngineConfig
from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.build import choose_device, choose_dtype, load_model
from lastrow.engine.llm import LLM
from lastrow.harness import reference
from lastrow.harness.direct import Chunk, DirectRunner
from lastrow.models.config import ConfigError, from_file
from lastrow.models.gemma4 import Gemma4Model
from lastrow.progress import track
from lastrow.weights.resolve import resolve_model

BLOCK = 16
NOISE = {  # largest logit difference that rounding explains, by dtype, and why
    "float32": (1e-3, "fp32 sums in another order: measured up to 4e-4; the gentlest of 19 wrong models moves tiny-e's logits by 0.05"),
    "bfloat16": (2.0, "8-bit mantissas: transformers' own eager and sdpa differ by up to 1.4 in bf16"),
    "float16": (0.5, "11-bit mantissas: an eighth of bf16's noise, doubled"),
}
EXACT = (0.0, "batch_invariant: the same bits in any company")
Prompt = list[int]


@dataclass(frozen=True)
class ParityOptions:
    """heldout: JSONL of prompts with reference outputs; default: heldout.jsonl beside the checkpoint, if there. items: held-out
    prompts a task whose logits are compared (all of them are generated). skip_transformers: leave those checks out."""

    engine: EngineConfig
    heldout: Path | None = None
    items: int = 2
    skip_transformers: bool = False
    seed: int = 0


@dataclass
class Check:
    """One row of the table. Tokens are judged where the reference's own top-1 margin exceeds twice the tolerance: below that the
    tolerated difference alone may swap two tokens. A check of tokens alone has no logit difference."""

    name: str
    cases: int = 0
    rows: int = 0
    max_difference: float | None = None
    mean_difference: float | None = None
    tolerance: float | None = None
    reason: str = ""
    tokens_equal: int = 0
    judged: int = 0
    judged_equal: int = 0
    detail: str = ""

    @property
    def passed(self) -> bool:
        close = self.max_difference is None or self.max_difference <= (self.tolerance or 0.0)  # NaN is not close
        return self.cases > 0 and close and self.judged_equal == self.judged

    def compare(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        """Add one case of logits [R, V] each."""
        got, expected = got.float().cpu(), expected.float().cpu()
        difference = (got - expected).abs()
        worst = float(difference.max())  # the max of a NaN is NaN, and stays so
        top = expected.topk(2, -1).values
        equal = got.argmax(-1) == expected.argmax(-1)
        judged = top[:, 0] - top[:, 1] > 2 * (self.tolerance or 0.0)
        before, rows = self.mean_difference or 0.0, len(expected)
        self.mean_difference = (before * self.rows + float(difference.mean()) * rows) / (self.rows + rows)
        self.max_difference = worst if self.max_difference is None or math.isnan(worst) else max(self.max_difference, worst)
        self.cases, self.rows = self.cases + 1, self.rows + rows
        self.tokens_equal += int(equal.sum())
        self.judged, self.judged_equal = self.judged + int(judged.sum()), self.judged_equal + int((equal & judged).sum())

    def compare_tokens(self, got: Sequence[int], expected: Sequence[int], label: str, judge: bool = True) -> None:
        """Add one case of generated tokens; the first that differs is named. judge: whether they must be equal."""
        same = sum(a == b for a, b in zip(got, expected, strict=False))
        self.cases, self.rows = self.cases + 1, self.rows + len(expected)
        self.tokens_equal += same
        if not judge:
            return
        self.judged, self.judged_equal = self.judged + 1, self.judged_equal + (list(got) == list(expected))
        if list(got) != list(expected) and not self.detail:
            at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
            self.detail = f"{label} differs first at output token {at}"


class Parity:
    """The checks of one model. Every `check_*` returns one or more finished `Check`s."""

    def __init__(self, options: ParityOptions) -> None:
        self.options = options
        engine = options.engine
        if engine.shape:
            raise ConfigError(f"shape {engine.shape!r} has dummy weights: parity needs a checkpoint, a folder, a hub id or tiny-e")
        if options.items < 1:
            raise ConfigError(f"items is {options.items}: at least 1 prompt a task is needed")
        self.folder = resolve_model(engine.model, engine.revision)
        self.config = from_file(self.folder)
        self.device = choose_device(engine.device)
        self.dtype = choose_dtype(engine.dtype, self.device)
        self.heldout = read_heldout(options.heldout, self.folder)
        for d in self.heldout:
            if not all(0 <= i < self.config.vocab_size for i in (*d["prompt_ids"], *d["output_ids"])):
                raise ConfigError(f"held-out item {d['task']} {d['id']}: ids from 0 to {self.config.vocab_size - 1} are needed")
        rng = random.Random(options.seed)
        self.random_prompts = [self._random_prompt(rng, n) for n in self._lengths()]
        self.longest = max(map(len, (*self.random_prompts, *(d["prompt_ids"] + d["output_ids"] for d in self.heldout))))
        self.model = load_model(engine, self.config, self.folder, getattr(torch, self.dtype), self.device, self.longest)

    def _lengths(self) -> list[int]:
        """Around the boundaries where paths change: one token, one block, one window, and well past a window."""
        w = self.config.sliding_window
        return sorted({1, 5, BLOCK, BLOCK + 1, w, w + 1, 2 * w + 3})

    def _random_prompt(self, rng: random.Random, length: int) -> Prompt:
        low = min(256, self.config.vocab_size // 2)  # control tokens and bytes lie below
        return [self.config.bos_token_id, *(rng.randrange(low, self.config.vocab_size) for _ in range(length - 1))]

    def runner(self, sequences: int = 1, model: Gemma4Model | None = None, seed: int = 0) -> DirectRunner:
        kv = self.options.engine.kv_cache_dtype
        return DirectRunner(model or self.model, self.longest, sequences, self.options.engine.block_size or BLOCK, kv, seed)

    def new_check(self, name: str, against_itself: bool = False) -> Check:
        exact = against_itself and self.options.engine.batch_invariant
        tolerance, reason = EXACT if exact else NOISE[self.dtype]
        return Check(name, tolerance=tolerance, reason=reason)

    def chosen(self) -> list[dict[str, Any]]:
        """The held-out prompts whose logits are compared: the first `items` of each task."""
        taken: dict[str, int] = {}
        return [d for d in self.heldout if (n := taken.get(d["task"], 0)) < self.options.items and not taken.update({d["task"]: n + 1})]

    # ------------------------------------------------------------------------------------------ against transformers
    def check_transformers(self) -> Iterable[Check]:
        """The checkpoint: every row of random prompts, the output rows of held-out ones (teacher-forced)."""
        theirs, ours = reference.load_reference(self.folder).to(self.device), self.runner()
        check = self.new_check("transformers fp32, this checkpoint")
        for ids in track(self.random_prompts, check.name):
            check.compare(ours.all_logits(ids), reference.reference_logits(theirs, ids))
        for d in track(self.chosen(), check.name):
            ids = d["prompt_ids"] + d["output_ids"]
            rows = range(len(d["prompt_ids"]) - 1, len(ids) - 1)
            check.compare(ours.all_logits(ids, rows), reference.reference_logits(theirs, ids)[rows.start : rows.stop])
        yield check

    def check_random_shapes(self) -> Iterable[Check]:
        """Random fp32 models on the CPU: every feature of the family, sizes that divide nothing, prompts past several windows."""
        tolerance, reason = NOISE["float32"]
        for name, shape in reference.RANDOM_SHAPES.items():
            check = Check(f"transformers fp32, random: {name}", tolerance=tolerance, reason=reason)
            theirs, config = reference.random_reference(shape, self.options.seed)
            ours = DirectRunner(reference.model_of(theirs, config), 160, block_size=4)
            rng = random.Random(name)
            for length in (1, config.sliding_window, config.sliding_window + 1, 53, 150):
                ids = [rng.randrange(3, config.vocab_size) for _ in range(length)]
                check.compare(ours.all_logits(ids), reference.reference_logits(theirs, ids))
            yield check

    # ------------------------------------------------------------------------------------------------ against itself
    def prompts(self) -> list[Prompt]:
        return self.random_prompts + [d["prompt_ids"] + d["output_ids"] for d in self.chosen()]

    def check_rows(self) -> Iterable[Check]:
        check, runner = self.new_check("rows=last against rows=all", against_itself=True), self.runner()
        subsets = self.new_check("any rows against rows=all", against_itself=True)
        rng = random.Random(self.options.seed)
        for ids in track(self.prompts(), check.name):
            every = runner.all_logits(ids)
            check.compare(runner.all_logits(ids, [len(ids) - 1]), every[-1:])
            some = sorted(rng.sample(range(len(ids)), rng.randint(1, len(ids))))
            subsets.compare(runner.all_logits(ids, some), every[some])
        yield from (check, subsets)

    def check_chunks(self) -> Iterable[Check]:
        check, runner = self.new_check("chunked against whole", against_itself=True), self.runner()
        rng = random.Random(self.options.seed)
        for ids in track(self.prompts(), check.name):
            whole, start = self.runner(seed=1).all_logits(ids, [len(ids) - 1]), 0
            while start < len(ids):
                end = min(len(ids), start + rng.randint(1, max(1, len(ids) // 2)))
                last = [end - start - 1] if end == len(ids) else []
                hidden, start = runner.forward([Chunk(ids[start:end], start, last)]), end
            assert hidden is not None
            check.compare(self.model.logits(hidden), whole)
        yield check

    def check_batch(self) -> Iterable[Check]:
        check, prompts = self.new_check("alone against batched", against_itself=True), self.prompts()
        alone = [self.runner().all_logits(ids, [len(ids) - 1]) for ids in track(prompts, check.name)]
        size = 8
        for first in range(0, len(prompts), size):
            part = prompts[first : first + size]
            runner = self.runner(len(part), seed=2)
            got = runner.logits([Chunk(ids, 0, [len(ids) - 1], i) for i, ids in enumerate(part)])
            for row, expected in zip(got, alone[first:], strict=False):
                check.compare(row[None], expected)
        yield check

    def check_prefixes(self) -> Iterable[Check]:
        """A prefix computed earlier (no row wanted), then the rest: prefixes of exactly one token, one block and one window."""
        for label, length in (("1 token", 1), ("exactly one block", BLOCK), ("exactly one window", self.config.sliding_window)):
            check, runner = self.new_check(f"prefix of {label}", against_itself=True), self.runner()
            for ids in (ids for ids in self.prompts() if len(ids) > length):
                whole = self.runner(seed=1).all_logits(ids)
                runner.forward([Chunk(ids[:length])])
                rest = runner.logits([Chunk(ids[length:], length, range(len(ids) - length))])
                check.compare(rest, whole[length:])
            yield check

    # ------------------------------------------------------------------------------------------- recorded outputs
    def check_greedy(self) -> Iterable[Check]:
        """The engine's greedy tokens, all prompts at once, and again in small chunks and batches with prefix hits."""
        small = {"max_num_batched_tokens": 96, "max_num_seqs": 5}
        for name, items, changes in (
            ("held-out greedy tokens", self.heldout, {}),
            ("held-out greedy tokens, 96-token steps, 5 requests", self.chosen(), small),
        ):
            llm = LLM(**{**_options(replace(self.options.engine, model=str(self.folder))), **changes})
            check = Check(name, reason="recorded by transformers in fp32: every token of every prompt")
            if self.dtype != "float32":
                check.reason = "recorded by transformers in fp32: prompts whose every margin exceeds twice the dtype's tolerance"
            params = [SamplingParams(temperature=0.0, max_tokens=len(d["output_ids"])) for d in items]
            for d, out in zip(items, llm.generate([{"prompt_token_ids": d["prompt_ids"]} for d in items], params), strict=True):
                judge = self.dtype == "float32" or min(d["margins"], default=0.0) > 2 * NOISE[self.dtype][0]
                check.compare_tokens(out.outputs[0].token_ids, d["output_ids"], f"{d['task']} {d['id']}", judge)
            llm.shutdown()
            yield check


def _options(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def read_heldout(file: Path | None, folder: Path) -> list[dict[str, Any]]:
    """Items with `task`, `id`, `prompt_ids`, `output_ids`, `margins` (may be empty). Without a file named, those beside the
    checkpoint, or none."""
    path = file or folder / "heldout.jsonl"
    if file is None and not path.exists():
        return []
    items = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            item = json.loads(line)
            ids = [*item["prompt_ids"], *item["output_ids"]]
            if not (item["prompt_ids"] and item["output_ids"] and all(isinstance(i, int) for i in ids)):
                raise ValueError("empty or no integers")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: no held-out item with prompt_ids and output_ids ({error!r})") from None
        known = {"task": "", "id": number, "margins": []} | item
        items.append({key: known[key] for key in ("task", "id", "prompt_ids", "output_ids", "margins")})
    if not items:
        raise ConfigError(f"{path}: holds no items")
    return items


def run(options: ParityOptions) -> dict[str, Any]:
    """All checks. Returns the report: stable keys for --json; `passed` is false when a check failed or, transformers missing and
    not skipped on purpose, could not run. Raises ConfigError, WeightsError or OSError for bad input."""
    parity = Parity(options)
    version = reference.transformers_version()
    checks: list[Check] = []
    not_run: list[dict[str, Any]] = []
    for names, method, needs in _plan(parity):
        if needs == "transformers" and options.skip_transformers:
            not_run.append({"name": names, "reason": "left out by --skip-transformers", "counts_as_failure": False})
        elif needs == "transformers" and version is None:
            reason = "transformers is not installed: pip install 'transformers==5.24.0', or leave it out with --skip-transformers"
            not_run.append({"name": names, "reason": reason, "counts_as_failure": True})
        elif needs == "heldout" and not parity.heldout:
            reason = f"no heldout.jsonl in {parity.folder} and no --heldout FILE"
            not_run.append({"name": names, "reason": reason, "counts_as_failure": False})
        else:
            checks += method()
    return {
        "model": options.engine.model,
        "dtype": parity.dtype,
        "device": str(parity.device),
        "backend": parity.model.ops.name,
        "transformers": version,
        "checks": [asdict(check) | {"passed": check.passed} for check in checks],
        "not_run": not_run,
        "passed": all(check.passed for check in checks) and not any(item["counts_as_failure"] for item in not_run),
    }


def _plan(parity: Parity) -> list[tuple[str, Callable[[], Iterable[Check]], str]]:
    return [
        ("transformers fp32, this checkpoint", parity.check_transformers, "transformers"),
        ("transformers fp32, random shapes", parity.check_random_shapes, "transformers"),
        ("rows", parity.check_rows, ""),
        ("chunks", parity.check_chunks, ""),
        ("batches", parity.check_batch, ""),
        ("prefixes", parity.check_prefixes, ""),
        ("held-out greedy tokens", parity.check_greedy, "heldout"),
    ]


def render(report: dict[str, Any], width: int | None = None) -> str:
    """The table, the reasons of the tolerances, what was not run, and the verdict."""
    from io import StringIO

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("check", "cases", "max |dlogit|", "tolerance", "tokens equal", "result"):
        table.add_column(column, justify="left" if column in ("check", "result") else "right", no_wrap=True)
    for c in report["checks"]:
        difference = "-" if c["max_difference"] is None else f"{c['max_difference']:.1e}"
        tolerance = "-" if c["tolerance"] is None else f"{c['tolerance']:.0e}"
        verdict = "pass" if c["passed"] else f"FAIL {c['detail']}".rstrip()
        table.add_row(c["name"], str(c["cases"]), difference, tolerance, f"{c['tokens_equal']:,} of {c['rows']:,}", verdict)
    for item in report["not_run"]:
        table.add_row(item["name"], "-", "-", "-", "-", f"not run: {item['reason']}")
    text = StringIO()
    Console(file=text, width=width or 200, no_color=True).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    reasons = dict.fromkeys((c["tolerance"], c["reason"]) for c in report["checks"] if c["reason"])
    lines += ["", *(f"tolerance {t:.0e}: {why}" if t is not None else f"tokens: {why}" for t, why in reasons)]
    state = "every check passed" if report["passed"] else "NOT passed"
    lines.append(f"{report['model']}, {report['dtype']} on {report['device']} ({report['backend']}): {state}")
    return "\n".join(lines)
