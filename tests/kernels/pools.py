"""A filled paged pool with scattered blocks, and the rows that read it."""

from __future__ import annotations

import torch

from kernels.compare import randn
from lastrow.kernels import kv_cache
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rows import QueryRows

FORMATS = ("auto", "int8_per_token_head", "fp8_per_token_head")
STORAGE = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}


def empty_pool(blocks: int, block_size: int, kv_heads: int, head_dim: int, form: str, dtype: torch.dtype, device: str) -> PagedKV:
    storage = STORAGE.get(form, dtype)
    k, v = (torch.zeros(blocks, block_size, kv_heads, head_dim, dtype=storage, device=device) for _ in "kv")
    if form == "auto":
        return PagedKV(k, v)
    return PagedKV(k, v, *(torch.zeros(blocks, block_size, kv_heads, device=device) for _ in "kv"))


def filled_pool(kv_lens: list[int], block_size: int, kv_heads: int, head_dim: int, form: str, dtype: torch.dtype, device: str):
    """K/V of every sequence written at scattered blocks -> (pool, block table [S, max_blocks]). Block 0 is the null block;
    the tail of a sequence's last block holds another sequence's leftovers."""
    per_sequence = [-(-n // block_size) for n in kv_lens]
    order = torch.randperm(sum(per_sequence)) + 1
    pool = empty_pool(sum(per_sequence) + 1, block_size, kv_heads, head_dim, form, dtype, device)
    table = torch.zeros(len(kv_lens), max(per_sequence) + 1, dtype=torch.int32)
    first = 0
    for sequence, blocks in enumerate(per_sequence):
        table[sequence, :blocks] = order[first : first + blocks]
        first += blocks
    slots = (order[:, None] * block_size + torch.arange(block_size)).flatten().int().to(device)
    k, v = (randn(len(slots), kv_heads, head_dim, dtype=dtype, device=device) for _ in "kv")
    # score spread of a trained head: |q . k| of a few, whatever the head dim
    kv_cache.store(pool, slots, k * (4 / head_dim**0.5), v)
    return pool, table.to(device)


def query_rows(positions: list[list[int]], table: torch.Tensor, num_single: int = 0, **fields) -> QueryRows:
    """One list of positions per sequence (a sequence without rows is legal)."""
    device = table.device
    flat = [p for rows in positions for p in rows]
    index = [s for s, rows in enumerate(positions) for _ in rows]
    return QueryRows(
        positions=torch.tensor(flat, dtype=torch.int32, device=device),
        seq_index=torch.tensor(index, dtype=torch.int32, device=device),
        block_tables=(table, table),
        q_lens=tuple(len(rows) for rows in positions),
        kv_lens=tuple(max(rows, default=-1) + 1 for rows in positions),
        num_single=num_single,
        **fields,
    )
