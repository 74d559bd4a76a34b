"""Answers: from label scores to probabilities, with the calibration that was asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lastrow.decisions.labels import LabelScores, log_sum
from lastrow.decisions.questions import DecisionError, Question, Value

CONTENT_FREE = ("N/A",)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Corrections of the probabilities; by default none.

    prior: states without content. Each question is asked about them once, and every answer's scores are divided by what they get there
    (contextual calibration, Zhao et al. 2021, arXiv 2102.09690). temperature: the log scores are divided by it, one for all questions or
    one by name. abstain_below: an answer whose best option is less probable than this abstains. Raises DecisionError."""

    prior: tuple[str, ...] = ()
    temperature: float | Mapping[str, float] = 1.0
    abstain_below: float = 0.0

    def __post_init__(self) -> None:
        values = self.temperature.values() if isinstance(self.temperature, Mapping) else [self.temperature]
        if not all(isinstance(t, (int, float)) and not isinstance(t, bool) and 0.0 < t < math.inf for t in values):
            raise DecisionError(f"calibration.temperature is {self.temperature!r}: a positive number, or one by question name, is needed")
        if not isinstance(self.abstain_below, (int, float)) or isinstance(self.abstain_below, bool) or not 0.0 <= self.abstain_below <= 1.0:
            raise DecisionError(f"calibration.abstain_below is {self.abstain_below!r}: a probability is needed")
        if not isinstance(self.prior, (list, tuple)) or not all(isinstance(text, str) and text.strip() for text in self.prior):
            raise DecisionError(
                f"calibration.prior is {self.prior!r}: true, or a text without content (such as N/A), or a list of them, is needed"
            )

    @classmethod
    def of(cls, value: Calibration | Mapping[str, Any] | None) -> Calibration:
        """From a mapping with the fields' names; prior may be true for the built-in text."""
        if value is None or isinstance(value, Calibration):
            return value or cls()
        if not isinstance(value, Mapping):
            raise DecisionError(f"calibration is {value!r}: a mapping with prior, temperature or abstain_below is needed")
        if unknown := [key for key in value if key not in ("prior", "temperature", "abstain_below")]:
            raise DecisionError(f"calibration.{unknown[0]} is not known: prior, temperature or abstain_below is needed")
        prior = value.get("prior")
        prior = CONTENT_FREE if prior is True else () if prior is None or prior is False else (prior,) if isinstance(prior, str) else prior
        return cls(prior, value.get("temperature", 1.0), value.get("abstain_below", 0.0))

    def check_names(self, questions: Sequence[Question]) -> None:
        """Raises DecisionError for a temperature of a question that is not there."""
        known = [question.name for question in questions if question.name is not None]
        names = self.temperature if isinstance(self.temperature, Mapping) else ()
        if unknown := [name for name in names if name not in known]:
            raise DecisionError(
                f"calibration.temperature names {unknown[0]!r}, and no question has this name: {', '.join(known) or 'none'}"
            )

    def temperature_of(self, question: Question) -> float:
        return self.temperature.get(question.name or "", 1.0) if isinstance(self.temperature, Mapping) else self.temperature


@dataclass(slots=True)
class Answer:
    """One question's answer.

    values, texts: of the options, in the question's order. probabilities: of the options, together 1. log_scores: before calibration,
    natural logs; over the whole vocabulary where label_mass is known. label_mass: probability of all labels together over the whole
    vocabulary. argmax_is_label: whether the most probable next token begins a label. Both are None unless asked for."""

    type: str
    name: str | None
    values: list[Value]
    texts: list[str]
    probabilities: list[float]
    log_scores: list[float]
    label_mass: float | None = None
    argmax_is_label: bool | None = None
    abstained: bool = False

    @property
    def best(self) -> int:
        """Index of the most probable option; the first of equals."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def choice(self) -> Value | None:
        """The most probable option's value (a score's: its level); None where the answer abstains."""
        return None if self.abstained else self.values[self.best]

    @property
    def confidence(self) -> float:
        """Probability of the most probable option."""
        return self.probabilities[self.best]

    @property
    def probability(self) -> float:
        """A predicate's probability of being true."""
        return self.probabilities[0]

    @property
    def score(self) -> float:
        """A score's expected level, counted from 0."""
        return math.fsum(i * p for i, p in enumerate(self.probabilities))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Answer:
        """From `to_dict`; log scores are not kept there."""
        entries = data.get("probabilities") or [
            {"value": True, "probability": data["probability"]}, {"value": False, "probability": 1.0 - data["probability"]},
        ]  # fmt: skip
        values = [entry["value"] for entry in entries]
        texts = ["yes", "no"] if data["type"] == "predicate" else [entry.get("label", str(entry["value"])) for entry in entries]
        return cls(
            data["type"], data["name"], values, texts, [entry["probability"] for entry in entries], [], data.get("label_mass"),
            data.get("argmax_is_label"), data.get("abstained", False),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """JSON data with stable keys, in the shape of OpenAI's Decisions API and what it leaves out."""
        data: dict[str, Any] = {"type": self.type, "name": self.name}
        if self.type == "predicate":
            data["probability"] = self.probability
        elif self.type == "choice":
            data["choice"] = self.choice
        else:
            data |= {"score": self.score, "level": self.choice}
        data["confidence"] = self.confidence
        if self.type != "predicate":
            labels = {} if self.type == "choice" else {"label": self.texts}
            data["probabilities"] = [
                {"value": value, **{key: texts[i] for key, texts in labels.items()}, "probability": p}
                for i, (value, p) in enumerate(zip(self.values, self.probabilities, strict=True))
            ]
        for key in ("label_mass", "argmax_is_label"):
            if getattr(self, key) is not None:
                data[key] = getattr(self, key)
        if self.abstained:
            data["abstained"] = True
        return data


@dataclass(slots=True)
class DecisionOutput:
    """What one state got.

    error: why there are no answers, in one line. num_prompt_tokens: tokens given to the model, the state's once.
    num_cached_tokens: those of them that the prefix cache had."""

    index: int
    answers: list[Answer] = field(default_factory=list[Answer])
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    truncated: bool = False

    def __getitem__(self, name: str | int) -> Answer:
        """An answer by its question's name or place. Raises KeyError or IndexError, or DecisionError when there are none."""
        if self.error is not None:
            raise DecisionError(f"state {self.index} has no answers: {self.error}")
        if isinstance(name, int):
            return self.answers[name]
        found = next((answer for answer in self.answers if answer.name == name), None)
        if found is None:
            raise KeyError(f"no question is named {name!r}: {', '.join(str(answer.name) for answer in self.answers)}")
        return found

    @classmethod
    def from_dict(cls, index: int, data: Mapping[str, Any]) -> DecisionOutput:
        """From `to_dict`. Log scores are not kept there."""
        answers = [Answer.from_dict(answer) for answer in data.get("answers", ())]
        counts = data.get("usage", {"prompt_tokens": 0, "cached_tokens": 0})
        return cls(index, answers, data.get("error"), counts["prompt_tokens"], counts["cached_tokens"], data.get("truncated", False))

    def to_dict(self) -> dict[str, Any]:
        """JSON data of one output line."""
        if self.error is not None:
            return {"error": self.error}
        data: dict[str, Any] = {"answers": [answer.to_dict() for answer in self.answers]}
        data["usage"] = {"prompt_tokens": self.num_prompt_tokens, "cached_tokens": self.num_cached_tokens}
        return data | ({"truncated": True} if self.truncated else {})


def make_answer(
    question: Question, scores: LabelScores, calibration: Calibration, prior: Sequence[float] | None, argmax_is_label: bool | None = None
) -> Answer:
    """prior: log scores of the same labels behind states without content."""
    logs = scores.log_scores if prior is None else [log - base for log, base in zip(scores.log_scores, prior, strict=True)]
    probabilities = softmax(logs, calibration.temperature_of(question))
    return Answer(
        question.type, question.name, [option.value for option in question.options], [option.text for option in question.options],
        probabilities, list(scores.log_scores), scores.label_mass, argmax_is_label, max(probabilities) < calibration.abstain_below,
    )  # fmt: skip


def softmax(logs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities in proportion to exp(logs / temperature)."""
    top = max(logs)
    parts = [math.exp((log - top) / temperature) for log in logs]  # the difference first: no temperature is too small for it
    total = math.fsum(parts)
    return [part / total for part in parts]


def mean_log(scores: Sequence[LabelScores]) -> list[float]:
    """log of the mean of the options' normalized probabilities over several states."""
    normal = [[log - log_sum(s.log_scores) for log in s.log_scores] for s in scores]
    return [log_sum(column) - math.log(len(normal)) for column in zip(*normal, strict=True)]


def fit_temperature(log_scores: Sequence[Sequence[float]], right: Sequence[int], low: float = 0.05, high: float = 20.0) -> float:
    """The temperature with the least mean negative log likelihood of the right options (Guo et al. 2017, arXiv 1706.04599), by golden
    section on its logarithm. Raises DecisionError without examples."""
    if not right or len(right) != len(log_scores):
        raise DecisionError(f"{len(log_scores)} answers and {len(right)} right options: as many of both, at least one, are needed")

    def loss(log_t: float) -> float:
        t = math.exp(log_t)
        return math.fsum(log_sum([log / t for log in logs]) - logs[i] / t for logs, i in zip(log_scores, right, strict=True))

    a, b, ratio = math.log(low), math.log(high), (math.sqrt(5.0) - 1.0) / 2.0
    while b - a > 1e-4:
        c, d = b - ratio * (b - a), a + ratio * (b - a)
        a, b = (a, d) if loss(c) < loss(d) else (c, b)
    return math.exp((a + b) / 2.0)
