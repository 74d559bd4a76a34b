"""SchedulerOutput -> ForwardBatch: one slot per running request, everything of a step in one host buffer and one copy to the device.

The host writes ids, a few numbers per part and the wanted rows; what follows from them for every token, and the block tables, the device
makes itself (kernels/token_fields.py), as the first thing of the step's forward.

A slot belongs to a request from its first scheduled part until the scheduler reports it finished or preempted. Whatever a later
step needs of an earlier one (block tables, the last sampled token) is kept by slot, never by the row a request happened to have."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Protocol

import numpy as np
import torch

from lastrow.config import MAX_DRAFTS
from lastrow.core.output import ScheduledRequest, SchedulerOutput
from lastrow.core.request import Request
from lastrow.engine.block_copies import block_copies
from lastrow.engine.staging import ALIGN, Layout, Staging, StaticFields, layout_of, views
from lastrow.kernels.ops import Ops
from lastrow.kernels.rows import AttentionPlan, QueryRows, num_split_sequences
from lastrow.kernels.token_fields import PART_FIELDS, TOKEN_FIELDS
from lastrow.models.batch import ForwardBatch

STEP_FIELDS = 15  # int32 per token at most: its id, a part with two tile lists, three of its row, two int64 indices
MAX_STATIC_ROWS = 256  # wanted rows of a captured prefill, and the sequences it has room for
COPIES = ("copies_full", "copies_sliding")
TABLE_COLUMNS = 16  # block tables are padded to a multiple of this, so that their stride divides by 16


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides how a step runs. rows: wanted rows. context: longest K/V length. is_decode: one sampled row per sequence and
    nothing else. copies: blocks that forks copy inside the forward, the larger number of the two groups."""

    tokens: int
    sequences: int
    rows: int
    context: int
    is_decode: bool
    copies: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """How a step runs: the fields of the graph before and of the graph behind the cut, None where that part runs eagerly. A
    decode step is one graph: both are the same fields."""

    before: StaticFields | None = None
    behind: StaticFields | None = None

    @property
    def is_whole(self) -> bool:
        return self.before is not None and self.before is self.behind


EAGER = Route()


class Router(Protocol):
    """Chooses the graphs of a step (engine/cuda_graphs.py)."""

    def route(self, shape: StepShape) -> Route: ...


@dataclass(slots=True)
class StepInputs:
    """One step, ready for the model. Row order of the parts: decodes, then others with one wanted row, with several, with none.

    slots [S]: runner slot of each part (host). row_start: index of each part's first row among the R wanted rows. num_tokens,
    num_rows: T and R, padding not counted. sample_rows [n] int64: those of the R rows that are sampled, None when all are;
    sample_slots [n] int32: their slots; sample_parts: for each, its index in `parts`; sample_positions [n]: absolute positions of
    those rows (host), of parts that follow drafts in flight the last that are possible. batch: the tensors of the parts that run eagerly,
    None where everything is captured."""

    parts: list[ScheduledRequest]
    slots: np.ndarray
    num_decodes: int
    num_tokens: int
    batch: ForwardBatch | None
    row_start: list[int]
    num_rows: int
    sample_rows: torch.Tensor | None
    sample_slots: torch.Tensor
    sample_parts: list[int]
    sample_positions: np.ndarray
    route: Route = EAGER


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """hidden [R, H] of the wanted rows, None when none is wanted. logits [R, V]: before the softcap, and greedy [R] int64: their
    argmax, already kept in last_sampled for the rows that are sampled; both None after an eager forward."""

    hidden: torch.Tensor | None
    logits: torch.Tensor | None = None
    greedy: torch.Tensor | None = None


class InputBatch:
    """Slots, block tables and last sampled tokens of the running requests.

    block_tables: (full, sliding), each [max_num_seqs + 1, columns] int32 on the device, at one address for good; the last row is
    all null blocks, for padding rows. last_sampled [max_num_seqs + 1] int32 on the device: what each slot's request sampled last,
    the source of ids the host has not seen yet. coming [max_num_seqs + 1, 1 + MAX_DRAFTS] int32 on the device: that token's position
    and the drafts behind it, for parts that follow drafts in flight. attention_plans: before and behind the cut, see
    `QueryRows.plan`. router: where graphs are captured, what chooses them. tile_rows: rows per tile of the tiled attention's tile
    lists (`use_tiles`)."""

    def __init__(
        self,
        ops: Ops,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device | str,
        attention_plans: tuple[AttentionPlan, AttentionPlan] = ("auto", "auto"),
        max_num_batched_tokens: int = 0,
    ) -> None:
        if block_size & (block_size - 1):
            raise ValueError(f"block_size is {block_size}: a power of two is needed")
        self.ops = ops
        self.device = torch.device(device)
        self.block_size = block_size
        columns = _round_up(-(-max_model_len // block_size), TABLE_COLUMNS)
        self._tables = torch.zeros(2, max_num_seqs + 1, columns, dtype=torch.int32, device=self.device)
        self.block_tables = (self._tables[0], self._tables[1])
        self.filled = [0] * max_num_seqs
        self.slot_of: dict[str, int] = {}
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.null_slot = max_num_seqs
        self.last_sampled = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=self.device)
        self.coming = torch.zeros(max_num_seqs + 1, 1 + MAX_DRAFTS, dtype=torch.int32, device=self.device)
        self.router: Router | None = None
        self.use_tiles(())
        self.attention_plans = attention_plans
        self.padding: dict[str, int] = dict.fromkeys(("row_seqs", "row_slots"), self.null_slot)
        self._staging = Staging(self.device, 0)
        self.reserve(STEP_FIELDS * max(max_num_batched_tokens, max_num_seqs))

    def reserve(self, size: int) -> torch.Tensor:
        """Device memory for the fields that a step sends, `size` int32 elements in all, and room behind them for those that only some
        steps have: new blocks and sampled rows. At one address from then on, if no larger size is asked."""
        rows, slack = 2 * max(self.null_slot, MAX_STATIC_ROWS), STEP_FIELDS * ALIGN
        return self._staging.reserve(size + self._tables.numel() + rows + slack)

    def use_tiles(self, rows_per_tile: tuple[int, ...]) -> None:
        """Make tile lists of these sizes for attention before the cut, where a backend reads them."""
        self.tile_rows = rows_per_tile
        self._tile_rows = torch.tensor(rows_per_tile, dtype=torch.int32, device=self.device)

    # ------------------------------------------------------------------------------------------------------ slots
    def drop(self, request_ids: Iterable[str]) -> None:
        """Free the slots of finished and preempted requests; ids without a slot are ignored."""
        for request_id in request_ids:
            slot = self.slot_of.pop(request_id, None)
            if slot is not None:
                self.free_slots.append(slot)

    def admit(self, request: Request) -> int:
        """A slot for a request that has none. Raises RuntimeError when more than max_num_seqs requests run."""
        if not self.free_slots:
            raise RuntimeError(f"request {request.request_id}: all {self.null_slot} slots are taken (max_num_seqs)")
        slot = self.free_slots.pop()
        self.slot_of[request.request_id] = slot
        self.filled[slot] = 0
        return slot

    # ------------------------------------------------------------------------------------------------------ one step
    def prepare(self, out: SchedulerOutput) -> StepInputs:
        """The tensors of a step whose requests all have slots."""
        parts = _row_order(out)
        slots = [self.slot_of[part.request.request_id] for part in parts]
        plan = _StepPlan(parts, slots)
        copies = block_copies(parts)
        route = EAGER
        if self.router is not None:
            is_decode = out.num_decodes == len(parts)
            shape = StepShape(plan.num_tokens, len(parts), plan.num_rows, max(plan.kv_lens), is_decode, max(map(len, copies)))
            route = self.router.route(shape)
            if plan.follows and not route.is_whole:  # the host's positions of the wanted rows are not theirs
                route = EAGER
        if not route.is_whole or self.attention_plans[0] == "tiled":
            split = num_split_sequences(plan.q_lens, out.num_decodes, self.attention_plans[0]) if route.before is None else 0
            plan.tile_ends = [plan.ends_of_tiles(rows, split) for rows in self.tile_rows]
        values = self._row_values(plan, route)
        if any(map(len, copies)):
            values |= dict(zip(COPIES, (rows.reshape(-1) for rows in copies), strict=True))
        if not plan.samples_every_row:
            values["sample_rows"] = plan.sample_rows.view(np.int32)
        t = self._send(parts, plan, values, route)
        batch = None if route.before is not None else self._batch(plan, out.num_decodes, t, route)
        row_slots = t["row_slots"][: plan.num_rows]
        sample_rows = None if plan.samples_every_row else t["sample_rows"].view(torch.int64)
        return StepInputs(
            parts, plan.slots, out.num_decodes, plan.num_tokens, batch, plan.row_start, plan.num_rows, sample_rows,
            row_slots if sample_rows is None else row_slots[sample_rows], plan.row_parts[plan.sample_rows].tolist(),
            plan.row_positions[plan.sample_rows], route,
        )  # fmt: skip

    def _row_values(self, plan: _StepPlan, route: Route) -> dict[str, np.ndarray]:
        """The fields of the wanted rows, int32, unpadded. row_slots: the slot of each sampled row, the null slot of the others. A step
        whose every row is wanted, in one graph, has the others among those of its tokens."""
        seqs = plan.slots[plan.row_parts]
        row_slots = seqs
        if not plan.samples_every_row:
            row_slots = np.full(plan.num_rows, self.null_slot, np.int32)
            row_slots[plan.sample_rows] = seqs[plan.sample_rows]
        if route.is_whole:
            return {"row_slots": row_slots}
        take = plan.logits_indices().view(np.int32)
        return {"row_slots": row_slots, "row_positions": plan.row_positions, "row_seqs": seqs, "logits_indices": take}

    def _send(
        self, parts: Sequence[ScheduledRequest], plan: _StepPlan, values: dict[str, np.ndarray], route: Route
    ) -> dict[str, torch.Tensor]:
        """The step's fields on the device, in one copy: those of the route's graphs where they read them, the others behind. Padding
        rows of a graph are token 0 at position 0 of the null slot and store nothing."""
        layout: Layout = {}
        t: dict[str, torch.Tensor] = {}
        end = 0
        for static in (route.behind, route.before):
            if static is not None:
                layout |= static.layout
                t |= static.t
                end = max(end, static.end)
        known, begin, new_blocks = self._new_blocks(parts, plan.slots.tolist())
        # a graph reads new blocks behind its last field, as many as there are
        sizes = {"new_blocks": len(new_blocks), "ids": plan.num_tokens, "parts": self.part_fields * (len(parts) + 1)}
        sizes |= {name: len(value) for name, value in values.items()}
        others, end = layout_of({name: size for name, size in sizes.items() if name not in layout}, end)
        fields = self._staging.begin(layout | others, end)
        _token_ids(parts, plan.first, fields.pop("ids"))
        table = fields.pop("parts").reshape(self.part_fields, -1)
        starts = [-1 if part.follows else part.start for part in parts] if plan.follows else plan.starts
        table[:PART_FIELDS, : len(parts)] = plan.first[:-1], starts, plan.slots, known, begin
        table[:PART_FIELDS, len(parts) :] = np.array(self.padding_part(plan.num_tokens, len(new_blocks) // 2), np.int32)[:, None]
        for first_tile, ends in zip(table[PART_FIELDS:], plan.tile_ends, strict=False):
            first_tile[0], first_tile[1 : len(ends) + 1], first_tile[len(ends) + 1 :] = 0, ends, ends[-1]
        values["new_blocks"] = new_blocks
        for name, field in fields.items():
            value = values[name]
            field[: len(value)] = value
            if len(value) < len(field):
                field[len(value) :] = self.padding.get(name, 0)
        return t | views(self._staging.to_device(bool(layout)), others)

    @property
    def part_fields(self) -> int:
        """Rows of a step's `parts`."""
        return PART_FIELDS + len(self.tile_rows)

    def make_token_fields(self, t: Mapping[str, torch.Tensor], new_blocks: torch.Tensor, out: torch.Tensor, tiles: torch.Tensor) -> None:
        """Complete the ids in t, write the step's new blocks to the block tables, fill out and tiles, on the device: once per step,
        before anything else of it. See kernels/token_fields.py."""
        parts = t["parts"].view(self.part_fields, -1)
        self.ops.token_fields(
            t["ids"], parts, new_blocks, self._tables, self.last_sampled, self.coming, self.block_size, out,
            self._tile_rows[: tiles.shape[0]], tiles,
        )  # fmt: skip

    def padding_part(self, tokens: int = 0, new_blocks: int = 0) -> tuple[int, ...]:
        """What stands in `parts` behind the last part of a step with so many tokens and new blocks."""
        return tokens, 0, self.null_slot, 0, new_blocks

    def _batch(self, plan: _StepPlan, num_decodes: int, t: dict[str, torch.Tensor], route: Route) -> ForwardBatch:
        counts = [ends[-1] for ends in plan.tile_ends]
        made = torch.empty(TOKEN_FIELDS, _round_up(plan.num_tokens, ALIGN), dtype=torch.int32, device=self.device)[:, : plan.num_tokens]
        tiles = torch.empty(len(counts), _round_up(max(counts, default=0), ALIGN), 5, dtype=torch.int32, device=self.device)
        self.make_token_fields(t, t["new_blocks"], made, tiles)
        positions, seq_index, *slots = made
        rows = QueryRows(
            positions, seq_index, self.block_tables, plan.q_lens, plan.kv_lens, num_decodes,
            {rows: tiles[i, : counts[i]] for i, rows in enumerate(self.tile_rows)}, self.attention_plans[0],
        )  # fmt: skip
        full, sliding = (t[name].view(-1, 4) if name in t else None for name in COPIES)
        copies = (full, sliding)
        if not plan.num_rows:
            return ForwardBatch(t["ids"], rows, (slots[0], slots[1]), copies=copies)
        wanted, take = None, t["logits_indices"].view(torch.int64)
        if route.behind is None:
            wanted = QueryRows(
                positions[take] if plan.follows else t["row_positions"], t["row_seqs"], self.block_tables, plan.row_lens,
                plan.row_kv_lens, plan.num_single, plan=self.attention_plans[1],
            )  # fmt: skip
        return ForwardBatch(t["ids"], rows, (slots[0], slots[1]), take, wanted, copies)

    def _new_blocks(self, parts: Sequence[ScheduledRequest], slots: list[int]) -> tuple[list[int], list[int], np.ndarray]:
        """The block table entries that each request got since its last part: for each part how many there were before and how many of
        the step's come before its own, and [2 * n] int32, the full group's n and then the sliding one's. Entries that the window has
        passed keep their stale value: no row reads them."""
        known = [self.filled[slot] for slot in slots]
        ends = [len(part.block_ids[0]) or len(part.block_ids[1]) for part in parts]  # a group that no layer owns has none
        begin = [0] * len(parts)
        full: list[int] = []
        sliding: list[int] = []
        if ends != known:
            for i, (part, have, end) in enumerate(zip(parts, known, ends, strict=True)):
                begin[i] = len(full)
                if end > have:
                    full += part.block_ids[0][have:] or [0] * (end - have)
                    sliding += part.block_ids[1][have:] or [0] * (end - have)
                    self.filled[slots[i]] = end
        assert len(full) == len(sliding), "the groups' tables are of one length"
        new = struct.pack(f"{2 * len(full)}i", *full, *sliding)  # half the time of np.array
        return known, begin, np.frombuffer(new, np.int32)

    def keep_sampled(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Remember on the device what these slots sampled: slots [n] int32, token_ids [n]."""
        self.last_sampled[slots] = token_ids.to(torch.int32)

    def keep_drafts(self, slots: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, drafts: torch.Tensor) -> None:
        """Remember on the device the newest tokens [n] of slots [n], their positions [n] and the drafts behind them [n, K]: all that a step
        needs which follows before the host has seen them."""
        self.last_sampled[slots] = token_ids
        self.coming[slots, 0] = positions
        self.coming[slots, 1 : 1 + drafts.shape[1]] = drafts.to(torch.int32)


class _StepPlan:
    """What a step's parts say, in numbers on the host. Of the S parts: q_lens, kv_lens; starts: position of the first token; first
    [S + 1]: where its tokens begin among the T; slots [S] int32; row_start: where its rows begin among the R. Of the parts with wanted
    rows: row_lens, row_kv_lens; num_single: how many of them, at the front, have one row. Of the rows: row_parts [R]: index of the part,
    row_positions [R] int32. sample_rows [n] int64 into the rows. tile_ends: `ends_of_tiles` of each list that the step reads. follows: a
    part follows drafts in flight, and its positions and lengths here are the largest possible."""

    def __init__(self, parts: Sequence[ScheduledRequest], slots: list[int]) -> None:
        self.slots = np.array(slots, np.int32)
        self.q_lens = tuple([part.num_tokens for part in parts])
        self.starts = [part.start for part in parts]
        self.follows = any(part.follows for part in parts)
        self.first = [0, *accumulate(self.q_lens)]
        self.num_tokens = self.first[-1]
        self.kv_lens = tuple(map(add, self.starts, self.q_lens))
        self.row_lens = tuple([count for part in parts if (count := len(part.rows))])
        count = len(self.row_lens)
        self.num_rows = sum(self.row_lens)
        self.num_single = next((i for i, rows in enumerate(self.row_lens) if rows != 1), count)
        self.row_start = [*accumulate(self.row_lens, initial=0), *[self.num_rows] * (len(parts) - count)][: len(parts)]
        last = [part.rows[-1] for part in parts[:count]]
        self.row_kv_lens = tuple([position + 1 for position in last])
        pieces = [np.array(last[: self.num_single], np.int32)]
        pieces += [np.asarray(part.rows, np.int32) for part in parts[self.num_single : count]]
        self.row_positions = pieces[0] if self.num_single == count else np.concatenate(pieces)
        self.row_parts = np.arange(count)
        if self.num_single < count:
            self.row_parts = self.row_parts.repeat(self.row_lens)
        self.sample_rows = self._sample_rows(parts, count)
        self.samples_every_row = len(self.sample_rows) == self.num_rows
        self.tile_ends: list[list[int]] = []

    def _sample_rows(self, parts: Sequence[ScheduledRequest], count: int) -> np.ndarray:
        sampled = [i for i in range(count) if parts[i].sample]
        if len(sampled) == self.num_rows:
            return np.arange(self.num_rows)
        rows: list[int] = []
        for i in sampled:
            end = self.row_start[i] + self.row_lens[i]
            rows += range(end - 1 - len(parts[i].draft_token_ids), end)
        return np.array(rows, np.int64)

    def logits_indices(self) -> np.ndarray:
        """[R] int64 into the T tokens."""
        shift = np.array([first - start for first, start in zip(self.first, self.starts, strict=False)], np.int64)
        return shift[self.row_parts] + self.row_positions

    def ends_of_tiles(self, rows_per_tile: int, split: int) -> list[int]:
        """[S]: tiles of this many rows in each part and those before it, the first `split` parts having none."""
        return [*accumulate([0] * split + [-(-rows // rows_per_tile) for rows in self.q_lens[split:]])]


def _row_order(out: SchedulerOutput) -> list[ScheduledRequest]:
    """Decodes first, then parts with one wanted row, several, none: single rows stay adjacent among the wanted rows, and the
    sequences with rows come first."""
    parts, decodes = out.scheduled, out.num_decodes
    others = parts[decodes:]
    if all(len(part.rows) == 1 for part in others):
        return list(parts)
    return parts[:decodes] + sorted(others, key=lambda part: (0, 1)[len(part.rows) > 1] if len(part.rows) else 2)


def _token_ids(parts: Sequence[ScheduledRequest], bounds: Sequence[int], out: np.ndarray) -> None:
    """Input ids of every part, which begin at `bounds`; where only the device knows: -1, and -2 - i for draft i."""
    singles: list[int] = []
    for i, part in enumerate(parts):
        request, start = part.request, part.start
        if part.num_tokens == 1 and len(singles) == i:
            behind = start - len(request.prompt_token_ids)
            if behind < 0:
                singles.append(request.prompt_token_ids[start])
            else:
                singles.append(request.output_token_ids[behind] if behind < len(request.output_token_ids) else -1)
            continue
        if request.prompt_buffer is not None and part.end <= len(request.prompt_buffer):
            out[bounds[i] : bounds[i + 1]] = np.frombuffer(request.prompt_buffer, np.int32)[start : part.end]
            continue
        out[bounds[i] : bounds[i + 1]] = request.token_ids(start, part.end)
        if part.draft_token_ids:
            drafts = range(-2, -2 - len(part.draft_token_ids), -1) if part.follows else part.draft_token_ids
            out[bounds[i + 1] - len(part.draft_token_ids) : bounds[i + 1]] = drafts
    out[: len(singles)] = singles


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
