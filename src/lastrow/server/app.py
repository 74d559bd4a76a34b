"""The FastAPI application: endpoints, errors in OpenAI's envelope, and the engine's life around it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

import lastrow
from lastrow.server import api_cache, api_chat, api_completions, api_misc, api_responses, decisions
from lastrow.server.async_engine import EngineDeadError
from lastrow.server.http import ClientGone, Gate, error_response
from lastrow.server.json_route import JsonRoute
from lastrow.server.state import ApiError, ServerState, as_api_error

logger = logging.getLogger("lastrow.server")
# Time in which clients read their errors and a health check sees the 503 before the server goes.
DEATH_GRACE = 1.0
MAX_RESTARTS = 5
RESTART_WINDOW = 300.0


def create_app(state: ServerState, exit_server: Callable[[], None] = lambda: None) -> FastAPI:
    """exit_server: called when the engine is dead and will not be started again."""
    keeper = EngineKeeper(state, exit_server)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # The port opens at once; /health says 503 until the engine is warm.
        starting = asyncio.create_task(keeper.start())
        yield
        starting.cancel()
        await state.engine.stop()

    # Without telemetry, which variables of the environment would turn on (and which asks for them three times a request).
    app = FastAPI(
        title="lastrow", version=lastrow.__version__, lifespan=lifespan, telemetry={"tracing": False, "metrics": False, "logs": False}
    )
    app.router.route_class = JsonRoute
    for part in (api_completions, api_chat, api_responses, decisions, api_cache, api_misc):
        part.add_routes(app.router, state)  # not include_router: FastAPI would look for a route twice, and in every part
    app.add_middleware(Gate, api_keys=state.settings.api_key, max_body_bytes=state.settings.max_body_bytes)
    _add_handlers(app, state)
    return app


def _add_handlers(app: FastAPI, state: ServerState) -> None:
    def answer(error: ApiError) -> Response:
        if error.status != 429:
            state.metrics.request_refused(error.status)
        return error_response(error)

    @app.exception_handler(ApiError)
    async def _(_: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(ValueError)
    async def _(_: Request, error: ValueError) -> Response:
        return answer(as_api_error(error))

    @app.exception_handler(EngineDeadError)
    async def _(_: Request, error: EngineDeadError) -> Response:
        return answer(as_api_error(error))

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        return answer(ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}"))

    @app.exception_handler(ClientGone)
    async def _(_: Request, __: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def _(_: Request, error: Exception) -> Response:
        return answer(as_api_error(error))


class EngineKeeper:
    """Starts the engine, and again after its death when that is wanted; else ends the server."""

    def __init__(self, state: ServerState, exit_server: Callable[[], None]) -> None:
        self._state = state
        self._exit_server = exit_server
        self._deaths: list[float] = []
        self._task: asyncio.Task[None] | None = None
        state.engine.on_death = self._died

    async def start(self) -> None:
        with suppress(EngineDeadError):  # told to on_death already
            await self._state.engine.start()
            logger.info("ready: %s, up to %d tokens", self._state.model_name, self._state.max_model_len)

    def _died(self, _: str) -> None:
        now = asyncio.get_running_loop().time()
        self._deaths = [t for t in self._deaths if now - t < RESTART_WINDOW] + [now]
        # An engine that never became ready has a fault that another start does not mend.
        again = self._state.settings.restart_engine and len(self._deaths) <= MAX_RESTARTS and self._state.engine.ready is not None
        self._task = asyncio.create_task(self._restart() if again else self._leave())

    async def _restart(self) -> None:
        logger.warning("the engine is started again (%d of at most %d in %.0f s)", len(self._deaths), MAX_RESTARTS, RESTART_WINDOW)
        await self.start()

    async def _leave(self) -> None:
        await asyncio.sleep(DEATH_GRACE)
        self._exit_server()
