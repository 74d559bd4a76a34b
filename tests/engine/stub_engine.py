"""An engine over a model whose logits are a hash of every token a row may see, read back through the block tables.

A wrong slot, table, position, copy or token changes every later token of a request, so the tests need no tolerance for it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from lastrow.core.kv_cache_manager import KVCacheConfig, KVCacheManager
from lastrow.core.limits import SchedulerConfig
from lastrow.core.scheduler import Scheduler
from lastrow.engine.engine import LLMEngine
from lastrow.engine.model_runner import ModelRunner
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.models.batch import ForwardBatch

VOCAB = 40
BLOCK = 4
WINDOW = 6
EOS = (1, 2)
# 26 letters, then 14 of them with a space in front
TEXTS = [chr(97 + i) for i in range(26)] + [" " + chr(97 + i) for i in range(14)]


def stub_logits(tokens: Sequence[int]) -> np.ndarray:
    """[V] fp32 for the row behind `tokens`: a function of all of them and of the last WINDOW."""
    whole = np.asarray(tokens, np.int64)
    rng = np.random.default_rng([zlib.crc32(whole.tobytes()), zlib.crc32(whole[-WINDOW:].tobytes())])
    return (3 * rng.standard_normal(VOCAB)).astype(np.float32)


class StubTokenizer:
    """What the engine and the detokenizer use of a Tokenizer, over TEXTS."""

    all_special_ids = frozenset(EOS)

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        ids, i = [], 0
        while i < len(text):
            size = 2 if text[i] == " " else 1
            ids.append(TEXTS.index(text[i : i + size]))
            i += size
        return ids

    def token_text(self, token: int) -> str | None:
        return TEXTS[token]

    def token_byte(self, token: int) -> int | None:
        return None


class StubModel:
    """Stores token ids where a model stores K/V."""

    def __init__(self, full_blocks: int, sliding_blocks: int) -> None:
        self.ops = ReferenceOps()
        self.memory = [np.full(blocks * BLOCK, -7, np.int64) for blocks in (full_blocks, sliding_blocks)]

    def forward(self, batch: ForwardBatch, pool: None) -> torch.Tensor | None:
        ids = batch.input_ids.numpy()
        assert ids.min() >= 0, "an id in flight was not filled in"
        for memory, slots, copies in zip(self.memory, batch.slots, batch.copies, strict=True):
            memory[slots.numpy()] = ids
            origin = memory.copy()  # all copies at once
            for source, destination, first, end in () if copies is None else copies.tolist():
                memory[destination * BLOCK + first : destination * BLOCK + end] = origin[source * BLOCK + first : source * BLOCK + end]
        if batch.logits_indices is None:
            return None
        take, rows, wanted = batch.logits_indices.numpy(), batch.rows, batch.wanted
        assert (np.diff(take) > 0).all()
        assert (rows.positions.numpy()[take] == wanted.positions.numpy()).all()
        assert (rows.seq_index.numpy()[take] == wanted.seq_index.numpy()).all()
        assert sum(wanted.q_lens) == len(take) and all(n == 1 for n in wanted.q_lens[: wanted.num_single])
        return torch.from_numpy(np.stack([self._row(wanted, i) for i in range(len(take))]))

    def _row(self, rows, i: int) -> np.ndarray:
        end, slot = int(rows.positions[i]) + 1, int(rows.seq_index[i])
        at = np.arange(end)
        full, sliding = (
            memory[table[slot].numpy()[at // BLOCK] * BLOCK + at % BLOCK]
            for memory, table in zip(self.memory, rows.block_tables, strict=True)
        )
        assert (sliding[-WINDOW:] == full[-WINDOW:]).all(), "the two groups disagree inside the window"
        return stub_logits(full.tolist())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    def row_logsumexp(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(logits, -1)

    def label_logits(self, hidden: torch.Tensor, label_ids: torch.Tensor) -> torch.Tensor:
        return hidden[:, label_ids]

    def logsumexp(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(hidden, -1)


def stub_engine(
    full_blocks: int = 64, sliding_blocks: int = 64, max_num_seqs: int = 5, max_num_batched_tokens: int = 16, max_model_len: int = 64,
    prefix_caching: bool = True, async_scheduling: bool = False, max_prefill_seqs: int | None = None, tokenizer: bool = True,
) -> LLMEngine:  # fmt: skip
    blocks = KVCacheConfig(BLOCK, full_blocks, sliding_blocks, WINDOW)
    limits = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, max_prefill_seqs)
    stub = StubTokenizer()
    runner = ModelRunner(
        StubModel(full_blocks, sliding_blocks), None, vocab_size=VOCAB, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
        block_size=BLOCK, encode=stub.encode,
    )  # fmt: skip
    return LLMEngine(
        Scheduler(limits, KVCacheManager(blocks, prefix_caching)), runner, stub if tokenizer else None, vocab_size=VOCAB,
        stop_token_ids=EOS, async_scheduling=async_scheduling,
    )  # fmt: skip


def check_idle(engine: LLMEngine) -> None:
    """Nothing is held when nothing runs: blocks, slots, request states."""
    assert not engine.has_unfinished_requests
    engine.step()  # hands the last finished ids to the runner
    engine.scheduler.kv.check_integrity([])
    for pool in engine.scheduler.kv.pools:
        assert pool.num_free_blocks == pool.num_usable_blocks
    assert not engine.runner.inputs.slot_of and not engine.outputs.states and not engine.outputs.groups
    assert sorted(engine.runner.inputs.free_slots) == list(range(engine.runner.inputs.null_slot))
