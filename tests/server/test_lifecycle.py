"""What happens around requests: limits, keys, a dead engine, a silent one, the end of the server."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from lastrow.config import EngineConfig
from lastrow.server import serve
from lastrow.server.state import ServerSettings

from .conftest import ServerProcess

KEYS = ("first-key", "second-key")
LONG = {"prompt": [2, 300], "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def strict(tmp_path_factory) -> Iterator[ServerProcess]:
    """Two requests run, one may wait; keys; small bodies; starts its engine again. The last test ends it."""
    flags = ["--max-num-seqs", "2", "--max-queued-requests", "1", "--api-key", *KEYS, "--max-body-bytes", "20000"]
    flags += ["--restart-engine", "--max-model-len", "1024"]
    process = ServerProcess(tmp_path_factory.mktemp("strict"), *flags)
    yield process
    process.stop()


@pytest.fixture(scope="module")
def mortal(tmp_path_factory) -> Iterator[ServerProcess]:
    """A shape with dummy weights. Ends with its engine, which may be silent for 2 s."""
    flags = ("--shape", "e2b-eighth", "--max-model-len", "1024", "--step-timeout", "2")
    process = ServerProcess(tmp_path_factory.mktemp("mortal"), *flags)
    yield process
    process.stop()


@pytest.fixture(autouse=True, scope="module")
def all_started(strict, mortal) -> None:
    """They start side by side."""


def bearer(key: str = KEYS[1]) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Stream(threading.Thread):
    """A request read in the background.

    first: set after its first event. lines, status, ended (monotonic): when it is over. leave: go away after the next line."""

    def __init__(self, server: ServerProcess, body: dict[str, Any], **options: Any) -> None:
        super().__init__(daemon=True)
        self.first = threading.Event()
        self.leave = False
        self.lines: list[str] = []
        self.status = 0
        self.ended = 0.0
        self._request = (server.url + "/v1/completions", body, options)
        self.start()

    def run(self) -> None:
        url, body, options = self._request
        try:
            with httpx.stream("POST", url, json=body, timeout=120, **options) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    self.lines.append(line)
                    self.first.set()
                    if self.leave:
                        break
        except httpx.TransportError as error:
            self.lines.append(f"broken: {error}")
        self.ended = time.monotonic()
        self.first.set()

    def result(self) -> str:
        self.join(60)
        assert self.ended, "the stream did not end"
        return "\n".join(self.lines)


def test_health_is_503_until_the_engine_is_warm(mortal: ServerProcess):
    """The port opens before the model is loaded. Whatever the pace of this machine: never 200 before `ready` was logged."""
    seen: dict[int | None, list[str]] = {}
    while mortal.process.poll() is None and 200 not in seen:
        status = mortal.health()
        assert status in (None, 503, 200)
        if status == 503 and 503 not in seen:
            bodies = {"/v1/completions": {"prompt": "x", "max_tokens": 1}, "/v1/cache/rebuild": {"kv_cache_memory_bytes": "3m"}}
            seen[503] = [mortal.error(path, body, 503) for path, body in bodies.items()]
        seen.setdefault(status, [])
        time.sleep(0.02)  # a busy loop would hold up what it waits for
    assert 200 in seen and "ready:" in mortal.log.read_text()
    assert seen[503] == ["the engine is starting"] * 2


def test_api_keys_are_asked_for(strict: ServerProcess):
    strict.wait_ready()
    body = {"prompt": "x", "max_tokens": 1}
    for headers in ({}, bearer("wrong"), {"Authorization": KEYS[0]}, {"Authorization": f"Basic {KEYS[0]}"}, bearer("first-ke")):
        response = strict.post("/v1/completions", body, headers=headers)
        assert response.status_code == 401 and response.json()["error"]["type"] == "AuthenticationError"
        assert httpx.get(strict.url + "/v1/models", headers=headers).status_code == 401
    for key in KEYS:
        assert strict.post("/v1/completions", body, headers=bearer(key)).status_code == 200
    assert httpx.get(strict.url + "/health").status_code == httpx.get(strict.url + "/").status_code == 200


def test_a_body_that_is_too_large_is_refused(strict: ServerProcess):
    strict.wait_ready()
    big = b'{"prompt":"' + b"x" * 30000 + b'"}'
    assert httpx.post(strict.url + "/v1/completions", content=big, headers=bearer()).status_code == 413
    pieces = (big[i : i + 5000] for i in range(0, len(big), 5000))
    assert httpx.post(strict.url + "/v1/completions", content=pieces, headers=bearer()).status_code == 413


def test_more_than_may_wait_gets_429_with_retry_after(strict: ServerProcess):
    strict.wait_ready()
    streams = [Stream(strict, LONG, headers=bearer()) for _ in range(2)]
    for stream in streams:
        assert stream.first.wait(60)
    waiting = Stream(strict, {**LONG, "max_tokens": 2}, headers=bearer())
    deadline = time.monotonic() + 30
    while not httpx.get(strict.url + "/stats", headers=bearer()).json()["num_requests_waiting"] and time.monotonic() < deadline:
        time.sleep(0.02)
    refused = strict.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=bearer())
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
    for stream in streams:
        stream.leave = True
    assert "[DONE]" in waiting.result()


def test_requests_that_come_together_are_no_more_than_may_run_and_wait(strict: ServerProcess):
    """The places were counted before they were taken, so that a burst all found the queue empty. Completions count, not requests."""
    strict.wait_ready()
    burst = [Stream(strict, {**LONG, "n": n}, headers=bearer()) for n in [1] * 10 + [2] * 2]
    deadline = time.monotonic() + 30
    while sum(stream.ended > 0 for stream in burst) < 9 and time.monotonic() < deadline:
        time.sleep(0.02)
    refused = [stream for stream in burst if stream.ended]
    for stream in burst:
        stream.leave = True
    assert [stream.status for stream in refused] == [429] * len(refused) and len(refused) in (9, 10)
    for stream in burst:
        stream.result()
    while httpx.get(strict.url + "/stats", headers=bearer()).json()["num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.02)
    larger = strict.post("/v1/completions", {"prompt": [[2, 300]] * 4, "n": 2, "max_tokens": 2}, headers=bearer())
    assert larger.status_code == 200 and len(larger.json()["choices"]) == 8  # more than the queue: taken when nothing else is there


def test_a_killed_engine_is_an_error_at_once_and_is_started_again(strict: ServerProcess):
    strict.wait_ready()
    stream = Stream(strict, LONG, headers=bearer())
    assert stream.first.wait(60)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(strict.post, "/v1/completions", {**LONG, "stream": False}, headers=bearer())
        time.sleep(0.2)
        killed = time.monotonic()
        os.kill(strict.engine_pid(), signal.SIGKILL)
        assert "EngineDeadError" in stream.result() and stream.ended - killed < 2
        assert whole.result(60).status_code == 503 and time.monotonic() - killed < 2
    assert strict.health() == 503
    strict.wait_ready()
    assert strict.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=bearer()).status_code == 200


def test_a_shape_without_a_checkpoint_answers_ids_and_texts(mortal: ServerProcess):
    """Load generators measure published sizes so, without their weights; ids that tiny-e's tokenizer has no text for are no mistake."""
    mortal.wait_ready()
    assert [model["id"] for model in httpx.get(mortal.url + "/v1/models").json()["data"]] == ["e2b-eighth"]
    fields = {"max_tokens": 4, "ignore_eos": True, "temperature": 1.0}
    for body in ({"prompt": [2, 32_767], "logprobs": 2}, {"prompt": "some text"}, {"prompt": [[2, 30_000], [2, 31_000]], "n": 2}):
        answer = mortal.post("/v1/completions", {**fields, **body})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4 * len(answer.json()["choices"])
    assert len(mortal.chat("hello", max_tokens=3, ignore_eos=True, logprobs=True)["logprobs"]["content"]) == 3
    assert "from 0 to 32767" in mortal.error("/v1/completions", {"prompt": [32_768]})
    assert "tokenizer" in mortal.error("/v1/completions", {"prompt": "x", "structured_outputs": {"choice": ["a"]}})


def test_a_silent_engine_is_ended_by_the_watchdog_and_the_server_with_it(mortal: ServerProcess):
    mortal.wait_ready()
    stream = Stream(mortal, LONG)
    assert stream.first.wait(60)
    os.kill(mortal.engine_pid(), signal.SIGSTOP)
    assert "no progress for 2 s" in stream.result()
    assert mortal.health() in (503, None)
    assert mortal.process.wait(20) == 1


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones(strict: ServerProcess):
    strict.wait_ready()
    engine = strict.engine_pid()
    stream = Stream(strict, {**LONG, "max_tokens": 200}, headers=bearer())
    assert stream.first.wait(60)
    for _ in range(2):  # `timeout` sends it twice
        strict.process.send_signal(signal.SIGTERM)
    text = stream.result()
    assert text.rstrip().endswith("data: [DONE]") and '"finish_reason":"length"' in text
    assert strict.process.wait(20) == 0
    with pytest.raises(httpx.ConnectError):
        strict.post("/v1/completions", {"prompt": "x"})
    assert not os.path.exists(f"/proc/{engine}")


def test_an_impatient_second_signal_ends_server_and_engine(tmp_path):
    server = ServerProcess(tmp_path).wait_ready()
    engine = server.engine_pid()
    stream = Stream(server, {**LONG, "max_tokens": 3000})
    assert stream.first.wait(60)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.8)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(10)
    assert not os.path.exists(f"/proc/{engine}")


def test_an_engine_that_cannot_start_says_why_in_one_line_and_ends_the_server(tmp_path):
    server = ServerProcess(tmp_path, "--max-model-len", "100000")
    assert server.process.wait(60) == 1
    log = server.log.read_text()
    assert "the model was made for 4096 positions" in log and "Traceback" not in log


def test_a_mistake_on_the_command_line_is_one_line(tmp_path):
    process = ServerProcess(tmp_path, "--default-chat-template-kwargs", "[1]")
    assert process.process.wait(60) == 2
    assert process.log.read_text().count("\n") == 1 and "JSON object" in process.log.read_text()


def test_the_loop_is_asyncios_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop, which uvicorn takes where it is installed, makes a watched pipe non-blocking: with 64 requests at once, 15 were lost."""
    seen: list[str] = []
    monkeypatch.setattr(serve.Server, "run", lambda self: seen.append(self.config.loop))
    serve.serve(EngineConfig(model="tiny-e"), ServerSettings(), serve.Listen())
    assert seen == ["asyncio"]
