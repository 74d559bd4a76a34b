"""Captured forwards: decode steps by batch and context, prefills by tokens, the layers behind the cut by rows and context.

Under about 16k tokens an eager forward is bound by the host's launches, not by the card (docs/benchmarks). A step that fits a
bucket is written straight into the bucket's fields (engine/inputs.py pads it) and replayed; everything else runs eagerly and is
counted, with its reason. All graphs are captured before the first request and share one memory pool."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace

import torch

from lastrow.engine.inputs import (
    COPIES,
    EAGER,
    MAX_STATIC_ROWS,
    ForwardResult,
    InputBatch,
    Route,
    StepInputs,
    StepShape,
)
from lastrow.engine.staging import ALIGN, StaticFields, layout_of
from lastrow.kernels.attention import rows_per_tile, tile_config
from lastrow.kernels.decode_attention import decode_config
from lastrow.kernels.rows import AttentionPlan, QueryRows, max_tiles
from lastrow.kernels.token_fields import PART_FIELDS, TOKEN_FIELDS
from lastrow.kv.pool import KVPool
from lastrow.models.batch import ForwardBatch
from lastrow.models.gemma4 import Gemma4Model
from lastrow.progress import track

TOKEN_BUCKETS = (
    64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288,
    14336, 16384,
)  # fmt: skip
COPYING_TOKENS = (256, 512, 1024, 1536, 2048, 3072, 4096)
MAX_COPIES = 256  # blocks of a group that forks copy in a captured prefill
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXT_BUCKETS = (512, 1024, 2048, 4096, 8192, 32768, 131072)
KERNEL_TOKENS = (1, 65, 512, 1024)  # from each of these on, a prefill has other kernels
COMPILING_THREADS = 8


@dataclass(frozen=True)
class GraphBuckets:
    """The sizes that are captured, ascending. contexts: upper bounds of the K/V length, in tokens. copying: sizes in tokens of steps in
    which forks copy blocks (questions about one state, several completions of one prompt)."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    copying: tuple[int, ...] = ()

    @classmethod
    def for_limits(cls, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> GraphBuckets:
        """The default buckets up to the engine's limits; the last one of each kind is the first that holds the limit."""
        tokens = _up_to(TOKEN_BUCKETS, max_num_batched_tokens)
        copying = tuple(size for size in tokens if size in COPYING_TOKENS)
        return cls(tokens, _up_to(ROW_BUCKETS, max_num_seqs), _up_to(CONTEXT_BUCKETS, max_model_len), copying)


def _up_to(buckets: Sequence[int], limit: int) -> tuple[int, ...]:
    return tuple(buckets[: bisect_left(buckets, limit) + 1])


def smallest(buckets: Sequence[int], value: int) -> int | None:
    """The first bucket that holds `value`, None past the last."""
    at = bisect_left(buckets, value)
    return buckets[at] if at < len(buckets) else None


Outputs = tuple[torch.Tensor, ...]
Forward = Callable[[], Outputs]


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured forward and the fields it reads."""

    replay: Forward
    fields: StaticFields


def attention_tile_rows(model: Gemma4Model, pool: KVPool) -> tuple[int, ...]:
    """Rows per tile of the tiled attention, for each attention shape before the cut."""
    c, block, dtype = model.config, pool.budget.block_size, model.weights.embed.dtype
    sizes = set()
    for layer in range(c.cut):
        config = tile_config(c.layer_head_dim(layer), block, dtype, pool.reader(layer).is_quantized)
        sizes.add(rows_per_tile(c.num_attention_heads, c.layer_kv_heads(layer), config))
    return tuple(sorted(sizes))


class CUDAGraphs:
    """`warm_up` captures; then `route` chooses and `run` replays, once per step each.

    verifies: whether drafts will be verified; their rows then have graphs of their own. misses: parts of steps that ran eagerly, by
    reason. capture: makes a replay of a forward (tests: itself)."""

    def __init__(
        self,
        model: Gemma4Model,
        pool: KVPool,
        inputs: InputBatch,
        buckets: GraphBuckets,
        verifies: bool = False,
        capture: Callable[[Forward], Forward] | None = None,
    ) -> None:
        self.model, self.pool, self.inputs, self.buckets = model, pool, inputs, buckets
        self.device = inputs.last_sampled.device
        self.verifies = verifies
        self.misses: Counter[str] = Counter()
        self._make_replay = capture or _CUDACapture()
        embed, rows = model.weights.embed, buckets.rows[-1]
        # one buffer for every bucket: a step's logits are read before the next replay
        self._logits = torch.empty(rows, embed.shape[0], dtype=embed.dtype, device=self.device)
        # what goes from the part before the cut to the part behind it, x, h and ids: every graph writes and reads it here
        most, hidden = max(rows, MAX_STATIC_ROWS), model.config.hidden_size
        x, h = (torch.zeros(most, hidden, dtype=embed.dtype, device=self.device) for _ in range(2))
        self._rows = (x, h, torch.zeros(most, dtype=torch.int32, device=self.device))
        self._all_rows = torch.arange(rows, device=self.device)
        self._before_at, self._fields_memory = self._reserve()
        # what every graph makes of its tokens first of all, and what its kernels read of it: these two
        tokens = max(buckets.tokens[-1], rows)
        self._token_memory = torch.zeros(TOKEN_FIELDS, -(-tokens // ALIGN) * ALIGN, dtype=torch.int32, device=self.device)
        tiles = len(inputs.tile_rows) * self._most_tiles(tokens, most)
        self._tile_memory = torch.zeros(tiles * 5, dtype=torch.int32, device=self.device)
        self._decode: dict[tuple[int, int], _Captured] = {}
        self._every_row: dict[tuple[int, int], _Captured] = {}
        self._before: dict[int, _Captured] = {}
        self._copying: dict[int, _Captured] = {}
        self._behind: dict[tuple[int, int], _Captured] = {}
        self._of_fields: dict[int, _Captured] = {}

    # ------------------------------------------------------------------------------------------------------ one step
    def route(self, shape: StepShape) -> Route:
        """The graphs that run a step of this shape."""
        b = self.buckets
        context, rows = smallest(b.contexts, shape.context), smallest(b.rows, shape.rows)
        if context is None or rows is None:
            return self._miss("rows or context past the last bucket", EAGER)
        if shape.is_decode:
            fields = self._decode[rows, context].fields
            return Route(fields, fields)
        if shape.rows == shape.tokens and not shape.copies and (rows, context) in self._every_row:
            fields = self._every_row[rows, context].fields
            return Route(fields, fields)
        behind = self._behind[rows, context].fields if shape.rows else None
        captured, sizes = (self._copying, b.copying) if shape.copies else (self._before, b.tokens)
        tokens = smallest(sizes, shape.tokens)
        if tokens is None:
            return self._miss("tokens past the last bucket", Route(None, behind))
        if shape.copies > MAX_COPIES:
            return self._miss("forks copy more blocks than a bucket holds", Route(None, behind))
        if max(shape.rows, shape.sequences) > min(MAX_STATIC_ROWS, tokens):
            return self._miss("sequences of a prefill past the last bucket", Route(None, behind))
        return Route(captured[tokens].fields, behind)

    def whole_step(self, rows: int, context: int, follow: bool) -> tuple[Forward, StaticFields]:
        """The captured step for `rows` rows and its fields, to measure it alone. follow: rows that follow each other in a sequence."""
        b = self.buckets
        captured = (self._every_row if follow else self._decode)[smallest(b.rows, rows) or 0, smallest(b.contexts, context) or 0]
        return captured.replay, captured.fields

    def _miss(self, reason: str, route: Route) -> Route:
        self.misses[reason] += 1
        return route

    def run(self, step: StepInputs) -> ForwardResult:
        """Run a step by its route; padding rows are cut off."""
        before, behind, n = step.route.before, step.route.behind, step.num_rows
        if step.route == EAGER:
            return ForwardResult(self.model.forward(self._eager(step), self.pool))
        if before is None:
            self._self_decoder(self._eager(step))
        elif before is not behind:
            self._replay(before)
        if behind is None:
            return ForwardResult(None)
        hidden, logits, greedy = self._replay(behind)
        return ForwardResult(hidden[:n], logits[:n], greedy[:n])

    def _self_decoder(self, batch: ForwardBatch) -> None:
        """The part before the cut, its wanted rows left for the part behind it."""
        x, h = self.model.self_decoder(batch, self.pool)
        take = batch.logits_indices
        if take is not None:
            for source, target in zip((x, h, batch.input_ids), self._rows, strict=True):
                torch.index_select(source, 0, take, out=target[: len(take)])

    def _replay(self, fields: StaticFields) -> Outputs:
        return self._of_fields[id(fields)].replay()

    @staticmethod
    def _eager(step: StepInputs) -> ForwardBatch:
        assert step.batch is not None, "a step that runs eagerly has its tensors"
        return step.batch

    # ------------------------------------------------------------------------------------------------------ capture
    def warm_up(self) -> None:
        """Compile every kernel and capture every bucket, the largest first, so that all fit in one pool."""
        if self.device.type == "cuda":
            self.compile_kernels()
        b = self.buckets
        jobs: list[Callable[[], None]] = [lambda t=tokens: self._capture_before(t) for tokens in reversed(b.tokens)]
        jobs += [lambda t=tokens: self._capture_before(t, MAX_COPIES) for tokens in reversed(b.copying)]
        for rows in reversed(b.rows):
            for context in reversed(b.contexts):
                jobs += [lambda r=rows, c=context: self._capture_behind(r, c), lambda r=rows, c=context: self._capture_whole(r, c)]
        for job in track(jobs, "capturing CUDA graphs"):
            job()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def compile_kernels(self) -> None:
        """One forward of every kind, in threads: Triton compiles outside Python's lock, so a start without its cache takes as long as
        the slowest forward's kernels and not as all of them one after the other. At the longest context, and at the shortest for one
        number of rows, the least, of each kernel that reads few keys (`decode_config`). Nothing is captured or kept."""
        b = self.buckets
        sizes = {smallest(b.tokens, least) or b.tokens[-1] for least in KERNEL_TOKENS}
        jobs: list[Callable[[CUDAGraphs], None]] = [lambda g, t=tokens: g._capture_before(t) for tokens in sizes]
        jobs += [lambda g, t=tokens: g._capture_before(t, MAX_COPIES) for tokens in b.copying[:1]]
        short = {replace(decode_config(rows, b.contexts[0]), chunk=0): (rows, b.contexts[0]) for rows in reversed(b.rows)}
        for rows, context in {*((rows, b.contexts[-1]) for rows in b.rows), *short.values()}:
            jobs += [lambda g, r=rows, c=context: g._capture_whole(r, c), lambda g, r=rows, c=context: g._capture_behind(r, c)]
        with ThreadPoolExecutor(COMPILING_THREADS) as threads:
            list(threads.map(lambda job: job(self._scratch()), jobs))

    def _scratch(self) -> CUDAGraphs:
        """These graphs with nothing captured and fields of their own, to run forwards beside others."""
        made = copy(self)
        made._make_replay = _run_once
        made._fields_memory, made._token_memory, made._tile_memory = (
            torch.zeros_like(memory) for memory in (self._fields_memory, self._token_memory, self._tile_memory)
        )
        x, h, ids = self._rows
        made._rows = (torch.zeros_like(x), torch.zeros_like(h), torch.zeros_like(ids))
        made._decode, made._every_row, made._before, made._copying, made._behind, made._of_fields = {}, {}, {}, {}, {}, {}
        return made

    def _capture_before(self, tokens: int, copies: int = 0) -> None:
        """copies: blocks that forks may copy; a graph of its own, because each owner then has one launch more."""
        fields = self._fields(self._before_sizes(tokens, copies), self._before_at)

        batch = self._token_batch(fields, fields.t["logits_indices"].view(torch.int64), "tiled")
        if copies:
            full, sliding = (fields.t[name].view(-1, 4) for name in COPIES)
            batch = replace(batch, copies=(full, sliding))

        def forward() -> Outputs:
            self._make_token_fields(fields, "tiled")
            self._self_decoder(batch)
            return ()

        (self._copying if copies else self._before)[tokens] = self._capture(forward, fields)

    def _capture_behind(self, rows: int, context: int) -> None:
        fields = self._fields(self._row_sizes(rows))
        x, h, ids = (t[:rows] for t in self._rows)

        def forward() -> Outputs:
            # the residual is updated in place, and a replay must find its input again only as the step left it
            wanted = self._single_rows(fields.t["row_positions"], fields.t["row_seqs"], context, "rows")
            return self._tail(self.model.cross_decoder(x.clone(), h, ids, wanted, self.pool), fields)

        self._behind[rows, context] = self._capture(forward, fields)

    def _capture_whole(self, rows: int, context: int) -> None:
        """Steps whose every row is wanted, in one graph: decodes, and rows that follow each other in their sequences (drafts to
        verify), which need all K/V of a layer stored before its first row attends. Few decodes do both in one launch; where they
        do not, one graph serves both."""
        decode, fuses = self._whole(rows, context, single=True)
        self._decode[rows, context] = decode
        if not fuses:
            self._every_row[rows, context] = decode
        elif self.verifies and rows > 1:
            self._every_row[rows, context], _ = self._whole(rows, context, single=False)

    def _whole(self, rows: int, context: int, single: bool) -> tuple[_Captured, bool]:
        """The graph, and whether a row's K/V is stored and read in one launch. single: no two rows are of one sequence."""
        fields = self._fields(self._decode_sizes(rows))

        batch = self._token_batch(fields, self._all_rows[:rows], self._decode_plan, context)
        wanted = self._single_rows(batch.rows.positions, batch.rows.seq_index, context, "rows")
        batch = replace(batch, wanted=wanted, rows=batch.rows if single else replace(batch.rows, num_single=0))

        def forward() -> Outputs:
            self._make_token_fields(fields, self._decode_plan)
            hidden = self.model.forward(batch, self.pool)
            assert hidden is not None
            return self._tail(hidden, fields)

        return self._capture(forward, fields), self.model.ops.fuses_decode(batch.rows)

    def _tail(self, hidden: torch.Tensor, fields: StaticFields) -> Outputs:
        logits = self.model.raw_logits(hidden, out=self._logits[: hidden.shape[0]])
        greedy = self.model.ops.argmax(logits)
        self.inputs.keep_sampled(fields.t["row_slots"], greedy)
        return hidden, logits, greedy

    @torch.inference_mode()
    def _capture(self, forward: Forward, fields: StaticFields) -> _Captured:
        captured = _Captured(self._make_replay(forward), fields)
        self._of_fields[id(fields)] = captured
        return captured

    # ------------------------------------------------------------------------------------------------------ fields
    def _token_sizes(self, tokens: int, sequences: int) -> dict[str, int]:
        return {"ids": tokens, "parts": self.inputs.part_fields * (sequences + 1)}

    @staticmethod
    def _row_sizes(rows: int) -> dict[str, int]:
        return dict.fromkeys(("row_positions", "row_seqs", "row_slots"), rows)

    def _before_sizes(self, tokens: int, copies: int = 0) -> dict[str, int]:
        rows = min(MAX_STATIC_ROWS, tokens)
        sizes = self._token_sizes(tokens, rows) | {"logits_indices": 2 * rows}
        return sizes | (dict.fromkeys(COPIES, 4 * copies) if copies else {})

    @property
    def _decode_plan(self) -> AttentionPlan:
        return "tiled" if self.inputs.attention_plans[0] == "tiled" else "rows"

    def _decode_sizes(self, rows: int) -> dict[str, int]:
        return self._token_sizes(rows, rows) | {"row_slots": rows}

    def _most_tiles(self, tokens: int, sequences: int) -> int:
        """Length of the longest tile list of a bucket, aligned."""
        most = max((max_tiles(tokens, sequences, rows) for rows in self.inputs.tile_rows), default=0)
        return -(-most // ALIGN) * ALIGN

    def _reserve(self) -> tuple[int, torch.Tensor]:
        """Where fields before the cut begin, which is behind those of any rows behind it, and memory for the largest bucket."""
        _, begin = layout_of(self._row_sizes(self.buckets.rows[-1]))
        ends = [layout_of(self._before_sizes(tokens), begin)[1] for tokens in self.buckets.tokens]
        ends += [layout_of(self._before_sizes(tokens, MAX_COPIES), begin)[1] for tokens in self.buckets.copying]
        ends += [layout_of(self._decode_sizes(rows))[1] for rows in self.buckets.rows]
        return begin, self.inputs.reserve(max(ends))

    def _fields(self, sizes: dict[str, int], begin: int = 0) -> StaticFields:
        """Fields that describe padding only, so that a capture touches nothing."""
        fields = StaticFields(sizes, self._fields_memory, begin)
        for name, value in self.inputs.padding.items():
            if name in fields.t:
                fields.t[name].fill_(value)
        if "parts" in fields.t:
            padding = torch.tensor(self.inputs.padding_part(), dtype=torch.int32)
            self._parts(fields)[:PART_FIELDS].copy_(padding[:, None])
        return fields

    def _single_rows(
        self,
        positions: torch.Tensor,
        seq_index: torch.Tensor,
        context: int,
        plan: AttentionPlan,
        tiles: dict[int, torch.Tensor] | None = None,
    ) -> QueryRows:
        n = positions.shape[0]
        return QueryRows(positions, seq_index, self.inputs.block_tables, (1,) * n, (context,) * n, n, tiles or {}, plan)

    def _token_batch(self, fields: StaticFields, take: torch.Tensor, plan: AttentionPlan, context: int = 0) -> ForwardBatch:
        """take: the tokens whose row is wanted."""
        made, lists = self._made_of(fields, plan)
        positions, seq_index, full, sliding = made
        bounds = (max_tiles(made.shape[1], self._parts(fields).shape[1] - 1, rows) for rows in self.inputs.tile_rows)
        tiles = {rows: tiles[:most] for rows, tiles, most in zip(self.inputs.tile_rows, lists, bounds, strict=False)}
        return ForwardBatch(fields.t["ids"], self._single_rows(positions, seq_index, context, plan, tiles), (full, sliding), take)

    def _make_token_fields(self, fields: StaticFields, plan: AttentionPlan) -> None:
        self.inputs.make_token_fields(fields.t, self._fields_memory[fields.end :], *self._made_of(fields, plan))

    def _made_of(self, fields: StaticFields, plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Where token fields and tile lists of a step with these fields are made."""
        tokens, lists = fields.t["ids"].shape[0], len(self.inputs.tile_rows) if plan == "tiled" else 0
        most = self._most_tiles(tokens, self._parts(fields).shape[1] - 1) if lists else 0
        return self._token_memory[:, :tokens], self._tile_memory[: lists * most * 5].view(lists, most, 5)

    def _parts(self, fields: StaticFields) -> torch.Tensor:
        return fields.t["parts"].view(self.inputs.part_fields, -1)


def _run_once(forward: Forward) -> Forward:
    forward()
    return forward


class _CUDACapture:
    """Runs a forward once, which compiles its kernels and lets libraries make their workspaces, then captures it. All graphs share
    one memory pool."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Forward) -> Forward:
        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            outputs = forward()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay
