"""Server throughput against offline throughput, and the time to the first token: the same engine options, arms in ABBA order.

    python tools/bench_server.py --requests 64 --prompt-tokens 64 --output-tokens 64 --rounds 3
    python tools/bench_server.py --shape e2b --requests 256 --concurrency 128 --prompt-tokens 1024 --output-tokens 1 \\
        --max-model-len 2048 --kv-cache-memory-bytes 8G

offline: one `LLM.generate` call with all requests. whole / stream: as many HTTP requests to `lastrow serve`, --concurrency of them open at
a time, answered at once or token by token. first: --first-requests streams sent together; their first-token times. The client shares the
machine, which is part of what a server costs here; both engines are there all the time, and the idle one computes nothing. Prompts are
token ids. Flags that this tool does not know go to both engines. One JSON line a run and one at the end, which has the medians."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from lastrow.cli.options import add_engine_flags, engine_options

ARMS = ("offline", "whole", "stream", "first")
START_TIMEOUT = 300.0


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Different random ids, so that no prefix is shared."""
    draw = random.Random(seed)
    return [[2, *(draw.randrange(500, 4000) for _ in range(tokens - 1))] for _ in range(count)]


def offline(llm: Any, ids: list[list[int]], max_tokens: int) -> dict[str, Any]:
    from lastrow import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    llm.engine.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(ids, params, use_tqdm=False)
    return {"seconds": time.perf_counter() - start, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}


class Served:
    """The server's process and its clients."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid

    async def run(self, ids: list[list[int]], max_tokens: int, stream: bool, concurrency: int) -> dict[str, Any]:
        """seconds, tokens, seconds of processor time that the HTTP process took, and for streams each first token's seconds."""
        bodies = [_body(prompt, max_tokens, stream) for prompt in ids]
        firsts: list[float] = []
        gate = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(base_url=self.url, timeout=600, limits=limits) as client:
            (await client.post("/reset_prefix_cache")).raise_for_status()

            async def one(body: bytes) -> int:
                async with gate:
                    return await (_stream(client, body, firsts) if stream else _whole(client, body))

            busy, start = _processor_seconds(self.pid), time.perf_counter()
            counts = await asyncio.gather(*(one(body) for body in bodies))
            seconds = time.perf_counter() - start
        row = {"seconds": seconds, "tokens": sum(counts), "server_cpu_seconds": _processor_seconds(self.pid) - busy}
        return {**row, "first_token_seconds": firsts} if stream else row


def _body(ids: list[int], max_tokens: int, stream: bool) -> bytes:
    body: dict[str, Any] = {"prompt": ids, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body).encode()


async def _whole(client: httpx.AsyncClient, body: bytes) -> int:
    answer = await client.post("/v1/completions", content=body)
    answer.raise_for_status()
    return answer.json()["usage"]["completion_tokens"]


async def _stream(client: httpx.AsyncClient, body: bytes, firsts: list[float]) -> int:
    began, seen = time.perf_counter(), False
    async with client.stream("POST", "/v1/completions", content=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if not seen:
                    firsts.append(time.perf_counter() - began)
                seen = True
                if '"usage"' in line:
                    return json.loads(line[6:])["usage"]["completion_tokens"]
    raise RuntimeError("a stream ended without usage")


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit("the server ended before it was ready")
        try:
            if httpx.get(url + "/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the server did not become ready in {START_TIMEOUT:.0f} s")


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def summary(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians. of_offline: offline's seconds by the arm's, so 1 is as fast; both have the same requests."""
    seconds = {arm: [row["seconds"] for row in rows if row["arm"] == arm] for arm in ARMS}
    base = statistics.median(seconds["offline"])
    made: dict[str, Any] = {}
    for arm in ARMS[:3]:
        middle, tokens = statistics.median(seconds[arm]), args.requests * (args.prompt_tokens + args.output_tokens)
        made[arm] = {
            "seconds": round(middle, 4),
            "seconds_range": [round(min(seconds[arm]), 4), round(max(seconds[arm]), 4)],
            "requests_per_second": round(args.requests / middle, 2),
            "output_tokens_per_second": round(args.requests * args.output_tokens / middle, 1),
            "all_tokens_per_second": round(tokens / middle, 1),
            "of_offline": round(base / middle, 4),
        }
    firsts = [first for row in rows if row["arm"] == "first" for first in row["first_token_seconds"]]
    made["first_token_seconds"] = {
        "median": round(statistics.median(firsts), 4),
        "p99": round(percentile(firsts, 0.99), 4),
        "count": len(firsts),
    }
    return made


def measure(llm: Any, served: Served, args: argparse.Namespace) -> list[dict[str, Any]]:
    load = prompts(args.requests, args.prompt_tokens, args.seed), args.output_tokens
    first = prompts(args.first_requests, args.first_prompt_tokens, args.seed + 1), args.first_output_tokens
    concurrency = args.concurrency or args.requests
    run = {
        "offline": lambda: offline(llm, *load),
        "whole": lambda: asyncio.run(served.run(*load, stream=False, concurrency=concurrency)),
        "stream": lambda: asyncio.run(served.run(*load, stream=True, concurrency=concurrency)),
        "first": lambda: asyncio.run(served.run(*first, stream=True, concurrency=args.first_requests)),
    }
    for arm in ARMS:  # compiles and warms up
        run[arm]()
    rows = []
    for turn in range(args.rounds):
        for arm in (*ARMS, *ARMS[::-1]):
            row = {"arm": arm, "round": turn, **run[arm]()}
            rows.append(row)
            shown = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
            if firsts := shown.pop("first_token_seconds", None):
                shown["first_token_median"] = round(statistics.median(firsts), 4)
            print(json.dumps(shown), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--model", help="default: tiny-e, or what --shape names")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=0, help="open requests at a time; 0: all")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--first-requests", type=int, default=64)
    parser.add_argument("--first-prompt-tokens", type=int, default=600)
    parser.add_argument("--first-output-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="of offline, whole, stream, first and the same backwards")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of both engines")
    parser.add_argument("--port", type=int, default=8790)
    parser.add_argument("--seed", type=int, default=0)
    args, flags = parser.parse_known_args()
    engine_parser = argparse.ArgumentParser(prog="bench_server.py", usage=argparse.SUPPRESS, allow_abbrev=False)
    add_engine_flags(engine_parser)
    options = engine_options(engine_parser.parse_args(flags, argparse.Namespace(model=args.model)))
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    began = time.monotonic()
    model = [] if args.model is None else [args.model]
    command = [sys.executable, "-m", "lastrow", "serve", *model, "--port", str(args.port), "--uvicorn-log-level", "warning", *flags]
    server = subprocess.Popen(command)
    try:
        from lastrow import LLM
        from lastrow.harness.records import environment

        llm = LLM(**options)
        url = f"http://127.0.0.1:{args.port}"
        wait_ready(url, server)
        start = time.monotonic() - began
        print(json.dumps({"ready_seconds": round(start, 1)}), flush=True)
        rows = measure(llm, Served(url, server.pid), args)
        where = environment(command="tools/bench_server.py " + " ".join(sys.argv[1:]), accelerator=_accelerator())
        took = {"start_seconds": round(start, 1), "total_seconds": round(time.monotonic() - began, 1)}
        print(json.dumps({**summary(rows, args), **took, "environment": where}))
    finally:
        server.terminate()
        server.wait(30)


def _accelerator() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
