"""One captured draft step by batch and context, replayed once per draft: eagerly a draft of four layers is some fifty launches."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lastrow.kernels.rows import QueryRows
from lastrow.kv.pool import KVPool
from lastrow.models.gemma4_assistant import Gemma4Assistant
from lastrow.progress import track

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # past the last one drafts hardly pay, and run eagerly
Replay = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Step:
    """A captured step and what it reads: tokens [R] int32, hidden [R, H], positions [R], slots [R] int32. It leaves the next draft in
    tokens and the next hidden state in hidden."""

    replay: Replay
    tokens: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class DraftGraphs:
    """`draft` of a Gemma4Assistant through graphs. contexts: upper bounds of the K/V length, ascending; null_slot: the row of
    block_tables that padding rows read. misses: calls that ran eagerly. capture: makes a replay of a function (tests: itself)."""

    def __init__(
        self,
        assistant: Gemma4Assistant,
        pool: KVPool,
        block_tables: tuple[torch.Tensor, torch.Tensor],
        null_slot: int,
        contexts: Sequence[int],
        max_rows: int = ROW_BUCKETS[-1],
        capture: Callable[[Replay], Replay] | None = None,
    ) -> None:
        self.assistant, self.pool, self.block_tables, self.null_slot = assistant, pool, block_tables, null_slot
        self.contexts = tuple(contexts)
        self.rows = ROW_BUCKETS[: bisect_left(ROW_BUCKETS, max_rows) + 1]
        self.misses: Counter[str] = Counter()
        self._capture = capture or _CUDACapture()
        self._steps: dict[tuple[int, int], _Step] = {}

    @property
    def config(self):
        return self.assistant.config

    def warm_up(self) -> None:
        """Capture every bucket, the largest first, so that all fit in one pool."""
        buckets = [(rows, context) for rows in reversed(self.rows) for context in reversed(self.contexts)]
        for rows, context in track(buckets, "capturing draft graphs"):
            self._steps[rows, context] = self._make(rows, context)

    def step(self, rows: int, context: int) -> tuple[Replay, torch.Tensor]:
        """The captured step for `rows` rows and its positions, to measure it alone."""
        made = self._steps[self.rows[bisect_left(self.rows, rows)], self.contexts[bisect_left(self.contexts, context)]]
        return made.replay, made.positions

    @torch.inference_mode()
    def _make(self, rows: int, context: int) -> _Step:
        embed = self.assistant.target.weights.embed
        tokens, positions, slots = (torch.zeros(rows, dtype=torch.int32, device=embed.device) for _ in range(3))
        slots.fill_(self.null_slot)
        hidden = torch.zeros(rows, self.assistant.config.backbone_hidden_size, dtype=embed.dtype, device=embed.device)
        query = QueryRows(positions, slots, self.block_tables, (1,) * rows, (context,) * rows, rows, plan="rows")

        def step() -> None:
            y, following = self.assistant.forward(tokens, hidden, query, self.pool)
            tokens.copy_(self.assistant.best_token(y))
            hidden.copy_(following)

        return _Step(self._capture(step), tokens, hidden, positions, slots)

    @torch.inference_mode()
    def draft(self, token_ids: torch.Tensor, hidden: torch.Tensor, rows: QueryRows, pool: KVPool, num_tokens: int) -> torch.Tensor:
        """As Gemma4Assistant.draft, over the pool of the constructor."""
        n = len(token_ids)
        r, c = bisect_left(self.rows, n), bisect_left(self.contexts, rows.max_kv_len)
        if r == len(self.rows) or c == len(self.contexts):
            self.misses["rows" if r == len(self.rows) else "context"] += 1
            return self.assistant.draft(token_ids, hidden, rows, pool, num_tokens)
        step = self._steps[self.rows[r], self.contexts[c]]
        step.tokens[:n], step.hidden[:n] = token_ids, hidden
        step.positions[:n], step.slots[:n] = rows.positions, rows.seq_index
        if n < self.rows[r]:
            step.positions[n:].zero_()
            step.slots[n:].fill_(self.null_slot)
        drafts = token_ids.new_empty(n, num_tokens)
        for i in range(num_tokens):
            step.replay()
            drafts[:, i] = step.tokens[:n]
        return drafts


class _CUDACapture:
    """Runs a function once, which compiles its kernels, then captures it."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, step: Replay) -> Replay:
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            step()
        return graph.replay
