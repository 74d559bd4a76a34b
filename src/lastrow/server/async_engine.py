"""AsyncEngine: the engine process seen from the server's event loop.

Starts it, sends it requests, hands each request its outputs, and notices when it is gone or stands still."""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from lastrow.config import EngineConfig
from lastrow.server import wire
from lastrow.server.channel import Channel

logger = logging.getLogger("lastrow.server")
STOP_TIMEOUT = 5.0


def _engine_main(config: EngineConfig, connection: Connection, log_level: int) -> None:
    """In the new process. Imported there: the server needs no torch."""
    from lastrow.server.engine_process import main

    main(config, connection, log_level)


class EngineDeadError(RuntimeError):
    """The engine process has ended or was ended; the request cannot be answered."""


class RequestRejected(ValueError):
    """The engine refused the request; the message names the limit."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request that is not finished: outputs its reader has not taken, and a bell for it."""

    unfinished: int
    outputs: list[wire.Output] = field(default_factory=list[wire.Output])
    error: Exception | None = None
    bell: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncEngine:
    """config: of the engine. step_timeout: seconds without a sign of life, while requests wait, after which the process is ended.

    on_death: called in the event loop, with the reason, when the process has ended unasked. stats, ready: the latest the engine said;
    on_stats is called with every Stats."""

    def __init__(self, config: EngineConfig, step_timeout: float = 120.0, log_level: int = logging.INFO) -> None:
        self.config = config
        self.step_timeout = step_timeout
        self.log_level = log_level
        self.on_death: Callable[[str], None] = lambda _: None
        self.on_stats: Callable[[wire.Stats], None] = lambda _: None
        self.on_finish: Callable[[wire.Output], None] = lambda _: None
        self.ready: wire.Ready | None = None
        self.stats = wire.Stats()
        self.death: str | None = None
        self._open: dict[str, _Open] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._process: Any = None
        self._watcher: asyncio.Task[None] | None = None
        self._last_sign = time.monotonic()
        self._stopping = False

    # ------------------------------------------------------------------------------------------------ life of the process
    async def start(self) -> None:
        """Start the process and return once it can take requests. Raises EngineDeadError when it cannot start."""
        loop = asyncio.get_running_loop()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._became_ready = loop.create_future()
        self._stopping, self.death, self.ready, self.stats = False, None, None, wire.Stats()
        self._process = context.Process(target=_engine_main, args=(self.config, theirs, self.log_level), name="lastrow-engine", daemon=True)
        self._process.start()
        theirs.close()
        self._channel = Channel(ours)
        self._sentinel = self._process.sentinel
        loop.add_reader(self._sentinel, self._process_ended)
        loop.add_reader(self._channel.fileno(), self._read)
        self._watcher = asyncio.create_task(self._watch())
        await self._became_ready

    async def stop(self) -> None:
        """End the process; open requests get an error."""
        if self._process is None or self.death is not None:
            return
        self._stopping = True
        if self._process.is_alive():
            self._send(wire.Stop())
            for _ in range(int(STOP_TIMEOUT / 0.02)):
                if not self._process.is_alive():
                    break
                await asyncio.sleep(0.02)
            else:
                self._process.kill()
        self._close("the server is shutting down")

    def kill(self) -> None:
        """End the process at once, if it is still there: for a server that does not get to `stop`."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join(STOP_TIMEOUT)

    @property
    def is_ready(self) -> bool:
        return self.ready is not None and self.death is None and not self._stopping

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _process_ended(self) -> None:
        if self._stopping:
            self._remove_readers()
            return
        self._process.join(0.1)
        self._die(f"the engine process ended with exit code {self._process.exitcode}")

    def _die(self, reason: str) -> None:
        if self.death is not None:
            return
        logger.error("%s", reason)
        if self._process.is_alive():
            self._process.kill()
        self._close(reason)
        self.on_death(reason)

    def _close(self, reason: str) -> None:
        """Fail whatever is open and let go of the pipe and the watcher."""
        self.death = reason
        error = EngineDeadError(reason)
        for request in self._open.values():
            request.error = error
            request.bell.set()
        self._open.clear()
        for future in [*self._calls.values(), self._became_ready]:
            if not future.done():
                future.set_exception(error)
        self._calls.clear()
        self._remove_readers()
        if self._watcher is not None and self._watcher is not asyncio.current_task():
            self._watcher.cancel()
        self._channel.close(timeout=0.0)

    def _remove_readers(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sentinel)
        with suppress(OSError):
            loop.remove_reader(self._channel.fileno())

    # ------------------------------------------------------------------------------------------------ requests
    @property
    def num_open(self) -> int:
        """Requests that are not finished, waiting ones included."""
        return len(self._open)

    async def generate(self, add: wire.Add, n: int = 1) -> AsyncGenerator[list[wire.Output]]:
        """Outputs as they come, several at a time when the reader is slower than the engine. Leaving the iterator early ends the
        request. Raises RequestRejected or EngineDeadError."""
        if not self.is_ready:
            raise EngineDeadError(self.death or "the engine is starting")
        if add.request_id in self._open:
            raise RequestRejected(f"request_id is {add.request_id!r}: a request with this id is not finished yet")
        request = self._open[add.request_id] = _Open(n)
        self._send(add)
        try:
            while True:
                if not request.outputs:
                    if request.error is not None:
                        raise request.error
                    if not request.unfinished:
                        return
                    request.bell.clear()
                    await request.bell.wait()
                    continue
                outputs, request.outputs = request.outputs, []
                if failed := next((output for output in outputs if output.finish_reason == "error"), None):
                    raise RequestRejected(str(failed.stop_reason))
                yield outputs
        finally:
            request.error = None  # raised, it holds this frame: in a cycle it would keep the prompt until garbage is collected
            if self._open.pop(add.request_id, None) is not None and self.death is None:
                self._send(wire.Abort([add.request_id]))

    async def read(self, adds: list[wire.Add]) -> list[list[wire.Output]]:
        """All outputs of requests that are added together, forks of each other among them, once every one is finished. Leaving early
        ends them. Raises RequestRejected or EngineDeadError."""
        if not self.is_ready:
            raise EngineDeadError(self.death or "the engine is starting")
        opened = {add.request_id: _Open(1) for add in adds}
        self._open.update(opened)
        self._send(wire.AddMany(adds))
        try:
            for request in opened.values():
                while request.unfinished and request.error is None:
                    request.bell.clear()
                    await request.bell.wait()
                if request.error is not None:
                    raise request.error
            return [request.outputs for request in opened.values()]
        finally:
            for request in opened.values():
                request.error = None  # as in `generate`
            left = [name for name in opened if self._open.pop(name, None) is not None]
            if left and self.death is None:
                self._send(wire.Abort(left))

    async def call(self, name: str, **arguments: Any) -> Any:
        """Ask the engine something; see wire.Call. Raises EngineDeadError or ValueError."""
        if not self.is_ready:
            raise EngineDeadError(self.death or "the engine is starting")
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(wire.Call(call_id, name, arguments))
        return await future

    def _send(self, message: wire.ToEngine) -> None:
        self._channel.send(wire.encode(message))

    # ------------------------------------------------------------------------------------------------ what comes back
    def _read(self) -> None:
        """One message; the loop calls again while there are more."""
        try:
            message = wire.decode_from_engine(self._channel.receive())
        except EOFError:
            # The process is ending; its sentinel says so in a moment, with the exit code.
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            return
        self._last_sign = time.monotonic()
        if isinstance(message, wire.Outputs):
            self._take_outputs(message)
        elif isinstance(message, wire.Ready):
            self.ready = message
            if not self._became_ready.done():
                self._became_ready.set_result(None)
        elif isinstance(message, wire.Rejected):
            self._fail(message.request_id, RequestRejected(message.message))
        elif isinstance(message, wire.Reply):
            self._take_reply(message)
        else:
            self._die(message.message)

    def _take_reply(self, reply: wire.Reply) -> None:
        future = self._calls.pop(reply.call_id, None)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(ValueError(reply.error))

    def _take_outputs(self, message: wire.Outputs) -> None:
        for output in message.outputs:
            request = self._open.get(output.request_id)
            if request is None:
                continue
            request.outputs.append(output)
            if output.finish_reason is not None:
                self.on_finish(output)
                request.unfinished -= 1
                if not request.unfinished:
                    del self._open[output.request_id]
            request.bell.set()
        if message.stats is not None:
            self.stats = message.stats
            self.on_stats(message.stats)

    def _fail(self, request_id: str, error: Exception) -> None:
        request = self._open.pop(request_id, None)
        if request is not None:
            request.error = error
            request.bell.set()

    async def _watch(self) -> None:
        """Ends an engine that has been silent for step_timeout although requests wait."""
        idle = True
        while True:
            await asyncio.sleep(min(1.0, self.step_timeout / 4))
            if not self._open or self.ready is None:
                idle = True
            elif idle:
                idle, self._last_sign = False, max(self._last_sign, time.monotonic())
            elif time.monotonic() - self._last_sign > self.step_timeout:
                self._die(f"the engine has made no progress for {self.step_timeout:.0f} s (--step-timeout): it was ended")
                return
