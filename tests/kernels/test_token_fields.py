"""A step's token fields, block tables and tile lists against loops over parts and tokens, and `QueryRows.tile_list`."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from lastrow.kernels import token_fields
from lastrow.kernels.rows import QueryRows
from lastrow.kernels.token_fields import PART_FIELDS, TOKEN_FIELDS

SLOTS, COLUMNS, BLOCK_SIZE, DRAFTS = 9, 32, 4, 3
TILE_ROWS = (3, 8)


@dataclass
class Part:
    """known: block table entries that earlier steps wrote; new: those of this step, (full, sliding). follows: the host does not send
    `start`, the device has it."""

    slot: int
    start: int
    tokens: int
    known: int
    new: tuple[list[int], list[int]]
    follows: bool


def random_parts(rng: random.Random, most: int) -> list[Part]:
    """Decodes and chunks, some behind a prefix hit or a fork's shared blocks: then entries are new that no token of the part is in."""
    parts = []
    for slot in rng.sample(range(SLOTS - 1), rng.randint(1, SLOTS - 1)):
        tokens = rng.choice([1, 1, rng.randint(1, most)])
        start = rng.randint(0, COLUMNS * BLOCK_SIZE - tokens)
        entries = -(-(start + tokens) // BLOCK_SIZE)
        known = rng.choice([0, start // BLOCK_SIZE, -(-start // BLOCK_SIZE), entries])
        full, sliding = ([rng.randint(1, 99) for _ in range(entries - known)] for _ in range(2))
        parts.append(Part(slot, start, tokens, known, (full, sliding), rng.random() < 0.3))
    return parts


def run(operation, parts: list[Part], split: int, padding: tuple[int, int, int], ids: list[int], tables, last_sampled, coming, device: str):
    """padding: tokens, parts and tiles behind the real ones. Returns (ids, out, tiles, tables)."""
    first = [sum(part.tokens for part in parts[:i]) for i in range(len(parts) + 1)]
    begin = [sum(len(part.new[0]) for part in parts[:i]) for i in range(len(parts) + 1)]
    starts = [*(-1 if part.follows else part.start for part in parts), 0]
    rows = [first, starts, [*(part.slot for part in parts), SLOTS - 1], [*(part.known for part in parts), 0]]
    rows.append(begin)
    for size in TILE_ROWS:
        counts = [0 if i < split else -(-part.tokens // size) for i, part in enumerate(parts)]
        rows.append([sum(counts[:i]) for i in range(len(parts) + 1)])
    most = max(row[-1] for row in rows[PART_FIELDS:]) + padding[2]
    rows = [row + row[-1:] * padding[1] for row in rows]
    new = [block for group in (0, 1) for part in parts for block in part.new[group]] + [77] * 3
    made = [torch.tensor(x, dtype=torch.int32, device=device) for x in (ids + [5] * padding[0], rows, new, TILE_ROWS)]
    ids, parts_, new_blocks, tile_rows = made
    tables, last_sampled, coming = tables.to(device).clone(), last_sampled.to(device), coming.to(device)
    # as in the runner: rows of a wider memory
    out = torch.full((TOKEN_FIELDS, len(ids) + 32), 1234, dtype=torch.int32, device=device)[:, : len(ids)]
    tiles = torch.full((len(TILE_ROWS), most, 5), 1234, dtype=torch.int32, device=device)
    operation(ids, parts_, new_blocks, tables, last_sampled, coming, BLOCK_SIZE, out, tile_rows, tiles)
    return ids.cpu(), out.cpu(), tiles.cpu(), tables.cpu()


@pytest.mark.parametrize("operation", [token_fields.reference, token_fields.triton], ids=["reference", "triton"])
@pytest.mark.parametrize("most", [9, 90])
def test_fields_tables_and_tiles_are_those_of_a_loop(device, operation, most):
    rng = random.Random(most)
    for _ in range(12):
        parts = random_parts(rng, most)
        ids = [rng.choice([-1, rng.randint(-1 - DRAFTS, -2), rng.randint(0, 99)]) for part in parts for _ in range(part.tokens)]
        tables = torch.randint(1, 99, (2, SLOTS, COLUMNS), dtype=torch.int32)
        tables[:, -1] = 0
        last_sampled = torch.randint(0, 99, (SLOTS,), dtype=torch.int32)
        coming = torch.randint(0, 99, (SLOTS, 1 + DRAFTS), dtype=torch.int32)
        for part in parts:
            coming[part.slot, 0] = part.start if part.follows else 12345
        split = rng.randint(0, len(parts))
        padding = rng.choice([(0, 0, 0), (rng.randint(0, 200), rng.randint(0, 9), rng.randint(0, 200))])
        got_ids, out, tiles, got_tables = run(operation, parts, split, padding, ids, tables, last_sampled, coming, device)

        expected_tables = tables.clone()
        for part in parts:
            for group in (0, 1):
                for i, block in enumerate(part.new[group]):
                    expected_tables[group, part.slot, part.known + i] = block
        assert torch.equal(got_tables, expected_tables)
        rows = []
        for part in parts:
            for position in range(part.start, part.start + part.tokens):
                blocks = expected_tables[:, part.slot, position // BLOCK_SIZE].tolist()
                given = ids[len(rows)]
                token = given if given >= 0 else int(last_sampled[part.slot] if given == -1 else coming[part.slot, -1 - given])
                rows.append((token, position, part.slot, *(block * BLOCK_SIZE + position % BLOCK_SIZE for block in blocks)))
        rows += [(0, 0, SLOTS - 1, -1, -1)] * padding[0]
        assert torch.cat((got_ids[None], out)).T.tolist() == [list(row) for row in rows]

        q_lens = tuple(part.tokens for part in parts)
        behind = sum(q_lens[:split])
        query = QueryRows(out[0, behind : len(ids)], out[1, behind : len(ids)], (tables[0], tables[1]), q_lens[split:], (), plan="tiled")
        for size, made in zip(TILE_ROWS, tiles, strict=True):
            real = query.tile_list(size) + torch.tensor([behind, 0, 0, 0, 0])
            assert torch.equal(made[: len(real)], real.int()) and not made[len(real) :].any()


def test_a_step_of_padding_only_writes_nothing(device):
    """What a capture runs on."""
    parts = torch.zeros(PART_FIELDS, 3, dtype=torch.int32, device=device)
    parts[2] = SLOTS - 1
    ids = torch.full((5,), -1, dtype=torch.int32, device=device)
    tables = torch.randint(1, 99, (2, SLOTS, COLUMNS), dtype=torch.int32, device=device)
    before, last_sampled = tables.clone(), torch.full((SLOTS,), 3, dtype=torch.int32, device=device)
    out, none = torch.ones(TOKEN_FIELDS, 5, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.int32, device=device)
    coming = torch.full((SLOTS, 1 + DRAFTS), 9, dtype=torch.int32, device=device)
    token_fields.triton(ids, parts, none, tables, last_sampled, coming, BLOCK_SIZE, out, none, none.view(0, 0, 5))
    assert torch.equal(tables, before) and not ids.any()
    assert out.tolist() == [[0] * 5, [SLOTS - 1] * 5, [-1] * 5, [-1] * 5]
