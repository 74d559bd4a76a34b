"""Questions/s: one pass for all questions of a state, against one request per question without prefix reuse, and transformers.

    python tools/decisions/bench.py                                   tiny-e on a CPU: 20 yes/no questions over states of 1,000 tokens
    python tools/decisions/bench.py --shape e2b --states 256 ...      any shape with dummy weights (token ids in place of texts), on a GPU

Arms, interleaved (A B B A): one pass; one pass again (the null arm); alone (our engine, one request per question, no prefix reuse);
prefill (the states alone: the prefill throughput by tokens); items (one question per item of
--item tokens); transformers (one forward per question, one row of logits). Writes a record with --record docs/benchmarks."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lastrow import LLM
from lastrow.decisions.driver import JobDriver
from lastrow.decisions.labels import LabelTrie, Leaf
from lastrow.decisions.plan import LABELS, Job, Unit, label_scores, label_units
from lastrow.decisions.results import softmax
from lastrow.harness.records import Ratio, Record, environment, interleave, markdown_table, values_of

sys.path.insert(0, str(Path(__file__).parent))
ARMS = ("one pass", "one pass again", "alone", "prefill", "items", "transformers")


class Workload:
    """states x questions as token ids: a state's prompts share their first `state` tokens and end in `tail` of their own."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        r = random.Random(args.seed)
        self.llm, self.questions, self.item = llm, args.questions, args.item
        vocab = llm.engine.vocab_size

        def ids(count: int) -> list[int]:
            return [r.randrange(300, vocab) for _ in range(count)]

        tails = [ids(args.tail) for _ in range(args.questions)]
        shared = [ids(args.state) for _ in range(args.states)]
        self.prompts = [[[*state, *tail] for tail in tails] for state in shared]
        self.items = [ids(args.item) for _ in range(args.items or args.states * args.questions // 4)]
        self.state = args.state
        labels = r.sample(range(300, vocab), 2)
        self.trie = LabelTrie(tuple(Leaf(i, (token,)) for i, token in enumerate(labels)), 2)

    @property
    def num_questions(self) -> int:
        return len(self.prompts) * self.questions

    def job(self, prompts: Sequence[list[int]], shared: int) -> Job[list[list[float]]]:
        units: list[Unit] = [Unit(prompts[0][:shared], LABELS, (), ())] if shared else []
        parent = 0 if shared else None
        places = [label_units(units, root, self.trie, False, parent, shared, None) for root in prompts]
        reads = yield units
        return [softmax(label_scores(self.trie, len(p), at, units, reads).log_scores) for p, at in zip(prompts, places, strict=True)]

    def _run(self, jobs: Iterator[Job[list[list[float]]]]) -> list[list[float]]:
        made: list[list[float]] = []
        for result in JobDriver(self.llm.engine).run(jobs):
            if isinstance(result, ValueError):
                raise result
            made += result
        return made

    def one_pass(self) -> list[list[float]]:
        return self._run(self.job(prompts, self.state) for prompts in self.prompts)

    def alone(self) -> list[list[float]]:
        return self._run(self.job([prompt], 0) for prompts in self.prompts for prompt in prompts)

    def one_question_per_item(self) -> list[list[float]]:
        return self._run(self.job([item], 0) for item in self.items)

    def prefill(self) -> list[list[float]]:
        """The states alone, one row each: the prefill throughput, in tokens."""
        return self._run(self.job([prompts[0][: self.state]], 0) for prompts in self.prompts)


class HF:
    def __init__(self, workload: Workload) -> None:
        from held_out import TINY_E

        from lastrow.harness.reference import load_reference

        self.workload = workload
        self.model = load_reference(TINY_E, torch.float32, "sdpa")

    @torch.inference_mode()
    def run(self) -> list[list[float]]:
        labels = [leaf.tokens[0] for leaf in self.workload.trie.leaves]
        made: list[list[float]] = []
        for prompts in self.workload.prompts:
            for prompt in prompts:
                logits = self.model(input_ids=torch.tensor([prompt]), use_cache=False, logits_to_keep=1).logits[0, -1].float()
                made.append(torch.softmax(logits[labels], -1).tolist())
        return made


def report(w: Workload, rows: Sequence[dict[str, Any]], conditions: dict[str, Any]) -> dict[str, Any]:
    seconds = {name: values_of(rows, name) for name in dict.fromkeys(r["arm"] for r in rows)}
    work = {name: {"items": len(w.items), "prefill": 0}.get(name, w.num_questions) for name in seconds}
    states, tails = len(w.prompts) * w.state, w.num_questions * (len(w.prompts[0][0]) - w.state)
    full = w.num_questions * len(w.prompts[0][0])
    tokens = {"items": len(w.items) * w.item, "alone": full, "transformers": full, "prefill": states}
    table = []
    for name, times in seconds.items():
        middle = sorted(times)[len(times) // 2]
        table.append({
            "arm": name, "seconds": middle, "questions_per_s": work[name] / middle, "states_per_s": len(w.prompts) / middle,
            "tokens": tokens.get(name, states + tails), "tokens_per_s": tokens.get(name, states + tails) / middle,
        })  # fmt: skip
    base = seconds["one pass"]
    ratios = {
        f"{name} / one pass": Ratio.of(times, base) for name, times in seconds.items() if name not in ("one pass", "items", "prefill")
    }
    by_name = {row["arm"]: row for row in table}
    made = {"conditions": conditions, "table": table, "ratios": {name: str(r) for name, r in ratios.items()}, "rows": list(rows)}
    if args_are_issue_5s(conditions):
        made["targets"] = targets(made, by_name)
    if "prefill" in by_name:
        made["share_of_prefill_tokens_per_s"] = by_name["one pass"]["tokens_per_s"] / by_name["prefill"]["tokens_per_s"]
    return made


def args_are_issue_5s(conditions: dict[str, Any]) -> bool:
    """The sizes that issue 5 names for the H200."""
    return (conditions["shape"], conditions["questions"], conditions["state"], conditions["item"]) == ("e2b", 20, 1000, 300)


def targets(made: dict[str, Any], by_name: dict[str, dict[str, Any]]) -> list[str]:
    """What issue 5 asks for, beside what was measured."""

    def line(what: str, value: float, asked: float, form: str) -> str:
        return f"{what}: {value:{form}}, asked for at least {asked:{form}}: {'reached' if value >= asked else 'missed'}"

    lines = []
    one = by_name["one pass"]
    if "alone" in by_name:
        lines.append(
            line("questions/s over one request per question", one["questions_per_s"] / by_name["alone"]["questions_per_s"], 5, ".2f")
        )
    if "prefill" in by_name:
        lines.append(line("share of the prefill's tokens/s", one["tokens_per_s"] / by_name["prefill"]["tokens_per_s"], 0.85, ".1%"))
    if "items" in by_name:
        lines.append(line("items/s of 300 tokens and one question (aim 1,600)", by_name["items"]["questions_per_s"], 1200, ",.0f"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("states", 4),
        ("questions", 20),
        ("state", 1000),
        ("tail", 24),
        ("item", 300),
        ("items", 0),
        ("rounds", 6),
        ("seed", 0),
        ("threads", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shape")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    begin = time.perf_counter()
    torch.set_num_threads(args.threads)
    source = {"shape": args.shape, "load_format": "dummy"} if args.shape else {"model": "tiny-e"}
    llm = LLM(
        **source, enable_prefix_caching=False, max_model_len=args.state + args.questions * args.tail + 8, max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )  # fmt: skip
    ready = time.perf_counter()
    w = Workload(llm, args)
    arms: dict[str, Callable[[], Any]] = {
        "one pass": w.one_pass, "one pass again": w.one_pass, "alone": w.alone, "prefill": w.prefill, "items": w.one_question_per_item,
    }  # fmt: skip
    if "transformers" in args.arms and not args.shape:
        arms["transformers"] = HF(w).run
    arms = {name: run for name, run in arms.items() if name in args.arms.split(",") or name == "one pass"}
    first = {name: run() for name, run in arms.items()}  # pays for allocations and graphs
    same = {name: first[name] for name in ("one pass", "alone", "transformers") if name in arms}
    worst = {
        name: max(abs(a - b) for x, y in zip(same["one pass"], made, strict=True) for a, b in zip(x, y, strict=True))
        for name, made in same.items()
    }
    conditions = environment(**{k: v for k, v in vars(args).items() if k != "record"}, largest_difference=worst)
    started = time.perf_counter()
    document = report(w, interleave(arms, args.rounds, warm_ups=0), conditions)
    conditions |= {"start_seconds": round(ready - begin, 1), "measuring_seconds": round(time.perf_counter() - started, 1)}
    print(json.dumps({key: value for key, value in document.items() if key != "rows"}, indent=1, default=str))
    if args.record:
        write_record(document, args)


def write_record(document: dict[str, Any], args: argparse.Namespace) -> None:
    columns = ("arm", "seconds", "questions_per_s", "states_per_s", "tokens", "tokens_per_s")
    cells = [[f"{row[c]:,.2f}" if isinstance(row[c], float) else row[c] for c in columns] for row in document["table"]]
    ratios = markdown_table(("ratio", "median (quartiles)"), list(document["ratios"].items()))
    where = (args.shape or "tiny-e") + ("-h200" if "H200" in document["conditions"].get("gpu", "") else "")
    share = document.get("share_of_prefill_tokens_per_s")
    record = Record(
        topic=f"decisions-{where}",
        title=f"Decisions: {args.questions} questions over states of {args.state} tokens, {where}",
        summary="One pass for all questions of a state against one request per question without prefix reuse."
        + ("" if share is None else f" One pass reads {share:.0%} of the tokens/s of plain prefills."),
        environment=document["conditions"],
        rows=document["rows"],
        not_measured=[
            "tokenizing and the server: prompts are token ids",
            "label mass, several tokens per label",
            "other sizes",
            *(["answers: dummy weights do the work of trained ones and know nothing"] if args.shape else []),
        ],
        sections=[
            *([("Targets", "\n".join(f"* {line}." for line in document["targets"]))] if "targets" in document else []),
            ("Rates (medians)", markdown_table(columns, cells)),
            ("Times, round by round", ratios),
        ],
    )
    print(record.write(args.record))


if __name__ == "__main__":
    main()
