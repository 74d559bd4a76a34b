"""Many clients at once, some of them rude: does the server keep working?

    python tools/soak.py --streams 256 --seconds 120

Clients stream, leave in the middle, leave before the first token, send nonsense, force calls and grammars, and ask for whole
answers. Reported: answers that were not the asked-for kind, blocks that are not free at the end, the growth of both processes'
memory, first-token times. Before the clock starts, what may fill once is filled: every block of the pool, the largest
step, the tokenizer's cache of texts. Exit code 1 when an answer was wrong, a block leaked, or a process needed
MAX_GROWTH more in the second half than in the first. --record writes a page with the memory's curve."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lastrow.harness.records import Record, environment, markdown_table

# MiB. Python's own small-object memory comes in pieces of 1 MiB; the engine's heap is as large as its largest step made it.
MAX_GROWTH = {"server": 2.0, "engine": 2.0}
WORDS = ["time", "river", "stone", "light", "paper", "seven", "blue", "north", "window", "market", "letter", "garden"]
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "note", "description": "", "parameters": PARAMETERS}}
BAD: list[tuple[str, Any, int]] = [
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "temperature": -1}, 400),
    ("/v1/completions", {"prompt": [1, 2, 10**6]}, 400),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "(["}}, 400),
    ("/v1/completions", {"prompt": "x", "model": "other"}, 404),
    ("/v1/completions", {"prompt": [2] + [300] * 5000}, 400),
    ("/v1/nothing", {}, 404),
]


@dataclass
class Report:
    """What happened. wrong: answers that were not what was asked for."""

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    tokens: int = 0
    memory: list[tuple[float, dict[int, int]]] = field(default_factory=list)
    leaked: dict[str, int] = field(default_factory=dict)

    def highest(self, pid: int, begin: float, end: float) -> float:
        """Most MiB that a process had from one share of the time to another."""
        count = len(self.memory)
        samples = self.memory[int(count * begin) : int(count * end)]
        return max((sample.get(pid, 0) for _, sample in samples), default=0) / 2**20

    def growth(self) -> dict[int, float]:
        """How much more each process had at its highest in the second half than in the first, of which the first third is left out: the
        burst of the start stands in it. The highest, because the engine's memory goes up and down with the size of its steps."""
        pids = self.memory[-1][1] if self.memory else ()
        return {pid: self.highest(pid, 1 / 2, 1) - self.highest(pid, 1 / 6, 1 / 2) for pid in pids}


class Client:
    """One of the many. Each round draws what to do from its own generator."""

    def __init__(self, http: httpx.AsyncClient, report: Report, seed: int) -> None:
        self.http = http
        self.report = report
        self.draw = random.Random(seed)

    async def run(self, deadline: float) -> None:
        kinds = {self.stream: 55, self.leave: 15, self.leave_early: 8, self.bad: 10, self.forced: 6, self.whole: 6}
        while time.monotonic() < deadline:
            kind = self.draw.choices(list(kinds), list(kinds.values()))[0]
            try:
                await kind()
                self.report.done[kind.__name__] += 1
            except Exception as error:
                self.report.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}"[:300])

    def body(self, **fields: Any) -> dict[str, Any]:
        text = " ".join(self.draw.choices(WORDS, k=self.draw.choice((3, 10, 40, 200))))
        fields = {"max_tokens": self.draw.randrange(1, 60), "ignore_eos": True, "seed": self.draw.randrange(1000), **fields}
        return {"messages": [{"role": "user", "content": text}], **fields}

    async def stream(self, leave_after: int | None = None) -> None:
        body = self.body(stream=True, stream_options={"include_usage": True})
        began, count, usage = time.monotonic(), 0, None
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, f"status {response.status_code}: {(await response.aread())[:200]!r}"
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if not count:
                    self.report.firsts.append(time.monotonic() - began)
                count += 1
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                usage = chunk.get("usage") or usage
                if leave_after is not None and count > leave_after:
                    return
        assert usage is not None and usage["completion_tokens"] == body["max_tokens"], f"usage {usage} for {body['max_tokens']} tokens"
        self.report.tokens += usage["completion_tokens"]

    async def leave(self) -> None:
        await self.stream(leave_after=self.draw.randrange(1, 6))

    async def leave_early(self) -> None:
        task = asyncio.create_task(self.stream())
        await asyncio.sleep(self.draw.random() * 0.2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def bad(self) -> None:
        path, body, status = self.draw.choice(BAD)
        response = await self.http.post(path, json=body)
        told = f"{path} {status}: {response.status_code} {response.text[:100]}"
        assert response.status_code == status and "error" in response.json(), told

    async def forced(self) -> None:
        word = self.draw.choice(WORDS)
        if self.draw.random() < 0.5:
            body = self.body(structured_outputs={"choice": [word]}, ignore_eos=False, max_tokens=30)
            message = (await self.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
            assert message["content"] == word, message
        else:
            body = self.body(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, ignore_eos=False, max_tokens=60)
            choice = (await self.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
            if choice["finish_reason"] != "length":
                assert isinstance(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["n"], int), choice

    async def whole(self) -> None:
        body = self.body(n=self.draw.randrange(1, 4))
        answer = (await self.http.post("/v1/chat/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == body["max_tokens"] * body["n"], answer["usage"]


async def soak(url: str, streams: int, seconds: float, seed: int = 0, pids: tuple[int, ...] = ()) -> Report:
    report = Report()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        deadline = time.monotonic() + seconds
        watch = asyncio.create_task(_watch_memory(report, pids))
        await asyncio.gather(*(Client(http, report, seed * 10_000 + i).run(deadline) for i in range(streams)))
        watch.cancel()
        await _wait_idle(http, report)
    return report


async def warm_up(url: str, streams: int) -> None:
    """Fills what fills once. All streams together ask for as many tokens as the pool holds, which is also the largest step there is."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        for i in range(1200):
            await http.post("/tokenize", json={"prompt": f"text number {i}"})
        groups = (await http.get("/v1/cache/status")).json()
        longest = (await http.get("/v1/models")).json()["data"][0]["max_model_len"]
        tokens = max(group["total"] for group in groups["groups"].values()) * groups["block_size"]
        draw = random.Random(0)
        for _ in range(2):
            prompts = [[draw.randrange(300, 4000) for _ in range(min(tokens // streams, longest - 70))] for _ in range(streams)]
            bodies = [{"prompt": prompt, "max_tokens": 60, "ignore_eos": True} for prompt in prompts]
            await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))


async def _watch_memory(report: Report, pids: tuple[int, ...]) -> None:
    while True:
        sample = {}
        for pid in pids:
            status = Path(f"/proc/{pid}/statm").read_text().split()
            sample[pid] = int(status[1]) * os.sysconf("SC_PAGE_SIZE")
        report.memory.append((time.monotonic(), sample))
        await asyncio.sleep(1)


async def _wait_idle(http: httpx.AsyncClient, report: Report) -> None:
    """Ten seconds for the last requests to go; what is not free then has leaked."""
    for _ in range(100):
        groups = (await http.get("/v1/cache/status")).json()["groups"]
        report.leaked = {name: group["total"] - group["free"] for name, group in groups.items()}
        stats = (await http.get("/stats")).json()
        if not any(report.leaked.values()) and not stats["num_requests_running"] + stats["num_requests_waiting"]:
            return
        await asyncio.sleep(0.1)
    if not any(report.leaked.values()):
        report.leaked = {"requests": stats["num_requests_running"] + stats["num_requests_waiting"]}


def told(report: Report, seconds: float, names: dict[int, str]) -> list[str]:
    firsts = sorted(report.firsts)
    lines = [
        f"{sum(report.done.values())} rounds in {seconds:.0f} s: {dict(report.done)}",
        f"{report.tokens / seconds:.0f} tokens/s of streams read to their end",
        f"wrong answers: {len(report.wrong)}; blocks not free at the end: {report.leaked}",
        *(f"  {count} x {line}" for line, count in Counter(report.wrong).most_common(5)),
    ]
    if firsts:
        p99 = firsts[int(len(firsts) * 0.99)]
        lines.append(f"time to first token: median {firsts[len(firsts) // 2] * 1000:.0f} ms, 99 % {p99 * 1000:.0f} ms")
    for pid, grown in report.growth().items():
        lines.append(
            f"memory of the {names[pid]}: at most {report.highest(pid, 1 / 2, 1):.0f} MiB in the second half, {grown:+.1f} to the first"
        )
    return lines


def record(report: Report, lines: list[str], args: argparse.Namespace, names: dict[int, str]) -> Record:
    """A page: what was told, and the resident memory of both processes every 10 s."""
    start = report.memory[0][0]
    rows = [{"seconds": round(at - start, 1), **{names[pid]: size for pid, size in sample.items()}} for at, sample in report.memory]
    columns = ["s", *(f"{name}, MiB" for name in names.values())]
    curve = markdown_table(
        columns, [[round(row["seconds"]), *(f"{row[name] / 2**20:.1f}" for name in names.values())] for row in rows[::10]]
    )
    return Record(
        topic=f"soak-cpu-{args.streams}-streams",
        title=f"{args.streams} clients for {args.seconds:.0f} s, some of them rude",
        summary=f"`tools/soak.py` against `lastrow serve {args.model}` on a CPU.\n\n" + "\n".join(f"* {line.strip()}" for line in lines),
        environment=environment(command=f"tools/soak.py --streams {args.streams} --seconds {args.seconds:.0f}", seed=args.seed),
        rows=rows,
        not_measured=["a GPU", "longer than this run", "prompts of more than a few hundred tokens"],
        sections=[("Resident memory", curve)],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--port", type=int, default=8791)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-e")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write a page and its rows there")
    args = parser.parse_args()
    command = [sys.executable, "-m", "lastrow", "serve", args.model, "--port", str(args.port), "--uvicorn-log-level", "warning"]
    server = subprocess.Popen(command)
    url = f"http://127.0.0.1:{args.port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(url + "/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        engine = next(int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
        names = {server.pid: "server", engine: "engine"}
        asyncio.run(warm_up(url, args.streams))
        report = asyncio.run(soak(url, args.streams, args.seconds, args.seed, tuple(names)))
        lines = told(report, args.seconds, names)
        print("\n".join(lines))
        if args.record is not None:
            print(record(report, lines, args, names).write(args.record))
        grew = any(grown > MAX_GROWTH[names[pid]] for pid, grown in report.growth().items())
        return int(bool(report.wrong) or any(report.leaked.values()) or grew)
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    sys.exit(main())
