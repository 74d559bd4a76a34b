"""Which rows a forward computes: the metadata every attention operation takes as an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class QueryRows:
    """N query rows of S sequences. Rows of a sequence are adjacent and ascend in position; any subset of positions is legal.

    positions [N] int32: absolute position of each row. seq_index [N] int32: the row of the block tables that holds its
    sequence (a request's slot, so that the tables can stay on the device from step to step).
    block_tables: (full, sliding), each [slots, max_blocks] int32, indexed by position // block_size.
    q_lens, kv_lens: host copies per sequence: query rows, and 1 + the last position a row of it may read.
    num_single: the first `num_single` sequences have exactly one row each (decodes, or one wanted row per prompt).
    tiles: device tile lists by tokens per tile, filled by the tiled attention kernel on first use."""

    positions: torch.Tensor
    seq_index: torch.Tensor
    block_tables: tuple[torch.Tensor, torch.Tensor]
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_single: int = 0
    tiles: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def max_kv_len(self) -> int:
        return max(self.kv_lens, default=0)
