"""`lastrow serve`: the OpenAI-compatible server. Flags that vLLM has are named as there."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lastrow.cli.options import add_engine_flags, add_model, engine_options, size

MISSING = "the server's packages are not installed ({}): pip install 'lastrow[server]'"
# What vLLM needs to be told and lastrow does by itself; accepted so that a command line can be kept.
ALREADY_SO = {
    "--tool-call-parser": 1,
    "--reasoning-parser": 1,
    "--enable-auto-tool-choice": 0,
    "--enable-chunked-prefill": 0,
    "--kv-sharing-fast-prefill": 0,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8000, metavar="N", help="port (default: 8000)")
    add("--api-key", nargs="+", default=[], metavar="KEY", help="keys of which requests must bring one as a bearer token")
    add("--served-model-name", nargs="+", default=[], metavar="NAME", help="names clients may use (default: MODEL)")
    add("--max-queued-requests", type=size, default=1024, metavar="SIZE", help="requests that may wait; more get 429 (default: 1024)")
    add("--max-body-bytes", type=size, default=32 * 2**20, metavar="SIZE", help="largest request body (default: 32M)")
    add("--enable-timings-report", action="store_true", help="a timings object in every response")
    add("--default-chat-template-kwargs", type=_json_object, default={}, metavar="JSON", help='such as {"enable_thinking": true}')
    add("--chat-template", metavar="FILE", help="jinja file to use in place of the checkpoint's")
    add("--trust-request-chat-template", action="store_true", help="let a request bring its own chat_template")
    add("--generation-config", choices=("auto", "vllm"), default="auto", metavar="auto|vllm",
        help="defaults of sampling: auto takes the model's generation_config.json, vllm is neutral (default: auto)")  # fmt: skip
    add("--restart-engine", action="store_true", help="start the engine again when its process dies, instead of ending the server")
    add("--step-timeout", type=float, default=120.0, metavar="N", help="seconds without progress after which the engine is ended")
    add("--shutdown-timeout", type=int, default=30, metavar="N", help="seconds running requests get after SIGTERM (default: 30)")
    add("--uvicorn-log-level", choices=("critical", "error", "warning", "info", "debug", "trace"), default="info", metavar="LEVEL",
        help="critical to trace; debug logs every request (default: info)")  # fmt: skip
    for flag, values in ALREADY_SO.items():
        options: dict[str, Any] = {"metavar": "NAME"} if values else {"action": "store_true"}
        add(flag, help=argparse.SUPPRESS, **options)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    from lastrow.config import EngineConfig
    from lastrow.models.config import ConfigError

    config = EngineConfig(**engine_options(args))
    try:
        from lastrow.server.serve import Listen, serve
        from lastrow.server.state import ServerSettings
    except ModuleNotFoundError as error:
        raise ConfigError(MISSING.format(error.name)) from None
    settings = ServerSettings(
        served_model_name=tuple(args.served_model_name) or (config.shape or config.model,),
        api_key=tuple(args.api_key),
        max_queued_requests=args.max_queued_requests,
        max_body_bytes=args.max_body_bytes,
        enable_timings_report=args.enable_timings_report,
        default_chat_template_kwargs=args.default_chat_template_kwargs,
        chat_template=Path(args.chat_template).read_text(encoding="utf-8") if args.chat_template else None,
        trust_request_chat_template=args.trust_request_chat_template,
        generation_config=args.generation_config,
        restart_engine=args.restart_engine,
        step_timeout=args.step_timeout,
    )
    return serve(config, settings, Listen(args.host, args.port, args.uvicorn_log_level, args.shutdown_timeout))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is needed")
    return value
