"""One step on the device: inputs, model, head on the wanted rows, sampling; results come back by request id.

`execute` returns at once on CUDA: the sampled ids stay on the device for the next step and are copied to pinned host memory, and
`StepHandle.result` waits for that copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from lastrow.core.output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from lastrow.engine.footprint import LOGIT_ROWS_BYTES
from lastrow.engine.inputs import ForwardResult, InputBatch, Router, StepInputs
from lastrow.engine.logprobs import LogprobTensors, gather_logprobs
from lastrow.engine.relaxed_acceptance import RelaxedAcceptance
from lastrow.engine.sampler import Early, Sampler
from lastrow.engine.sampling_state import Grammar
from lastrow.engine.spec_decode import PendingDrafts, Speculator, accept
from lastrow.engine.transfer import download, upload
from lastrow.kernels.ops import Ops
from lastrow.kernels.rows import AttentionPlan
from lastrow.kv.pool import KVPool
from lastrow.models.batch import ForwardBatch


class Model(Protocol):
    """What the runner needs of a model; `models.gemma4.Gemma4Model` is one."""

    ops: Ops

    def forward(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor | None: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def softcap(self, raw_logits: torch.Tensor) -> torch.Tensor: ...

    def row_logsumexp(self, logits: torch.Tensor) -> torch.Tensor: ...

    def label_logits(self, hidden: torch.Tensor, label_ids: torch.Tensor) -> torch.Tensor: ...

    def logsumexp(self, hidden: torch.Tensor) -> torch.Tensor: ...


class GraphRunner(Router, Protocol):
    """Chooses and replays captured forwards (engine/cuda_graphs.py)."""

    def run(self, step: StepInputs) -> ForwardResult: ...


@dataclass(slots=True)
class RunnerStats:
    """Since the start. rows_given: tokens of all steps; rows_computed: those of them that the layers after the cut ran on.
    eager, graphs: steps by how they ran."""

    steps: int = 0
    rows_given: int = 0
    rows_computed: int = 0
    eager: int = 0
    graphs: int = 0


@dataclass(slots=True)
class _Labels:
    """Rows of requests with the same labels: (request id, position) per row of values [m, n] and logsumexp [m] (or None)."""

    keys: list[tuple[str, int, bool]]
    values: torch.Tensor
    logsumexp: torch.Tensor | None


@dataclass(slots=True)
class StepHandle:
    """Results of one step on their way to the host."""

    requests: list[str]
    drafts: dict[str, Sequence[int]] = field(default_factory=dict)
    proposals: PendingDrafts | None = None
    sampled: torch.Tensor | None = None
    logprobs: LogprobTensors | None = None
    prompt_logprobs: list[tuple[list[tuple[str, int]], LogprobTensors]] = field(default_factory=list)
    labels: list[_Labels] = field(default_factory=list)
    done: torch.cuda.Event | None = None

    def result(self) -> ModelRunnerOutput:
        """Wait for the device and decode. Call it once."""
        if self.done is not None:
            self.done.synchronize()
        out = ModelRunnerOutput()
        if self.sampled is not None:
            self._decode_sampled(out, self.sampled.tolist())
        if self.proposals is not None:
            out.draft_token_ids = self.proposals.finish(out.sampled_token_ids)
        for keys, tensors in self.prompt_logprobs:
            for (request_id, position), entry in zip(keys, tensors.decode(), strict=True):
                out.prompt_logprobs.setdefault(request_id, {})[position] = entry
        for labels in self.labels:
            sums = [None] * len(labels.keys) if labels.logsumexp is None else labels.logsumexp.tolist()
            for (request_id, position, mass), values, total in zip(labels.keys, labels.values.tolist(), sums, strict=True):
                out.label_logits.setdefault(request_id, {})[position] = (values, total if mass else None)
        return out

    def _decode_sampled(self, out: ModelRunnerOutput, tokens: list[int]) -> None:
        if not self.drafts:
            out.sampled_token_ids = {request_id: [token] for request_id, token in zip(self.requests, tokens, strict=True)}
        else:
            for request_id, token in zip(self.requests, tokens, strict=True):
                out.sampled_token_ids.setdefault(request_id, []).append(token)
            for request_id, drafts in self.drafts.items():
                out.sampled_token_ids[request_id] = accept(out.sampled_token_ids[request_id], drafts)
        if self.logprobs is not None:
            for (row, _, _), entry in zip(self.logprobs.wishes, self.logprobs.decode(), strict=True):
                of = out.logprobs.setdefault(self.requests[row], [])
                if len(of) < len(out.sampled_token_ids[self.requests[row]]):
                    of.append(entry)


class ModelRunner:
    """model + pool + sampler. block_size and max_model_len size the block tables; encode: text -> ids for bad_words."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device | str = "cpu",
        encode: Callable[[str], list[int]] | None = None,
        attention_plans: tuple[AttentionPlan, AttentionPlan] = ("auto", "auto"),
        max_num_batched_tokens: int = 0,
    ) -> None:
        self.model = model
        self.pool: Any = pool
        self.device = torch.device(device)
        self.inputs = InputBatch(model.ops, max_num_seqs, max_model_len, block_size, device, attention_plans, max_num_batched_tokens)
        self.sampler = Sampler(max_num_seqs, vocab_size, device, encode, model.row_logsumexp)
        self.grammars: dict[str, Grammar] = {}
        self.graphs: GraphRunner | None = None
        self.speculator: Speculator | None = None
        self.relaxed: RelaxedAcceptance | None = None
        self.stats = RunnerStats()
        self._logit_rows = max(1, LOGIT_ROWS_BYTES // (4 * vocab_size))

    # ------------------------------------------------------------------------------------------------------ a step
    @torch.inference_mode()
    def execute(self, out: SchedulerOutput) -> StepHandle:
        """Run a step. An empty one only frees slots."""
        self.inputs.drop(out.preempted)
        self.inputs.drop(out.finished)
        if self.speculator is not None:
            self.speculator.drop(out.finished)
        if self.relaxed is not None:
            self.relaxed.drop(out.finished)
        if out.is_empty:
            return StepHandle([])
        for part in out.scheduled:
            if part.request.request_id not in self.inputs.slot_of:
                slot = self.inputs.admit(part.request)
                if part.request.samples:
                    self.sampler.admit(slot, part.request, self.grammars.get(part.request.request_id))
        step = self.inputs.prepare(out)
        result = self.forward(step)
        handle, hidden = StepHandle([]), result.hidden
        if hidden is not None:
            self._sample(step, result, handle)
            self._score(step, hidden, handle)
            if self.speculator is not None and handle.sampled is not None:
                handle.sampled = self.speculator.simulate(step, handle.sampled)
                waits = self.relaxed is not None or self.sampler.needs_host(step.slots[step.sample_parts])
                handle.proposals = self.speculator.start(step, hidden, handle.sampled, may_follow=not waits)
        return self._send(handle)

    def use_graphs(self, graphs: GraphRunner) -> None:
        """Run steps through captured graphs from now on."""
        self.graphs = self.inputs.router = graphs

    def drop_pool(self) -> None:
        """Let go of the pool and of the graphs captured over it, before another pool takes its place."""
        self.graphs = self.inputs.router = None
        if self.speculator is not None:
            self.speculator.proposer.drop_pool()
        self.pool = None  # pyright: ignore[reportAttributeAccessIssue]  no step runs before the next one is set

    def forward(self, step: StepInputs) -> ForwardResult:
        """The wanted rows' hidden state, by captured graphs where they fit, eagerly elsewhere."""
        self.stats.steps += 1
        self.stats.rows_given += step.num_tokens
        self.stats.rows_computed += step.num_rows
        if self.graphs is None or step.route.before is None:
            self.stats.eager += 1
        else:
            self.stats.graphs += 1
        if self.graphs is not None:
            return self.graphs.run(step)
        assert step.batch is not None, "without graphs every step has its tensors"
        return ForwardResult(self.model.forward(step.batch, self.pool))

    def _sample(self, step: StepInputs, result: ForwardResult, handle: StepHandle) -> None:
        """Next tokens of the rows that are sampled; the device keeps them by slot for the next step."""
        of = step.sample_parts
        if not of:
            return
        parts = [step.parts[i] for i in of]
        prompt = np.fromiter((len(part.request.prompt_token_ids) for part in parts), np.int64, len(parts))
        handle.requests = [part.request.request_id for part in parts]
        handle.drafts = {part.request.request_id: part.draft_token_ids for part in parts if part.draft_token_ids}
        behind = _drafts_behind(step) if handle.drafts else None
        slots, rows = step.slots[of], step.sample_rows
        relaxed = self.relaxed if handle.drafts else None
        if result.greedy is not None and self.sampler.is_plain_greedy(slots):
            handle.sampled = result.greedy if rows is None else result.greedy[rows]
            if relaxed is not None:
                handle.sampled = relaxed.apply(step, handle.sampled, lambda: self._logits(result, rows))
        else:
            settle = None if relaxed is None else lambda ids, logits: relaxed.apply(step, ids, lambda: logits)
            index = step.sample_positions + 1 - prompt
            early = self._early(step, parts) if any(part.follows for part in parts) else None
            handle.sampled, handle.logprobs = self.sampler.sample(self._logits(result, rows), slots, index, behind, settle, early)
            self.inputs.keep_sampled(step.sample_slots, handle.sampled)

    def _early(self, step: StepInputs, parts: list[ScheduledRequest]) -> Early:
        """How far in front of its last possible position each sampled row is."""
        starts = upload([part.start if part.follows else -1 for part in parts], self.device)
        by = torch.where(starts < 0, 0, starts - self.inputs.coming[step.sample_slots, 0])
        return Early(by, max(part.start - part.request.num_known_tokens for part in parts if part.follows))

    def _logits(self, result: ForwardResult, rows: torch.Tensor | None) -> torch.Tensor:
        """Softcapped logits of `rows` (None: all) of a step's wanted rows."""
        if result.logits is not None:
            return self.model.softcap(result.logits if rows is None else result.logits[rows])
        assert result.hidden is not None, "sampled rows have a hidden state"
        return self.model.logits(result.hidden if rows is None else result.hidden[rows])

    def _score(self, step: StepInputs, hidden: torch.Tensor, handle: StepHandle) -> None:
        """Prompt logprobs and label logits of the rows that are wanted for them."""
        prompt: list[tuple[int, str, int, int, int]] = []
        labels: dict[tuple[int, ...], list[tuple[int, str, int, bool]]] = {}
        if len(step.sample_parts) == step.num_rows:
            return
        for i, part in enumerate(step.parts):
            request, params = part.request, part.request.sampling_params
            count = len(part.rows) - (1 + len(part.draft_token_ids) if part.sample else 0)
            rows = zip(range(step.row_start[i], step.row_start[i] + count), part.rows, strict=False)
            if request.label_token_ids:
                mass = params.logprobs is not None
                of = labels.setdefault(request.label_token_ids, [])
                of += [(row, request.request_id, position, mass) for row, position in rows]
            elif request.label_token_ids is None and params.prompt_logprobs is not None:
                ids, k = request.prompt_token_ids, params.prompt_logprobs
                prompt += [(row, request.request_id, at + 1, ids[at + 1], k) for row, at in rows]
        for first in range(0, len(prompt), self._logit_rows):
            self._prompt_logprobs(hidden, prompt[first : first + self._logit_rows], handle)
        for label_ids, rows_of in labels.items():
            self._label_logits(hidden, label_ids, rows_of, handle)

    def _prompt_logprobs(self, hidden: torch.Tensor, rows: list[tuple[int, str, int, int, int]], handle: StepHandle) -> None:
        index, targets = self._on_device([row[0] for row in rows]), self._on_device([row[3] for row in rows])
        wishes = [(row, k, ()) for row, (_, _, _, _, k) in enumerate(rows)]
        tensors = gather_logprobs(self.model.logits(hidden[index]), targets, wishes, self.model.row_logsumexp)
        handle.prompt_logprobs.append(([(request_id, position) for _, request_id, position, _, _ in rows], tensors))

    def _label_logits(
        self, hidden: torch.Tensor, label_ids: tuple[int, ...], rows: list[tuple[int, str, int, bool]], handle: StepHandle
    ) -> None:
        wanted = hidden[self._on_device([row[0] for row in rows])]
        values = self.model.label_logits(wanted, self._on_device(list(label_ids)))
        total = self.model.logsumexp(wanted) if any(mass for _, _, _, mass in rows) else None
        handle.labels.append(_Labels([row[1:] for row in rows], values, total))

    def _on_device(self, values: list[int]) -> torch.Tensor:
        return upload(values, self.device)

    # ------------------------------------------------------------------------------------------------------ results
    def _send(self, handle: StepHandle) -> StepHandle:
        """Start the copies of the results to the host."""
        if self.device.type != "cuda":
            return handle
        if handle.sampled is not None:
            handle.sampled = download(handle.sampled)
        if handle.proposals is not None and handle.proposals.tensor is not None:
            handle.proposals.tensor = download(handle.proposals.tensor)
        for tensors in [*([handle.logprobs] if handle.logprobs else []), *(t for _, t in handle.prompt_logprobs)]:
            tensors.ids, tensors.values, tensors.ranks = (download(t) for t in (tensors.ids, tensors.values, tensors.ranks))
        for labels in handle.labels:
            labels.values = download(labels.values)
            labels.logsumexp = None if labels.logsumexp is None else download(labels.logsumexp)
        handle.done = torch.cuda.Event()
        handle.done.record()
        return handle


def _drafts_behind(step: StepInputs) -> list[Sequence[int]]:
    """For each sampled row, the drafts between it and the last token that is certain."""
    behind: list[Sequence[int]] = []
    while len(behind) < len(step.sample_parts):
        drafts = step.parts[step.sample_parts[len(behind)]].draft_token_ids
        behind += [drafts[:i] for i in range(len(drafts) + 1)]
    return behind
