"""The K/V cache over HTTP: what it holds, another size for it, and forgetting what is cached."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from lastrow.config import parse_size
from lastrow.server.http import json_response
from lastrow.server.protocol import Request
from lastrow.server.state import ApiError, ServerState


class RebuildRequest(Request):
    """kv_cache_memory_bytes: bytes of the pool, or a size such as "4G". timeout: seconds that running requests get to finish."""

    kv_cache_memory_bytes: int | str
    timeout: float = Field(60.0, ge=0.0, le=3600.0)


def add_routes(routes: APIRouter, state: ServerState) -> None:
    @routes.get("/v1/cache/status")
    async def status() -> Response:
        _need_engine(state)
        return json_response(await state.engine.call("cache_status"))

    @routes.post("/v1/cache/rebuild")
    async def rebuild(request: RebuildRequest) -> Response:
        """Requests that run finish first, and those that come meanwhile wait until the new pool is there."""
        _need_engine(state)
        size = request.kv_cache_memory_bytes
        size = parse_size(size) if isinstance(size, str) else size
        if size >= 2**63:
            raise ApiError(400, f"kv_cache_memory_bytes is {size}: no machine has so many", param="kv_cache_memory_bytes")
        answer = await state.engine.call("rebuild_cache", kv_cache_memory_bytes=size, timeout=request.timeout)
        if answer["state"] == "busy":
            raise ApiError(409, "the cache is being rebuilt already: one at a time", "ConflictError")
        if answer["state"] == "not drained":
            text = f"{answer['unfinished']} requests were not finished after {request.timeout:g} s (timeout): the cache is as it was"
            raise ApiError(503, text, "ServiceUnavailableError", retry_after=1)
        return json_response(answer["status"])

    @routes.post("/v1/cache/reset")
    @routes.post("/reset_prefix_cache")
    async def reset() -> Response:
        _need_engine(state)
        if not await state.engine.call("reset_prefix_cache"):
            raise ApiError(409, "requests are running: what is cached is forgotten when none is left", "ConflictError")
        return json_response({"success": True})


def _need_engine(state: ServerState) -> None:
    if (why := state.unhealthy) is not None:
        raise ApiError(503, why, "ServiceUnavailableError", retry_after=1)
