"""What `LLM.decide`, `score`, `loglikelihood` and `rank` do; their signatures are there, their work is here."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
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

    def decide(self, states: Iterable[Any], questions: QuestionSet) -> Iterator[DecisionOutput]:
        """One output per state, in order; a state that cannot be asked about has its error there."""
        jobs = (_decide_job(questions, i, *pair) for i, pair in enumerate(self._encoded(states)))
        results = JobDriver(self.engine).run(jobs)
        return (DecisionOutput(i, error=str(r)) if isinstance(r, ValueError) else r for i, r in enumerate(results))

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
    def score(self, prompts: Iterable[tuple[Any, Any]]) -> Iterator[ScoreOutput]:
        """prompts: (prompt, choices). A pair that cannot be scored has its error in its place."""
        jobs = (_score_job(self.splicer, i, pair, self.limit) for i, pair in enumerate(prompts))
        return (ScoreOutput(i, error=str(r)) if isinstance(r, ValueError) else r for i, r in enumerate(JobDriver(self.engine).run(jobs)))

    def loglikelihood(self, pairs: Iterable[tuple[Any, Any]]) -> Iterator[Loglikelihood]:
        """pairs: (context, continuation), texts or token ids; neighbours with the same context share it. Raises ValueError."""
        tokens = map(self.continuation_tokens, pairs)
        grouped = (list(group) for _, group in itertools.groupby(tokens, key=lambda pair: pair[0]))
        for result in JobDriver(self.engine).run(loglikelihood_job(group, self.limit) for group in grouped):
            if isinstance(result, ValueError):
                raise result
            yield from result

    def continuation_tokens(self, pair: tuple[Any, Any]) -> tuple[list[int], list[int]]:
        """(context ids with <bos>, continuation ids). Blanks at a context's end belong to the continuation, as lm-eval has it: there
        the tokenizer puts them."""
        context, continuation = pair
        bos = self.tokenizer.bos_token_id
        if not isinstance(context, str) or not isinstance(continuation, str):
            if isinstance(context, str) or isinstance(continuation, str):
                raise DecisionError("context and continuation must both be texts, or both token ids")
            return list(context), list(continuation)
        context = self.tokenizer.without_bos(context)
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        ids = self.splicer.encode(kept)
        whole = self.splicer.join(kept, ids, continuation, self.splicer.encode(continuation))
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
    return (yield from score_job(splicer, index, pair[0], pair[1], limit))


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


def ranked(documents: Sequence[str], scores: Sequence[float], top_n: int | None) -> list[Ranked]:
    """Most relevant first; equals in the order given."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [Ranked(i, documents[i], scores[i]) for i in order[: len(order) if top_n is None else top_n]]


# ------------------------------------------------------------------------------------------------------ LLM's methods
def decide(decider: Decider, state: Any, questions: Any, use_tqdm: bool, output: str | Path | None, options: dict[str, Any]) -> Any:
    """See `LLM.decide`."""
    made = questions if isinstance(questions, QuestionSet) else decider.question_set(questions, **options)
    is_one = isinstance(state, (str, Mapping))
    run = fingerprint({"questions": [asdict(q) for q in made.questions], "options": options})

    def ask(states: Iterable[Any]) -> Iterator[DecisionOutput]:
        return decider.decide(states, made)

    if output is None or is_one:
        return shaped(state, is_one, ask, "deciding" if use_tqdm else None)
    return shaped(
        state, False, lambda states: logged(states, ask, Path(output), run, DecisionOutput.from_dict), "deciding" if use_tqdm else None
    )


def score(decider: Decider, prompt: Any, choices: Any, use_tqdm: bool, output: str | Path | None) -> Any:
    """See `LLM.score`."""
    is_one = choices is not None and (
        isinstance(prompt, str) or (isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], int))
    )
    pairs = (prompt, choices) if is_one else prompt if choices is None else _with_choices(prompt, choices)
    if output is None or is_one:
        return shaped(pairs, is_one, decider.score, "scoring" if use_tqdm else None)
    run = fingerprint({"choices": choices})
    return shaped(
        pairs, False, lambda items: logged(items, decider.score, Path(output), run, ScoreOutput.from_dict), "scoring" if use_tqdm else None
    )


def _with_choices(prompts: Iterable[Any], choices: Any) -> Any:
    pairs = ((prompt, choices) for prompt in prompts)
    return list(pairs) if isinstance(prompts, Sequence) else pairs


def loglikelihood(decider: Decider, pairs: Any, use_tqdm: bool) -> Any:
    """See `LLM.loglikelihood`."""
    return shaped(pairs, False, decider.loglikelihood, "scoring" if use_tqdm else None)


def logged(
    items: Iterable[Any], run_items: Callable[[Iterable[Any]], Iterator[T]], path: Path, run: str, read: Callable[[int, dict[str, Any]], T]
) -> Iterator[T]:
    """Results of all items; those a log has already are read from it, the others are appended as they come."""
    log = ResultLog(path, run)
    try:
        done, source = log.num_done, iter(items)
        for i, record in enumerate(itertools.islice(log.records(), done)):
            next(source, None)
            yield read(i, record)
        for i, result in enumerate(run_items(source), start=done):
            result.index = i  # pyright: ignore[reportAttributeAccessIssue]
            log.append(result.to_dict())  # pyright: ignore[reportAttributeAccessIssue]
            yield result
    finally:
        log.close()
