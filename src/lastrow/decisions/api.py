"""What `LLM.decide`, `score`, `loglikelihood` and `rank` do; their signatures are there, their work is here."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lastrow.decisions.driver import JobDriver
from lastrow.decisions.log import ResultLog, fingerprint
from lastrow.decisions.plan import Job, QuestionSet, Truncate
from lastrow.decisions.prompts import PromptWriter
from lastrow.decisions.questions import DecisionError, content_text, parse_questions
from lastrow.decisions.results import Calibration, DecisionOutput
from lastrow.decisions.scoring import Loglikelihood, Ranked, Ranker, ScoreOutput, loglikelihood_job, score_job
from lastrow.decisions.splice import Splicer
from lastrow.engine.engine import LLMEngine
from lastrow.progress import track
from lastrow.tokenizer import Tokenizer

T = TypeVar("T")
L = TypeVar("L", DecisionOutput, ScoreOutput, Loglikelihood)
TOKENIZER_THREADS, TOKENIZE_AHEAD = 4, 32  # cores that tokenize, and states that may be ready before the engine has room for them
RANK_GROUP = 64  # documents that one job holds; more come as the engine has room


class Decider:
    """An engine with the parts that decisions need. Cheap to make; keeps what the tokenizer has taught it."""

    def __init__(self, engine: LLMEngine) -> None:
        if engine.tokenizer is None:
            raise DecisionError("decisions need a tokenizer, and a model with dummy weights has none")
        self.engine = engine
        self.tokenizer: Tokenizer = engine.tokenizer
        self.splicer = Splicer(self.tokenizer)
        self.limit = engine.scheduler.config.max_model_len

    # -------------------------------------------------------------------------------------------------- decide
    def question_set(
        self,
        questions: Any,
        *,
        instructions: str | None = None,
        prompt_template: str | Path | None = None,
        chat: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        label_mass: bool = False,
        diagnostics: bool = False,
        truncate: Truncate | None = None,
        calibration: Calibration | Mapping[str, Any] | None = None,
    ) -> QuestionSet:
        """Questions made ready, the prior measured where the calibration asks for it."""
        writer = PromptWriter(self.tokenizer, prompt_template, chat=chat, chat_template_kwargs=chat_template_kwargs)
        made = QuestionSet(
            writer, self.splicer, parse_questions(questions), max_model_len=self.limit, instructions=instructions, label_mass=label_mass,
            diagnostics=diagnostics, truncate=truncate, calibration=Calibration.of(calibration),
        )  # fmt: skip
        if made.calibration.prior:
            made.priors = self.one(made.prior_job())
        return made

    def decide(self, states: Iterable[Any], questions: QuestionSet, first: int = 0) -> Iterator[DecisionOutput]:
        """One output per state, in order, counted from `first`; a state that cannot be asked about has its error there."""

        def results(given: Iterable[Any]) -> Iterator[DecisionOutput]:
            jobs = (_decide_job(questions, i, *pair) for i, pair in enumerate(self._encoded(given), first))
            for i, result in enumerate(JobDriver(self.engine).run(jobs), first):
                yield DecisionOutput(i, error=str(result)) if isinstance(result, ValueError) else result

        return _in_order(states, results)

    def _encoded(self, states: Iterable[Any]) -> Iterator[tuple[str | ValueError, Future[list[int]] | None]]:
        """Each state's text and its tokens, which other cores make ahead (the tokenizer holds no lock of Python's)."""
        texts = (_state_text(state) for state in states)
        first = list(itertools.islice(texts, 2))
        if len(first) < 2:
            yield from ((text, None) for text in first)
            return
        with ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize") as pool:
            ahead: deque[tuple[str | ValueError, Future[list[int]] | None]] = deque()
            for text in itertools.chain(first, texts):
                ahead.append((text, pool.submit(self.splicer.encode, text.strip()) if isinstance(text, str) else None))
                if len(ahead) > TOKENIZE_AHEAD:
                    yield ahead.popleft()
            yield from ahead

    # -------------------------------------------------------------------------------------------------- scores
    def score(self, prompts: Iterable[tuple[Any, Any]], first: int = 0) -> Iterator[ScoreOutput]:
        """prompts: (prompt, choices), counted from `first`. A pair that cannot be scored has its error in its place."""

        def results(given: Iterable[Any]) -> Iterator[ScoreOutput]:
            jobs = (_score_job(self.splicer, i, pair, self.limit) for i, pair in enumerate(given, first))
            for i, result in enumerate(JobDriver(self.engine).run(jobs), first):
                yield ScoreOutput(i, error=str(result)) if isinstance(result, ValueError) else result

        return _in_order(prompts, results)

    def loglikelihood(self, pairs: Iterable[tuple[Any, Any]]) -> Iterator[Loglikelihood]:
        """pairs: (context, continuation), texts or token ids; neighbours with the same context share it. Raises ValueError."""

        def results(tokens: Iterable[tuple[list[int], list[int]]]) -> Iterator[Loglikelihood]:
            grouped = (list(group) for _, group in itertools.groupby(tokens, key=lambda pair: pair[0]))
            for result in JobDriver(self.engine).run(loglikelihood_job(group, self.limit) for group in grouped):
                if isinstance(result, ValueError):
                    raise result
                yield from result

        return _in_order(map(self.continuation_tokens, pairs), results)

    def continuation_tokens(self, pair: tuple[Any, Any]) -> tuple[list[int], list[int]]:
        """(context ids with <bos>, continuation ids). Blanks at a context's end belong to the continuation, as lm-eval has it: there
        the tokenizer puts them."""
        context, continuation = _pair(pair, "context", "continuation")
        bos = self.tokenizer.bos_token_id
        if not isinstance(context, str) or not isinstance(continuation, str):
            if isinstance(context, str) or isinstance(continuation, str):
                raise DecisionError("context and continuation must both be texts, or both token ids")
            if not isinstance(context, Sequence) or not isinstance(continuation, Sequence):
                raise DecisionError(f"the pair is {pair!r}: context and continuation must both be texts, or both token ids")
            return list(context), list(continuation)
        context = self.tokenizer.without_bos(context)
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        ids = self.splicer.encode(kept)
        whole = self.splicer.join(kept, ids, continuation, self.splicer.encode(continuation))
        if continuation and len(whole) <= len(ids):
            raise DecisionError(
                f"the continuation {continuation!r} melts into the context's last token: begin it with a space, or give token ids"
            )
        return [bos, *ids], whole[len(ids) :]

    def rank(
        self, query: str, documents: Iterable[str], instructions: str | None = None, prompt_template: str | Path | None = None
    ) -> list[float]:
        """Relevance of each document. Raises ValueError."""
        ranker = Ranker(PromptWriter(self.tokenizer, prompt_template, name="rank"), self.splicer, self.limit)
        scores: list[float] = []
        for result in JobDriver(self.engine).run(ranker.job(query, group, instructions) for group in _groups(documents, RANK_GROUP)):
            if isinstance(result, ValueError):
                raise result
            scores += result[0]
        return scores

    def one(self, job: Job[T]) -> T:
        """The result of one job. Raises what it raises."""
        result = next(JobDriver(self.engine).run([job]))
        if isinstance(result, ValueError):
            raise result
        return result


def _in_order(items: Iterable[Any], run: Callable[[Iterable[Any]], Iterator[T]]) -> Iterator[T]:
    """What `run` makes of items. An exception of theirs comes behind the results of what they gave before it."""
    failed: list[Exception] = []

    def given() -> Iterator[Any]:
        try:
            yield from items
        except Exception as error:
            failed.append(error)

    yield from run(given())
    if failed:
        raise failed[0]


def _pair(value: Any, first: str, second: str) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise DecisionError(f"{value!r} is no pair: ({first}, {second}) is needed")
    return value[0], value[1]


def _iterable(value: Any, what: str, needed: str) -> Iterable[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise DecisionError(f"{what} is {value!r}: {needed} is needed")
    return value


def _groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    source = iter(items)
    while group := list(itertools.islice(source, size)):
        yield group


def _state_text(state: Any) -> str | ValueError:
    if isinstance(state, ValueError):  # a row that could not be read
        return state
    try:
        return content_text(state, "state")
    except DecisionError as error:
        return error


def _decide_job(
    questions: QuestionSet, index: int, text: str | ValueError, ids: Future[list[int]] | None
) -> Generator[Any, Any, DecisionOutput]:
    if isinstance(text, ValueError):
        raise text
    return (yield from questions.job(index, text, None if ids is None else ids.result()))


def _score_job(splicer: Splicer, index: int, pair: Any, limit: int) -> Generator[Any, Any, ScoreOutput]:
    if isinstance(pair, ValueError):
        raise pair
    return (yield from score_job(splicer, index, *_pair(pair, "prompt", "choices"), limit))


def shaped(value: Any, is_one: bool, run: Callable[[Iterable[Any]], Iterator[T]], progress: str | None) -> Any:
    """One result for one input, a list for a list, an iterator for an iterator; a single input's error is raised."""
    if is_one:
        result = next(run([value]))
        if (error := getattr(result, "error", None)) is not None:
            raise DecisionError(error)
        return result
    if isinstance(value, Sequence):
        return list(track(run(value), progress, total=len(value)) if progress else run(value))
    return run(value)


# ------------------------------------------------------------------------------------------------------ LLM's methods
def decide(decider: Decider, state: Any, questions: Any, use_tqdm: bool, output: str | Path | None, options: dict[str, Any]) -> Any:
    """See `LLM.decide`."""
    made = questions if isinstance(questions, QuestionSet) else decider.question_set(questions, **options)
    is_one = isinstance(state, (str, Mapping))
    if not is_one:
        _iterable(state, "state", "a text, JSON data, or an iterable of them")

    def ask(states: Iterable[Any], first: int = 0) -> Iterator[DecisionOutput]:
        return decider.decide(states, made, first)

    if output is None or is_one:
        return shaped(state, is_one, ask, "deciding" if use_tqdm else None)
    run = fingerprint([str(decider.tokenizer.path), made.settings])
    return shaped(
        state, False, lambda states: logged(states, ask, Path(output), run, DecisionOutput.from_dict), "deciding" if use_tqdm else None
    )


def score(decider: Decider, prompt: Any, choices: Any, use_tqdm: bool, output: str | Path | None) -> Any:
    """See `LLM.score`."""
    is_one = choices is not None and (
        isinstance(prompt, str) or (isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], int))
    )
    needed = (
        "an iterable of (prompt, choices), as there are no choices," if choices is None else "a text, token ids, or an iterable of them"
    )
    items = () if is_one else _iterable(prompt, "prompt", needed)
    pairs = (prompt, choices) if is_one else items if choices is None else _with_choices(items, choices)
    if output is None or is_one:
        return shaped(pairs, is_one, decider.score, "scoring" if use_tqdm else None)
    run = fingerprint([str(decider.tokenizer.path), choices])
    return shaped(
        pairs, False, lambda items: logged(items, decider.score, Path(output), run, ScoreOutput.from_dict), "scoring" if use_tqdm else None
    )


def _with_choices(prompts: Iterable[Any], choices: Any) -> Any:
    pairs = ((prompt, choices) for prompt in prompts)
    return list(pairs) if isinstance(prompts, Sequence) else pairs


def loglikelihood(decider: Decider, pairs: Any, use_tqdm: bool, output: str | Path | None) -> Any:
    """See `LLM.loglikelihood`."""
    run = fingerprint([str(decider.tokenizer.path), "log likelihoods"])

    def score_pairs(items: Iterable[Any], _first: int = 0) -> Iterator[Loglikelihood]:
        return decider.loglikelihood(items)

    def log_pairs(items: Iterable[Any]) -> Iterator[Loglikelihood]:
        return score_pairs(items) if output is None else logged(items, score_pairs, Path(output), run, Loglikelihood.from_dict)

    pairs = _iterable(pairs, "pairs", "an iterable of (context, continuation)")
    return shaped(pairs, False, log_pairs, "scoring" if use_tqdm else None)


def rank(
    decider: Decider, query: Any, documents: Any, top_n: int | None, instructions: str | None, prompt_template: str | Path | None
) -> list[Ranked]:
    """See `LLM.rank`. Equals stay in the order given."""
    if not isinstance(query, str):
        raise DecisionError(f"query is {query!r}: a text is needed")
    if top_n is not None and top_n < 0:
        raise DecisionError(f"top_n is {top_n}: a number of documents is needed")
    documents = list(_iterable(documents, "documents", "an iterable of texts"))
    scores = decider.rank(query, documents, instructions, prompt_template)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [Ranked(i, documents[i], scores[i]) for i in order[:top_n]]


def logged(
    items: Iterable[Any],
    run_items: Callable[[Iterable[Any], int], Iterator[L]],
    path: Path,
    run: str,
    read: Callable[[int, dict[str, Any]], L],
) -> Iterator[L]:
    """Results of all items; those a log has already are read from it, the others are appended as they come. run_items: gets the other
    items and the place of their first."""
    log = ResultLog(path, run)
    try:
        done, source = log.num_done, iter(items)
        for i, record in enumerate(itertools.islice(log.records(), done)):
            next(source, None)
            yield read(i, record)
        for result in run_items(source, done):
            log.append(result.to_dict())
            yield result
    finally:
        log.close()
