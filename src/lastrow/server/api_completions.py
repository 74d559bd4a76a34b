"""/v1/completions: raw prompts, one or several, with echo and logprobs."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.structured_output import StructuredOutputsParams
from lastrow.server import wire
from lastrow.server.concurrent import merged, together
from lastrow.server.generation import LogprobWriter, TextChoice, outputs_by_choice, timings, usage
from lastrow.server.http import EventStream, event, json_response, while_connected
from lastrow.server.protocol import CompletionRequest
from lastrow.server.state import ApiError, ServerState, new_id

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024


class PromptRun:
    """One prompt of a request with its n choices. first_index: of its first choice in the response."""

    def __init__(
        self, state: ServerState, request: CompletionRequest, prompt_ids: list[int], params: SamplingParams, first_index: int
    ) -> None:
        self.state = state
        self.request = request
        self.prompt_ids = prompt_ids
        self.params = params
        self.prompt_logprobs: dict[int, list[wire.TokenLogprob]] = {}
        self._first_index = first_index
        self.choices = [
            TextChoice(
                first_index + i, state.tokenizer, prompt_ids, params.skip_special_tokens, params.stop or (),
                params.include_stop_str_in_output, params.min_tokens,
            )
            for i in range(params.n)
        ]  # fmt: skip

    async def steps(self, request_id: str) -> AsyncGenerator[tuple[TextChoice, str, wire.Output]]:
        outputs = self.state.generate(
            self.prompt_ids, self.params, request_id, self.choices, self.request.priority, self.request.cache_salt
        )  # fmt: skip
        async with aclosing(outputs_by_choice(outputs, self.choices, self.prompt_logprobs)) as steps:
            async for choice, output in steps:
                yield choice, choice.take(output), output

    async def run(self, request_id: str) -> None:
        async with aclosing(self.steps(request_id)) as steps:
            async for _ in steps:
                pass

    @property
    def prompt_text(self) -> str:
        """What an echo shows: the prompt without the <bos> that was put in front."""
        ids = self.prompt_ids[1:] if self.prompt_ids[:1] == [self.state.tokenizer.bos_token_id] else self.prompt_ids
        return self.state.tokenizer.decode(ids, skip_special_tokens=False)

    def prompt_entries(self) -> list[list[wire.TokenLogprob] | None]:
        return [self.prompt_logprobs.get(i) for i in range(len(self.prompt_ids))]


class CompletionRun:
    """All prompts of one request."""

    def __init__(self, state: ServerState, request: CompletionRequest, prompts: list[list[int]]) -> None:
        self.state = state
        self.request = request
        self.id = request.request_id or new_id("cmpl-")
        self.created = int(time.time())
        self.writer = LogprobWriter(state.tokenizer, bool(request.return_tokens_as_token_ids))
        params = self._params()
        self.prompts = [PromptRun(state, request, ids, params, i * params.n) for i, ids in enumerate(prompts)]
        for prompt in self.prompts:
            state.check_params(prompt.prompt_ids, params)

    def _params(self) -> SamplingParams:
        request = self.request
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        fixed: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": self._num_logprobs}
        if request.stream and request.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs come with whole answers only: leave out stream", param="prompt_logprobs")
        if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
            fixed["prompt_logprobs"] = request.logprobs
        if request.echo and max_tokens == 0 and request.logprobs is None and request.prompt_logprobs is None:
            fixed["prompt_logprobs"] = 0
        if request.suffix:
            raise ApiError(400, "suffix is not supported: this model does not fill in the middle", param="suffix")
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise ApiError(400, f"best_of is {request.best_of}: only n ({request.n or 1}) completions are made", param="best_of")
        constraint = request.constraint()
        if constraint:
            if request.allowed_token_ids is not None:
                raise ValueError("allowed_token_ids cannot stand beside a structured output: the grammar says what is allowed")
            structured = StructuredOutputsParams.of(constraint)
            self.state.grammars.validate(structured)
            fixed |= {"structured_outputs": structured, "min_tokens": 0}
        return request.sampling_params(self.state.defaults, **fixed)

    @property
    def _num_logprobs(self) -> int | None:
        """Logprobs of exactly these ids are logprobs that were asked for."""
        return 0 if self.request.logprobs is None and self.request.logprob_token_ids else self.request.logprobs

    @property
    def _choices(self) -> list[TextChoice]:
        return [choice for prompt in self.prompts for choice in prompt.choices]

    async def answer(self) -> dict[str, Any]:
        with self.state.admitted(len(self._choices)):
            await together([prompt.run(f"{self.id}-{i}") for i, prompt in enumerate(self.prompts)])
        body = self._envelope([self._whole(prompt, choice) for prompt in self.prompts for choice in prompt.choices])
        body["usage"] = self.usage()
        if self.state.settings.enable_timings_report and len(self.prompts) == 1:
            body["timings"] = timings(len(self.prompts[0].prompt_ids), self._choices)
        return body

    def usage(self) -> dict[str, Any]:
        return usage(sum(len(prompt.prompt_ids) for prompt in self.prompts), self._choices)

    def _whole(self, prompt: PromptRun, choice: TextChoice) -> dict[str, Any]:
        request, text = self.request, choice.text
        entries: list[list[wire.TokenLogprob] | None] = list(choice.logprobs)
        ids = choice.token_ids
        if request.echo:
            text = prompt.prompt_text + text
            entries, ids = prompt.prompt_entries() + entries, prompt.prompt_ids + ids
        made: dict[str, Any] = {"index": choice.index, "text": text, "logprobs": None}
        if self._num_logprobs is not None:
            made["logprobs"] = self.writer.completion(entries, ids[: len(entries)], self._num_logprobs, 0)
        if request.prompt_logprobs is not None:
            made["prompt_logprobs"] = [None if e is None else self.writer.prompt(e) for e in prompt.prompt_entries()]
        if request.return_token_ids:
            made |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt.prompt_ids}
        return {**made, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    # ------------------------------------------------------------------------------------------------ streams
    async def events(self) -> AsyncGenerator[bytes]:
        with self.state.admitted(len(self._choices)):
            async with aclosing(merged([self._events(prompt, i) for i, prompt in enumerate(self.prompts)])) as events:
                async for item in events:
                    yield item
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield event({**self._envelope([]), "usage": self.usage()})

    async def _events(self, prompt: PromptRun, number: int) -> AsyncGenerator[bytes]:
        echoed: set[int] = set()
        async with aclosing(prompt.steps(f"{self.id}-{number}")) as steps:
            async for choice, text, output in steps:
                first = bool(self.request.echo) and choice.index not in echoed
                if output.token_ids or choice.finished:
                    if first:
                        echoed.add(choice.index)
                    yield event(self._chunk(prompt, choice, text, output, first))

    def _chunk(self, prompt: PromptRun, choice: TextChoice, text: str, output: wire.Output, echo: bool) -> dict[str, Any]:
        entries: list[list[wire.TokenLogprob] | None] = list(output.logprobs or ())
        ids = output.token_ids
        offset = len(choice.text) - len(text)
        if echo:
            text = prompt.prompt_text + text
            entries, ids = prompt.prompt_entries() + entries, prompt.prompt_ids + ids
        made: dict[str, Any] = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": choice.finish_reason}
        if self._num_logprobs is not None:
            made["logprobs"] = self.writer.completion(entries, ids[: len(entries)], self._num_logprobs, offset)
        if choice.finished:
            made["stop_reason"] = choice.stop_reason
        if self.request.return_token_ids:
            made["token_ids"] = output.token_ids
        body = self._envelope([made])
        if self.request.stream_options is not None and self.request.stream_options.continuous_usage_stats:
            body["usage"] = self.usage()
        if choice.finished and self.state.settings.enable_timings_report and all(c.finished for c in prompt.choices):
            body["timings"] = timings(len(prompt.prompt_ids), prompt.choices)
        return body

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        model = self.request.model or self.state.model_name
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": model, "choices": choices}


async def prompt_ids(state: ServerState, request: CompletionRequest) -> list[list[int]]:
    """Texts get exactly one <bos> (of their own or none where add_special_tokens is false); lists of ids are taken as they are.

    truncate_prompt_tokens keeps the last tokens, and the <bos> of a text. Raises ApiError."""
    prompt = request.prompt
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    else:
        prompts = [prompt] if prompt and isinstance(prompt[0], int) else list(prompt)
    if not prompts or len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"prompt holds {len(prompts)} prompts: 1 to {MAX_PROMPTS} are needed", param="prompt")
    keep = request.truncate_prompt_tokens
    texts = [p for p in prompts if isinstance(p, str)]
    for text in texts if keep is None else ():
        state.check_room(len(text))

    def encode(prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return state.last_tokens(state.encode(prompt, request.add_special_tokens), keep)
        return prompt if keep is None else prompt[-keep:]

    all_ids = await state.prepare(lambda: [encode(p) for p in prompts], sum(map(len, texts)))
    if any(not ids for ids in all_ids):
        raise ApiError(400, "a prompt is empty: at least one token is needed", param="prompt")
    return all_ids


def add_routes(routes: APIRouter, state: ServerState) -> None:
    @routes.post("/v1/completions")
    async def completions(request: CompletionRequest, http: Request) -> Response:
        state.check(request)
        state.check_queue(request.n or 1)
        run = CompletionRun(state, request, await prompt_ids(state, request))
        if request.stream:
            return EventStream(run.events())
        return json_response(await while_connected(http.receive, run.answer()))
