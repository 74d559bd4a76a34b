"""POST /v1/cache/rebuild and /reset over a real server: who waits, who is refused, and that nobody's answer changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from server.conftest import ServerProcess

LONG = {"prompt": "In the beginning", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of its own: the others' must keep their cache."""
    server = ServerProcess(tmp_path_factory.mktemp("cache"), "--kv-cache-memory-bytes", "3m", "--max-num-seqs", "8")
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def status(server: ServerProcess) -> dict[str, Any]:
    return httpx.get(server.url + "/v1/cache/status", timeout=20).json()


def window(server: ServerProcess) -> int:
    return httpx.get(server.url + "/v1/models", timeout=20).json()["data"][0]["max_model_len"]


def complete(server: ServerProcess, max_tokens: int, **more: Any) -> str:
    response = server.post("/v1/completions", {**LONG, "max_tokens": max_tokens, **more})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_a_new_size_while_requests_run_and_come(own: ServerProcess):
    """Those that run finish with the answer they would have had; those that come meanwhile wait; a second rebuild is a 409."""
    own.wait_idle()
    alone, small = complete(own, 300), complete(own, 5, prompt="And God said")
    assert status(own)["kv_cache_memory_bytes"] == 3_000_000
    with ThreadPoolExecutor(8) as pool:
        running = pool.submit(complete, own, 300)
        deadline = time.monotonic() + 20
        while status(own)["groups"]["full"]["in_use"] == 0:
            assert time.monotonic() < deadline
        rebuilt = pool.submit(own.post, "/v1/cache/rebuild", {"kv_cache_memory_bytes": "6m"})
        time.sleep(0.05)
        second = pool.submit(own.post, "/v1/cache/rebuild", {"kv_cache_memory_bytes": 5_000_000})
        late = pool.submit(complete, own, 5, prompt="And God said")
        assert running.result() == alone and late.result() == small
    assert rebuilt.result().status_code == 200, rebuilt.result().text
    assert second.result().status_code == 409 and "being rebuilt already" in second.result().json()["error"]["message"]
    document = rebuilt.result().json()
    assert document["kv_cache_memory_bytes"] == 6_000_000
    assert document["groups"]["full"]["in_use"] == 0 and [o["layer"] for o in document["owners"]] == [0, 1, 2, 3, 4]
    assert 0 < document["pool_bytes"] <= document["kv_cache_memory_bytes"]


def test_the_window_follows_the_pool(own: ServerProcess):
    own.wait_idle()
    assert own.post("/v1/cache/rebuild", {"kv_cache_memory_bytes": 1_000_000}).status_code == 200
    small = status(own)["groups"]["full"]["total"] * 16 + 1
    assert window(own) == small < 4096
    assert own.post("/v1/cache/rebuild", {"kv_cache_memory_bytes": "12m"}).status_code == 200
    assert window(own) == 4096


def test_requests_that_do_not_finish_in_time_keep_the_old_size(own: ServerProcess):
    own.wait_idle()
    before = status(own)
    done = threading.Event()

    def read() -> None:
        with httpx.stream("POST", own.url + "/v1/completions", json={**LONG, "max_tokens": 2000, "stream": True}, timeout=120) as response:
            for _ in response.iter_lines():
                if done.is_set():
                    return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        deadline = time.monotonic() + 20
        while status(own)["groups"]["full"]["in_use"] == 0:
            assert time.monotonic() < deadline
        response = own.post("/v1/cache/rebuild", {"kv_cache_memory_bytes": 2_000_000, "timeout": 0.0})
        assert response.status_code == 503 and "1 requests were not finished after 0 s" in response.json()["error"]["message"]
        assert response.headers["retry-after"] == "1"
        reset = own.post("/v1/cache/reset", {})
        assert reset.status_code == 409 and "requests are running" in reset.json()["error"]["message"]
    finally:
        done.set()
        reader.join()
    own.wait_idle()
    assert status(own)["pool_bytes"] == before["pool_bytes"]


def test_reset_forgets_what_is_cached(own: ServerProcess):
    own.wait_idle()
    body = {"messages": [{"role": "user", "content": "cache me " * 20}], "max_tokens": 1, "temperature": 0}
    cached = []
    for path in (None, None, "/v1/cache/reset", "/reset_prefix_cache"):
        if path:
            assert own.post(path, {}).json() == {"success": True}
        usage = own.post("/v1/chat/completions", body).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        own.wait_idle()
    assert cached[0] == 0 < cached[1] and cached[2] == cached[3] == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": "much"}, "'much' is no size"),
        ({"kv_cache_memory_bytes": 0}, "a positive number of bytes is needed"),
        ({"kv_cache_memory_bytes": 100}, "hold no K/V block of 16 tokens"),
        ({"kv_cache_memory_bytes": 10**30}, "no machine has so many"),
        ({"kv_cache_memory_bytes": 10**18}, "the old one included"),
        ({"kv_cache_memory_bytes": "6m", "timeout": -1}, "timeout"),
    ],
)
def test_a_size_that_cannot_be_is_a_400_and_changes_nothing(own: ServerProcess, body: dict[str, Any], says: str):
    own.wait_idle()
    before = status(own)["pool_bytes"]
    assert says in own.error("/v1/cache/rebuild", body)
    assert status(own)["pool_bytes"] == before
    assert own.health() == 200
