"""What every layer reads of a step's tokens, made from a few numbers per part of the step, and the block table entries it brings.

A position, a sequence, two places in the pool and the tiles of attention are thousands of numbers that the host would otherwise compute
and send while the card waits."""

from __future__ import annotations

import torch

from lastrow.kernels._triton import cdiv, jit, tl

PART_FIELDS = 5
"""Rows of `parts` before those of tile lists: index of the part's first token, that token's position, the part's slot, entries of the
slot's block tables that earlier steps have written, and how many of the step's new entries come before the part's. A position of -1:
the device knows it, from the step before."""
TOKEN_FIELDS = 4
"""Rows of `out`: positions, seq_index, slots of the full and of the sliding group."""
BLOCK = 128  # tokens, new entries or tiles of a program


def reference(
    ids: torch.Tensor,
    parts: torch.Tensor,
    new_blocks: torch.Tensor,
    tables: torch.Tensor,
    last_sampled: torch.Tensor,
    coming: torch.Tensor,
    block_size: int,
    out: torch.Tensor,
    tile_rows: torch.Tensor,
    tiles: torch.Tensor,
) -> None:
    """All int32.

    ids [T]: -1 becomes what the token's slot sampled last (last_sampled [slots]), -2 - i draft i of its slot. coming [slots, 1 + drafts]:
    the position of that sampled token, which a part's -1 stands for, and the drafts behind it.
    parts [PART_FIELDS + any, P]: no two of one slot. The last one is none but says where tokens, new entries and tiles end, with the
    slot that padding reads; there may be more of its kind.
    new_blocks [2 * n and any more]: the n new entries of the full group's table, then those of the sliding one's, part after part. They
    are written to tables [2, slots, columns], indexed by position // block_size.
    out [TOKEN_FIELDS, T]: filled; slots are block * block_size + offset. Tokens behind the last part's are padding: id and position 0,
    and slots of -1, which store nothing.
    tiles [L, C, 5]: filled with the tile lists of tile_rows [L] rows a tile, as `QueryRows.tile_list` has them, and behind them with
    zeros, which are empty tiles. Row PART_FIELDS + l of parts: index of the part's first tile in list l; a part without tiles has that of
    the next one."""
    first, start, slot, known, begin = parts[:PART_FIELDS].long()
    start = torch.where(start < 0, coming[slot, 0], start)
    entry = torch.arange(int(begin[-1]), device=ids.device)
    part = _part_of(entry, begin)
    tables[:, slot[part], known[part] + entry - begin[part]] = new_blocks[: 2 * len(entry)].view(2, -1)
    token = torch.arange(ids.shape[0], device=ids.device)
    part = _part_of(token, first)
    is_real, seq = token < first[-1], slot[part]
    positions = torch.where(is_real, start[part] + token - first[part], 0)
    out[0], out[1] = positions, seq
    out[2:] = torch.where(is_real, tables[:, seq, positions // block_size] * block_size + positions % block_size, -1)
    draft = coming[seq, (-1 - ids).clamp(0, coming.shape[1] - 1).long()]
    ids.copy_(torch.where(is_real, torch.where(ids < -1, draft, torch.where(ids < 0, last_sampled[seq], ids)), 0))
    for rows_per_tile, first_tile, made in zip(tile_rows, parts[PART_FIELDS:].long(), tiles, strict=False):
        tile = torch.arange(made.shape[0], device=ids.device)
        part = _part_of(tile, first_tile)
        following = (part + 1).clamp_max(parts.shape[1] - 1)
        skipped = (first_tile[following] - 1 - tile) * rows_per_tile  # heaviest first: behind the tiles that follow in the list
        rows = (first[following] - first[part] - skipped).clamp_max(rows_per_tile)
        position = start[part] + skipped
        columns = torch.stack((first[part] + skipped, rows, slot[part], position, position + rows - 1), 1)
        made.copy_(torch.where((tile < first_tile[-1])[:, None], columns, 0))


def _part_of(values: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """The last part that begins at or before each value."""
    return torch.searchsorted(begins, values, right=True) - 1


@jit
def part_of(begins_ptr, values, parts, steps):
    """The last of `parts` <= 2 ** steps parts that begins at or before each value; the first one does."""
    found = tl.zeros_like(values)
    width = 1 << steps
    for _ in range(steps):
        width = width // 2
        ahead = found + width
        inside = ahead < parts
        found = tl.where(inside & (tl.load(begins_ptr + ahead, mask=inside, other=0) <= values), ahead, found)
    return found


@jit
def write_new_blocks(parts_ptr, new_ptr, tables_ptr, parts, steps, table_size, columns, BLOCK: tl.constexpr):
    """They go around the programs of the launch's first row."""
    slot_ptr, known_ptr, begin_ptr = parts_ptr + 2 * parts, parts_ptr + 3 * parts, parts_ptr + 4 * parts
    count = tl.load(begin_ptr + parts - 1)
    for at in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        entry = at + tl.arange(0, BLOCK)
        inside = entry < count
        part = part_of(begin_ptr, entry, parts, steps)
        place = tl.load(slot_ptr + part) * columns + tl.load(known_ptr + part) + entry - tl.load(begin_ptr + part)
        tl.store(tables_ptr + place, tl.load(new_ptr + entry, mask=inside, other=0), mask=inside)
        tl.store(tables_ptr + table_size + place, tl.load(new_ptr + count + entry, mask=inside, other=0), mask=inside)


@jit
def make_tokens(
    ids_ptr, parts_ptr, new_ptr, tables_ptr, last_sampled_ptr, coming_ptr, out_ptr, tokens, parts, steps, out_stride, table_size, columns,
    COMING: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token whose block is new reads it where the host put it: another program may not have written it to the table yet."""
    known_ptr, begin_ptr = parts_ptr + 3 * parts, parts_ptr + 4 * parts
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stored, is_real = token < tokens, token < tl.load(parts_ptr + parts - 1)
    part = part_of(parts_ptr, token, parts, steps)
    slot, known = tl.load(parts_ptr + 2 * parts + part), tl.load(known_ptr + part)
    start = start_of(parts_ptr, coming_ptr, part, slot, parts, COMING)
    position = tl.where(is_real, start + token - tl.load(parts_ptr + part), 0)
    entry, offset = position // BLOCK_SIZE, position % BLOCK_SIZE
    is_old, is_new = is_real & (entry < known), is_real & (entry >= known)
    old, new = tables_ptr + slot * columns + entry, new_ptr + tl.load(begin_ptr + part) + entry - known
    full = tl.load(old, mask=is_old, other=0) + tl.load(new, mask=is_new, other=0)
    count = tl.load(begin_ptr + parts - 1)
    sliding = tl.load(old + table_size, mask=is_old, other=0) + tl.load(new + count, mask=is_new, other=0)
    tl.store(out_ptr + token, position, mask=stored)
    tl.store(out_ptr + out_stride + token, slot, mask=stored)
    tl.store(out_ptr + 2 * out_stride + token, tl.where(is_real, full * BLOCK_SIZE + offset, -1), mask=stored)
    tl.store(out_ptr + 3 * out_stride + token, tl.where(is_real, sliding * BLOCK_SIZE + offset, -1), mask=stored)
    known_id = tl.load(ids_ptr + token, mask=stored & is_real, other=0)
    draft = tl.load(coming_ptr + slot * COMING - 1 - known_id, mask=known_id < -1, other=0)
    known_id = tl.where(known_id == -1, tl.load(last_sampled_ptr + slot), known_id)
    tl.store(ids_ptr + token, tl.where(known_id < -1, draft, known_id), mask=stored)


@jit
def start_of(parts_ptr, coming_ptr, part, slot, parts, COMING: tl.constexpr):
    """Position of the first token of each part."""
    start = tl.load(parts_ptr + parts + part)
    return tl.where(start < 0, tl.load(coming_ptr + slot * COMING), start)


@jit
def make_tiles(
    parts_ptr, first_tile_ptr, coming_ptr, out_ptr, rows_per_tile, tiles, parts, steps, COMING: tl.constexpr, BLOCK: tl.constexpr
):
    """One list, its programs the launch's first axis."""
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = tile < tl.load(first_tile_ptr + parts - 1)
    part = part_of(first_tile_ptr, tile, parts, steps)
    first = tl.load(parts_ptr + part)
    skipped = (tl.load(first_tile_ptr + part + 1, mask=is_real, other=0) - 1 - tile) * rows_per_tile
    rows = tl.minimum(tl.load(parts_ptr + part + 1, mask=is_real, other=0) - first - skipped, rows_per_tile)
    slot = tl.load(parts_ptr + 2 * parts + part)
    position = start_of(parts_ptr, coming_ptr, part, slot, parts, COMING) + skipped
    out_ptr += tile * 5
    stored = tile < tiles
    tl.store(out_ptr, tl.where(is_real, first + skipped, 0), mask=stored)
    tl.store(out_ptr + 1, tl.where(is_real, rows, 0), mask=stored)
    tl.store(out_ptr + 2, tl.where(is_real, slot, 0), mask=stored)
    tl.store(out_ptr + 3, tl.where(is_real, position, 0), mask=stored)
    tl.store(out_ptr + 4, tl.where(is_real, position + rows - 1, 0), mask=stored)


@jit(do_not_specialize=["tokens", "tiles", "parts", "steps", "out_stride"])
def token_fields_kernel(
    ids_ptr, parts_ptr, new_ptr, tables_ptr, last_sampled_ptr, coming_ptr, out_ptr, tile_rows_ptr, tiles_ptr,
    tokens, tiles, parts, steps, out_stride, table_size, columns,
    FIELDS: tl.constexpr, COMING: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """program (BLOCK tokens, 0) or (BLOCK tiles, 1 + list)"""
    tile_list = tl.program_id(1) - 1
    if tile_list < 0:
        write_new_blocks(parts_ptr, new_ptr, tables_ptr, parts, steps, table_size, columns, BLOCK)
        make_tokens(
            ids_ptr, parts_ptr, new_ptr, tables_ptr, last_sampled_ptr, coming_ptr, out_ptr, tokens, parts, steps, out_stride, table_size,
            columns, COMING, BLOCK_SIZE, BLOCK,
        )  # fmt: skip
    else:
        rows_per_tile, first_tile_ptr = tl.load(tile_rows_ptr + tile_list), parts_ptr + (FIELDS + tile_list) * parts
        out_ptr = tiles_ptr + tile_list * tiles * 5
        make_tiles(parts_ptr, first_tile_ptr, coming_ptr, out_ptr, rows_per_tile, tiles, parts, steps, COMING, BLOCK)


def triton(
    ids: torch.Tensor,
    parts: torch.Tensor,
    new_blocks: torch.Tensor,
    tables: torch.Tensor,
    last_sampled: torch.Tensor,
    coming: torch.Tensor,
    block_size: int,
    out: torch.Tensor,
    tile_rows: torch.Tensor,
    tiles: torch.Tensor,
) -> None:
    """`reference` in one launch. Kernels that load ahead of their predecessor's end must not follow it directly."""
    count, (_, slots, columns), (lists, most, _) = parts.shape[1], tables.shape, tiles.shape
    token_fields_kernel[(cdiv(max(ids.shape[0], most), BLOCK), 1 + lists)](
        ids, parts, new_blocks, tables, last_sampled, coming, out, tile_rows, tiles, ids.shape[0], most, count, (count - 1).bit_length(),
        out.stride(0), slots * columns, columns, PART_FIELDS, coming.shape[1], block_size, BLOCK, num_warps=4,
    )  # fmt: skip
