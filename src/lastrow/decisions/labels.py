"""Which tokens answer: a question's labels as a trie of token sequences, and the rows that score it.

A label of one token needs one row of the model, the prompt's last. Longer ones need one more row for every inner node of the trie: label
prefixes that several options share are computed once, and a row is scored for all its children together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lastrow.decisions.questions import DecisionError, Question
from lastrow.decisions.splice import Splicer, common_prefix

OPENING = "([{\"'`"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One token sequence that counts as option `option`."""

    option: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class TriePath:
    """A run of inner nodes that one sequence of the model scores.

    tokens: from the root to its last node. first: how many of them the path it branches off (`parent`, None for the prompt itself)
    has computed already; its rows are those of prefixes of first + 1 .. len(tokens) tokens (the root path: 0 .. len(tokens))."""

    parent: int | None
    first: int
    tokens: tuple[int, ...]
    label_ids: tuple[int, ...] = ()

    @property
    def depths(self) -> range:
        """Lengths of the prefixes whose next token this path scores."""
        return range(0 if self.parent is None else self.first + 1, len(self.tokens) + 1)


@dataclass(slots=True)
class LabelTrie:
    """All labels of one question. Raises DecisionError on construction when two options cannot be told apart."""

    leaves: tuple[Leaf, ...]
    num_options: int
    paths: list[TriePath] = field(default_factory=list[TriePath])
    _place: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])

    def __post_init__(self) -> None:
        children: dict[tuple[int, ...], set[int]] = {}
        for leaf in self.leaves:
            for depth, token in enumerate(leaf.tokens):
                children.setdefault(leaf.tokens[:depth], set()).add(token)
        self._grow(None, 0, (), children)
        for i, path in enumerate(self.paths):
            wanted: set[int] = set()
            for depth in path.depths:
                self._place[path.tokens[:depth]] = i
                wanted |= children[path.tokens[:depth]]
            path.label_ids = tuple(sorted(wanted))

    def _grow(self, parent: int | None, first: int, start: tuple[int, ...], children: Mapping[tuple[int, ...], set[int]]) -> None:
        """Adds the path that runs from prefix `start` down through first inner children, then those that branch off it."""
        tokens = start
        branches: list[tuple[int, ...]] = []
        while True:
            inner = [(*tokens, token) for token in sorted(children[tokens]) if (*tokens, token) in children]
            branches += inner[1:]
            if not inner:
                break
            tokens = inner[0]
        index = len(self.paths)
        self.paths.append(TriePath(parent, first, tokens))
        for branch in branches:
            self._grow(index, len(branch) - 1, branch, children)

    @property
    def needs_normalizer(self) -> bool:
        """Whether some row behind the prompt's last is scored: its logits mean nothing without the whole vocabulary's."""
        return len(self.paths) > 1 or bool(self.paths[0].tokens)

    @property
    def num_rows(self) -> int:
        return sum(len(path.depths) for path in self.paths)

    @property
    def longest_path(self) -> int:
        return max(len(path.tokens) for path in self.paths)

    @property
    def first_tokens(self) -> frozenset[int]:
        return frozenset(leaf.tokens[0] for leaf in self.leaves)

    def score(self, rows: Sequence[Mapping[int, tuple[Mapping[int, float], float | None]]]) -> LabelScores:
        """rows: per path, prefix length -> (logit by token, logsumexp over the vocabulary or None). Raises DecisionError for a logit
        that is no finite number."""
        per_option: list[list[float]] = [[] for _ in range(self.num_options)]
        for leaf in self.leaves:
            per_option[leaf.option].append(self._leaf_log(leaf, rows))
        return LabelScores([log_sum(logs) for logs in per_option], rows[0][0][1] is not None)

    def _leaf_log(self, leaf: Leaf, rows: Sequence[Mapping[int, tuple[Mapping[int, float], float | None]]]) -> float:
        total = 0.0
        for depth, token in enumerate(leaf.tokens):
            logits, normalizer = rows[self._place[leaf.tokens[:depth]]][depth]
            total += logits[token] - (normalizer or 0.0)
        if not math.isfinite(total):
            raise DecisionError("the model gave a logit that is no finite number; its weights or its dtype are at fault")
        return total


@dataclass(frozen=True, slots=True)
class LabelScores:
    """log_scores: per option, natural log of its probability over the vocabulary, or up to a constant that all share (then
    is_normalized is False)."""

    log_scores: list[float]
    is_normalized: bool

    @property
    def label_mass(self) -> float | None:
        """Probability of all labels together, over the whole vocabulary."""
        return min(1.0, math.exp(log_sum(self.log_scores))) if self.is_normalized else None


def log_sum(logs: Sequence[float]) -> float:
    if len(logs) == 1:
        return logs[0]
    top = max(logs)
    return top if math.isinf(top) else top + math.log(sum(math.exp(log - top) for log in logs))


# ------------------------------------------------------------------------------------------------------ from texts
@dataclass(frozen=True, slots=True)
class PromptEnd:
    """Where the answer begins: num_root of the prompt's tokens are common to the prompt and to the prompt with any label."""

    num_root: int
    trie: LabelTrie


def separator(prompt_text: str, after_special: bool) -> str:
    """What stands between the prompt and a label: a space where the prompt ends in a word or a colon, else nothing."""
    last = prompt_text[-1:]
    return "" if not last or after_special or last.isspace() or last in OPENING else " "


def encode_labels(splicer: Splicer, text: str, ids: Sequence[int], question: Question, end_token: int | None, where: str) -> PromptEnd:
    """The labels of `question` behind a prompt (or its end) of tokens `ids`.

    A label is what the tokenizer makes of prompt and label together: it may take the prompt's last tokens with it. end_token: stands
    behind a label that begins another option's, which makes them different answers (None: such labels are refused). Raises
    DecisionError for labels that the tokenizer cannot tell apart."""
    sep = separator(text, bool(ids) and ids[-1] in splicer.tokenizer.all_special_ids)
    whole = {
        surface: splicer.join(text, ids, sep + surface, splicer.encode(sep + surface))
        for option in question.options
        for surface in option.surfaces
    }
    root = min(common_prefix(ids, encoded, len(ids) - 1) for encoded in whole.values())
    owner: dict[tuple[int, ...], tuple[int, str]] = {}
    built_in = question.is_predicate and question.scheme == "words"
    for i, option in enumerate(question.options):
        for surface in option.surfaces:
            tokens = tuple(whole[surface][root:])
            if built_in and surface != option.surfaces[0] and len(tokens) > 1:
                continue  # `Yes` beside `yes` is not worth a row of its own
            known, other = owner.setdefault(tokens, (i, surface))
            if known != i:
                raise DecisionError(f"{where}: the tokenizer gives the labels {other!r} and {surface!r} the same tokens")
    return PromptEnd(root, LabelTrie(_disjoint(owner, end_token, where), len(question.options)))


def _disjoint(owner: Mapping[tuple[int, ...], tuple[int, str]], end_token: int | None, where: str) -> tuple[Leaf, ...]:
    """Leaves none of which begins another."""
    leaves: list[Leaf] = []
    for tokens, (option, surface) in owner.items():
        shorter = [other for depth in range(1, len(tokens)) if (other := owner.get(tokens[:depth])) is not None]
        if any(other == option for other, _ in shorter):
            continue  # the shorter label counts it already
        longer = [text for other, (o, text) in owner.items() if o != option and other[: len(tokens)] == tokens and other != tokens]
        if longer and end_token is None:
            raise DecisionError(f"{where}: the label {surface!r} begins the label {longer[0]!r}, and nothing ends it here")
        leaves.append(Leaf(option, (*tokens, end_token) if longer and end_token is not None else tokens))
    return tuple(leaves)
