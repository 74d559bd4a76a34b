"""The block copies of a step, for a kernel that does them all at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lastrow.core.output import ScheduledRequest

NO_COPIES = np.zeros((0, 4), np.int32)


def block_copies(parts: Sequence[ScheduledRequest]) -> tuple[np.ndarray, np.ndarray]:
    """Per group [n, 4] int32: (source block, destination block, first, end) of the tokens that forks in this step copy."""
    if not any(part.copies for part in parts):
        return NO_COPIES, NO_COPIES
    by_group: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])
    for part in parts:
        for group, source, destination, tokens in part.copies:
            by_group[group].append((source, destination, tokens))
    return resolve(by_group[0]), resolve(by_group[1])


def resolve(copies: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """copies: (source, destination, tokens), meant one after the other; a destination is written once. Returned are copies that may be
    done at once: where a source is itself a destination (a fork of a fork), its copied tokens are read where they come from."""
    copies = list(copies)
    destinations = {copy[1] for copy in copies}
    if not any(copy[0] in destinations for copy in copies):  # forks of one another are not in one step, as the scheduler has it
        return np.array([(source, destination, 0, tokens) for source, destination, tokens in copies], np.int32).reshape(-1, 4)
    made: dict[int, list[tuple[int, int, int]]] = {}
    rows: list[tuple[int, int, int, int]] = []
    for source, destination, tokens in copies:
        pieces, known = [], 0
        for origin, first, end in made.get(source, ()):
            if first < tokens:
                pieces.append((origin, first, min(end, tokens)))
            known = end
        if known < tokens:
            pieces.append((source, known, tokens))
        made[destination] = pieces
        rows += [(origin, destination, first, end) for origin, first, end in pieces]
    return np.array(rows, np.int32).reshape(-1, 4)
