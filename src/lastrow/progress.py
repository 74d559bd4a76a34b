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
