"""Labelled decisions of the kinds tiny-e was trained on, from seeds that training never drew, and what transformers says about them.

The prompts here are written by hand, not by lastrow's template: they are the other side of a comparison."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools" / "tiny_e"))

import tiny_data  # noqa: E402

TINY_E = ROOT / "src" / "lastrow" / "assets" / "tiny-e"
FIRST_SEED = 77_000_000  # training and its evaluation stay under 10 million
KINDS = ("choice", "predicate", "score", "words")


@dataclass(frozen=True)
class HeldOut:
    """One decision. question: as lastrow takes it. right: index of the right option. content: the user's turn. labels: per option."""

    kind: str
    state: str
    question: dict[str, Any]
    right: int
    content: str
    labels: list[str]


def held_out(kind: str, seed: int) -> HeldOut:
    """kind: choice (letters), predicate (yes, no), score (ordered letters) or words (options of several tokens, by their texts)."""
    r = random.Random(FIRST_SEED + seed)
    if kind == "predicate":
        return _predicate(r)
    name, label, text = tiny_data.message(r, "urgency" if kind == "score" else None)
    state = tiny_data.wrap_msg(r, text)
    options = list(tiny_data.SETS[name][1]) if kind == "score" else tiny_data.opts(r, name, label)
    asked = tiny_data.pick(r, tiny_data.SETS[name][0].split(";"))
    return with_options(kind, state, asked, options, label)


def with_options(kind: str, state: str, asked: str, options: list[str], right: str) -> HeldOut:
    letters = [chr(65 + i) for i in range(len(options))]
    if kind == "words":
        block, tail, labels = "\n".join(options), "Answer with one of the options.", list(options)
    else:
        block = "\n".join(f"{letter}) {option}" for letter, option in zip(letters, options, strict=True))
        tail, labels = "Answer with the letter of the right option.", letters
    question: dict[str, Any] = {"type": "score" if kind == "score" else "choice", "instructions": asked}
    question["levels" if kind == "score" else "choices"] = options
    if kind == "words":
        question["labels"] = "words"
    return HeldOut(kind, state, question, options.index(right), f"{state}\n\nQuestion: {asked}\n{block}\n{tail}", labels)


def _predicate(r: random.Random) -> HeldOut:
    while True:
        name, label, text = tiny_data.message(r)
        state = tiny_data.wrap_msg(r, text)
        known = [(asked, truth) for asked, judge in tiny_data.PRED if (truth := judge(name, label, text)) is not None]
        wanted = r.random() < 0.5
        asked, truth = tiny_data.pick(r, [p for p in known if p[1] == wanted] or known)
        question = {"type": "predicate", "instructions": asked}
        return HeldOut("predicate", state, question, 0 if truth else 1, f"{state}\n\n{asked} Answer yes or no.", ["yes", "no"])


class Transformers:
    """tiny-e in transformers, fp32: one sequence at a time, no cache, every logit."""

    def __init__(self, attention: str = "eager") -> None:
        from transformers import AutoTokenizer

        from lastrow.harness.reference import load_reference

        self.model = load_reference(TINY_E, torch.float32, attention)
        self.tokenizer = AutoTokenizer.from_pretrained(TINY_E)

    @torch.inference_mode()
    def log_softmax(self, ids: list[int]) -> torch.Tensor:
        """[T, V] natural logs."""
        return torch.log_softmax(self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0], -1)

    def label_logs(self, item: HeldOut, instructions: str | None = None) -> list[float]:
        """log probability of each label behind the prompt, over the whole vocabulary; labels of several tokens along the whole text."""
        messages = [{"role": "system", "content": instructions}] if instructions else []
        messages.append({"role": "user", "content": item.content})
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = self.tokenizer(text, add_special_tokens=False).input_ids
        logs: list[float] = []
        for label in item.labels:
            whole = self.tokenizer(text + label, add_special_tokens=False).input_ids
            assert whole[: len(prompt)] == prompt
            table = self.log_softmax(whole)
            logs.append(sum(table[at - 1, whole[at]].item() for at in range(len(prompt), len(whole))))
        return logs

    def next_token_logs(self, item: HeldOut) -> torch.Tensor:
        messages = [{"role": "user", "content": item.content}]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.log_softmax(self.tokenizer(text, add_special_tokens=False).input_ids)[-1]
