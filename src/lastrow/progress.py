"""A progress bar where somebody looks at it, silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield `items`, with a bar on stderr when it is a terminal and rich is installed (the GPU host has no rich)."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track as rich_track
        except ImportError:
            pass
        else:
            yield from rich_track(items, description, total=total, console=Console(stderr=True), transient=True)
            return
    yield from items


def count(items: Iterable[T], description: str) -> Iterator[T]:
    """Yield `items`, saying on stderr how many there have been, when it is a terminal, while the next is awaited. For an iterator, whose
    reader prints between two items and may never take the last: the line is gone by then, and unlike a bar it needs no thread, hides no
    cursor and redirects no stdout."""
    if not sys.stderr.isatty():
        yield from items
        return

    def show(text: str) -> None:
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    show(f"{description} 0")
    try:
        for done, item in enumerate(items, 1):
            show("")
            yield item
            show(f"{description} {done}")
    finally:
        show("")
