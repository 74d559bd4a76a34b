"""Several prompts at a time, and what errors leave behind: a server looks for garbage rarely, and a prompt may have millions of ids."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest

from lastrow.config import EngineConfig
from lastrow.core.sampling_params import SamplingParams
from lastrow.server import wire
from lastrow.server.async_engine import AsyncEngine, RequestRejected
from lastrow.server.concurrent import merged, together
from lastrow.server.http import EventStream


class Prompt(list[int]):
    """What a request holds on to; plain lists take no weak references."""


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Wanted(Exception):
    pass


def is_kept_after(use: Callable[[Any], Any]) -> bool:
    """Whether what an asyncio function was given is still there after it has failed."""
    prompt = Prompt()
    seen = weakref.ref(prompt)

    async def run(prompt: Prompt) -> None:
        try:
            await use(prompt)
        except (Wanted, RequestRejected):
            return
        raise AssertionError("no error")

    works = [run(prompt)]
    del prompt
    asyncio.run(works.pop())
    return seen() is not None


async def fails(prompt: Prompt, after: int = 3) -> None:
    for _ in range(after):
        await asyncio.sleep(0)
    raise Wanted


async def source(prompt: Prompt | None, log: list[str], name: str) -> AsyncGenerator[str]:
    try:
        for i in range(3):
            yield f"{name}{i}"
            await asyncio.sleep(0)
        if prompt is not None:
            raise Wanted
        await asyncio.sleep(60)
    finally:
        log.append(name)


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_error_ends_the_others_and_leaves_nothing(count: int) -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("")

    assert not is_kept_after(lambda prompt: together([fails(prompt), *(waits() for _ in range(count - 1))]))
    assert len(ended) == count - 1


@pytest.mark.parametrize("count", [1, 3])
def test_a_source_that_fails_ends_the_others_after_its_items_and_leaves_nothing(count: int) -> None:
    items: list[str] = []
    ended: list[str] = []

    async def read(prompt: Prompt) -> None:
        async for item in merged([source(prompt, ended, "a"), *(source(None, ended, name) for name in "bc"[: count - 1])]):
            items.append(item)

    assert not is_kept_after(read)
    assert [item for item in items if item[0] == "a"] == ["a0", "a1", "a2"]
    assert sorted(ended) == ["a", "b", "c"][:count]


def test_who_leaves_early_ends_all() -> None:
    ended: list[str] = []

    async def read() -> None:
        items = merged([source(None, ended, name) for name in "abc"])
        await anext(items)
        await items.aclose()
        assert sorted(ended) == ["a", "b", "c"]

    asyncio.run(read())


def test_a_stream_that_fails_leaves_nothing() -> None:
    sent: list[Any] = []

    async def stream(prompt: Prompt) -> None:
        async def receive() -> Any:
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            sent.append(message)

        async def events(prompt: Prompt) -> AsyncGenerator[bytes]:
            yield b"one"
            raise ValueError("two")

        await EventStream(events(prompt))({}, receive, send)
        raise Wanted

    assert not is_kept_after(stream)
    assert [message["body"][:9] for message in sent[1:]] == [b"one", b'data: {"e', b"data: [DO"]


def test_a_request_that_the_engine_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(prompt: Prompt) -> None:
        engine = AsyncEngine(EngineConfig(model="tiny-e"))
        engine.ready = wire.Ready(8, 8, 8, 0)
        monkeypatch.setattr(engine, "_send", lambda message: engine._fail("name", RequestRejected("too long")))
        async for _ in engine.generate(wire.Add("name", prompt, SamplingParams(), 0.0)):
            pass

    assert not is_kept_after(generate)
