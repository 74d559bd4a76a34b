"""Attention of any set of query rows over the paged pool, in torch (spec sections 2.5, 2.7)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lastrow.kernels import kv_cache
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rows import QueryRows

QUERY_CHUNK = 256  # rows per call: bounds the mask and lets sliding layers skip keys outside the window


def reference(q: torch.Tensor, kv: PagedKV, rows: QueryRows, block_table: torch.Tensor, window: int) -> torch.Tensor:
    """q [N, heads, d] -> [N, heads, d]. Scale 1.0. A row at position p reads keys 0..p, or p-window+1..p when window > 0.

    block_table [slots, max_blocks] int32 is that of the layer's group; a sequence's row in it is rows.seq_index."""
    out = torch.empty_like(q)
    first = 0
    for count in rows.q_lens:
        blocks = block_table[int(rows.seq_index[first])]
        for start in range(first, first + count, QUERY_CHUNK):
            end = min(start + QUERY_CHUNK, first + count)
            out[start:end] = _attend(q[start:end], kv, blocks, rows.positions[start:end], window)
        first += count
    return out


def _attend(q: torch.Tensor, kv: PagedKV, blocks: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    low = max(int(positions[0]) - window + 1, 0) if window else 0
    high = int(positions[-1]) + 1
    k, v = kv_cache.load(kv, blocks, low, high, q.dtype)
    key_positions = torch.arange(low, high, device=q.device)
    mask = key_positions <= positions[:, None]
    if window:
        mask &= key_positions > positions[:, None] - window
    o = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask, scale=1.0, enable_gqa=True
    )
    return o[0].transpose(0, 1)
