"""From a state and its questions to sequences for the engine, and from their logits to label scores. No engine here.

Work is written as generators: a job yields the units it wants read, gets their results, and returns its own result. Whoever runs an
engine (in this process or another) drives it."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeVar

from lastrow.core.output import Logprob
from lastrow.core.sampling_params import SamplingParams
from lastrow.decisions.labels import LabelScores, LabelTrie, PromptEnd, encode_labels
from lastrow.decisions.prompts import PromptParts, PromptWriter
from lastrow.decisions.questions import DecisionError, Question
from lastrow.decisions.results import Calibration, DecisionOutput, make_answer, mean_log
from lastrow.decisions.splice import Splicer, common_prefix

T = TypeVar("T")
MIN_SHARED = 8  # tokens from which on sharing them is worth a sequence of its own
SHARED_LABELS = 64  # questions whose labels are together no more than this are scored with one product
TRUNCATE_MARK = "\n[...]\n"
Truncate = Literal["left", "right", "middle"]


@dataclass(slots=True)
class Unit:
    """One sequence for the engine; arguments of LLMEngine.add_request. prompt_token_ids stays as it is until the unit is read.

    parent: index, among the units yielded together, of the one whose first fork_num_tokens tokens it shares."""

    prompt_token_ids: list[int]
    params: SamplingParams
    prompt_rows: Sequence[int] | None = None
    label_token_ids: tuple[int, ...] | None = None
    parent: int | None = None
    fork_num_tokens: int = 0

    @property
    def num_own_tokens(self) -> int:
        return len(self.prompt_token_ids) - self.fork_num_tokens


@dataclass(slots=True)
class Read:
    """What a unit brought. label_logits, prompt_logprobs: by position, as in ModelRunnerOutput."""

    label_logits: Mapping[int, tuple[list[float], float | None]] = field(default_factory=dict[int, tuple[list[float], float | None]])
    prompt_logprobs: Mapping[int, dict[int, Logprob]] = field(default_factory=dict[int, dict[int, Logprob]])
    token_ids: Sequence[int] = ()
    num_cached_tokens: int = 0


Job = Generator[list[Unit], list[Read], T]
LABELS = SamplingParams(max_tokens=1, temperature=0.0)
LABELS_AND_MASS = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def label_units(
    units: list[Unit], root: list[int], trie: LabelTrie, mass: bool, parent: int | None, fork_at: int, label_ids: tuple[int, ...] | None
) -> list[int]:
    """Appends the units that score `trie` behind the prompt `root`; returns their indices, one per path. label_ids: the ids to ask for at
    a prompt's last row, where that is the only row (None: the trie's own)."""
    places: list[int] = []
    params = LABELS_AND_MASS if mass or trie.needs_normalizer else LABELS
    for path in trie.paths:
        if path.parent is not None:
            parent, fork_at = places[path.parent], len(root) + path.first
        rows = [len(root) - 1 + depth for depth in path.depths]
        ids = path.label_ids if label_ids is None or path.tokens else label_ids
        places.append(len(units))
        units.append(Unit([*root, *path.tokens] if path.tokens else root, params, rows, ids, parent, fork_at if parent is not None else 0))
    return places


def label_scores(trie: LabelTrie, num_root: int, places: Sequence[int], units: Sequence[Unit], reads: Sequence[Read]) -> LabelScores:
    """Scores of the labels from what `label_units` brought."""
    rows: list[dict[int, tuple[Mapping[int, float], float | None]]] = []
    for path, place in zip(trie.paths, places, strict=True):
        ids, logits = units[place].label_token_ids or (), reads[place].label_logits
        rows.append({d: (dict(zip(ids, logits[num_root - 1 + d][0], strict=True)), logits[num_root - 1 + d][1]) for d in path.depths})
    return trie.score(rows)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question with everything that does not depend on the state."""

    question: Question
    where: str
    parts: PromptParts
    after: list[int]
    end: PromptEnd


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One question about one state: tokens up to where the labels begin, and the labels. num_head: tokens before the question's own,
    where those are what they are behind any state; else 0."""

    root: list[int]
    trie: LabelTrie
    num_head: int = 0


@dataclass(slots=True)
class StatePlan:
    """places: per question, the units of its trie's paths."""

    prompts: list[_Prompt]
    units: list[Unit]
    places: list[list[int]]
    truncated: bool

    def scores(self, reads: Sequence[Read]) -> list[LabelScores]:
        return [label_scores(p.trie, len(p.root), at, self.units, reads) for p, at in zip(self.prompts, self.places, strict=True)]


class QuestionSet:
    """Questions made ready for any number of states.

    max_model_len: the window, in tokens. label_mass: score over the whole vocabulary. diagnostics: label_mass, and whether the most
    probable token begins a label. truncate: where a state that does not fit is cut (None: it is an error). settings: what decides the
    answers, but for the model (JSON data). Raises DecisionError naming the question."""

    def __init__(
        self,
        writer: PromptWriter,
        splicer: Splicer,
        questions: Sequence[Question],
        *,
        max_model_len: int,
        instructions: str | None = None,
        label_mass: bool = False,
        diagnostics: bool = False,
        truncate: Truncate | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        if truncate not in (None, "left", "right", "middle"):
            raise DecisionError(f"truncate is {truncate!r}: left, right or middle is needed")
        self.questions, self.calibration = tuple(questions), calibration or Calibration()
        self.calibration.check_names(self.questions)
        self.priors: list[list[float]] | None = None
        self._splicer, self._writer, self._truncate = splicer, writer, truncate
        self._limit, self._mass, self._diagnostics = max_model_len, label_mass or diagnostics, diagnostics
        self.settings = [
            [asdict(question) for question in self.questions], asdict(self.calibration), max_model_len, instructions, label_mass,
            diagnostics, truncate, writer.settings,
        ]  # fmt: skip
        self._bos = [splicer.tokenizer.bos_token_id]
        self._before: dict[str, list[int]] = {}
        self._asked = [
            self._ask(q, instructions, f"questions[{i}]" if q.name is None else f"question {q.name!r}") for i, q in enumerate(questions)
        ]
        same = len({asked.parts.before for asked in self._asked}) == 1
        # tokens that all questions begin with, behind a state that stands before all of them alike
        self._common_after = min(common_prefix(self._asked[0].after, asked.after) for asked in self._asked) if same else None
        short = {i for a in self._asked if not a.end.trie.needs_normalizer for i in a.end.trie.paths[0].label_ids}
        self._label_ids = tuple(sorted(short)) if len(short) <= SHARED_LABELS else None

    def _ask(self, question: Question, instructions: str | None, where: str) -> _Asked:
        parts = self._writer.question(question, instructions, where)
        after = self._splicer.encode(parts.after)
        end = encode_labels(self._splicer, parts.after, after, question, self._writer.end_token, where)
        return _Asked(question, where, parts, after, end)

    # ------------------------------------------------------------------------------------------------------ one state
    def plan(self, state: str, ids: list[int] | None = None) -> StatePlan:
        """ids: tokens of the stripped state, where somebody has them. Raises DecisionError for a state that is empty or does not fit."""
        state = state.strip()
        if not state:
            raise DecisionError("the state is empty: a text is needed")
        prompts, truncated = self._prompts(state, ids), False
        over = self._excess(prompts)
        if over > 0:
            if self._truncate is None:
                raise DecisionError(
                    f"the state and its longest question have {self._limit + over} tokens, the window has {self._limit}: "
                    "shorten it, or ask for truncate left, right or middle"
                )
            prompts, truncated = self._shortened(state, over), True
        units: list[Unit] = []
        parent, fork_at = self._shared(prompts, units)
        places = [label_units(units, p.root, p.trie, self._mass, parent, fork_at, self._label_ids) for p in prompts]
        return StatePlan(prompts, units, places, truncated)

    def _prompts(self, state: str, ids: list[int] | None = None) -> list[_Prompt]:
        join, encode = self._splicer.join, self._splicer.encode
        ids = encode(state) if ids is None else ids
        heads: dict[str, list[int]] = {}
        prompts: list[_Prompt] = []
        for asked in self._asked:
            before = asked.parts.before
            if before not in heads:
                if before not in self._before:
                    self._before[before] = encode(before)
                heads[before] = join(before, self._before[before], state, ids)
            prompts.append(self._prompt(asked, before + state, heads[before]))
        return prompts

    def _prompt(self, asked: _Asked, head: str, head_ids: list[int]) -> _Prompt:
        whole = self._splicer.join(head, head_ids, asked.parts.after, asked.after)
        end, cut = asked.end, len(asked.after) - asked.end.num_root
        if len(whole) == len(head_ids) + len(asked.after) and whole[len(head_ids) :] == asked.after:
            return _Prompt([*self._bos, *whole[: len(whole) - cut]], end.trie, 1 + len(head_ids))
        if whole[-cut - 1 :] == asked.after[-cut - 1 :]:
            return _Prompt(self._bos + whole[: len(whole) - cut], end.trie)
        # The state took tokens with it to the very end of the prompt: the labels are what they are behind this whole text.
        end = encode_labels(self._splicer, head + asked.parts.after, whole, asked.question, self._writer.end_token, asked.where)
        return _Prompt(self._bos + whole[: end.num_root], end.trie)

    def _excess(self, prompts: Sequence[_Prompt]) -> int:
        return max(len(p.root) + p.trie.longest_path for p in prompts) - self._limit

    def _shortened(self, state: str, over: int) -> list[_Prompt]:
        """The prompts of the longest shortened state found that fits."""
        tokenizer, ids = self._splicer.tokenizer, self._splicer.encode(state)
        keep = len(ids) - over
        if self._truncate == "middle":
            keep -= len(self._splicer.encode(TRUNCATE_MARK))
        while keep > 0:
            head = {"left": 0, "right": keep, "middle": (keep + 1) // 2}[self._truncate or "right"]
            tail = keep - head
            mark = TRUNCATE_MARK if self._truncate == "middle" else ""
            # half a character at the cut has no text
            text = (
                tokenizer.decode(ids[:head]).rstrip("\ufffd")
                + mark
                + tokenizer.decode(ids[len(ids) - tail :] if tail else []).lstrip("\ufffd")
            )
            if not (text := text.strip()):
                break
            prompts = self._prompts(text)
            if (over := self._excess(prompts)) <= 0:
                return prompts
            keep -= over
        raise DecisionError(f"the longest question alone fills the window of {self._limit} tokens: there is no room for the state")

    def _shared(self, prompts: Sequence[_Prompt], units: list[Unit]) -> tuple[int | None, int]:
        """Appends the unit of what all prompts begin with, if that is worth it. Returns (its index, its length)."""
        if len(prompts) < 2:
            return None, 0
        first = prompts[0].root
        shared = min(len(p.root) for p in prompts) - 1
        if self._common_after is not None and len({p.num_head for p in prompts}) == 1 and prompts[0].num_head:
            shared = min(shared, prompts[0].num_head + self._common_after)
        else:
            shared = min(shared, *(common_prefix(first, p.root, shared) for p in prompts[1:]))
        if shared < MIN_SHARED:
            return None, 0
        units.append(Unit(first[:shared], LABELS, (), ()))
        return len(units) - 1, shared

    # ------------------------------------------------------------------------------------------------------ jobs
    def job(self, index: int, state: str, ids: list[int] | None = None) -> Job[DecisionOutput]:
        """Asks every question about one state; ids as in `plan`."""
        plan = self.plan(state, ids)
        reads = yield plan.units
        scores = plan.scores(reads)
        output = DecisionOutput(index, truncated=plan.truncated)
        checked: list[bool | None] = [None] * len(scores)
        if self._diagnostics:
            checked = yield from self._argmax_checks(plan, reads, output)
        for i, (question, score) in enumerate(zip(self.questions, scores, strict=True)):
            prior = None if self.priors is None else self.priors[i]
            answer = make_answer(question, score, self.calibration, prior, checked[i])
            answer.label_mass = answer.label_mass if self._mass else None
            output.answers.append(answer)
        output.num_prompt_tokens += sum(unit.num_own_tokens for unit in plan.units)
        output.num_cached_tokens += sum(read.num_cached_tokens for read, unit in zip(reads, plan.units, strict=True) if unit.parent is None)
        return output

    def prior_job(self) -> Job[list[list[float]]]:
        """Log scores of the labels behind the calibration's states without content."""
        tables: list[list[LabelScores]] = []
        for text in self.calibration.prior:
            plan = self.plan(text)
            tables.append(plan.scores((yield plan.units)))
        return [mean_log(column) for column in zip(*tables, strict=True)]

    def _argmax_checks(self, plan: StatePlan, reads: Sequence[Read], output: DecisionOutput) -> Job[list[bool | None]]:
        """Whether each prompt's most probable token begins a label: certain where one label token outweighs all that is no label;
        the other prompts are read once more for their most probable token."""
        checks: list[bool | None] = [True] * len(plan.prompts)
        units: list[Unit] = []
        doubtful: list[int] = []
        for i, (prompt, places) in enumerate(zip(plan.prompts, plan.places, strict=True)):
            if not _outweighs(plan.units[places[0]], reads[places[0]], len(prompt.root) - 1, prompt.trie.first_tokens):
                doubtful.append(i)
                units.append(Unit(prompt.root, ONE_TOKEN))
        if units:
            for i, read in zip(doubtful, (yield units), strict=True):
                checks[i] = read.token_ids[0] in plan.prompts[i].trie.first_tokens
            output.num_prompt_tokens += sum(unit.num_own_tokens for unit in units)
        return checks


def _outweighs(unit: Unit, read: Read, row: int, tokens: frozenset[int]) -> bool:

    values, normalizer = read.label_logits[row]
    chances = [math.exp(v - (normalizer or 0.0)) for v, i in zip(values, unit.label_token_ids or (), strict=True) if i in tokens]
    return max(chances) > 1.0 - sum(chances) + 1e-5  # rounding of the sums, far under what would matter
