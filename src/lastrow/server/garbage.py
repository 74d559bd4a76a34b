"""Python's cyclic garbage collector in a process that serves."""

from __future__ import annotations

import gc

# Objects more than before, after which the young ones are looked through. By default 700, which five open requests hold; every id of the
# prompts read since is visited then (0.08 ms a request of 1,024 ids), for the two or three objects that a request leaves in a cycle.
YOUNG = 20_000


def settle() -> None:
    """Called when everything is there that stays: looking through libraries and weights again would stop a step for tens of ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG)
