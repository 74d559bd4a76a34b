"""Several prompts of one request at a time. A single one, which is what most requests bring, needs no task and no queue."""

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
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Items of all as they come. The first error, and leaving early, ends them all."""
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    queue: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue()

    async def feed(source: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    queue.put_nowait((item,))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(feed(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
