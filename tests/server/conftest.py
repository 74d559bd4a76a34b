"""Real server processes on loopback. The ordinary one is shared by all tests of a session."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).parent.parent.parent
START_TIMEOUT = 120.0
# Small steps, so that prompts come in chunks, and a window that a test can fill.
MAX_MODEL_LEN, STEP_TOKENS = 1024, 128


class ServerProcess:
    """`lastrow serve tiny-e`, or `lastrow serve` where the flags name a shape."""

    def __init__(self, folder: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server-{self.port}.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        model = () if "--shape" in flags else ("tiny-e",)
        command = [sys.executable, "-m", "lastrow", "serve", *model, "--port", str(self.port), *flags]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def wait_ready(self) -> ServerProcess:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            if self.health() == 200:
                return self
            time.sleep(0.05)
        raise AssertionError("the server did not become ready:\n" + self.log.read_text())

    def health(self) -> int | None:
        """Status of /health; None when nobody listens."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.url + "/health", timeout=5).status_code
        return None

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"spawn_main" in command:
                return int(child)
        raise AssertionError(f"no engine among the children {children}")

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **options)

    def chat(self, content: str | list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """One greedy chat completion's first choice."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        response = self.post("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    def error(self, path: str, body: Any, status: int = 400) -> str:
        """Message of an error in OpenAI's envelope."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["code"] == status and error["type"]
        return error["message"]

    def wait_idle(self) -> dict[str, Any]:
        """The cache status once nothing runs any more; a few steps may still be under way."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            stats = httpx.get(self.url + "/stats", timeout=20).json()
            status = httpx.get(self.url + "/v1/cache/status", timeout=20).json()
            if not stats["num_requests_running"] + stats["num_requests_waiting"] and not status["groups"]["full"]["in_use"]:
                return status
            time.sleep(0.05)
        raise AssertionError(f"requests are still there: {stats}, {status}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    """The server most tests talk to."""
    flags = ("--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", "64")
    process = ServerProcess(tmp_path_factory.mktemp("server"), *flags, "--enable-timings-report")
    yield process.wait_ready()
    process.stop()


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)
