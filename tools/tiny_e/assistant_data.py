"""What tiny-e itself says: the sequences, hidden states and K/V that a drafter for it is trained on.

Nothing here is labelled by hand. A row's label is tiny-e's own distribution; the conversations of tiny_data.py only decide where tiny-e
is listened to, and prose is continued by tiny-e greedily."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import train_tiny
from tiny_data import conversation, render, retrieval
from tokenizers import Tokenizer

from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kernels.rows import QueryRows
from lastrow.kv.layout import KVBudget
from lastrow.kv.pool import KVPool
from lastrow.models.batch import ForwardBatch
from lastrow.models.config import from_file
from lastrow.models.gemma4 import Gemma4Model
from lastrow.weights.loader import load_model_weights

MAX_TOKENS = 1024
TOP_TOKENS = 16
CONVERSATIONS = {"tools": 2500, "json": 2500, "think": 2000, "multiturn": 1500, "chat": 2000, "decide": 800, "yesno": 300, "levels": 300}
RETRIEVALS, PROSE_PIECES, PROSE_PROMPTS, PROSE_OUTPUT = 600, 1500, 2500, 48


@dataclass(slots=True)
class Sequence:
    """ids [T]; rows [n]: the rows (ascending) whose next token is of interest. hidden [n, H] fp16: the target's final-norm hidden
    there. kv: by layer, K and V [T, d] fp16. likely, chance [n, TOP_TOKENS]: the target's most likely next tokens, best first."""

    ids: np.ndarray
    rows: np.ndarray
    hidden: torch.Tensor | None = None
    kv: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
    likely: torch.Tensor | None = None
    chance: torch.Tensor | None = None


def load_target(folder: Path) -> Gemma4Model:
    config, ops = from_file(folder), ReferenceOps()
    return Gemma4Model(config, load_model_weights(folder, config, ops.pack_gate_up, torch.float32, "cpu"), ops, MAX_TOKENS + 8)


def one_block_pool(model: Gemma4Model, sequences: int) -> KVPool:
    """A pool in which sequence i lives in block i + 1 alone."""
    return KVPool(model.config, KVBudget(sequences + 1, sequences + 1, MAX_TOKENS))


def batch_of(parts: list[tuple[int, np.ndarray, int, np.ndarray]]) -> ForwardBatch:
    """parts: (sequence, ids, first position, wanted positions)."""
    ids = torch.from_numpy(np.concatenate([ids for _, ids, _, _ in parts]).astype(np.int32))
    at = [np.arange(first, first + len(ids)) for _, ids, first, _ in parts]
    positions = torch.from_numpy(np.concatenate(at).astype(np.int32))
    owner = torch.from_numpy(np.repeat([s for s, *_ in parts], [len(p) for p in at]).astype(np.int32))
    slots = (owner + 1) * MAX_TOKENS + positions
    table = torch.arange(1, 2 + max(s for s, *_ in parts), dtype=torch.int32)[:, None]
    ends = tuple(first + len(ids) for _, ids, first, _ in parts)
    rows = QueryRows(positions, owner, (table, table), tuple(len(p) for p in at), ends)
    offsets = np.cumsum([0] + [len(p) for p in at[:-1]])
    take = torch.from_numpy(np.concatenate([wanted - first + o for (_, _, first, wanted), o in zip(parts, offsets, strict=True)]))
    wanted = QueryRows(positions[take], owner[take], (table, table), tuple(len(w) for *_, w in parts), ends)
    return ForwardBatch(ids, rows, (slots, slots), take, wanted)


def listen(model: Gemma4Model, sequences: list[Sequence], layers: set[int], tokens: int = 6000) -> None:
    """Fill in hidden and kv of every sequence, about `tokens` at a time."""
    order = sorted(sequences, key=lambda s: len(s.ids))
    first = 0
    while first < len(order):
        group, total = [], 0
        while first < len(order) and total < tokens:
            group.append(order[first])
            total += len(order[first].ids)
            first += 1
        pool = one_block_pool(model, len(group))
        hidden = model.forward(batch_of([(i, s.ids, 0, s.rows) for i, s in enumerate(group)]), pool)
        chance, likely = model.logits(hidden).softmax(-1).topk(TOP_TOKENS)
        lengths = [len(s.rows) for s in group]
        for i, (s, h, p, ids) in enumerate(zip(group, *(t.split(lengths) for t in (hidden, chance, likely)), strict=True)):
            s.hidden, s.chance, s.likely = h.half(), p.half(), ids.to(torch.int16)
            block = {layer: pool.reader(layer) for layer in layers}
            s.kv = {n: (kv.k[i + 1, : len(s.ids), 0].half(), kv.v[i + 1, : len(s.ids), 0].half()) for n, kv in block.items()}


def continue_greedily(model: Gemma4Model, prompts: list[np.ndarray], length: int, batch: int = 64) -> list[Sequence]:
    """tiny-e's greedy continuation of each prompt, `length` tokens."""
    out = []
    for start in range(0, len(prompts), batch):
        group = [p.astype(np.int64) for p in prompts[start : start + batch]]
        pool, new = one_block_pool(model, len(group)), []
        parts = [(i, p, 0, np.array([len(p) - 1])) for i, p in enumerate(group)]
        for step in range(length):
            token = model.logits(model.forward(batch_of(parts), pool)).argmax(-1).numpy()
            new.append(token)
            parts = [(i, token[i : i + 1], len(p) + step, np.array([len(p) + step])) for i, p in enumerate(group)]
        for i, p in enumerate(group):
            ids = np.concatenate([p, [t[i] for t in new]])
            out.append(Sequence(ids, np.arange(len(p) - 1, len(ids) - 1)))
    return out


def tokenize(tokenizer: Tokenizer, segments: list) -> Sequence | None:
    """Segments of tiny_data.render or retrieval. Rows are those that predict what the model is to say."""
    ids, rows = [], []
    for text, is_output in segments:
        for piece in text if isinstance(text, list) else (text,):
            new = tokenizer.encode(piece, add_special_tokens=False).ids if isinstance(piece, str) else piece.tolist()
            if is_output:
                rows += range(len(ids) - 1, len(ids) + len(new) - 1)
            ids += new
    return Sequence(np.array(ids), np.array(rows)) if len(ids) <= MAX_TOKENS else None


def fresh_prose(prose: train_tiny.Prose, model: Gemma4Model, layers: set[int], r: random.Random, count: int) -> list[Sequence]:
    """Pieces of the text as it is, with what tiny-e would say at every row."""
    pieces = [prose.sample(r, r.randint(60, 160)).astype(np.int64) for _ in range(count)]
    sequences = [Sequence(ids, np.arange(1, len(ids) - 1)) for ids in pieces]
    listen(model, sequences, layers)
    return sequences


def build(folder: Path, text: str, model: Gemma4Model, layers: set[int], seed: int, scale: float) -> list[Sequence]:
    """All training sequences with hidden states and K/V; `scale` multiplies every count."""
    r, tokenizer = random.Random(seed), Tokenizer.from_file(str(folder / "tokenizer.json"))
    prose = train_tiny.Prose(tokenizer, text)
    found = []
    for task, count in CONVERSATIONS.items():
        found += [tokenize(tokenizer, render(*conversation(task, r))) for _ in range(round(count * scale))]
    for _ in range(round(RETRIEVALS * scale)):
        found.append(tokenize(tokenizer, retrieval(r, prose.sentences, r.randint(120, 860))))
    for _ in range(round(PROSE_PIECES * scale)):
        ids = prose.sample(r, r.randint(60, 260)).astype(np.int64)
        found.append(Sequence(ids, np.arange(1, len(ids) - 1)))
    prompts = [prose.sample(r, r.randint(25, 200)) for _ in range(round(PROSE_PROMPTS * scale))]
    sequences = [s for s in found if s is not None] + continue_greedily(model, prompts, PROSE_OUTPUT)
    listen(model, sequences, layers)
    return sequences
