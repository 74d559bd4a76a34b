"""Log probabilities of rows: computed on the device without a [rows, V] copy, decoded on the host by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lastrow.core.output import Logprob
from lastrow.engine.transfer import upload

# (row, number of top logprobs or None, explicit ids): what one row asks for
Wish = tuple[int, int | None, Sequence[int]]


@dataclass(slots=True)
class LogprobTensors:
    """Of m rows. wishes: for each, (its row among the sampled ones, k, explicit ids).

    ids, values [m, 1 + K + E]: the taken token, the K best, explicit ids (padded); ranks [m]: 1 + how many tokens are likelier
    than the taken one. K is the largest number wished for."""

    wishes: list[Wish]
    num_top: int
    ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor

    def decode(self) -> list[dict[int, Logprob]]:
        """Per row: token id -> Logprob, the taken token first. Host tensors only."""
        result = []
        ids, values, ranks = self.ids.tolist(), self.values.tolist(), self.ranks.tolist()
        for (_, k, explicit), row_ids, row_values, rank in zip(self.wishes, ids, values, ranks, strict=True):
            entry = {row_ids[0]: Logprob(row_values[0], rank)}
            if explicit:
                first = 1 + self.num_top
                for token, value in zip(row_ids[first : first + len(explicit)], row_values[first:], strict=False):
                    entry.setdefault(token, Logprob(value))
            elif k:
                end = 1 + (self.num_top if k < 0 else k)
                for place, (token, value) in enumerate(zip(row_ids[1:end], row_values[1:end], strict=True), 1):
                    entry.setdefault(token, Logprob(value, place))
            result.append(entry)
        return result


def gather_logprobs(logits: torch.Tensor, taken: torch.Tensor, wishes: Sequence[Wish]) -> LogprobTensors:
    """logits [m, V] fp32 and the token taken in each row, [m]."""
    size = logits.shape[1]
    num_top = max((size if k == -1 else k or 0) for _, k, explicit in wishes) if any(not e for _, _, e in wishes) else 0
    num_top = min(num_top, size)
    num_explicit = max(len(explicit) for _, _, explicit in wishes)
    norm = torch.logsumexp(logits, -1, keepdim=True)
    taken = taken.to(torch.int64)[:, None]
    own = logits.gather(1, taken)
    ids, values = [taken], [own]
    if num_top:
        best = logits.topk(num_top)
        ids.append(best.indices)
        values.append(best.values)
    if num_explicit:
        padded = [[*explicit, *[0] * (num_explicit - len(explicit))] for _, _, explicit in wishes]
        ids.append(upload(np.array(padded, np.int64), logits.device))
        values.append(logits.gather(1, ids[-1]))
    ranks = (logits > own).sum(-1) + 1
    return LogprobTensors(list(wishes), num_top, torch.cat(ids, 1), torch.cat(values, 1) - norm, ranks)
