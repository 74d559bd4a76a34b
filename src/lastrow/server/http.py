"""ASGI parts: server-sent events that end with their client, and what stands before every endpoint."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lastrow.server.state import ApiError, as_api_error

T = TypeVar("T")
encode_json = msgspec.json.Encoder().encode
OPEN_PATHS = ("/health", "/ping", "/version", "/metrics", "/")


class ClientGone(Exception):
    """The client has closed the connection; there is nobody to answer."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return json_response(error.body(), error.status, headers)


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    return (b"" if name is None else b"event: " + name.encode() + b"\n") + b"data: " + encode_json(value) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes. Raises ClientGone then. It runs in the caller's task, as with
    asyncio.timeout: a task of its own for every request would cost more than watching for the client."""
    task, gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher, others = asyncio.create_task(watch()), task.cancelling()
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() <= others:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()


class EventStream(Response):
    """Sends `events` as they come. Headers go out with the first one, so an error before it still has its status.

    The iterator is closed, which aborts the request, when the client goes. An error later on is an event of its own."""

    def __init__(self, events: AsyncGenerator[bytes], end: bytes = b"data: [DONE]\n\n") -> None:
        self._events = events
        self._end = end
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    if not started:
                        await send(_start())
                        started = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                # Under no other name than `error`, which Python forgets: an error that its own frame holds keeps the request with it.
                if not started:
                    await error_response(as_api_error(error))(scope, receive, send)
                    return
                await send({"type": "http.response.body", "body": event(as_api_error(error).body()), "more_body": True})
        if not started:
            await send(_start())
        await send({"type": "http.response.body", "body": self._end, "more_body": False})


def _start() -> Message:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


class Gate:
    """Before every endpoint: API key and body size."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], max_body_bytes: int) -> None:
        self.app = app
        self._keys = [key.encode() for key in api_keys]
        self._max = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._keys and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS" and not self._knows(headers):
            error = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", "AuthenticationError")
            await error_response(error)(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max:
            await error_response(self._too_large())(scope, receive, send)
            return
        await self._counted(scope, receive, send)

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # Every key is compared, and each in constant time, so the time taken says nothing about them.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A body without a length (chunked) is counted as it comes; too long a one is answered here, whatever the endpoint makes of it."""
        total, refused = 0, False

        async def limited() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._max:
                raise self._too_large()
            return message

        async def answer(message: Message) -> None:
            nonlocal refused
            if total <= self._max:
                await send(message)
            elif not refused:
                refused = True
                await error_response(self._too_large())(scope, receive, send)

        await self.app(scope, limited, answer)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max} bytes (--max-body-bytes)", "RequestEntityTooLargeError")
