"""The full table of docs/decisions.md: parity with transformers, accuracy, option order, and reliability, on held-out decisions.

python tools/decisions/table.py [--parity 200] [--each 400] [--reliability 1500] [--record docs/data/decisions.json]
    [--plot docs/images/reliability.svg]"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from held_out import KINDS, HeldOut, Transformers, held_out, with_options

from lastrow import LLM
from lastrow.decisions import Answer, fit_temperature
from lastrow.decisions.results import softmax

TRAINED = ("choice", "predicate", "score")


def answers(llm: LLM, items: Sequence[HeldOut], **options: Any) -> list[Answer]:
    return [llm.decide(item.state, [item.question], **options).answers[0] for item in items]


def parity(llm: LLM, count: int) -> dict[str, Any]:
    """Largest differences from transformers' fp32 probabilities and label mass over `count` decisions of all kinds."""
    reference = Transformers()
    worst, mass, argmax = dict.fromkeys(KINDS, 0.0), 0.0, 0
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        item = held_out(kind, 10_000 + i)
        answer = answers(llm, [item], label_mass=True)[0]
        logs = torch.tensor(reference.label_logs(item)).double()
        expected = torch.softmax(logs, 0).tolist()
        worst[kind] = max(worst[kind], *(abs(a - b) for a, b in zip(answer.probabilities, expected, strict=True)))
        mass = max(mass, abs((answer.label_mass or 0.0) - logs.exp().sum().item()))
        argmax += answer.best == int(logs.argmax())
    return {"decisions": count, "largest_difference": worst, "label_mass_difference": mass, "same_answer": argmax}


def accuracy(llm: LLM, each: int) -> dict[str, float]:
    made: dict[str, float] = {}
    for kind in KINDS:
        items = [held_out(kind, seed) for seed in range(each)]
        made[kind] = sum(a.best == item.right for a, item in zip(answers(llm, items), items, strict=True)) / each
    return made


def option_order(llm: LLM, each: int, orders: int = 4) -> dict[str, Any]:
    """Choices asked again with their options in other orders: how many answers change, and how far the right option's probability moves."""
    changed = decisions = flips = 0
    moves: list[float] = []
    for seed in range(each):
        item = held_out("choice", seed)
        options = [option for option in item.question["choices"]]
        right = options[item.right]
        r = random.Random(seed)
        asked = [options, options[::-1]] + [r.sample(options, len(options)) for _ in range(orders - 2)]
        variants = [with_options("choice", item.state, item.question["instructions"], order, right) for order in asked]
        made = answers(llm, variants)
        chosen = [order[answer.best] for order, answer in zip(asked, made, strict=True)]
        chances = [answer.probabilities[variant.right] for answer, variant in zip(made, variants, strict=True)]
        decisions += orders - 1
        flips += sum(c != chosen[0] for c in chosen[1:])
        changed += len(set(chosen)) > 1
        moves.append(max(chances) - min(chances))
    return {
        "states": each, "orders": orders, "asked_again": decisions, "answers_changed": flips, "states_with_a_change": changed,
        "mean_probability_range": sum(moves) / len(moves),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ reliability
def ece(confidences: Sequence[float], right: Sequence[bool], bins: int = 10) -> float:
    """Expected calibration error: |accuracy - confidence| by bins of equal width, weighted by their counts."""
    total = 0.0
    for low in range(bins):
        chosen = [i for i, c in enumerate(confidences) if min(int(c * bins), bins - 1) == low]
        if chosen:
            total += abs(sum(right[i] for i in chosen) - sum(confidences[i] for i in chosen))
    return total / len(confidences)


def thinned(item: HeldOut, seed: int) -> HeldOut:
    """The same decision about a state of which every second word, drawn at random, is left."""
    r = random.Random(seed)
    words = item.state.split(" ")
    kept = sorted(r.sample(range(len(words)), max(1, len(words) // 2)))
    options = item.question["choices"]
    return with_options("choice", " ".join(words[i] for i in kept), item.question["instructions"], options, options[item.right])


def reliability(llm: LLM, count: int) -> dict[str, Any]:
    """Labelled decisions as tiny-e was trained on them, and the same with half of the state's words lost, so that there is something to
    be unsure of; the temperature is fitted on the first half and everything is reported on the second."""
    made: dict[str, Any] = {}
    for kind in ("whole", "half of the words lost"):
        items = [held_out("choice", 50_000 + seed) for seed in range(count)]
        if kind != "whole":
            items = [thinned(item, seed) for seed, item in enumerate(items)]
        got = answers(llm, items)
        half = count // 2
        temperature = fit_temperature([a.log_scores for a in got[:half]], [item.right for item in items[:half]])
        arms: dict[str, Any] = {}
        corrected = answers(llm, items[half:], calibration={"prior": True})
        for name, t, source in (("as read", 1.0, got[half:]), ("temperature", temperature, got[half:]), ("prior", None, corrected)):
            tables = [a.probabilities if t is None else softmax([log / t for log in a.log_scores]) for a in source]
            right = [max(range(len(p)), key=p.__getitem__) == item.right for p, item in zip(tables, items[half:], strict=True)]
            top = [max(p) for p in tables]
            loss = -sum(math.log(max(p[item.right], 1e-12)) for p, item in zip(tables, items[half:], strict=True)) / len(tables)
            arms[name] = {"accuracy": sum(right) / len(right), "ece": ece(top, right), "nll": loss, "confidence": top, "right": right}
        made[kind] = {"decisions": len(items) - half, "temperature": temperature, "arms": arms}
    return made


def plot(document: dict[str, Any], path: Path, bins: int = 10) -> None:
    from matplotlib.figure import Figure

    kinds = list(document)
    figure = Figure(figsize=(4.6 * len(kinds), 4.2), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        axes.plot([0, 1], [0, 1], color="#b0b0b0", linewidth=1, linestyle="--")
        for (name, arm), color in zip(document[kind]["arms"].items(), ("#4c78a8", "#e4813a", "#54a24b"), strict=True):
            xs, ys, sizes = [], [], []
            for low in range(bins):
                chosen = [i for i, c in enumerate(arm["confidence"]) if min(int(c * bins), bins - 1) == low]
                if len(chosen) >= 5:
                    xs.append(sum(arm["confidence"][i] for i in chosen) / len(chosen))
                    ys.append(sum(arm["right"][i] for i in chosen) / len(chosen))
                    sizes.append(8 + 250 * len(chosen) / len(arm["right"]))
            axes.plot(xs, ys, color=color, linewidth=1, alpha=0.7)
            axes.scatter(xs, ys, s=sizes, color=color, alpha=0.8, label=f"{name}: ECE {arm['ece']:.3f}, right {arm['accuracy']:.1%}")
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="probability of the answer", ylabel="share that is right")
        axes.set_title(f"states {kind}: {document[kind]['decisions']} decisions", fontsize=10, loc="left")
        axes.legend(fontsize=8, loc="upper left", frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("parity", 200), ("each", 400), ("reliability", 1500), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm = LLM("tiny-e", max_model_len=1024)
    document = {
        "parity": parity(llm, args.parity),
        "accuracy": {"each": args.each, **accuracy(llm, args.each)},
        "option_order": option_order(llm, args.each),
        "reliability": reliability(llm, args.reliability),
    }
    if args.plot:
        plot(document["reliability"], args.plot)
    for kind in document["reliability"].values():
        for arm in kind["arms"].values():
            del arm["confidence"], arm["right"]
    print(json.dumps(document, indent=1))
    if args.record:
        args.record.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
