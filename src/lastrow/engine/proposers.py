"""Where drafts come from: the assistant model on the device, or a look at the text so far on the host. One interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from lastrow.core.output import ScheduledRequest
from lastrow.core.request import Request
from lastrow.engine.inputs import InputBatch
from lastrow.engine.transfer import upload
from lastrow.kernels.rows import QueryRows
from lastrow.kv.pool import KVPool


@dataclass(slots=True)
class DraftRows:
    """The S sampled requests of one step. For each: the drafts the step verified, its runner slot, the index of its first sampled row,
    that row's position, 1 + the last position the step wrote, and how many drafts it wants next (0: none). Of a part that follows drafts
    in flight the position is -1 and the drafts stand-ins: the device has both."""

    requests: list[Request] = field(default_factory=list)
    drafts: list[Sequence[int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def add(self, part: ScheduledRequest, slot: int, first: int, position: int, length: int) -> None:
        self.requests.append(part.request)
        self.drafts.append(part.draft_token_ids)
        self.slots.append(slot)
        self.first.append(first)
        self.positions.append(-1 if part.follows else position)
        self.ends.append(part.end)
        self.lengths.append(length)


class Proposer(Protocol):
    """cost: time to propose one more draft, as a share of a step of the target for one request; it decides when drafting pays."""

    cost: float

    def start(self, rows: DraftRows, hidden: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor | None:
        """Right behind sampling, without waiting: hidden [n, H] and sampled [n] of the sampled rows -> drafts [S, K], or None."""
        ...

    def finish(self, request: Request, new: list[int], made: list[int] | None, length: int) -> list[int]:
        """On the host, when the step's tokens are known: at most `length` drafts behind request.output_token_ids + new. made: the
        request's row of what `start` returned."""
        ...

    def drop(self, request_id: str) -> None: ...

    def drop_pool(self) -> None:
        """Let go of the K/V pool and whatever was captured over it; `use_pool` follows before the next step."""
        ...


class Drafter(Protocol):
    """A Gemma4Assistant, or captured steps of one."""

    def draft(self, token_ids: torch.Tensor, hidden: torch.Tensor, rows: QueryRows, pool: KVPool, num_tokens: int) -> torch.Tensor: ...


class AssistantProposer:
    """Drafts of a Gemma 4 assistant, which stay in `inputs`, too, for a step that does not wait for the host to read them."""

    cost = 0.1

    def __init__(self, assistant: Drafter, pool: KVPool, inputs: InputBatch) -> None:
        self.assistant: Any = assistant
        self.pool: Any = pool
        self.inputs = inputs

    def start(self, rows: DraftRows, hidden: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor | None:
        most = max(rows.lengths)
        if not most:
            return None
        plan = upload(_verified(rows), sampled.device)
        first, slots, positions, count, verified = plan[:, 0], plan[:, 1], plan[:, 2], plan[:, 3], plan[:, 4:]
        if min(rows.positions) < 0:
            coming, follows = self.inputs.coming[slots].long(), positions < 0
            positions = torch.where(follows, coming[:, 0], positions)
            wide = torch.arange(verified.shape[1], device=plan.device) < count[:, None]
            verified = torch.where(follows[:, None] & wide, coming[:, 1 : 1 + verified.shape[1]], verified)
        # the row that stands last: every draft before it is what the target sampled there
        behind = (first[:, None] + torch.arange(verified.shape[1], device=plan.device)).clamp_max(len(sampled) - 1)
        stood = (sampled[behind] == verified).to(torch.int64).cumprod(1).sum(1)
        last = first + stood
        query = QueryRows(
            (positions + stood).to(torch.int32), slots.to(torch.int32), self.inputs.block_tables, (1,) * len(rows.requests),
            tuple(rows.ends), len(rows.requests),
        )  # fmt: skip
        newest = sampled[last].to(torch.int32)
        drafts = self.assistant.draft(newest, hidden[last], query, self.pool, most)
        self.inputs.keep_drafts(slots, newest, query.positions + 1, drafts)
        return drafts

    def finish(self, request: Request, new: list[int], made: list[int] | None, length: int) -> list[int]:
        return [] if made is None else made[:length]

    def drop(self, request_id: str) -> None:
        """Nothing is kept between steps."""

    def drop_pool(self) -> None:
        self.pool = self.assistant = None  # no step runs before use_pool

    def use_pool(self, assistant: Drafter, pool: KVPool) -> None:
        """assistant: the drafter again, or steps of it captured over `pool`."""
        self.assistant, self.pool = assistant, pool


def _verified(rows: DraftRows) -> np.ndarray:
    """[S, 4 + K] int64: first row, slot, position, how many drafts were verified, then these, -1 (no token) where there were fewer."""
    most = max(map(len, rows.drafts))
    plan = np.full((len(rows.requests), 4 + most), -1, np.int64)
    plan[:, 0], plan[:, 1], plan[:, 2], plan[:, 3] = rows.first, rows.slots, rows.positions, list(map(len, rows.drafts))
    for i, drafts in enumerate(rows.drafts):
        plan[i, 4 : 4 + len(drafts)] = drafts
    return plan


class NgramIndex:
    """Where each run of `shortest` to `longest` tokens of a growing text ended last."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Runs become findable when a token follows them: what is looked up is the text's end, which must not find itself."""
        for token in tokens:
            end = len(self.tokens)
            for size in self.sizes:
                if size <= end:
                    self._ends[tuple(self.tokens[end - size : end])] = end
            self.tokens.append(token)

    def propose(self, length: int) -> list[int]:
        """The tokens that followed the latest earlier place of the longest run that ends the text; none where no run came before."""
        for size in self.sizes:
            if size > len(self.tokens):
                continue
            start = self._ends.get(tuple(self.tokens[-size:]))
            if start is not None:
                # a place close to the end goes on into its own continuation: text that repeats itself
                period = len(self.tokens) - start
                return [self.tokens[start + i % period] for i in range(length)]
        return []


class NgramProposer:
    """Prompt lookup (Saxena 2023): what followed the same words earlier in prompt and output. Needs no model."""

    cost = 0.03

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self._index: dict[str, NgramIndex] = {}

    def start(self, rows: DraftRows, hidden: torch.Tensor, sampled: torch.Tensor) -> None:
        return None

    def finish(self, request: Request, new: list[int], made: list[int] | None, length: int) -> list[int]:
        index = self._index.get(request.request_id)
        if index is None:
            index = self._index[request.request_id] = NgramIndex(self.shortest, self.longest)
        have = len(index.tokens)
        index.extend(request.token_ids(have, request.num_known_tokens) if have < request.num_known_tokens else [])
        index.extend(new)
        return index.propose(length)

    def drop(self, request_id: str) -> None:
        self._index.pop(request_id, None)

    def drop_pool(self) -> None:
        """Only texts are kept, and they stay."""
