"""Logits -> tokens, for every request by its own parameters.

A random token is the inverse of the cumulative distribution at one number that depends on (seed, output index) alone. Weights are
integers (exp of the shifted logit in units of 2^-40), so sums have no rounding and no order: the token depends on the row's logits
and that number, never on what else is in the batch. Order of operations (vLLM's): logit_bias, penalties and masks, temperature,
min_p, top_k, top_p. Tokens tied with the last one that top_k or top_p keeps are kept, too; ties for the greedy token go to the
lowest id. logprobs are those of the softcapped logits before any of this ("raw_logprobs", vLLM's default)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lastrow.core.request import Request
from lastrow.engine.footprint import MAX_ELEMENTS
from lastrow.engine.logprobs import LogprobTensors, gather_logprobs
from lastrow.engine.sampling_state import EDITS, HISTORY, LOGPROBS, RANDOM, Grammar, RequestSampling, uniforms
from lastrow.engine.transfer import upload
from lastrow.kernels.head import reference_row_logsumexp

WEIGHT_UNIT = 2.0**40  # a 2^18-token row then sums to at most 2^58
CDF_BLOCK = 512  # the cumulative sum is searched in two levels: blocks, then inside one


@dataclass(frozen=True, slots=True)
class Early:
    """by [n] int64 on the device: how many tokens fewer came before each row than its output_index says; most: the largest possible."""

    by: torch.Tensor
    most: int


class Sampler:
    """Parameters by slot. device: where logits live. encode: text -> ids without BOS, for bad_words. row_logsumexp: the backend's,
    for logprobs."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str,
        encode: Callable[[str], list[int]] | None = None,
        row_logsumexp: Callable[[torch.Tensor], torch.Tensor] = reference_row_logsumexp,
    ) -> None:
        self.row_logsumexp = row_logsumexp
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.encode = encode
        self.states: list[RequestSampling | None] = [None] * max_num_seqs
        self.flags = np.zeros(max_num_seqs, np.int64)
        self.seeds = np.zeros(max_num_seqs, np.uint64)
        self.temperature = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float32)

    def admit(self, slot: int, request: Request, grammar: Grammar | None = None) -> None:
        """Prepare `slot` for a request. Raises ValueError where its parameters need a tokenizer and there is none."""
        params = request.sampling_params
        state = RequestSampling(request, self.vocab_size, self.device, self.encode, grammar)
        self.states[slot] = state
        self.flags[slot], self.seeds[slot] = state.flags, state.seed
        self.temperature[slot] = 1.0 if params.is_greedy else params.temperature
        self.top_k[slot] = min(params.top_k, self.vocab_size)
        self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p

    def is_plain_greedy(self, slots: np.ndarray) -> bool:
        """True when the rows of `slots` are all an argmax of the model's logits, with nothing to report."""
        return not self.flags[slots].any()

    def needs_host(self, slots: np.ndarray) -> bool:
        """True when a row of `slots` is sampled by what the host knows of the tokens before it: more than their number."""
        return bool((self.flags[slots] & HISTORY).any())

    def sample(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        output_index: np.ndarray,
        behind: Sequence[Sequence[int]] | None = None,
        settle: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        early: Early | None = None,
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """logits [n, V] fp32, softcapped, may be overwritten; slots [n]: each row's slot; output_index [n]: number of the token to
        come, from 0; behind: for each row, drafts that the output ends with there (None: no row has any); settle: the ids that are taken,
        from those sampled and the logits they were sampled from (None: the same); early: where output_index is the largest possible (None:
        it is what it says). Returns ids [n] int64 on the device and the logprobs of the rows that ask."""
        flags = self.flags[slots]
        every = int(np.bitwise_or.reduce(flags))
        if not every:
            ids = logits.argmax(-1)
            return ids if settle is None else settle(ids, logits), None
        wanting = np.flatnonzero(flags & LOGPROBS)
        raw = None
        if len(wanting):
            raw = logits[upload(wanting, self.device)] if every & EDITS or len(wanting) < len(slots) else logits
        if every & EDITS:
            self._edit(logits, slots, output_index, np.flatnonzero(flags & EDITS), behind)
        random = np.flatnonzero(flags & RANDOM)
        if not len(random):
            ids = logits.argmax(-1)
        else:
            chosen = self._draw(logits, random, slots[random], output_index[random], early)
            ids = chosen if len(random) == len(slots) else logits.argmax(-1).index_copy(0, upload(random, self.device), chosen)
        if settle is not None:
            ids = settle(ids, logits)
        if raw is None:
            return ids, None
        wishes = [(int(row), self.states[slots[row]]) for row in wanting]
        taken = ids if len(wanting) == len(slots) else ids[upload(wanting, self.device)]
        return ids, gather_logprobs(raw, taken, [(row, s.num_logprobs, s.logprob_token_ids) for row, s in wishes if s], self.row_logsumexp)

    def _draw(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, output_index: np.ndarray, early: Early | None
    ) -> torch.Tensor:
        if early is None:
            numbers = uniforms(self.seeds[slots], output_index)
        else:  # those of every token that a row may be
            possible = np.maximum(output_index[:, None] - np.arange(1 + early.most), 0)
            drawn = uniforms(self.seeds[slots].repeat(1 + early.most), possible.ravel()).reshape(possible.shape)
            numbers = upload(drawn, self.device).gather(1, early.by[upload(rows, self.device)][:, None])[:, 0]
        step = max(1, MAX_ELEMENTS // logits.shape[1])
        drawn = []
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            some = logits if len(rows) == len(logits) <= step else logits[upload(rows[part], self.device)]
            of = slots[part]
            drawn.append(draw(some, self.temperature[of], self.top_k[of], self.top_p[of], self.min_p[of], numbers[part]))
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)

    # ------------------------------------------------------------------------------------------------------ edits
    def _edit(
        self, logits: torch.Tensor, slots: np.ndarray, output_index: np.ndarray, rows: np.ndarray, behind: Sequence[Sequence[int]] | None
    ) -> None:
        """logit_bias, penalties and masks of `rows`, in place: one scatter per kind for the whole batch."""
        bias, repeated, counted, masked = _Scatter(), _Scatter(), _Scatter(), _Scatter()
        for row in rows.tolist():
            state = self.states[slots[row]]
            assert state is not None, f"slot {slots[row]} has no request"
            start = row * self.vocab_size
            drafts = behind[row] if behind is not None else ()
            state.count_output()
            if len(state.bias_ids):
                bias.add(start, state.bias_ids, state.bias_values)
            if state.repetition != 1.0:
                ids = state.repeated_ids(drafts)
                repeated.add(start, ids, np.full(len(ids), state.repetition, np.float32))
            if state.presence or state.frequency:
                ids, counts = state.output_counts.with_more(drafts)
                counted.add(start, ids, -(state.frequency * counts + np.float32(state.presence)))
            disallowed, masked_ids = state.masks(int(output_index[row]), drafts)
            if disallowed is not None:
                logits[row].masked_fill_(disallowed, float("-inf"))
            masked.add(start, masked_ids)
        flat = logits.view(-1)
        if bias:
            flat.index_add_(0, *bias.tensors(self.device))
        if repeated:
            index, factor = repeated.tensors(self.device)
            value = flat[index]
            flat[index] = torch.where(value > 0, value / factor, value * factor)
        if counted:
            flat.index_add_(0, *counted.tensors(self.device))
        if masked:
            flat.index_fill_(0, masked.tensors(self.device)[0], float("-inf"))


class _Scatter:
    """Flat logit indices and values collected over rows."""

    def __init__(self) -> None:
        self._index: list[np.ndarray] = []
        self._value: list[np.ndarray] = []

    def add(self, start: int, ids: np.ndarray | Sequence[int], values: np.ndarray | None = None) -> None:
        if len(ids):
            self._index.append(np.asarray(ids, np.int64) + start)
            self._value.append(np.zeros(len(ids), np.float32) if values is None else values)

    def __bool__(self) -> bool:
        return bool(self._index)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        index, value = np.concatenate(self._index), np.concatenate(self._value).astype(np.float32)
        return upload(index, device), upload(value, device)


# ---------------------------------------------------------------------------------------------------------- drawing
def draw(
    logits: torch.Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    numbers: np.ndarray | torch.Tensor,
) -> torch.Tensor:
    """One token per row: logits [n, V] fp32, parameters [n] (top_k 0, top_p 1, min_p 0: off), numbers [n] float64 in [0, 1), on the host
    or on the device -> [n] int64."""
    keep = np.where(top_k > 0, top_k, logits.shape[1])
    on_host = (temperature, keep, top_p, min_p) if isinstance(numbers, torch.Tensor) else (temperature, keep, top_p, min_p, numbers)
    on_device = upload(np.stack(on_host).astype(np.float64), logits.device)
    x = logits if (temperature == 1.0).all() else logits / on_device[0, :, None].float()
    rows = _Rows(x, x.amax(-1, keepdim=True), on_device[1:4])
    likelihood = torch.exp(x - rows.top)
    weight = (likelihood * WEIGHT_UNIT).to(torch.int64)
    if min_p.any():
        weight.masked_fill_(likelihood < rows.min_p, 0)
    # rows without top_k are sorted whole, so they are kept apart
    for some in (np.flatnonzero(top_k > 0), np.flatnonzero((top_k == 0) & (top_p < 1.0))):
        if len(some) == len(x):
            weight = _truncate(rows, weight, int(keep.max()), bool((top_p < 1.0).any()))
        elif len(some):
            index = upload(some, logits.device)
            kept = _truncate(rows.take(index), weight[index], int(keep[some].max()), bool((top_p[some] < 1.0).any()))
            weight.index_copy_(0, index, kept)
    return inverse_cdf(weight, numbers if isinstance(numbers, torch.Tensor) else on_device[4])


class _Rows:
    """x [n, V] fp32 after the temperature, top [n, 1] its maxima, parameters [3, n] fp64: tokens to keep, top_p, min_p."""

    def __init__(self, x: torch.Tensor, top: torch.Tensor, parameters: torch.Tensor) -> None:
        self.x, self.top, self.parameters = x, top, parameters
        keep, self.top_p, min_p = parameters[:, :, None]
        self.keep, self.min_p = keep.long(), min_p.float()

    def take(self, index: torch.Tensor) -> _Rows:
        return _Rows(self.x[index], self.top[index], self.parameters[:, index])


def _truncate(rows: _Rows, weight: torch.Tensor, most: int, has_top_p: bool) -> torch.Tensor:
    """weight with 0 for what top_k and top_p cut off. most: the largest number that a row keeps."""
    best = rows.x.topk(most).values
    border = best.gather(1, rows.keep - 1)
    if has_top_p:
        likelihood = torch.exp(best - rows.top)
        mass = (likelihood * WEIGHT_UNIT).to(torch.int64).masked_fill_((best < border) | (likelihood < rows.min_p), 0)
        total = weight.masked_fill(rows.x < border, 0).sum(-1, keepdim=True)  # ties at the border included
        inside = (mass.cumsum(-1) - mass < rows.top_p * total) | (rows.top_p >= 1.0)
        border = torch.maximum(border, best.masked_fill(~inside, float("inf")).amin(-1, keepdim=True))
    return weight.masked_fill_(rows.x < border, 0)


def inverse_cdf(weight: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """weight [n, V] int64 >= 0, numbers [n] float64 in [0, 1) -> the first id [n] whose cumulative weight, in id order, exceeds
    number * total."""
    n, size = weight.shape
    if size % CDF_BLOCK:
        weight = torch.nn.functional.pad(weight, (0, -size % CDF_BLOCK))
    blocks = weight.view(n, -1, CDF_BLOCK)
    ends = blocks.sum(-1).cumsum(-1)
    total = ends[:, -1]
    target = torch.minimum((numbers * total).to(torch.int64), total - 1)[:, None]
    block = (ends <= target).sum(-1, keepdim=True)
    begin = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0)
    inner = blocks.gather(1, block[:, :, None].expand(-1, 1, CDF_BLOCK))[:, 0].cumsum(-1)
    return block[:, 0] * CDF_BLOCK + (inner <= target - begin).sum(-1)
