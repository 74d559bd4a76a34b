"""Jobs that score given texts: choices behind a prompt, log likelihoods of continuations, documents for a query."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lastrow.core.sampling_params import SamplingParams
from lastrow.decisions.labels import LabelScores, LabelTrie, Leaf, encode_labels
from lastrow.decisions.plan import LABELS, MIN_SHARED, Job, Read, Unit, label_scores, label_units
from lastrow.decisions.prompts import PromptWriter
from lastrow.decisions.questions import MAX_CHOICES, DecisionError, Question, parse_questions
from lastrow.decisions.results import softmax
from lastrow.decisions.splice import Splicer, common_prefix

CONTINUATION = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
RELEVANCE = "Does the document answer the query?"


@dataclass(slots=True)
class ScoreOutput:
    """What one prompt's choices got. logprobs: natural log of each choice's probability behind the prompt, all its tokens. probabilities:
    of the choices among themselves. num_tokens: of each choice."""

    index: int
    choices: list[str] = field(default_factory=list[str])
    logprobs: list[float] = field(default_factory=list[float])
    probabilities: list[float] = field(default_factory=list[float])
    num_tokens: list[int] = field(default_factory=list[int])
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def best(self) -> int:
        return max(range(len(self.logprobs)), key=self.logprobs.__getitem__)

    @classmethod
    def from_dict(cls, index: int, data: Mapping[str, Any]) -> ScoreOutput:
        choices, logprobs, probabilities, tokens = (list(data.get(n, ())) for n in ("choices", "logprobs", "probabilities", "num_tokens"))
        return cls(index, choices, logprobs, probabilities, tokens, data.get("error"))

    def to_dict(self) -> dict[str, Any]:
        if self.error is not None:
            return {"error": self.error}
        names = ("choices", "logprobs", "probabilities", "num_tokens")
        return {"best": self.choices[self.best], **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document: its place in the list given, and the probability that it answers the query."""

    index: int
    document: str
    relevance_score: float


@dataclass(frozen=True, slots=True)
class Loglikelihood:
    """logprob: natural log of the continuation's probability. is_greedy: whether each of its tokens is the most probable one."""

    logprob: float
    is_greedy: bool
    num_tokens: int

    @classmethod
    def from_dict(cls, index: int, data: Mapping[str, Any]) -> Loglikelihood:
        return cls(data["logprob"], data["is_greedy"], data["num_tokens"])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def score_job(
    splicer: Splicer, index: int, prompt: str | Sequence[int], choices: Sequence[str | Sequence[int]], limit: int
) -> Job[ScoreOutput]:
    """Choices (texts, taken as they are, or token ids) behind a prompt (text, or ids that may begin with <bos>)."""
    root, leaves = _score_tokens(splicer, prompt, choices)
    trie = LabelTrie(tuple(leaves), len(leaves))
    if (total := len(root) + trie.longest_path) > limit:
        raise DecisionError(f"the prompt and its longest choice have {total} tokens, the window has {limit}")
    units: list[Unit] = []
    places = label_units(units, root, trie, True, None, 0, None)
    reads = yield units
    logs = label_scores(trie, len(root), places, units, reads).log_scores
    texts = [choice if isinstance(choice, str) else splicer.tokenizer.decode(list(choice)) for choice in choices]
    return ScoreOutput(
        index, texts, logs, softmax(logs), [len(leaf.tokens) for leaf in leaves], None, *_usage(units, reads)
    )  # fmt: skip


def _score_tokens(splicer: Splicer, prompt: Any, choices: Sequence[Any]) -> tuple[list[int], list[Leaf]]:
    if not isinstance(choices, Sequence):
        raise DecisionError(f"choices is {choices!r}: a list of 1 to {MAX_CHOICES} is needed")
    if isinstance(choices, (str, bytes)) or not 1 <= len(choices) <= MAX_CHOICES:
        count = "a text" if isinstance(choices, (str, bytes)) else f"{len(choices)} entries"
        raise DecisionError(f"choices is {count}: a list of 1 to {MAX_CHOICES} is needed")
    bos = splicer.tokenizer.bos_token_id
    if not isinstance(prompt, Sequence) or not prompt:
        raise DecisionError(f"the prompt is {prompt!r}: a text, or token ids, is needed")
    if not isinstance(prompt, str):
        if not all(not isinstance(c, str) for c in choices):
            raise DecisionError("the prompt is a list of token ids and the choices are texts: give both as texts or both as ids")
        return list(prompt), _leaves([tuple(c) for c in choices], list(choices))
    if not all(isinstance(choice, str) for choice in choices):
        raise DecisionError("the prompt is a text and a choice is not: give both as texts or both as ids")
    prompt = splicer.tokenizer.without_bos(prompt)
    ids = splicer.encode(prompt)
    whole = [splicer.join(prompt, ids, choice, splicer.encode(choice)) for choice in choices]
    root = min([len(ids), *(common_prefix(ids, w, len(ids)) for w in whole)])
    return [bos, *ids[:root]], _leaves([tuple(w[root:]) for w in whole], list(choices))


def _leaves(tokens: Sequence[tuple[int, ...]], choices: Sequence[Any]) -> list[Leaf]:
    seen: dict[tuple[int, ...], int] = {}
    for i, ids in enumerate(tokens):
        if not ids:
            raise DecisionError(f"choices[{i}] is empty: at least one token is needed")
        if seen.setdefault(ids, i) != i:
            raise DecisionError(f"choices[{i}] is {choices[i]!r}, whose tokens are those of choices[{seen[ids]}]: choices must differ")
    return [Leaf(i, ids) for i, ids in enumerate(tokens)]


# ------------------------------------------------------------------------------------------------------ log likelihoods
def loglikelihood_job(contexts_and_continuations: Sequence[tuple[list[int], list[int]]], limit: int) -> Job[list[Loglikelihood]]:
    """Token pairs that share their context: it is computed once. An empty context is an error: <bos> at least is needed."""
    context = contexts_and_continuations[0][0]
    if not context or not all(continuation for _, continuation in contexts_and_continuations):
        raise DecisionError("a log likelihood needs a context (<bos> at least) and a continuation of at least one token")
    most = len(context) + max(len(continuation) for _, continuation in contexts_and_continuations)
    if most > limit:
        raise DecisionError(f"context and continuation have {most} tokens, the window has {limit}")
    units: list[Unit] = []
    parent, shared = None, len(context) - 1  # the row of the last context token belongs to each continuation
    if len(contexts_and_continuations) > 1 and shared >= MIN_SHARED:
        parent = 0
        units.append(Unit(context[:shared], LABELS, (), ()))
    for _, continuation in contexts_and_continuations:
        ids = [*context, *continuation]
        units.append(
            Unit(ids, CONTINUATION, range(len(context) - 1, len(ids) - 1), None, parent, 0 if parent is None else shared)
        )  # fmt: skip
    reads = yield units
    first = len(units) - len(contexts_and_continuations)
    return [_loglikelihood(unit, read, len(context)) for unit, read in zip(units[first:], reads[first:], strict=True)]


def _loglikelihood(unit: Unit, read: Read, start: int) -> Loglikelihood:
    entries = [read.prompt_logprobs[at][unit.prompt_token_ids[at]] for at in range(start, len(unit.prompt_token_ids))]
    return Loglikelihood(math.fsum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries), len(entries))


# ------------------------------------------------------------------------------------------------------ ranking
class Ranker:
    """The built-in relevance question, or a jinja file's, asked of documents. Raises DecisionError."""

    def __init__(self, writer: PromptWriter, splicer: Splicer, limit: int) -> None:
        self._writer, self._splicer, self._limit = writer, splicer, limit
        self._question: Question = parse_questions([{"type": "predicate", "instructions": RELEVANCE}])[0]

    def job(self, query: str, documents: Sequence[str], instructions: str | None = None) -> Job[tuple[list[float], int, int]]:
        """Returns (relevance of each document, tokens given to the model, cached tokens). What stands before the documents is computed
        once."""
        splicer, encode = self._splicer, self._splicer.encode
        if not documents:
            raise DecisionError("documents is empty: at least one is needed")
        before, behind = self._writer.rank(query, instructions)
        before_ids, behind_ids = encode(before), encode(behind)
        roots: list[list[int]] = []
        tries: list[LabelTrie] = []
        known = encode_labels(splicer, behind, behind_ids, self._question, self._writer.end_token, "rank")
        cut = len(behind_ids) - known.num_root
        for i, document in enumerate(documents):
            if not isinstance(document, str) or not (document := document.strip()):
                raise DecisionError(f"documents[{i}] is empty or no text: a text is needed")
            head = splicer.join(before, before_ids, document, encode(document))
            ids = splicer.join(before + document, head, behind, behind_ids)
            end = known
            if ids[-cut - 1 :] != behind_ids[-cut - 1 :]:
                end = encode_labels(splicer, before + document + behind, ids, self._question, self._writer.end_token, "rank")
            root = [splicer.tokenizer.bos_token_id, *ids[: len(ids) - cut if end is known else end.num_root]]
            if len(root) + end.trie.longest_path > self._limit:
                raise DecisionError(f"documents[{i}] and the query have {len(root)} tokens, the window has {self._limit}")
            roots.append(root)
            tries.append(end.trie)
        scores, units, reads = yield from read_roots(roots, tries, len(before_ids), False)
        return [softmax(score.log_scores)[0] for score in scores], *_usage(units, reads)


def read_roots(
    roots: Sequence[list[int]], tries: Sequence[LabelTrie], guess: int, mass: bool
) -> Job[tuple[list[LabelScores], list[Unit], list[Read]]]:
    """Scores of each trie's labels behind its prompt. What all prompts begin with is computed once; guess: tokens of it that are known."""
    units: list[Unit] = []
    shared = min(common_prefix(roots[0], root, guess) for root in roots)
    shared = min(shared, min(len(root) for root in roots) - 1)
    parent = None
    if len(roots) > 1 and shared >= MIN_SHARED:
        parent = 0
        units.append(Unit(roots[0][:shared], LABELS, (), ()))
    places = [label_units(units, root, trie, mass, parent, shared, None) for root, trie in zip(roots, tries, strict=True)]
    reads = yield units
    return [label_scores(trie, len(root), at, units, reads) for root, trie, at in zip(roots, tries, places, strict=True)], units, reads


def label_tokens_job(
    splicer: Splicer, query: str | list[int], items: Sequence[str | list[int]], label_ids: Sequence[int], item_first: bool, limit: int
) -> Job[tuple[list[list[float]], int, int]]:
    """Log probability, over the whole vocabulary, of each of the tokens label_ids behind query + item (item + query with item_first).

    Texts get one <bos>, ids are taken as they are. Returns (a list per item, tokens given to the model, cached tokens)."""
    if not items or not label_ids or len(set(label_ids)) != len(label_ids):
        raise DecisionError("at least one item, and at least one label token id, all different, are needed")
    trie = LabelTrie(tuple(Leaf(i, (token,)) for i, token in enumerate(label_ids)), len(label_ids))
    roots = [_query_item(splicer, *((item, query) if item_first else (query, item))) for item in items]
    for i, root in enumerate(roots):
        if not 1 <= len(root) <= limit:
            raise DecisionError(f"query and items[{i}] have {len(root)} tokens: 1 to {limit} are needed")
    scores, units, reads = yield from read_roots(roots, [trie] * len(roots), 0, True)
    return [score.log_scores for score in scores], *_usage(units, reads)


def _query_item(splicer: Splicer, first: str | list[int], second: str | list[int]) -> list[int]:
    if isinstance(first, str) and isinstance(second, str):
        first = splicer.tokenizer.without_bos(first)
        return [splicer.tokenizer.bos_token_id, *splicer.join(first, splicer.encode(first), second, splicer.encode(second))]
    if isinstance(first, str) or isinstance(second, str):
        raise DecisionError("query and items must both be texts, or both token ids")
    return [*first, *second]


def _usage(units: Sequence[Unit], reads: Sequence[Read]) -> tuple[int, int]:
    """(tokens given to the model, those the prefix cache had)."""
    cached = sum(read.num_cached_tokens for read, unit in zip(reads, units, strict=True) if unit.parent is None)
    return sum(unit.num_own_tokens for unit in units), cached
