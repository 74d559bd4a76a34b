"""What a run of decisions brought: columns of a flat file, counts per question, and the histogram picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastrow.decisions.questions import DecisionError, Question

BINS = 20
FORMATS = (".svg", ".png", ".pdf")
BLUE, GRAY = "#4c78a8", "#9aa5b1"


def column_names(questions: Sequence[Question]) -> list[str]:
    """A question's name, or q0, q1, ... by its place."""
    return [question.name or f"q{i}" for i, question in enumerate(questions)]


def columns(questions: Sequence[Question], label_mass: bool, diagnostics: bool) -> dict[str, type]:
    """Columns of csv and parquet: per question its answer, then its probabilities. Raises DecisionError for two of one name."""
    made: list[tuple[str, type]] = []
    for name, question in zip(column_names(questions), questions, strict=True):
        if question.is_predicate:
            made.append((name, float))
        else:
            made += [(name, float if question.type == "score" else str), (f"{name}.confidence", float)]
            made += [(f"{name}.p.{_key(option.value, option.text)}", float) for option in question.options]
        if label_mass or diagnostics:
            made.append((f"{name}.label_mass", float))
        if diagnostics:
            made.append((f"{name}.argmax_is_label", bool))
    counts = Counter(name for name, _ in made)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise DecisionError(f"two columns would be named {twice[0]!r}: give the questions or options other names, or write .jsonl")
    return dict(made)


def flat(questions: Sequence[Question], record: Mapping[str, Any]) -> dict[str, Any]:
    """A record's values for `columns`."""
    row: dict[str, Any] = {}
    for name, answer in zip(column_names(questions), record.get("answers", ()), strict=False):
        kind = answer["type"]
        value = answer[{"predicate": "probability", "score": "score", "choice": "choice"}[kind]]
        row[name] = str(value).lower() if isinstance(value, bool) else value
        if kind != "predicate":
            row[f"{name}.confidence"] = answer["confidence"]
            row |= {f"{name}.p.{_key(entry['value'], entry.get('label'))}": entry["probability"] for entry in answer["probabilities"]}
        row |= {f"{name}.{key}": answer[key] for key in ("label_mass", "argmax_is_label") if key in answer}
    return row


def _key(value: Any, text: str | None) -> str:
    return str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else str(text)


@dataclass(slots=True)
class QuestionSummary:
    """Counts over all rows with an answer. bins: of `shown`, in BINS equal parts of its range."""

    question: Question
    name: str
    count: int = 0
    abstained: int = 0
    total: float = 0.0
    mass: float = 0.0
    mass_count: int = 0
    bins: list[int] = field(default_factory=lambda: [0] * BINS)
    chosen: Counter[Any] = field(default_factory=Counter[Any])

    @property
    def shown(self) -> str:
        """What the histogram is of."""
        return {"predicate": "probability of yes", "choice": "probability of the choice", "score": "expected level"}[self.question.type]

    @property
    def top(self) -> float:
        return float(len(self.question.options) - 1) if self.question.type == "score" else 1.0

    def add(self, answer: Mapping[str, Any]) -> None:
        value = answer[{"predicate": "probability", "choice": "confidence", "score": "score"}[self.question.type]]
        self.count += 1
        self.total += value
        self.bins[min(int(value / self.top * BINS), BINS - 1)] += 1
        self.abstained += bool(answer.get("abstained"))
        if "label_mass" in answer:
            self.mass += answer["label_mass"]
            self.mass_count += 1
        if self.question.is_predicate:
            self.chosen["yes" if value >= 0.5 else "no"] += 1
        else:
            self.chosen[answer["choice"] if self.question.type == "choice" else answer["level"]] += 1

    def answers(self, most: int = 4) -> str:
        """Shares of the answers, largest first."""
        text = {option.value: option.text for option in self.question.options} if not self.question.is_predicate else {}
        top = [(text.get(value, value), count) for value, count in self.chosen.most_common(most) if value is not None]
        rest = len(self.chosen) - len(top)
        return ", ".join(f"{value} {count / self.count:.0%}" for value, count in top) + (f", {rest} others" if rest > 0 else "")


class Summary:
    """Of all questions."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self.questions = [QuestionSummary(q, name) for q, name in zip(questions, column_names(questions), strict=True)]

    def see(self, record: Mapping[str, Any]) -> None:
        for summary, answer in zip(self.questions, record.get("answers", ()), strict=False):
            summary.add(answer)

    def rows(self) -> list[list[str]]:
        """Table: question, type, rows, answers, mean of what the histogram shows, label mass."""
        made: list[list[str]] = []
        for s in self.questions:
            mean = f"{s.total / s.count:.3f}" if s.count else "-"
            mass = f"{s.mass / s.mass_count:.4f}" if s.mass_count else "-"
            abstained = f" ({s.abstained} abstained)" if s.abstained else ""
            made.append([s.name, s.question.type, f"{s.count}{abstained}", s.answers() if s.count else "-", mean, mass])
        return made

    def plot(self, path: Path) -> None:
        """Histograms, one per question, to an SVG, PNG or PDF file. Raises DecisionError."""
        check_plot(path)
        from matplotlib.figure import Figure

        wide = min(3, len(self.questions))
        high = -(-len(self.questions) // wide)
        figure = Figure(figsize=(4.0 * wide, 2.6 * high), layout="constrained")
        grid = figure.subplots(high, wide, squeeze=False)
        for axes in grid.flat[len(self.questions) :]:
            axes.set_axis_off()
        for axes, s in zip(grid.flat, self.questions, strict=False):
            _histogram(axes, s)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def check_plot(path: Path) -> None:
    """Refuses, before a run, a picture that could not be drawn after it. Raises DecisionError."""
    if path.suffix.lower() not in FORMATS:
        raise DecisionError(f"--plot {path}: the name must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise DecisionError(f"--plot {path}: the folder {path.parent} does not exist")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise DecisionError("--plot needs matplotlib: pip install matplotlib") from None


def _histogram(axes: Any, s: QuestionSummary) -> None:
    width = s.top / BINS
    axes.bar([(i + 0.5) * width for i in range(BINS)], s.bins, width=width * 0.92, color=BLUE)
    if s.count:
        axes.axvline(s.total / s.count, color=GRAY, linestyle="--", linewidth=1.2)
    axes.set_xlim(0.0, s.top)
    if s.question.type == "score":
        texts = [option.text for option in s.question.options]
        axes.set_xticks(range(len(texts)), texts if len(texts) <= 6 else range(len(texts)), fontsize=8)
    axes.set_title(f"{s.name}  ({s.count:,} rows)", fontsize=10, loc="left")
    axes.set_xlabel(s.shown, fontsize=8)
    axes.set_ylabel("rows", fontsize=8)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
