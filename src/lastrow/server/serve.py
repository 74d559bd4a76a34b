"""Runs the server until a signal or the engine's end. Exit code 0 after SIGTERM or SIGINT, 1 when the engine died."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from lastrow.config import EngineConfig
from lastrow.models.config import from_file
from lastrow.models.shapes import named_shape
from lastrow.server.app import create_app
from lastrow.server.async_engine import AsyncEngine
from lastrow.server.garbage import settle
from lastrow.server.state import ServerSettings, ServerState
from lastrow.tokenizer import Tokenizer
from lastrow.weights.resolve import resolve_model

logger = logging.getLogger("lastrow.server")
IMPATIENT = 0.5


@dataclass(frozen=True)
class Listen:
    """Where the server listens. shutdown_timeout: seconds that running requests get after SIGTERM."""

    host: str = "127.0.0.1"
    port: int = 8000
    log_level: str = "info"
    shutdown_timeout: int = 30


class Server(uvicorn.Server):
    """uvicorn with our signals: SIGTERM and SIGINT drain, a second one does not wait."""

    state: ServerState
    _first_signal = 0.0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        yield

    def _drain(self) -> None:
        now = time.monotonic()
        if self.state.draining:
            # `timeout` and terminals send one signal twice; a person who means it does so later.
            self.force_exit = now - self._first_signal > IMPATIENT
            return
        self._first_signal = now
        self.state.draining = True
        logger.info("draining: %d completions are running", self.state.num_active)
        self.should_exit = True


def load_tokenizer(config: EngineConfig) -> tuple[Tokenizer, int]:
    """The tokenizer and the model's vocabulary size. A named shape has weights without meaning and no tokenizer, so tiny-e's reads and
    writes text for it: load generators that send text can measure it, too. Raises ConfigError or TokenizerError."""
    if config.shape:
        return Tokenizer(resolve_model("tiny-e")), named_shape(config.shape).vocab_size
    folder = resolve_model(config.model, config.revision)
    return Tokenizer(folder), from_file(folder).vocab_size


def serve(config: EngineConfig, settings: ServerSettings, listen: Listen) -> int:
    """Returns the exit code. Raises ConfigError or TokenizerError before anything is started."""
    level = logging.getLevelNamesMapping().get(listen.log_level.upper(), logging.INFO)
    logging.basicConfig(level=level, format="%(levelname)s:     %(message)s")
    tokenizer, vocab_size = load_tokenizer(config)
    _warn_if_open(listen.host, settings)
    engine = AsyncEngine(config, settings.step_timeout, level)
    state = ServerState(engine, tokenizer, vocab_size, settings)
    died = False

    def leave() -> None:
        nonlocal died
        died = server.should_exit = True

    app = create_app(state, leave)
    server = Server(
        uvicorn.Config(
            app, listen.host, listen.port, log_level=listen.log_level, access_log=listen.log_level in ("debug", "trace"),
            timeout_graceful_shutdown=listen.shutdown_timeout, timeout_keep_alive=75,
            # not uvloop where it is installed: it makes the engine's pipe non-blocking, and a message that finds it full is lost
            loop="asyncio",
            # not httptools where it is installed: it drops the body of a request that offers HTTP/2 and reads heads without end
            http="h11",
        )
    )  # fmt: skip
    server.state = state
    settle()
    try:
        server.run()
    finally:
        engine.kill()
    return 1 if died or not server.started else 0


def _warn_if_open(host: str, settings: ServerSettings) -> None:
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local and not settings.api_key:
        logger.warning("--host %s is reachable from other machines and there is no --api-key: anybody there can use this server", host)
