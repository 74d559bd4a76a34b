"""Opt-in and lossy: inside a thought, keep drafts that the target finds nearly as likely as its first choice.

Whoever reads only the answer may not mind a thought in other words. It is off by default, outside a thought it changes nothing, and
nothing that runs with it is parity: `lastrow parity` has no such option."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from lastrow.core.request import Request
from lastrow.engine.inputs import StepInputs


class RelaxedAcceptance:
    """share: a draft stays if its probability (temperature 1) is at least this share of the best token's. channel_start, channel_end:
    the ids that open and close a thought; neither is ever kept in place of what the target sampled."""

    def __init__(self, share: float, channel_start: int, channel_end: int) -> None:
        self.share = share
        self.channel_start, self.channel_end = channel_start, channel_end
        self._seen: dict[str, tuple[int, bool]] = {}

    def apply(self, step: StepInputs, sampled: torch.Tensor, logits: Callable[[], torch.Tensor]) -> torch.Tensor:
        """sampled [n] of the step's sampled rows, with drafts in the place of what was sampled where they stay; logits: gives [n, V]."""
        rows, drafts = self._drafts_in_thoughts(step)
        if not rows:
            return sampled
        row, draft = torch.tensor([rows, drafts], device=sampled.device)
        wanted = logits()[row]
        near = wanted.gather(1, draft[:, None])[:, 0] >= wanted.amax(1) + math.log(self.share)
        return sampled.index_copy(0, row, torch.where(near, draft.to(sampled.dtype), sampled[row]))

    def _drafts_in_thoughts(self, step: StepInputs) -> tuple[list[int], list[int]]:
        """Sampled rows inside a thought that have a draft behind them, and these drafts."""
        rows, drafts, first = [], [], 0
        while first < len(step.sample_parts):
            part = step.parts[step.sample_parts[first]]
            inside = self._in_thought(part.request) if part.draft_token_ids else False
            for i, draft in enumerate(part.draft_token_ids):
                if draft in (self.channel_start, self.channel_end):
                    inside = draft == self.channel_start
                elif inside:
                    rows.append(first + i)
                    drafts.append(draft)
            first += 1 + len(part.draft_token_ids)
        return rows, drafts

    def _in_thought(self, request: Request) -> bool:
        """Whether the last mark of prompt and output opens a thought; looks at tokens that are new since the last call."""
        seen, inside = self._seen.get(request.request_id, (0, False))
        for token in request.token_ids(seen, request.num_known_tokens):
            if token in (self.channel_start, self.channel_end):
                inside = token == self.channel_start
        self._seen[request.request_id] = request.num_known_tokens, inside
        return inside

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget finished requests."""
        for request_id in request_ids:
            self._seen.pop(request_id, None)
