"""Several prompts of one request at a time. A single one, which is what most requests bring, needs no task and no queue.

Errors leave no cycle of themselves, a frame and a local variable of it (TaskGroup's do): it would keep their prompts until garbage is
collected, which a server does rarely (garbage.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")


async def together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Returns when all have. The first error ends the others and is raised."""
    if len(works) == 1:
        await works[0]
        return
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


def merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Items of all as they come. The first error, and leaving early, ends them all."""
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    queue: asyncio.Queue[tuple[T] | int] = asyncio.Queue()  # an item, or the number of a source that has ended

    async def feed(number: int, source: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    queue.put_nowait((item,))
        finally:
            queue.put_nowait(number)

    tasks = [asyncio.create_task(feed(number, source)) for number, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, int):
                left -= 1
                tasks[item].result()
            else:
                yield item[0]
    finally:
        await _end(tasks)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()
