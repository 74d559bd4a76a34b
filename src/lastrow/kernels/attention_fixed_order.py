"""Attention in torch whose result for a row depends on its position and keys alone, whatever is computed beside it.

What the Triton kernels give by construction, for the reference backend with batch_invariant: keys in tiles at absolute
multiples of TILE, online softmax over them in ascending order, and matmuls of one shape. A tile that a row does not see
adds exact zeros to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lastrow.kernels import kv_cache
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rows import QueryRows

TILE = 64  # keys per step
ROWS = 16  # query rows per matmul; fewer are padded, because a CPU's matmul of few rows sums in another order


def reference(q: torch.Tensor, kv: PagedKV, rows: QueryRows, block_table: torch.Tensor, window: int) -> torch.Tensor:
    """As attention.reference: q [N, heads, d] -> [N, heads, d]."""
    out, first = torch.empty_like(q), 0
    for count in rows.q_lens:
        if count:
            blocks = block_table[int(rows.seq_index[first])]
            for i in range(first, first + count, ROWS):
                j = min(i + ROWS, first + count)
                out[i:j] = _rows(q[i:j], kv, blocks, rows.positions[i:j], window)
        first += count
    return out


def _rows(q: torch.Tensor, kv: PagedKV, blocks: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    count, heads, d = q.shape
    kv_heads = kv.k.shape[2]
    group = heads // kv_heads
    low, high = max(int(positions[0]) - window + 1, 0) if window else 0, int(positions[-1]) + 1
    # [kv_heads, ROWS * group, d]: the query heads of a K/V head are rows of one matmul
    queries = F.pad(q.float(), (0, 0, 0, 0, 0, ROWS - count)).view(ROWS, kv_heads, group, d).transpose(0, 1).reshape(kv_heads, -1, d)
    at = F.pad(positions, (0, ROWS - count), value=-1).repeat_interleave(group)[:, None]
    maximum = torch.full((kv_heads, ROWS * group), -1e30, device=q.device)
    total = torch.zeros_like(maximum)
    acc = torch.zeros(kv_heads, ROWS * group, d, device=q.device)
    for start in range(low // TILE * TILE, high, TILE):
        end = min(start + TILE, high)
        loaded = kv_cache.load(kv, blocks, start, end, q.dtype)
        k, v = (F.pad(x.float(), (0, 0, 0, 0, 0, TILE - x.shape[0])).transpose(0, 1) for x in loaded)
        key = torch.arange(start, start + TILE, device=q.device)
        seen = key <= at
        if window:
            seen &= key > at - window
        scores = torch.bmm(queries, k.transpose(1, 2)).masked_fill(~seen, float("-inf"))
        new = torch.maximum(maximum, scores.amax(-1))
        p = torch.exp(scores - new[..., None])
        scale = torch.exp(maximum - new)
        total = total * scale + p.sum(-1)
        acc = acc * scale[..., None] + torch.bmm(p.to(q.dtype).float(), v)
        maximum = new
    o = (acc / total.clamp_min(1e-30)[..., None]).view(kv_heads, ROWS, group, d).transpose(0, 1).reshape(ROWS, heads, d)
    return o[:count].to(q.dtype)
