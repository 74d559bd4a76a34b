"""The model without an engine: hand-made batches over a small pool, for parity checks, benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lastrow.kernels.rows import QueryRows
from lastrow.kv.layout import KVBudget
from lastrow.kv.pool import KVPool
from lastrow.models.batch import ForwardBatch
from lastrow.models.gemma4 import Gemma4Model


@dataclass(frozen=True)
class Chunk:
    """`ids` of one sequence at positions start, start + 1, ...; rows: which of them are wanted (indices into ids, ascending)."""

    ids: Sequence[int]
    start: int = 0
    rows: Sequence[int] = ()
    sequence: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class DirectRunner:
    """A model with room for `sequences` sequences of `max_tokens` tokens each.

    The blocks of every sequence lie in random order in the pool, and no block is ever freed, so that an answer can only be
    right if every layer goes through its block table."""

    def __init__(
        self,
        model: Gemma4Model,
        max_tokens: int,
        sequences: int = 1,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        seed: int = 0,
    ) -> None:
        self.model = model
        embed = model.weights.embed
        blocks = -(-max_tokens // block_size)
        total = blocks * sequences + 1  # block 0 is the null block
        self.block_size = block_size
        self.pool = KVPool(model.config, KVBudget(total, total, block_size), kv_cache_dtype, embed.dtype, embed.device)
        generator = torch.Generator().manual_seed(seed)
        order = [1 + torch.randperm(total - 1, generator=generator).to(torch.int32).view(sequences, blocks) for _ in "fs"]
        self._host_tables = order
        self.tables = (order[0].to(embed.device), order[1].to(embed.device))

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """One forward of all chunks together. Returns the final hidden state of the wanted rows in order, [R, H], or None."""
        return self.model.forward(self.batch(chunks), self.pool)

    def logits(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """fp32 logits [R, V] of the wanted rows; at least one row must be wanted."""
        hidden = self.forward(chunks)
        if hidden is None:
            raise ValueError("no chunk wants a row: there are no logits")
        return self.model.logits(hidden)

    def all_logits(self, ids: Sequence[int], rows: Sequence[int] | None = None, sequence: int = 0) -> torch.Tensor:
        """Logits of `rows` (default: every row) of one whole prompt."""
        return self.logits([Chunk(ids, 0, range(len(ids)) if rows is None else rows, sequence)])

    def batch(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        """The tensors of one forward over `chunks`; sequences must differ from chunk to chunk."""
        device = self.tables[0].device
        positions = torch.cat([torch.arange(c.start, c.end, dtype=torch.int32) for c in chunks])
        owner = torch.cat([torch.full((len(c.ids),), c.sequence, dtype=torch.int32) for c in chunks])
        ids = torch.cat([torch.as_tensor(c.ids, dtype=torch.int32) for c in chunks])
        full, sliding = (self._slots(table, owner, positions) for table in self._host_tables)
        offsets = [0]
        for c in chunks:
            offsets.append(offsets[-1] + len(c.ids))
        reading = [c for c in chunks if len(c.rows)]
        take = [first + row for c, first in zip(chunks, offsets, strict=False) for row in c.rows]
        rows = self._rows(positions, owner, [len(c.ids) for c in chunks], [c.end for c in chunks])
        if not take:
            return ForwardBatch(ids.to(device), rows, (full, sliding))
        index = torch.tensor(take)
        ends = [c.start + c.rows[-1] + 1 for c in reading]
        wanted = self._rows(positions[index], owner[index], [len(c.rows) for c in reading], ends)
        return ForwardBatch(ids.to(device), rows, (full, sliding), index.to(device), wanted)

    def _slots(self, table: torch.Tensor, owner: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        block = table[owner.long(), (positions // self.block_size).long()]
        return (block * self.block_size + positions % self.block_size).to(self.tables[0].device)

    def _rows(self, positions: torch.Tensor, owner: torch.Tensor, q_lens: list[int], kv_lens: list[int]) -> QueryRows:
        device = self.tables[0].device
        single = next((i for i, n in enumerate(q_lens) if n != 1), len(q_lens))
        return QueryRows(positions.to(device), owner.to(device), self.tables, tuple(q_lens), tuple(kv_lens), single)
