"""SchedulerOutput -> ForwardBatch: one slot per running request, everything of a step in one host buffer and one copy to the device.

A slot belongs to a request from its first scheduled part until the scheduler reports it finished or preempted. Whatever a later
step needs of an earlier one (block tables, the last sampled token) is kept by slot, never by the row a request happened to have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lastrow.core.output import ScheduledRequest, SchedulerOutput
from lastrow.core.request import Request
from lastrow.engine.block_copies import block_copies
from lastrow.engine.staging import ALIGN, Layout, Staging, StaticFields, layout_of, views
from lastrow.kernels.rows import AttentionPlan, QueryRows, num_split_sequences, tile_array
from lastrow.models.batch import ForwardBatch

STEP_FIELDS = 22  # int32 per token at most: ids, positions, sequences, slots, three of its row, two int64 indices, two tile lists
MAX_STATIC_ROWS = 256  # wanted rows of a captured prefill, and the sequences its tile list has room for
NOTHING_NEW = (np.zeros(0, np.int64), np.zeros(0, np.int32))
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
    those rows (host). batch: the tensors of the parts that run eagerly, None where everything is captured."""

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
    the source of ids the host has not seen yet. attention_plans: before and behind the cut, see `QueryRows.plan`. router: where
    graphs are captured, what chooses them. tile_rows: rows per tile of the tiled attention's tile lists, where a backend has one."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device | str,
        attention_plans: tuple[AttentionPlan, AttentionPlan] = ("auto", "auto"),
        max_num_batched_tokens: int = 0,
    ) -> None:
        if block_size & (block_size - 1):
            raise ValueError(f"block_size is {block_size}: a power of two is needed")
        self.device = torch.device(device)
        self.block_size = block_size
        self._columns = _round_up(-(-max_model_len // block_size), TABLE_COLUMNS)
        self._flat_tables = np.zeros(2 * (max_num_seqs + 1) * self._columns, np.int32)
        self._flat_block_tables = torch.from_numpy(self._flat_tables).to(self.device)  # on a CPU these are the host tables themselves
        full, sliding = self._flat_block_tables.view(2, max_num_seqs + 1, self._columns)
        self.block_tables = (full, sliding)
        self.filled = tuple([0] * max_num_seqs for _ in range(2))
        self.slot_of: dict[str, int] = {}
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.null_slot = max_num_seqs
        self.last_sampled = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=self.device)
        self.router: Router | None = None
        self.tile_rows: tuple[int, ...] = ()
        self.attention_plans = attention_plans
        self.padding = {"slots_full": -1, "slots_sliding": -1} | dict.fromkeys(("seq_index", "row_seqs", "row_slots"), self.null_slot)
        self._scratch, self._entry = np.empty((5, 0), np.int32), np.empty(0, np.int64)
        self._staging = Staging(self.device, 0)
        self.reserve(STEP_FIELDS * max(max_num_batched_tokens, max_num_seqs))

    def reserve(self, size: int) -> torch.Tensor:
        """Device memory for fields of `size` int32 elements in all, and room behind them for those that only some steps have: new
        blocks (an int64 place and a block) and sampled rows. At one address from then on, if no larger size is asked."""
        rows, slack = 2 * max(self.null_slot, MAX_STATIC_ROWS), STEP_FIELDS * ALIGN
        return self._staging.reserve(size + 3 * len(self._flat_tables) + rows + slack)

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
        for filled in self.filled:
            filled[slot] = 0
        return slot

    # ------------------------------------------------------------------------------------------------------ one step
    def prepare(self, out: SchedulerOutput) -> StepInputs:
        """The tensors of a step whose requests all have slots."""
        parts = _row_order(out)
        slots = np.array([self.slot_of[part.request.request_id] for part in parts], np.int32)
        new_blocks = self._update_tables(parts, slots.tolist())
        plan = _RowPlan(parts)
        copies = block_copies(parts)
        route = EAGER
        if self.router is not None:
            is_decode = out.num_decodes == len(parts)
            shape = StepShape(plan.num_tokens, len(parts), plan.num_rows, max(plan.kv_lens), is_decode, max(map(len, copies)))
            route = self.router.route(shape)
        values = self._values(parts, slots, plan)
        if any(map(len, copies)):
            values |= dict(zip(COPIES, (rows.reshape(-1) for rows in copies), strict=True))
        in_flight = route.before is None and bool((values["ids"] < 0).any())
        every = len(plan.sample_rows) == plan.num_rows
        if not every:
            values["sample_rows"] = plan.sample_rows.view(np.int32)
        if len(new_blocks[0]):
            values["new_index"], values["new_blocks"] = new_blocks[0].view(np.int32), new_blocks[1]
        first = num_split_sequences(plan.q_lens, out.num_decodes, self.attention_plans[0]) if route.before is None else 0
        pad_to = dict.fromkeys(self.tile_rows, 0) if route.before is None else route.before.tiles
        for rows, count in pad_to.items():
            values[f"tiles_{rows}"] = tile_array(plan.q_lens, plan.positions, values["seq_index"], rows, first, count).reshape(-1)
        t = self._send(values, route)
        self._write_tables(t)
        batch = None if route.before is not None else self._batch(plan, out.num_decodes, in_flight, t, route)
        row_slots = t["row_slots"][: plan.num_rows]
        sample_rows = None if every else t["sample_rows"].view(torch.int64)
        sampled_from = plan.logits_indices[plan.sample_rows]
        return StepInputs(
            parts, slots, out.num_decodes, plan.num_tokens, batch, plan.row_start, plan.num_rows, sample_rows,
            row_slots if sample_rows is None else row_slots[sample_rows], plan.sequence[sampled_from].tolist(),
            plan.positions[sampled_from], route,
        )  # fmt: skip

    def _values(self, parts: list[ScheduledRequest], slots: np.ndarray, plan: _RowPlan) -> dict[str, np.ndarray]:
        """Every field of the step, int32, unpadded, until the next step. row_slots: the slot of each sampled row, the null slot of the
        others."""
        positions, take, n = plan.positions, plan.logits_indices, plan.num_tokens
        if n > len(self._entry):
            self._scratch, self._entry = np.empty((5, n), np.int32), np.empty(n, np.int64)
        ids, sequence, full, sliding, offset = self._scratch[:, :n]
        _token_ids(parts, plan.starts, ids)
        # shifts, flat indices and the same memory each time: a step of 64k tokens is on the card's critical path
        np.take(slots, plan.sequence, out=sequence, mode="clip")
        entry = np.right_shift(positions, self.block_size.bit_length() - 1, out=self._entry[:n])
        entry += np.multiply(sequence, self._columns, out=offset)
        np.bitwise_and(positions, self.block_size - 1, out=offset)
        for table, place in zip(self._flat_tables.reshape(2, -1), (full, sliding), strict=True):
            np.take(table, entry, out=place, mode="clip")
            place *= self.block_size
            place += offset
        row_slots = np.full(plan.num_rows, self.null_slot)
        row_slots[plan.sample_rows] = sequence[take[plan.sample_rows]]
        return {
            "ids": ids,
            "positions": positions,
            "seq_index": sequence,
            "slots_full": full,
            "slots_sliding": sliding,
            "logits_indices": take.view(np.int32),
            "row_positions": positions[take],
            "row_seqs": sequence[take],
            "row_slots": row_slots,
        }

    def _send(self, values: dict[str, np.ndarray], route: Route) -> dict[str, torch.Tensor]:
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
        others, end = layout_of({name: len(value) for name, value in values.items() if name not in layout}, end)
        for name, field in self._staging.begin(layout | others, end).items():
            value = values[name]
            field[: len(value)] = value
            if len(value) < len(field):
                field[len(value) :] = self.padding.get(name, 0)
        return t | views(self._staging.to_device(bool(layout)), others)

    def _batch(self, plan: _RowPlan, num_decodes: int, in_flight: bool, t: dict[str, torch.Tensor], route: Route) -> ForwardBatch:
        ids = resolve_inflight(t["ids"], t["seq_index"], self.last_sampled) if in_flight else t["ids"]
        rows = QueryRows(
            t["positions"], t["seq_index"], self.block_tables, plan.q_lens, plan.kv_lens, num_decodes,
            {rows: t[f"tiles_{rows}"].view(-1, 5) for rows in self.tile_rows}, self.attention_plans[0],
        )  # fmt: skip
        slots = (t["slots_full"], t["slots_sliding"])
        full, sliding = (t[name].view(-1, 4) if name in t else None for name in COPIES)
        copies = (full, sliding)
        if not plan.num_rows:
            return ForwardBatch(ids, rows, slots, copies=copies)
        wanted = None
        if route.behind is None:
            wanted = QueryRows(
                t["row_positions"], t["row_seqs"], self.block_tables, plan.row_lens, plan.row_kv_lens, plan.num_single,
                plan=self.attention_plans[1],
            )  # fmt: skip
        return ForwardBatch(ids, rows, slots, t["logits_indices"].view(torch.int64), wanted, copies)

    def _update_tables(self, parts: Sequence[ScheduledRequest], slots: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Append the blocks each request got since its last part to the host tables. Entries the window has passed keep their
        stale value: no row reads them. Returns where in both tables, flat, and which blocks, [n] int64 and [n] int32."""
        first: list[int] = []
        counts: list[int] = []
        new: list[int] = []
        for group, filled in enumerate(self.filled):
            for part, slot in zip(parts, slots, strict=True):
                blocks, have = part.block_ids[group], filled[slot]
                if len(blocks) > have:
                    first.append((group * (self.null_slot + 1) + slot) * self._columns + have)
                    counts.append(len(blocks) - have)
                    new += blocks[have:]
                    filled[slot] = len(blocks)
        if not new:
            return NOTHING_NEW
        ends = np.cumsum(counts)
        index = np.repeat(np.array(first, np.int64) + counts - ends, counts) + np.arange(len(new))
        blocks = np.array(new, np.int32)
        self._flat_tables[index] = blocks
        return index, blocks

    def _write_tables(self, t: dict[str, torch.Tensor]) -> None:
        if "new_index" in t and self.device.type != "cpu":
            self._flat_block_tables.scatter_(0, t["new_index"].view(torch.int64), t["new_blocks"])

    def keep_sampled(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Remember on the device what these slots sampled: slots [n] int32, token_ids [n]."""
        self.last_sampled[slots] = token_ids.to(torch.int32)


def resolve_inflight(ids: torch.Tensor, seq_index: torch.Tensor, last_sampled: torch.Tensor) -> torch.Tensor:
    """ids [T] int32 with every -1 replaced by what its slot (seq_index [T] int32) sampled last."""
    return torch.where(ids < 0, last_sampled[seq_index], ids)


class _RowPlan:
    """Row arithmetic of a step on the host. logits_indices [R] into the T tokens; sample_rows [n] into the R rows."""

    def __init__(self, parts: Sequence[ScheduledRequest]) -> None:
        self.q_lens = tuple([part.num_tokens for part in parts])
        lens = np.array(self.q_lens, np.int64)
        starts = np.fromiter((part.start for part in parts), np.int64, len(parts))
        self.starts = np.concatenate(([0], np.cumsum(lens)))
        self.num_tokens = int(self.starts[-1])
        self.kv_lens = tuple((starts + lens).tolist())
        if self.num_tokens == len(parts):
            self.sequence, self.positions = np.arange(len(parts), dtype=np.int32), starts.astype(np.int32)
        else:
            self.sequence = np.repeat(np.arange(len(parts), dtype=np.int32), lens)
            shift = (starts - self.starts[:-1]).astype(np.int32)
            self.positions = np.repeat(shift, lens)
            self.positions += np.arange(self.num_tokens, dtype=np.int32)
        self.row_lens = tuple([len(part.rows) for part in parts if len(part.rows)])
        self.num_with_rows, self.num_rows = len(self.row_lens), sum(self.row_lens)
        self.num_single = next((i for i, count in enumerate(self.row_lens) if count != 1), self.num_with_rows)
        self._indices(parts, starts)

    def _indices(self, parts: Sequence[ScheduledRequest], starts: np.ndarray) -> None:
        count, single = self.num_with_rows, self.num_single
        shift = self.starts[:-1] - starts
        last = np.fromiter((part.rows[-1] for part in parts[:count]), np.int64, count)
        self.row_kv_lens = tuple((last + 1).tolist())
        pieces = [last[:single] + shift[:single]]
        pieces += [np.asarray(parts[i].rows, np.int64) + shift[i] for i in range(single, count)]
        self.logits_indices = np.concatenate(pieces)
        ends = np.cumsum(np.array(self.row_lens, np.int64))
        self.row_start = [0, *ends.tolist(), *[self.num_rows] * (len(parts) - count)][: len(parts)]
        sampled = [i for i in range(count) if parts[i].sample]
        if len(sampled) == self.num_rows:
            self.sample_rows = np.arange(self.num_rows)
        else:
            rows: list[int] = []
            for i in sampled:
                end = self.row_start[i] + self.row_lens[i]
                rows += range(end - 1 - len(parts[i].draft_token_ids), end)
            self.sample_rows = np.array(rows, np.int64)


def _row_order(out: SchedulerOutput) -> list[ScheduledRequest]:
    """Decodes first, then parts with one wanted row, several, none: single rows stay adjacent among the wanted rows, and the
    sequences with rows come first."""
    parts, decodes = out.scheduled, out.num_decodes
    others = parts[decodes:]
    if all(len(part.rows) == 1 for part in others):
        return list(parts)
    return parts[:decodes] + sorted(others, key=lambda part: (0, 1)[len(part.rows) > 1] if len(part.rows) else 2)


def _token_ids(parts: Sequence[ScheduledRequest], starts: np.ndarray, out: np.ndarray) -> None:
    """Input ids of every part; -1 where only the device knows."""
    singles: list[int] = []
    bounds = starts.tolist()
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
            out[bounds[i + 1] - len(part.draft_token_ids) : bounds[i + 1]] = part.draft_token_ids
    out[: len(singles)] = singles


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
