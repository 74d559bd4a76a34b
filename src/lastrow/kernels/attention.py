"""Attention of any set of query rows over the paged pool, in torch (spec sections 2.5, 2.7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F

from lastrow.kernels import kv_cache
from lastrow.kernels._triton import L2E, TensorDescriptor, jit, tl
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rows import QueryRows

QUERY_CHUNK = 64  # rows per call: sliding layers skip keys outside the chunk's window, full layers those behind it
PRODUCT_ROWS, SCORES = 32, 1 << 22  # rows of a sequence from which on, and scores of a chunk (16 MB) up to which two products win


def reference(q: torch.Tensor, kv: PagedKV, rows: QueryRows, block_table: torch.Tensor, window: int) -> torch.Tensor:
    """q [N, heads, d] -> [N, heads, d]. Scale 1.0. A row at position p reads keys 0..p, or p-window+1..p when window > 0.

    block_table [slots, max_blocks] int32 is that of the layer's group; a sequence's row in it is rows.seq_index."""
    parts = []
    first = 0
    for count in rows.q_lens:
        if count == 1 and q.dtype is torch.float32:
            k, v = keys_of_row(kv, rows, first, block_table, window)
            parts.append(one_row(q[first].view(k.shape[0], -1, q.shape[2]), k, v).view(1, *q.shape[1:]))
        elif count:
            blocks = block_table[int(rows.seq_index[first])]
            positions = rows.positions[first : first + count]
            parts.append(_sequence(q[first : first + count], kv, blocks, positions, window))
        first += count
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(q)


def one_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """One row, which sees all n keys: q [kv_heads, group, d], k [kv_heads, d, n], v [kv_heads, n, d] -> [kv_heads, group, d]. fp32: the
    scores are not rounded."""
    scores = torch.bmm(q, k)
    return torch.bmm(torch.softmax(scores, -1, out=scores), v, out=out)


def keys_of_row(kv: PagedKV, rows: QueryRows, row: int, block_table: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K [kv_heads, d, n] and V [kv_heads, n, d] that `row` sees, gathered once for all layers that read the same K/V."""
    source, k, v = rows.gathered.get((row, window), (0, None, None))
    if k is None or v is None or source != kv.k.data_ptr():
        end = int(rows.positions[row]) + 1
        keys, values = kv_cache.load(kv, block_table[int(rows.seq_index[row])], max(end - window, 0) if window else 0, end, torch.float32)
        k, v = keys.permute(1, 2, 0), values.transpose(0, 1)
        rows.gathered[row, window] = (kv.k.data_ptr(), k, v)
    return k, v


def _sequence(q: torch.Tensor, kv: PagedKV, blocks: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    """Attention of one sequence's rows, chunk by chunk over K/V gathered once."""
    count, heads, _ = q.shape
    start, end = int(positions[0]), int(positions[-1]) + 1
    low = max(start - window + 1, 0) if window else 0
    k, v = (x.transpose(0, 1) for x in kv_cache.load(kv, blocks, low, end, q.dtype))
    if end - start == count:
        chunks = _adjacent_chunks(start, count, window, q.dtype, q.device)
    else:
        chunks = [_chunk(positions[i : i + QUERY_CHUNK], i, low, window, q.dtype) for i in range(0, count, QUERY_CHUNK)]
    scores = heads * max(chunk.mask.numel() for chunk in chunks)
    if q.dtype is torch.float32 and k.shape[0] == 1 and count >= PRODUCT_ROWS and scores <= SCORES:
        return _by_products(q, k[0], v[0], chunks, q.new_empty(scores))
    out = q.new_empty(q.shape)
    for chunk in chunks:
        keys, values = k[None, :, chunk.keys], v[None, :, chunk.keys]
        of, mask = q[chunk.rows].transpose(0, 1)[None], None if chunk.mask.shape[0] == 1 else chunk.mask  # one row reads all its keys
        o = F.scaled_dot_product_attention(of, keys, values, attn_mask=mask, scale=1.0, enable_gqa=True)
        out[chunk.rows] = o[0].transpose(0, 1)
    return out


def _by_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunks: Sequence[_Chunk], room: torch.Tensor) -> torch.Tensor:
    """q [N, heads, d], k and v [keys, d] of the one K/V head, fp32 -> [N, heads, d]; a chunk's scores lie in `room`, and the query heads
    are rows of one product. For a prompt with one K/V head this takes 0.8 of sdpa's time on a CPU; for few rows or several K/V heads it
    takes more, and a long context's scores find no room in the caches."""
    heads, d = q.shape[1:]
    queries, keys = q.reshape(-1, d), k.t()
    out = torch.empty_like(queries)
    for chunk in chunks:
        n, m = chunk.mask.shape
        rows = slice(chunk.rows.start * heads, chunk.rows.stop * heads)
        scores = room[: n * heads * m].view(n * heads, m)
        scores.view(n, heads, m).copy_(chunk.mask[:, None])
        torch.addmm(scores, queries[rows], keys[:, chunk.keys], out=scores)
        torch.softmax(scores, -1, out=scores)
        torch.mm(scores, v[chunk.keys], out=out[rows])
    return out.view(q.shape)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """rows: some of a sequence's rows. keys: those that any of them reads, of the gathered ones. mask [rows, keys]: what is added."""

    rows: slice
    keys: slice
    mask: torch.Tensor


def _chunk(positions: torch.Tensor, first_row: int, low: int, window: int, dtype: torch.dtype) -> _Chunk:
    """Rows at any ascending positions, over keys that were gathered from `low` on."""
    first, last = int(positions[0]), int(positions[-1]) + 1
    first = max(first - window + 1, 0) if window else 0
    mask = _mask(positions[:, None], torch.arange(first, last, device=positions.device), window, dtype)
    return _Chunk(slice(first_row, first_row + positions.shape[0]), slice(first - low, last - low), mask)


@lru_cache(maxsize=256)
def _adjacent_chunks(start: int, count: int, window: int, dtype: torch.dtype, device: torch.device) -> tuple[_Chunk, ...]:
    """Rows at `count` positions from `start` on. Made once for all layers that have the same window, for up to 128 sequences a step."""
    low, chunks = max(start - window + 1, 0) if window else 0, []
    for i in range(0, count, QUERY_CHUNK):
        j = min(i + QUERY_CHUNK, count)
        first, last = max(start + i - window + 1, 0) if window else 0, start + j
        width = window - 1 + QUERY_CHUNK if window else 1 << (last - 1).bit_length()
        mask = _mask_template(width, window, dtype, device)[i - j :, first - last :]
        chunks.append(_Chunk(slice(i, j), slice(first - low, last - low), mask))
    return tuple(chunks)


@lru_cache(maxsize=16)
def _mask_template(width: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[QUERY_CHUNK, width], 0 where row i may read and -inf elsewhere. Counted from the last key the pattern does not depend on
    positions, so one template serves every layer, chunk and prompt."""
    row = torch.arange(QUERY_CHUNK, device=device)[:, None] - QUERY_CHUNK
    return _mask(row, torch.arange(width, device=device) - width, window, dtype)


def _mask(row: torch.Tensor, key: torch.Tensor, window: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where the row at position `row` [n, 1] may read `key` [keys], and -inf elsewhere."""
    hidden = key > row
    if window:
        hidden |= key <= row - window
    return torch.zeros(hidden.shape, dtype=dtype, device=row.device).masked_fill_(hidden, float("-inf"))


# ------------------------------------------------------------------------------------------------------------ tiled kernel
@jit
def softmax_step(s, m, total):
    """One key tile of the online softmax: scores s [M, N] (masked: -inf) -> probabilities, the factor for what was summed
    before, the new maximum and sum. m starts at -1e30, so a row that has seen no key yet stays finite."""
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s * L2E - (m_new * L2E)[:, None])
    alpha = tl.exp2((m - m_new) * L2E)
    return p, alpha, m_new, total * alpha + tl.sum(p, 1)


@jit
def tiled_attention_kernel(
    q_src, k_desc, v_desc, out_ptr, tiles_ptr, positions_ptr, table_ptr, k_scale_ptr, v_scale_ptr, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, QUANTIZED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BT query rows of one sequence, the G heads of one K/V head (a K/V tile is read once for all), DV of the value's columns.

    Key tiles start at multiples of BN and come in ascending order, so a row's bits depend on its position and keys alone,
    not on how the prompt was cut into tiles, chunks or batches: a tile that masks a row out adds exact zeros."""
    G: tl.constexpr = HEADS // KV_HEADS
    BM: tl.constexpr = BT * G
    tile = tiles_ptr + tl.program_id(0) * 5
    q_row = tl.load(tile)
    count = tl.load(tile + 1)
    sequence = tl.load(tile + 2).to(tl.int64)
    first = tl.load(tile + 3)
    last = tl.load(tile + 4)
    kv_head = tl.program_id(1) // (D // DV)
    v_col = tl.program_id(1) % (D // DV) * DV
    if count > 0:
        r = tl.arange(0, BM)
        row_mask = (r < count * G)[:, None]
        pos = tl.load(positions_ptr + q_row + r // G, mask=r < count * G, other=last)
        q_offset = ((q_row + r // G) * HEADS + kv_head * G + r % G).to(tl.int64) * D
        if KV_HEADS == 1:
            q = q_src.load([q_row * G, 0])
        else:
            q = tl.load(q_src + q_offset[:, None] + tl.arange(0, D)[None, :], mask=row_mask, other=0.0)
        acc = tl.zeros([BM, DV], tl.float32)
        m = tl.full([BM], -1e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(first - WINDOW + 1, 0) // BN
        end = last // BN + 1
        table = table_ptr + sequence * table_stride
        block = tl.load(table + begin * BN // BLOCK_SIZE)
        for i in tl.range(begin, end, num_stages=STAGES):
            slot = block * BLOCK_SIZE + i * BN % BLOCK_SIZE
            # the next tile's block number is on its way while this tile is computed
            block = tl.load(table + tl.minimum(i + 1, end - 1) * BN // BLOCK_SIZE)
            cols = i * BN + tl.arange(0, BN)
            k = k_desc.load([slot, kv_head * D])
            s = tl.dot(q, k.to(q.dtype).T, input_precision=PRECISION)
            if QUANTIZED:
                scale_row = (slot + tl.arange(0, BN)).to(tl.int64) * KV_HEADS + kv_head
                s = s * tl.load(k_scale_ptr + scale_row)[None, :]
            if WINDOW > 0:  # 0 <= pos - col < WINDOW in one unsigned comparison
                s = tl.where((pos[:, None] - cols[None, :]).to(tl.uint32) < WINDOW, s, float("-inf"))
            else:
                s = tl.where(cols[None, :] <= pos[:, None], s, float("-inf"))
            p, alpha, m, total = softmax_step(s, m, total)
            if QUANTIZED:
                p = p * tl.load(v_scale_ptr + scale_row)[None, :]
            v = v_desc.load([slot, kv_head * D + v_col])
            acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision=PRECISION)
        out = out_ptr + q_offset[:, None] + v_col + tl.arange(0, DV)[None, :]
        tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=row_mask)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """rows: query rows x heads of a program. keys: per step. value_columns: of the head dim, per program."""

    rows: int
    keys: int
    value_columns: int
    warps: int
    stages: int


def tile_config(head_dim: int, block_size: int, dtype: torch.dtype, quantized: bool) -> TileConfig:
    """Best found on an H200 for bf16; the same for every batch, because the key tile decides a row's bits.

    fp32 has no tensor core path that keeps its precision and gets small tiles."""
    if dtype is torch.float32:
        config = TileConfig(16, 16, min(head_dim, 128), 4, 1)
    elif head_dim <= 128:
        config = TileConfig(128, 64, head_dim, 4, 2)
    elif head_dim <= 256:
        config = TileConfig(128, 64, head_dim, 8, 2 if not quantized else 1)
    else:
        config = TileConfig(128, 32 if quantized else 64, 256, 8, 1)
    if block_size % 16:
        raise ValueError(f"block_size is {block_size}: the Triton attention kernels need a multiple of 16")
    keys = config.keys
    while block_size % keys:
        keys //= 2
    return replace(config, keys=keys)


def rows_per_tile(heads: int, kv_heads: int, config: TileConfig) -> int:
    """Query rows of one tile, the key of `QueryRows.tiles`. Raises ValueError for a group size that is no power of two."""
    group = heads // kv_heads
    if group & (group - 1):
        raise ValueError(f"{heads} query heads on {kv_heads} K/V heads: the Triton kernels need a power of two per K/V head")
    return max(config.rows // group, 1)


def triton(
    q: torch.Tensor,
    kv: PagedKV,
    rows: QueryRows,
    block_table: torch.Tensor,
    window: int,
    *,
    out: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """`reference` by tiles, for many rows per sequence. Takes the sequences behind `rows.num_split_sequences` and leaves the
    other rows of `out` alone."""
    _, heads, d = q.shape
    slots, kv_heads = kv.k.shape[0] * kv.block_size, kv.k.shape[2]
    c = config or tile_config(d, kv.block_size, q.dtype, kv.is_quantized)
    bt = rows_per_tile(heads, kv_heads, c)
    tiles = rows.tile_list(bt)
    out = torch.empty_like(q) if out is None else out
    if not tiles.shape[0]:
        return out
    width = kv_heads * d
    k_desc = TensorDescriptor(kv.k, [slots, width], [width, 1], [c.keys, d])
    v_desc = TensorDescriptor(kv.v, [slots, width], [width, 1], [c.keys, c.value_columns])
    group = heads // kv_heads
    q_src = TensorDescriptor(q, [q.shape[0] * heads, d], [d, 1], [bt * group, d]) if kv_heads == 1 else q
    tiled_attention_kernel[(tiles.shape[0], kv_heads * (d // c.value_columns))](
        q_src, k_desc, v_desc, out, tiles, rows.positions, block_table, kv.k_scale, kv.v_scale, block_table.stride(0),
        heads, kv_heads, d, c.value_columns, bt, c.keys, kv.block_size, window, kv.is_quantized,
        "ieee" if q.dtype is torch.float32 else "tf32", c.stages, num_warps=c.warps,
    )  # fmt: skip
    return out
