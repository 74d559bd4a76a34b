"""Models, tokenizing, health, version, metrics, and the page."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

import lastrow
from lastrow.server.chat import conversation_size
from lastrow.server.http import error_response, json_response
from lastrow.server.protocol import DetokenizeRequest, TokenizeRequest
from lastrow.server.state import ApiError, ServerState


@lru_cache(maxsize=1)
def page() -> str:
    return (files("lastrow.server") / "index.html").read_text(encoding="utf-8")


def add_routes(routes: APIRouter, state: ServerState) -> None:
    @routes.get("/", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        policy = "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
        return HTMLResponse(page(), headers={"Content-Security-Policy": policy})

    @routes.get("/health")
    @routes.get("/ping")
    async def health() -> Response:
        why = state.unhealthy
        return Response(status_code=200) if why is None else error_response(ApiError(503, why, "ServiceUnavailableError"))

    @routes.get("/version")
    async def version() -> Response:
        return json_response({"version": lastrow.__version__})

    @routes.get("/metrics")
    async def metrics() -> Response:
        state.metrics.engine_up = state.engine.is_ready
        return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/v1/models")
    async def models() -> Response:
        length = state.max_model_len or None
        return json_response({"object": "list", "data": [_model(state, name, length) for name in state.settings.served_model_name]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in state.settings.served_model_name:
            raise ApiError(404, f"the model {name!r} is not served here", param="model")
        return json_response(_model(state, name, state.max_model_len or None))

    @routes.get("/stats")
    async def stats() -> Response:
        """For the page: the moment's numbers as JSON."""
        s = state.engine.stats
        return json_response(
            {
                "ready": state.unhealthy is None,
                "num_requests_running": s.num_running,
                "num_requests_waiting": s.num_waiting,
                "kv_usage": {"full": s.kv_usage[0], "sliding": s.kv_usage[1]},
                "generated_tokens": s.generated_tokens,
                "rows_given": s.rows_given,
                "rows_computed": s.rows_computed,
                "prefix_cache": {"queries": s.prefix_cache_queries, "hits": s.prefix_cache_hits},
                "max_model_len": state.max_model_len,
                "model": state.model_name,
            }
        )

    @routes.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> Response:
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "prompt or messages is needed, one of them")
        if (text := request.prompt) is not None:
            ids = await state.prepare(lambda: state.encode(text, request.add_special_tokens), len(text))
        else:
            if request.chat_template is not None and not state.settings.trust_request_chat_template:
                raise ApiError(400, "chat_template in a request needs --trust-request-chat-template", param="chat_template")
            ids = await state.prepare(lambda: state.planner.render(request), conversation_size(request.messages or ()))
        body: dict[str, Any] = {"count": len(ids), "max_model_len": state.max_model_len, "tokens": ids, "token_strs": None}
        if request.return_token_strs:
            body["token_strs"] = [state.tokenizer.token_text(token) for token in ids]
        return json_response(body)

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Special tokens and chat template, under the names of tokenizer_config.json; lm-eval asks for it."""
        file = state.tokenizer.path / "chat_template.jinja"
        template = state.settings.chat_template or (file.read_text(encoding="utf-8") if file.is_file() else None)
        return json_response({**state.tokenizer.special_tokens_map, "chat_template": template})

    @routes.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> Response:
        state.check_ids("tokens", request.tokens)
        decode = state.tokenizer.decode
        text = await state.prepare(lambda: decode(request.tokens, skip_special_tokens=False), len(request.tokens))
        return json_response({"prompt": text})


def _model(state: ServerState, name: str, length: int | None) -> dict[str, Any]:
    root = state.engine.config.shape or state.engine.config.model
    return {"id": name, "object": "model", "created": state.started, "owned_by": "lastrow", "root": root, "max_model_len": length}
