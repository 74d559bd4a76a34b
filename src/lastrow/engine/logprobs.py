"""Log probabilities of rows: computed on the device without a [rows, V] copy, decoded on the host by request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lastrow.core.output import Logprob
from lastrow.engine.transfer import upload
from lastrow.kernels.head import reference_row_logsumexp

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


def best_tokens(logits: torch.Tensor, count: int) -> torch.Tensor:
    """ids [m, count] of the largest logits of each row, best first, ties by id. torch's topk alone leaves open which of several
    equal logits it takes, and its choice changes with the number of rows; bf16 logits tie often."""
    size = logits.shape[1]
    values, ids = logits.topk(count)
    least = values[:, -1:]
    every = torch.arange(size, device=logits.device)
    # the lowest ids among those equal to the last one that made it; `size` stands for none
    equal = torch.where(logits == least, every, size).topk(count, largest=False).values
    above = values > least
    ids = torch.where(above, ids, size)
    place = torch.arange(count, device=logits.device) - above.sum(-1, keepdim=True)
    filled = torch.where(place >= 0, equal.sort(-1).values.gather(1, place.clamp_min(0)), ids)
    by_id = filled.sort(-1).values
    return by_id.gather(1, logits.gather(1, by_id).sort(dim=-1, descending=True, stable=True).indices)


def gather_logprobs(
    logits: torch.Tensor,
    taken: torch.Tensor,
    wishes: Sequence[Wish],
    row_logsumexp: Callable[[torch.Tensor], torch.Tensor] = reference_row_logsumexp,
) -> LogprobTensors:
    """logits [m, V] fp32 and the token taken in each row, [m]. row_logsumexp: [m, V] -> [m], the backend's, whose order of
    summation does not depend on m."""
    size = logits.shape[1]
    num_top = max((size if k == -1 else k or 0) for _, k, explicit in wishes) if any(not e for _, _, e in wishes) else 0
    num_top = min(num_top, size)
    num_explicit = max(len(explicit) for _, _, explicit in wishes)
    norm = row_logsumexp(logits)[:, None]
    taken = taken.to(torch.int64)[:, None]
    own = logits.gather(1, taken)
    ids, values = [taken], [own]
    if num_top:
        ids.append(best_tokens(logits, num_top))
        values.append(logits.gather(1, ids[-1]))
    if num_explicit:
        padded = [[*explicit, *[0] * (num_explicit - len(explicit))] for _, _, explicit in wishes]
        ids.append(upload(np.array(padded, np.int64), logits.device))
        values.append(logits.gather(1, ids[-1]))
    ranks = (logits > own).sum(-1) + 1
    return LogprobTensors(list(wishes), num_top, torch.cat(ids, 1), torch.cat(values, 1) - norm, ranks)
