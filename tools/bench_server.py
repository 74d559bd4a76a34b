"""Server throughput against offline throughput: the same requests, the same engine options, arms in ABBA order.

    python tools/bench_server.py --requests 64 --prompt-tokens 64 --output-tokens 96 --rounds 2

offline: one `LLM.generate` call with all requests. whole / stream: as many concurrent HTTP requests to `lastrow serve`, answered at once or
token by token; the client shares the machine, which is part of what a server costs here. Writes one JSON line a run to stdout and a
summary at the end. The idle arm's process waits without using the processor."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import httpx


def prompts(args: argparse.Namespace) -> list[list[int]]:
    """Different random ids, so that no prefix is shared."""
    import random

    draw = random.Random(args.seed)
    return [[2, *(draw.randrange(500, 4000) for _ in range(args.prompt_tokens - 1))] for _ in range(args.requests)]


def offline(llm: Any, args: argparse.Namespace) -> tuple[float, int]:
    from lastrow import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=args.output_tokens, ignore_eos=True)
    llm.engine.scheduler.kv.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts(args), params, use_tqdm=False)
    return time.perf_counter() - start, sum(len(o.outputs[0].token_ids) for o in outputs)


async def served(url: str, args: argparse.Namespace, stream: bool) -> tuple[float, int, list[float]]:
    """(seconds, tokens, first-token seconds of each request)"""
    limits = httpx.Limits(max_connections=args.requests)
    firsts: list[float] = []

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await client.post("/reset_prefix_cache")

        async def one(ids: list[int]) -> int:
            body = {"prompt": ids, "temperature": 0, "max_tokens": args.output_tokens, "ignore_eos": True, "stream": stream}
            if not stream:
                answer = await client.post("/v1/completions", json=body)
                return answer.json()["usage"]["completion_tokens"]
            began, count = time.perf_counter(), 0
            async with client.stream("POST", "/v1/completions", json={**body, "stream_options": {"include_usage": True}}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        if not count:
                            firsts.append(time.perf_counter() - began)
                        count += 1
                        if '"usage"' in line:
                            return json.loads(line[6:])["usage"]["completion_tokens"]
            raise RuntimeError("a stream ended without usage")

        start = time.perf_counter()
        counts = await asyncio.gather(*(one(ids) for ids in prompts(args)))
        return time.perf_counter() - start, sum(counts), firsts


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit("the server ended before it was ready")
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-e")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2, help="of offline, whole, stream, stream, whole, offline")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of both engines")
    parser.add_argument("--port", type=int, default=8790)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    command = [sys.executable, "-m", "lastrow", "serve", args.model, "--port", str(args.port), "--uvicorn-log-level", "warning"]
    server = subprocess.Popen(command)
    url = f"http://127.0.0.1:{args.port}"
    try:
        from lastrow import LLM

        llm = LLM(model=args.model)
        wait_ready(url, server)
        offline(llm, args)
        asyncio.run(served(url, args, stream=False))
        rates: dict[str, list[float]] = {"offline": [], "whole": [], "stream": []}
        firsts: list[float] = []
        for _ in range(args.rounds):
            for arm in ("offline", "whole", "stream", "stream", "whole", "offline"):
                if arm == "offline":
                    seconds, tokens = offline(llm, args)
                else:
                    seconds, tokens, first = asyncio.run(served(url, args, stream=arm == "stream"))
                    firsts += first
                rates[arm].append(tokens / seconds)
                print(
                    json.dumps(
                        {"arm": arm, "seconds": round(seconds, 3), "tokens": tokens, "tokens_per_second": round(tokens / seconds, 1)}
                    )
                )
        base = statistics.median(rates["offline"])
        for arm, values in rates.items():
            middle = statistics.median(values)
            print(f"{arm:8} {middle:8.0f} tokens/s, {middle / base:5.1%} of offline, runs {min(values):.0f} to {max(values):.0f}")
        print(f"time to first token of {args.requests} concurrent streams: median {statistics.median(firsts) * 1000:.0f} ms, "
              f"99 % {sorted(firsts)[int(len(firsts) * 0.99) - 1] * 1000:.0f} ms")  # fmt: skip
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
