"""What all endpoints share: settings, the engine, admission, and errors in OpenAI's envelope."""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.structured_output import GrammarBackend
from lastrow.server import wire
from lastrow.server.async_engine import AsyncEngine, EngineDeadError, RequestRejected
from lastrow.server.chat import ChatPlanner
from lastrow.server.generation import Choice
from lastrow.server.metrics import ServerMetrics
from lastrow.tokenizer import LONG_TEXT, Tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class ServerSettings:
    """Options of the HTTP side; `lastrow serve --help` says what each is for."""

    served_model_name: tuple[str, ...] = ("tiny-e",)
    api_key: tuple[str, ...] = ()
    max_queued_requests: int = 1024
    max_body_bytes: int = 32 * 2**20
    enable_timings_report: bool = False
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    generation_config: str = "auto"
    restart_engine: bool = False
    step_timeout: float = 120.0


class ApiError(Exception):
    """An answer other than 200. kind: vLLM's error types."""

    def __init__(
        self, status: int, message: str, kind: str | None = None, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError"}.get(status, "InternalServerError")
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        # A message may quote what the client sent, which need not be Unicode.
        message = str(self).encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.status}}


def as_api_error(error: Exception) -> ApiError:
    """What a client is told. Whatever is not the request's fault is a 500 without its insides."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), "EngineDeadError")
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    return ApiError(500, f"the server failed on this request ({type(error).__name__})")


class ServerState:
    """One server. tokenizer: of the checkpoint; vocab_size: of the model."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, vocab_size: int, settings: ServerSettings) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.vocab_size = vocab_size
        self.metrics = ServerMetrics(settings.served_model_name[0])
        self.defaults: dict[str, Any] = {}
        if settings.generation_config == "auto":
            self.defaults = {k: v for k, v in tokenizer.generation_config.items() if v is not None}
            if self.defaults.get("do_sample") is False:
                self.defaults["temperature"] = 0.0
        self.grammars = GrammarBackend(tokenizer, vocab_size)
        self.planner = ChatPlanner(
            tokenizer, self.grammars, self.defaults, settings.default_chat_template_kwargs, settings.chat_template
        )  # fmt: skip
        self.draining = False
        self.started = int(time.time())
        self.num_active = 0
        self._mean_seconds = 1.0
        engine.on_stats = self.metrics.take_stats

    # ------------------------------------------------------------------------------------------------ before a request
    @property
    def model_name(self) -> str:
        return self.settings.served_model_name[0]

    @property
    def max_model_len(self) -> int:
        return self.engine.ready.max_model_len if self.engine.ready else 0

    @property
    def unhealthy(self) -> str | None:
        """Why requests cannot be taken; None when they can."""
        if self.engine.death is not None:
            return self.engine.death
        if self.draining:
            return "the server is shutting down"
        return None if self.engine.is_ready else "the engine is starting"

    def check(self, request: Any) -> None:
        """What every generating endpoint asks first. Raises ApiError."""
        if request.model is not None and request.model not in self.settings.served_model_name:
            names = ", ".join(self.settings.served_model_name)
            raise ApiError(404, f"the model {request.model!r} is not served here: {names}", param="model")
        if getattr(request, "chat_template", None) is not None and not self.settings.trust_request_chat_template:
            raise ApiError(400, "chat_template in a request needs --trust-request-chat-template", param="chat_template")
        if (why := self.unhealthy) is not None:
            raise ApiError(503, why, "ServiceUnavailableError", retry_after=1)

    def check_queue(self, count: int = 1) -> None:
        """Refuse `count` more completions where they would only wait. One request that is larger than the queue is taken when nothing
        else is there. Raises ApiError 429 with Retry-After."""
        running = self.engine.ready.max_num_seqs if self.engine.ready else 1
        limit = running + self.settings.max_queued_requests
        if self.num_active + min(count, limit) > limit:
            self.metrics.request_refused(429)
            wait = max(1, min(60, round(self._mean_seconds * (self.num_active / max(1, running) - 1))))
            raise ApiError(
                429,
                f"{self.num_active} completions run or wait, at most {limit} may (--max-num-seqs and --max-queued-requests)",
                retry_after=wait,
            )

    @contextmanager
    def admitted(self, count: int = 1) -> Iterator[None]:
        """Places for `count` completions. Checked where they are taken: requests that arrive together see each other. Raises ApiError."""
        self.check_queue(count)
        self.num_active += count
        try:
            yield
        finally:
            self.num_active -= count

    async def prepare(self, make: Callable[[], T], size: int) -> T:
        """What `make` returns: made in a thread where it reads a text of so many characters that everybody else would wait for it."""
        return make() if size < LONG_TEXT else await asyncio.to_thread(make)

    def check_room(self, num_chars: int, num_messages: int = 0) -> None:
        """Refuse what has too many tokens however it is read, before anybody reads it. Raises ApiError."""
        least = max(num_messages, num_chars // self.tokenizer.max_token_chars)
        if self.max_model_len and least >= self.max_model_len:
            raise ApiError(400, f"the prompt has at least {least} tokens, max_model_len is {self.max_model_len}")

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Tokens of a prompt: one <bos> in front, unless add_special_tokens is False and the text begins with none."""
        return self.tokenizer.encode(text, add_special_tokens is not False or text.startswith(self.tokenizer.bos_token))

    def last_tokens(self, ids: list[int], keep: int | None) -> list[int]:
        """truncate_prompt_tokens: the last `keep` tokens of a text; its <bos> is one of them. None: all."""
        if keep is None or len(ids) <= keep:
            return ids
        bos = [self.tokenizer.bos_token_id] if ids[0] == self.tokenizer.bos_token_id else []
        return [*bos, *ids[len(ids) - keep + len(bos) :]]

    def check_ids(self, name: str, ids: Any) -> None:
        if not ids:
            return
        with suppress(OverflowError):  # as C ints in a third of the time that min and max take
            if np.frombuffer(array("I", ids), np.uint32).max() < self.vocab_size:
                return
        wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
        raise ApiError(400, f"{name} holds {wrong}: token ids from 0 to {self.vocab_size - 1} are needed", param=name)

    def check_params(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Ids that the vocabulary does not have are refused before anything runs."""
        self.check_ids("prompt", prompt_ids)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
            self.check_ids(name, getattr(params, name))

    # ------------------------------------------------------------------------------------------------ a request
    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        choices: Sequence[Choice],
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[list[wire.Output]]:
        """Outputs of all n completions, which the reader puts into `choices`, for what has passed check_params. Raises ApiError. Leaving
        early aborts."""
        began = time.monotonic()
        rejected = False
        try:
            self.metrics.request_started(len(prompt_ids))
            add = wire.Add(request_id, prompt_ids, params, began, priority or 0, cache_salt)
            async with aclosing(self.engine.generate(add, params.n)) as steps:
                async for outputs in steps:
                    yield outputs
            self._mean_seconds += 0.1 * (time.monotonic() - began - self._mean_seconds)
        except (RequestRejected, EngineDeadError, ApiError) as error:
            rejected = not isinstance(error, EngineDeadError)
            raise as_api_error(error) from None
        finally:
            for i, choice in enumerate(() if rejected else choices):
                cached = choice.num_cached_tokens if i == 0 else 0
                timings = choice.timings if choice.finished else None
                self.metrics.request_finished(choice.finish_reason or "abort", len(choice.token_ids), cached, timings)


def new_id(prefix: str) -> str:
    """prefix: with its separator, as OpenAI writes it (chatcmpl-, resp_)."""
    return f"{prefix}{uuid.uuid4().hex}"
