"""/v1/decisions, /v1/systemone, /v1/score, /generative_scoring and /v1/rerank: work that reads prompts and samples nothing."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from lastrow.core.output import Logprob
from lastrow.decisions.plan import Job, QuestionSet, Read, Unit
from lastrow.decisions.prompts import PromptWriter
from lastrow.decisions.questions import DecisionError, content_text, parse_questions
from lastrow.decisions.results import Answer, Calibration, DecisionOutput, softmax
from lastrow.decisions.scoring import Ranker, label_tokens_job, score_job
from lastrow.decisions.splice import Splicer
from lastrow.server import wire
from lastrow.server.async_engine import RequestRejected
from lastrow.server.decision_protocol import (
    DecisionRequest,
    PrefillRequest,
    RerankRequest,
    ScoreRequest,
    SystemOneRequest,
    decision_input,
    systemone_question,
)
from lastrow.server.http import json_response, while_connected
from lastrow.server.state import ApiError, ServerState, new_id
from lastrow.tokenizer import LONG_TEXT

T = TypeVar("T")
MAX_SETS = 64  # question sets kept ready
MAX_ITEMS = 1024  # items or documents of one request


class DecisionService:
    """The parts that decisions need beside one engine in another process."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self.splicer = Splicer(state.tokenizer)
        self._sets: OrderedDict[str, QuestionSet] = OrderedDict()

    async def run(self, request: PrefillRequest, make: Callable[[], Job[T]], size: int) -> T:
        """Runs a job of about `size` characters for a request. Raises ApiError."""
        state = self.state
        reason = "abort"
        usage = [0]
        with state.admitted():
            try:
                result = await self._drive(make, request, size >= LONG_TEXT, usage)
                reason = "stop"
                return result
            except RequestRejected as error:
                raise ApiError(400, str(error)) from None
            finally:
                state.metrics.request_started(usage[0])
                state.metrics.request_finished(reason, 0, 0, None)

    async def _drive(self, make: Callable[[], Job[T]], request: PrefillRequest, is_long: bool, usage: list[int]) -> T:
        job: list[Job[T]] = []

        def advance(reads: list[Read] | None) -> tuple[list[Unit], T | None]:
            try:
                if reads is None:
                    job.append(make())
                    return next(job[0]), None
                return job[0].send(reads), None
            except StopIteration as end:
                return [], end.value

        # Tokenizing long texts leaves the event loop, as elsewhere.
        units, result = await asyncio.to_thread(advance, None) if is_long else advance(None)
        while units:
            usage[0] += sum(unit.num_own_tokens for unit in units)
            units, result = advance(await self._read(units, request))
        assert result is not None, "a job ends with its result"
        return result

    async def _read(self, units: list[Unit], request: PrefillRequest) -> list[Read]:
        prefix, now = new_id("read-"), time.monotonic()
        salt = request.cache_salt or getattr(request, "prompt_cache_key", None)
        adds = [
            wire.Add(
                f"{prefix}-{i}", unit.prompt_token_ids, unit.params, now, request.priority, salt,
                None if unit.prompt_rows is None else list(unit.prompt_rows),
                None if unit.label_token_ids is None else list(unit.label_token_ids),
                None if unit.parent is None else f"{prefix}-{unit.parent}", unit.fork_num_tokens,
            )
            for i, unit in enumerate(units)
        ]  # fmt: skip
        return [_as_read(outputs) for outputs in await self.state.engine.read(adds)]

    # -------------------------------------------------------------------------------------------------- question sets
    async def question_set(
        self, request: PrefillRequest, questions: list[dict[str, Any]], system: list[str], *, mass: bool, diagnostics: bool,
        truncate: Any, calibration: Mapping[str, Any] | None,
    ) -> QuestionSet:  # fmt: skip
        """Questions made ready, kept for the next request that asks the same. Raises DecisionError."""
        instructions = "\n\n".join([*([request.instructions] if request.instructions else []), *system]) or None
        kwargs = {**self.state.settings.default_chat_template_kwargs, **(request.chat_template_kwargs or {})}
        key = json.dumps([questions, instructions, kwargs, mass, diagnostics, truncate, calibration], default=str)
        made = self._sets.get(key)
        if made is None:
            writer = PromptWriter(self.state.tokenizer, chat_template_kwargs=kwargs)
            made = QuestionSet(
                writer, self.splicer, parse_questions(questions), max_model_len=self.state.max_model_len, instructions=instructions,
                label_mass=mass, diagnostics=diagnostics, truncate=truncate, calibration=Calibration.of(calibration),
            )  # fmt: skip
            if made.calibration.prior:
                made.priors = await self.run(request, made.prior_job, 0)
            self._sets[key] = made
            while len(self._sets) > MAX_SETS:
                self._sets.popitem(last=False)
        self._sets.move_to_end(key)
        return made

    def ranker(self, request: PrefillRequest) -> Ranker:
        writer = PromptWriter(self.state.tokenizer, name="rank", chat_template_kwargs=request.chat_template_kwargs)
        return Ranker(writer, self.splicer, self.state.max_model_len, request.instructions)


def _as_read(outputs: list[wire.Output]) -> Read:
    labels: dict[int, tuple[list[float], float | None]] = {}
    logprobs: dict[int, dict[int, Logprob]] = {}
    for output in outputs:
        labels.update(output.label_logits or {})
        for at, entries in (output.prompt_logprobs or {}).items():
            logprobs[at] = {token: Logprob(value, rank) for token, value, rank in entries}
    tokens = [token for output in outputs for token in output.token_ids]
    return Read(labels, logprobs, tokens, outputs[-1].num_cached_tokens if outputs else 0)


# ------------------------------------------------------------------------------------------------------ answers
def decision_answer(answer: Answer, diagnostics: bool) -> dict[str, Any]:
    """As openai-python types it; with diagnostics, label_mass and argmax_is_label besides."""
    data: dict[str, Any] = {"type": answer.type, "name": answer.name}
    if answer.type == "predicate":
        data["probability"] = answer.probability
    else:
        entries = zip(answer.values, answer.texts, answer.probabilities, strict=True)
        if answer.type == "choice":
            data |= {"choice": answer.values[answer.best], "probabilities": [{"value": v, "probability": p} for v, _, p in entries]}
        else:
            data |= {"score": answer.score, "probabilities": [{"value": v, "label": t, "probability": p} for v, t, p in entries]}
        data["confidence"] = answer.confidence
    if diagnostics:
        data |= {"label_mass": answer.label_mass, "argmax_is_label": answer.argmax_is_label}
    return data | ({"abstained": True} if answer.abstained else {})


def systemone_answer(answer: Answer) -> dict[str, Any]:
    """As vLLM has it: confidence is the chosen option's probability over the whole vocabulary, its share of the labels times
    label_mass."""
    confidence = answer.confidence * (answer.label_mass or 0.0)
    if answer.type == "predicate":
        chances = dict(zip(("yes", "no"), answer.probabilities, strict=True))
        return {"type": "noul", "noul": answer.probability, "probabilities": chances, "confidence": confidence}
    if answer.type == "choice":
        chances = dict(zip(answer.values, answer.probabilities, strict=True))
        return {"type": "choice", "choice": answer.values[answer.best], "probabilities": chances, "confidence": confidence}
    return {
        "type": "score",
        "score": answer.score,
        "legend": {str(i): text for i, text in enumerate(answer.texts)},
        "probabilities": {str(i): p for i, p in enumerate(answer.probabilities)},
        "confidence": confidence,
    }


def _decision_usage(output: DecisionOutput) -> dict[str, Any]:
    tokens = output.num_prompt_tokens
    return {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": tokens - output.num_cached_tokens},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens,
    }


def _usage(tokens: int, cached: int) -> dict[str, Any]:
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}


# ------------------------------------------------------------------------------------------------------ endpoints
async def decisions(service: DecisionService, request: DecisionRequest) -> dict[str, Any]:
    text, system = decision_input(request.input)
    made = await service.question_set(
        request, request.questions, system, mass=False, diagnostics=request.diagnostics, truncate=request.truncate,
        calibration=request.calibration,
    )  # fmt: skip
    output = await service.run(request, lambda: made.job(0, text), len(text))
    model = request.model or service.state.model_name
    answers = [decision_answer(answer, request.diagnostics) for answer in output.answers]
    return {"object": "decision", "model": model, "answers": answers, "usage": _decision_usage(output)}


async def systemone(service: DecisionService, request: SystemOneRequest) -> dict[str, Any]:
    text = content_text(request.state, "state")
    questions = [systemone_question(name, spec) for name, spec in request.questions.items()]
    made = await service.question_set(
        request, questions, [], mass=True, diagnostics=True, truncate=request.truncate, calibration=request.calibration
    )  # fmt: skip
    output = await service.run(request, lambda: made.job(0, text), len(text))
    return {
        "id": request.request_id or new_id("decision-"),
        "object": "structured_decision",
        "created": int(time.time()),
        "model": request.model or service.state.model_name,
        "answers": {answer.name: systemone_answer(answer) for answer in output.answers},
        "usage": {"input_tokens": output.num_prompt_tokens, "output_tokens": 0},
        "diagnostics": {a.name: {"label_mass": a.label_mass, "argmax_is_label": a.argmax_is_label} for a in output.answers},
    }


async def score(service: DecisionService, request: ScoreRequest, generative: bool = False) -> dict[str, Any]:
    """generative: vLLM's /generative_scoring, whose score is the first label's."""
    form, model = request.form(), request.model or service.state.model_name
    head: dict[str, Any] = {"id": new_id("score-"), "object": "list", "created": int(time.time()), "model": model}
    if form == "choices":
        prompt, choices = request.prompt or "", request.choices or []
        for name, ids in (("prompt", [prompt]), ("choices", choices)):
            for given in ids:
                service.state.check_ids(name, () if isinstance(given, str) else given)
        made = await service.run(request, lambda: score_job(service.splicer, 0, prompt, choices, service.state.max_model_len), len(prompt))
        rows = zip(made.choices, made.logprobs, made.probabilities, made.num_tokens, strict=True)
        data = [
            {"index": i, "object": "score", "choice": c, "logprob": log, "probability": p, "num_tokens": n, "score": p}
            for i, (c, log, p, n) in enumerate(rows)
        ]
        return {**head, "data": data, "usage": _usage(made.num_prompt_tokens, made.num_cached_tokens)}
    if form == "pairs":
        data, tokens, cached = [], 0, 0
        for query, documents in request.pairs():
            scores, used, hit = await _rank(service, request, query, documents)
            data += [{"index": len(data) + i, "object": "score", "score": value} for i, value in enumerate(scores)]
            tokens, cached = tokens + used, cached + hit
        return {**head, "data": data, "usage": _usage(tokens, cached)}
    return await _score_items(service, request, head, generative)


async def _score_items(service: DecisionService, request: ScoreRequest, head: dict[str, Any], generative: bool) -> dict[str, Any]:
    items, labels, query = request.items or [], request.label_token_ids or [], request.query or ""
    _need_count("items", len(items))
    for name, ids in (("label_token_ids", labels), ("query", query), *(("items", item) for item in items)):
        service.state.check_ids(name, () if isinstance(ids, str) else ids)
    logs, tokens, cached = await service.run(
        request, lambda: label_tokens_job(service.splicer, query, items, labels, request.item_first, service.state.max_model_len),
        len(query) + sum(map(len, items)),
    )  # fmt: skip
    if generative:
        data = [{"index": i, "object": "score", "score": softmax(row)[0]} for i, row in enumerate(logs)]
        return {**head, "data": data, "usage": _usage(tokens, cached)}
    scores = [softmax(row) if request.apply_softmax else [math.exp(log) for log in row] for row in logs]
    return {**head, "object": "scoring", "scores": scores, "usage": _usage(tokens, cached)}


async def _rank(service: DecisionService, request: PrefillRequest, query: str, documents: list[str]) -> tuple[list[float], int, int]:
    _need_count("documents", len(documents))
    ranker, size = service.ranker(request), len(query) + sum(map(len, documents))
    return await service.run(request, lambda: ranker.job(query, documents), size)


async def rerank(service: DecisionService, request: RerankRequest) -> dict[str, Any]:
    documents = request.texts()
    scores, tokens, cached = await _rank(service, request, request.query, documents)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order[: request.top_n or None]]
    if request.return_documents:
        results = [{**result, "document": {"text": documents[result["index"]]}} for result in results]
    return {
        "id": new_id("rerank-"),
        "model": request.model or service.state.model_name,
        "usage": _usage(tokens, cached),
        "results": results,
    }


def _need_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_ITEMS:
        raise DecisionError(f"{name} has {count} entries: 1 to {MAX_ITEMS} are needed")


def add_routes(routes: APIRouter, state: ServerState) -> None:
    service = DecisionService(state)

    async def answer(http: Request, request: Any, work: Callable[..., Coroutine[Any, Any, Any]], **more: Any) -> Response:
        state.check(request)
        return json_response(await while_connected(http.receive, work(service, request, **more)))

    @routes.post("/v1/decisions")
    async def _(request: DecisionRequest, http: Request) -> Response:
        return await answer(http, request, decisions)

    @routes.post("/v1/systemone")
    async def _(request: SystemOneRequest, http: Request) -> Response:
        return await answer(http, request, systemone)

    @routes.post("/score")
    @routes.post("/v1/score")
    async def _(request: ScoreRequest, http: Request) -> Response:
        return await answer(http, request, score)

    @routes.post("/generative_scoring")
    async def _(request: ScoreRequest, http: Request) -> Response:
        return await answer(http, request, score, generative=True)

    @routes.post("/rerank")
    @routes.post("/v1/rerank")
    @routes.post("/v2/rerank")
    async def _(request: RerankRequest, http: Request) -> Response:
        return await answer(http, request, rerank)
