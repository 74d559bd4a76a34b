"""Which rows a forward computes: the metadata every attention operation takes as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

AttentionPlan = Literal["auto", "tiled", "rows"]

FEW_ROWS = 4
"""Rows per sequence up to which a group of sequences goes to the split kernel: a tile of it would be mostly padding."""


@dataclass(frozen=True, slots=True)
class QueryRows:
    """N query rows of S sequences. Rows of a sequence are adjacent and ascend in position; any subset of positions is legal.

    positions [N] int32: absolute position of each row. seq_index [N] int32: the row of the block tables that holds its
    sequence (a request's slot, so that the tables can stay on the device from step to step).
    block_tables: (full, sliding), each [slots, max_blocks] int32, indexed by position // block_size.
    q_lens, kv_lens: host copies per sequence: query rows, and 1 + the last position a row of it may read. Under a CUDA graph
    kv_lens are the bucket's upper bound, and rows past the real ones have position 0 and slot -1.
    num_single: the first `num_single` sequences have exactly one row each (decodes, or one wanted row per prompt).
    plan: which attention kernel reads them. "auto": the single rows (and groups of few rows) the split kernel, the rest the
    tiled one. Both give a row the same bits in any company, but not the same bits as each other, so batch invariance
    asks for "tiled" before the cut and "rows" behind it.
    tiles: device tile lists by rows per tile, filled on first use. The runner puts those of a step's tokens here, made by
    kernels/token_fields.py.
    gathered: K and V that the reference's attention read last, by (row, window), with where they came from: layers that share K/V
    read the same. Of one pass through layers; whoever begins one clears it."""

    positions: torch.Tensor
    seq_index: torch.Tensor
    block_tables: tuple[torch.Tensor, torch.Tensor]
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_single: int = 0
    tiles: dict[int, torch.Tensor] = field(default_factory=dict)
    plan: AttentionPlan = "auto"
    gathered: dict[tuple[int, int], tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def max_kv_len(self) -> int:
        return max(self.kv_lens, default=0)

    @property
    def num_split_sequences(self) -> int:
        """Leading sequences whose rows the split kernel takes."""
        return num_split_sequences(self.q_lens, self.num_single, self.plan)

    def tile_list(self, rows_per_tile: int) -> torch.Tensor:
        """What the tiled kernel walks, [n, 5] int32: first query row, rows, block table row, first and last position, of the sequences
        behind the split ones. Heaviest tile of a sequence first; tiles of 0 rows do nothing. Built on first use."""
        if rows_per_tile not in self.tiles:
            tiles = np.stack(self._row_ranges(rows_per_tile), 1).astype(np.int32)
            device = self.positions.device
            first, count = torch.from_numpy(tiles).to(device, non_blocking=True).unbind(1)
            columns = (first, count, self.seq_index[first], self.positions[first], self.positions[first + count - 1])
            self.tiles[rows_per_tile] = torch.stack(columns, 1)
        return self.tiles[rows_per_tile]

    def _row_ranges(self, rows_per_tile: int) -> tuple[np.ndarray, np.ndarray]:
        """First query row and rows of every tile, [n] int64 each."""
        lens = np.array(self.q_lens, np.int64)
        begins = (lens.cumsum() - lens)[self.num_split_sequences :]
        lens = lens[self.num_split_sequences :]
        counts = -(-lens // rows_per_tile)
        ends = counts.cumsum()
        # tiles of the same sequence that follow in the list: none follows that of its first rows
        after = (ends - 1).repeat(counts) - np.arange(int(counts.sum()))
        start = after * rows_per_tile
        return begins.repeat(counts) + start, np.minimum(rows_per_tile, lens.repeat(counts) - start)


def num_split_sequences(q_lens: Sequence[int], num_single: int, plan: AttentionPlan) -> int:
    """Of sequences with q_lens rows, the leading ones whose rows the split kernel takes; the tiled one takes the rest."""
    if plan == "tiled":
        return 0
    if plan == "rows" or max(q_lens[num_single:], default=0) <= FEW_ROWS:
        return len(q_lens)
    return num_single


def max_tiles(num_rows: int, num_sequences: int, rows_per_tile: int) -> int:
    """Tiles that any division of `num_rows` rows among `num_sequences` sequences can need."""
    return min(num_rows, num_rows // rows_per_tile + num_sequences)
