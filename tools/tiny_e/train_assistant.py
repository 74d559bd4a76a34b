"""Train a drafter (Gemma 4 assistant) for tiny-e on tiny-e's own outputs. CPU only.

    python train_assistant.py --text corpus.txt --out DIR [--minutes 9] [--threads 2]

The drafter learns to say what tiny-e says next, one to four tokens ahead: for every row, four steps are unrolled with the drafter's own
hidden state, over tiny-e's K/V at the row, as in drafting. Loss: tiny-e's distribution and its argmax. `prep_text.py` makes corpus.txt."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from assistant_data import TOP_TOKENS, Sequence, build, fresh_prose, load_target
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from train_tiny import Prose

from lastrow.kernels.rope import apply_rope, rope_table
from lastrow.models.gemma4 import Gemma4Model

STEPS = 4
HIDDEN, MLP, HEADS, CENTROIDS, TOP_K = 64, 512, 4, 64, 8
ALL_STEPS = 0.4  # share of updates that unroll every step; the others train the first, from which the later ones profit as well
KINDS = ("sliding_attention", "sliding_attention", "sliding_attention", "full_attention")
SCALARS = (0.875, 1.125, 0.9375, 1.0625)  # not 1: a loader that forgets them must fail
TARGET_LAYER = {"sliding_attention": 3, "full_attention": 4}
EPS = 1e-6
FRESH_PIECES = 500  # of prose for each pass over the stored data
TURN = 105  # <|turn>: begins every conversation


def balanced_groups(points: np.ndarray, groups: int, rounds: int = 12, seed: int = 0) -> np.ndarray:
    """k-means with groups of equal size: group of each point, [V]."""
    rng, size = np.random.default_rng(seed), len(points) // groups
    centers = points[rng.choice(len(points), groups, replace=False)]
    group = np.zeros(len(points), np.int64)
    for _ in range(rounds):
        distance = ((points[:, None] - centers[None]) ** 2).sum(-1)
        nearest_two = np.sort(distance, 1)[:, :2]
        room = np.full(groups, size)
        for i in np.argsort(nearest_two[:, 0] - nearest_two[:, 1]):  # those with most to lose choose first
            best = np.where(room > 0, distance[i], np.inf).argmin()
            group[i] = best
            room[best] -= 1
        centers = np.stack([points[group == g].mean(0) for g in range(groups)])
    return group


def initial_weights(target: Gemma4Model, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Parameters by published name, and token_ordering. The head starts as the best 64-dimensional view of the target's table."""
    g = torch.Generator().manual_seed(seed)
    table = target.weights.embed.float()
    centred = table - table.mean(0)
    view = torch.linalg.svd(centred, full_matrices=False).Vh[:HIDDEN].T
    head = centred @ view
    group = torch.from_numpy(balanced_groups(head.numpy(), CENTROIDS))
    ordering = group.argsort(stable=True)
    w = {"model.embed_tokens.weight": head / head.std() * 0.15, "model.norm.weight": torch.ones(HIDDEN)}
    w["masked_embedding.centroids.weight"] = w["model.embed_tokens.weight"][ordering].view(CENTROIDS, -1, HIDDEN).mean(1)
    backbone = table.shape[1]

    def linear(out: int, inner: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(out, inner, generator=g) * gain * inner**-0.5

    w["pre_projection.weight"] = linear(HIDDEN, 2 * backbone)
    w["post_projection.weight"] = linear(backbone, HIDDEN)
    for i, kind in enumerate(KINDS):
        d, p = (64 if kind == "full_attention" else 32), f"model.layers.{i}."
        w[p + "self_attn.q_proj.weight"] = linear(HEADS * d, HIDDEN)
        w[p + "self_attn.o_proj.weight"] = linear(HIDDEN, HEADS * d)
        w[p + "self_attn.q_norm.weight"] = torch.full((d,), d**-0.25)
        for name, (out, inner) in {"gate": (MLP, HIDDEN), "up": (MLP, HIDDEN), "down": (HIDDEN, MLP)}.items():
            w[p + f"mlp.{name}_proj.weight"] = linear(out, inner)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            w[p + f"{name}_layernorm.weight"] = torch.full((HIDDEN,), 0.5 if name.startswith("post") else 1.0)
    return {name: t.contiguous().requires_grad_() for name, t in w.items()}, ordering


def stored_weights(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What an earlier run exported; a narrower MLP is widened without a change of what it computes."""
    tensors = load_file(folder / "model.safetensors")
    ordering = tensors.pop("masked_embedding.token_ordering")
    for name, t in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = torch.cat([t, torch.randn(MLP - len(t), HIDDEN).bfloat16() * HIDDEN**-0.5])
        elif name.endswith("down_proj.weight"):
            tensors[name] = F.pad(t, (0, MLP - t.shape[1]))
    return {name: t.float().requires_grad_() for name, t in tensors.items() if not name.endswith("layer_scalar")}, ordering


@dataclass(slots=True)
class Batch:
    """B sequences padded to T tokens, n starts, m rows.

    start [B, n]: position of the newest token. ids [B, n, STEPS + 1]: it and those after it. row [B, n]: index of the row that
    predicted it in hidden [B, m, H], the target's final-norm states. valid [B, n, STEPS]: the label row of the step exists.
    likely, chance [B, m, TOP_TOKENS]: what the target says at the rows.
    kv: by attention type, [B, T, d]; sliding ones hold only what some start sees. masks: [B, HEADS * n, T], 0 or -inf."""

    start: torch.Tensor
    ids: torch.Tensor
    row: torch.Tensor
    valid: torch.Tensor
    hidden: torch.Tensor
    likely: torch.Tensor
    chance: torch.Tensor
    kv: dict[str, tuple[torch.Tensor, torch.Tensor]]
    masks: dict[str, torch.Tensor]


def starts_of(s: Sequence) -> list[int]:
    """Indices j into s.rows such that row j + 1 follows row j: the token after row j has a successor of interest."""
    return [j for j in range(len(s.rows) - 1) if s.rows[j + 1] == s.rows[j] + 1]


def make_kv(group: list[tuple[Sequence, list[int]]], start: torch.Tensor, kind: str, window: int):
    """K, V and mask of one attention type; window 0: all keys."""
    size, n = start.shape
    lows = [max(0, int(s.rows[j[0]]) + 1 - window) if window else 0 for s, j in group]
    ends = [int(s.rows[j[-1]]) + 1 for s, j in group]
    tokens = max(end - low for end, low in zip(ends, lows, strict=True))
    pair = tuple(torch.zeros(size, tokens, part.shape[1]) for part in group[0][0].kv[TARGET_LAYER[kind]])
    for b, (s, _) in enumerate(group):
        for whole, part in zip(pair, s.kv[TARGET_LAYER[kind]], strict=True):
            whole[b, : ends[b] - lows[b]] = part[lows[b] : ends[b]]
    key, last = (torch.tensor(lows)[:, None] + torch.arange(tokens))[:, None], start[:, :, None] - 1
    seen = key <= last
    if window:
        seen &= key > last - window
    mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    return pair, mask[:, None].expand(size, HEADS, n, tokens).reshape(size, HEADS * n, tokens)


def make_batch(group: list[tuple[Sequence, list[int]]], window: int) -> Batch:
    n, m = max(len(j) for _, j in group), max(len(s.rows) for s, _ in group)
    size = len(group)
    start, row = torch.ones(size, n, dtype=torch.long), torch.zeros(size, n, dtype=torch.long)
    ids, valid = torch.zeros(size, n, STEPS + 1, dtype=torch.long), torch.zeros(size, n, STEPS, dtype=torch.bool)
    hidden = torch.zeros(size, m, group[0][0].hidden.shape[1])
    likely, chance = torch.zeros(size, m, TOP_TOKENS, dtype=torch.long), torch.zeros(size, m, TOP_TOKENS)
    for b, (s, picked) in enumerate(group):
        hidden[b, : len(s.rows)] = s.hidden
        j = np.array(picked)
        start[b] = int(s.rows[j[-1]]) + 1  # padding looks where a real start does, so that no row of the mask is empty
        start[b, : len(j)], row[b, : len(j)] = torch.from_numpy(s.rows[j] + 1), torch.from_numpy(j)
        for k in range(STEPS + 1):
            inside = (j + k < len(s.rows)) & (s.rows[np.minimum(j + k, len(s.rows) - 1)] == s.rows[j] + k)
            ids[b, : len(j), k] = torch.from_numpy(np.where(inside, s.ids[np.minimum(s.rows[j] + 1 + k, len(s.ids) - 1)], 0))
            if k:
                valid[b, : len(j), k - 1] = torch.from_numpy(inside)
        likely[b, : len(s.rows)], chance[b, : len(s.rows)] = s.likely, s.chance
    kv, masks = {}, {}
    for kind in TARGET_LAYER:
        kv[kind], masks[kind] = make_kv(group, start, kind, 0 if kind == "full_attention" else window)
    return Batch(start, ids, row, valid, hidden, likely, chance, kv, masks)


def some_of(sequences: list[Sequence], r: random.Random) -> list[Sequence]:
    """What one pass takes of the stored data: less of what the drafter finds easy, and of prose that it would learn by heart."""
    return [s for s in sequences if r.random() < (0.3 if TURN in s.ids[:8] else 0.4)]


def batches(sequences: list[Sequence], r: random.Random, rows: int, window: int, max_starts: int = 64) -> Iterator[Batch]:
    """One pass, sequences of like shape together, at most `rows` padded starts each."""
    items = []
    for s in sequences:
        picked = starts_of(s)
        if picked:
            items.append((s, sorted(r.sample(picked, max_starts)) if len(picked) > max_starts else picked))
    items.sort(key=lambda item: (len(item[1]) // 6, len(item[0].ids) + r.random() * 40))
    groups, group = [], []
    for item in items:
        most = max([len(item[1])] + [len(j) for _, j in group])
        if group and most * (len(group) + 1) > rows:
            groups.append(group)
            group = []
        group.append(item)
    groups.append(group)
    r.shuffle(groups)
    yield from (make_batch(group, window) for group in groups)


class Drafter:
    """The assistant's forward over padded batches, differentiable, on parameters with the published names."""

    def __init__(self, weights: dict[str, torch.Tensor], target: Gemma4Model) -> None:
        self.w, self.target = weights, target
        c = target.config
        self.rope = {
            "sliding_attention": rope_table(c.head_dim, c.rope_theta_sliding, 1100, None, torch.float32, "cpu"),
            "full_attention": rope_table(c.global_head_dim, c.rope_theta_full, 1100, c.rotated_pairs_full, torch.float32, "cpu"),
        }

    def step(self, ids: torch.Tensor, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [B, n], hidden [B, n, Hb] -> y [B, n, h], next hidden."""
        w = self.w
        embedded = self.target.weights.embed[ids] * self.target.embed_scale
        x = F.linear(torch.cat([embedded, hidden], -1), w["pre_projection.weight"])
        size, n = ids.shape
        for i, kind in enumerate(KINDS):
            p = f"model.layers.{i}."

            def norm(x: torch.Tensor, name: str, p: str = p) -> torch.Tensor:
                return F.rms_norm(x, x.shape[-1:], w[p + name + ".weight"], EPS)

            q = F.linear(norm(x, "input_layernorm"), w[p + "self_attn.q_proj.weight"]).view(size * n, HEADS, -1)
            q = apply_rope(norm(q, "self_attn.q_norm"), self.rope[kind][batch.start.flatten()]).view(size, n, HEADS, -1)
            k, v = batch.kv[kind]
            # one K/V head: the query heads become rows
            scores = torch.baddbmm(batch.masks[kind], q.transpose(1, 2).reshape(size, HEADS * n, -1), k.transpose(1, 2))
            o = torch.bmm(scores.softmax(-1), v)
            o = o.view(size, HEADS, n, -1).transpose(1, 2).reshape(size, n, -1)
            x = x + norm(F.linear(o, w[p + "self_attn.o_proj.weight"]), "post_attention_layernorm")
            f = norm(x, "pre_feedforward_layernorm")
            f = F.gelu(F.linear(f, w[p + "mlp.gate_proj.weight"]), approximate="tanh") * F.linear(f, w[p + "mlp.up_proj.weight"])
            x = (x + norm(F.linear(f, w[p + "mlp.down_proj.weight"]), "post_feedforward_layernorm")) * SCALARS[i]
        y = F.rms_norm(x, x.shape[-1:], w["model.norm.weight"], EPS)
        return y, F.linear(y, w["post_projection.weight"])


def batch_loss(drafter: Drafter, batch: Batch, group_of: torch.Tensor, steps: int = STEPS) -> tuple[torch.Tensor, list[float]]:
    """Mean loss over valid rows and steps, and the share of right first choices by step (given right ones before)."""
    pick = torch.arange(len(batch.row))[:, None]
    hidden, alive = batch.hidden[pick, batch.row], torch.ones_like(batch.valid[..., 0])
    total, count, right = torch.zeros(()), 0, []
    for k in range(steps):
        y, hidden = drafter.step(batch.ids[..., k], hidden, batch)
        alive = alive & batch.valid[..., k]
        if not alive.any():
            break
        at = pick.expand_as(batch.row)[alive], (batch.row + k + 1)[alive]
        likely, chance = batch.likely[at], batch.chance[at]
        best = likely[:, 0]
        logits = F.linear(y[alive], drafter.w["model.embed_tokens.weight"])
        groups = F.linear(y[alive], drafter.w["masked_embedding.centroids.weight"])
        wish = 0.5 * chance
        wish[:, 0] += 0.5
        loss = (wish.sum(-1) * logits.logsumexp(-1) - (wish * logits.gather(1, likely)).sum(-1)).sum()
        total = total + loss + 0.2 * F.cross_entropy(groups, group_of[best], reduction="sum")
        count += len(best)
        right.append(float((logits.argmax(-1) == best).float().mean()))
        # a draft after a wrong one is never looked at: go on where the text follows tiny-e's first choice
        follows = torch.zeros_like(alive)
        follows[alive] = best == batch.ids[..., k + 1][alive]
        alive = follows
    return total / max(count, 1), right


def train(
    target: Gemma4Model, sequences: list[Sequence], seconds: float, seed: int, rows: int, peak: float, start: Path | None, prose: Prose
):
    weights, ordering = initial_weights(target, seed) if start is None else stored_weights(start)
    group_of = torch.empty(len(ordering), dtype=torch.long)
    group_of[ordering] = torch.arange(len(ordering)) // (len(ordering) // CENTROIDS)
    drafter, r = Drafter(weights, target), random.Random(seed)
    matrices = [t for t in weights.values() if t.dim() > 1]
    vectors = [t for t in weights.values() if t.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}], lr=peak, betas=(0.9, 0.98)
    )
    began, step, shown, trace = time.time(), 0, 0.0, []
    while (done := (time.time() - began) / seconds) < 1:
        fresh = fresh_prose(prose, target, set(TARGET_LAYER.values()), r, FRESH_PIECES)
        for batch in batches(some_of(sequences, r) + fresh, r, rows, target.config.sliding_window):
            done = min((time.time() - began) / seconds, 1.0)
            if done >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
            loss, right = batch_loss(drafter, batch, group_of, STEPS if r.random() < ALL_STEPS else 1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
            optimizer.step()
            step += 1
            trace.append((float(loss.detach()), right))
            if time.time() - shown > 20:
                shown, recent = time.time(), trace[-100:]
                rates = [np.mean([x[1][k] for x in recent if len(x[1]) > k]) for k in range(STEPS)]
                print(
                    f"{time.time() - began:5.0f} s step {step} loss {np.mean([x[0] for x in recent]):.3f} right {np.round(rates, 3)}",
                    flush=True,
                )
        else:
            print("pass over the data complete", flush=True)
    return weights, ordering


def export(weights: dict[str, torch.Tensor], ordering: torch.Tensor, target_folder: Path, out: Path) -> None:
    """config.json, generation_config.json and model.safetensors, laid out like the published assistants."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().bfloat16().contiguous() for name, t in weights.items()}
    tensors |= {f"model.layers.{i}.layer_scalar": torch.tensor([s]).bfloat16() for i, s in enumerate(SCALARS)}
    tensors["masked_embedding.token_ordering"] = ordering.long().contiguous()
    save_file(dict(sorted(tensors.items())), out / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((target_folder / "config.json").read_text())["text_config"]
    text |= {
        "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": len(KINDS), "layer_types": list(KINDS),
        "num_kv_shared_layers": len(KINDS), "num_attention_heads": HEADS, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "final_logit_softcapping": None,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "backbone_hidden_size": 192, "dtype": "bfloat16",
        "tie_word_embeddings": True, "use_ordered_embeddings": True, "num_centroids": CENTROIDS, "centroid_intermediate_top_k": TOP_K,
        "text_config": text,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    advice = {"num_assistant_tokens": STEPS, "num_assistant_tokens_schedule": "constant"}
    (out / "generation_config.json").write_text(json.dumps(advice, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=Path, default=Path(__file__).parents[2] / "src" / "lastrow" / "assets" / "tiny-e")
    parser.add_argument("--text", type=Path, required=True, help="corpus.txt of prep_text.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--scale", type=float, default=0.6, help="multiplies the amount of data")
    parser.add_argument("--data", type=Path, help="file that keeps the data of a first run for a second one")
    parser.add_argument("--start", type=Path, help="folder of an earlier run to go on from")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=400, help="padded starts of one update")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=7)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    target = load_target(a.target)
    prose = Prose(Tokenizer.from_file(str(a.target / "tokenizer.json")), a.text.read_text(encoding="utf-8"))
    if a.data and a.data.exists():
        sequences = [Sequence(*item) for item in torch.load(a.data, weights_only=False)]
    else:
        began = time.time()
        sequences = build(a.target, a.text.read_text(encoding="utf-8"), target, set(TARGET_LAYER.values()), a.seed, a.scale)
        print(f"{len(sequences)} sequences, {sum(len(s.rows) for s in sequences)} rows in {time.time() - began:.0f} s", flush=True)
        if a.data:
            torch.save([(s.ids, s.rows, s.hidden, s.kv, s.likely, s.chance) for s in sequences], a.data)
    weights, ordering = train(target, sequences, a.minutes * 60, a.seed, a.rows, a.rate, a.start, prose)
    export(weights, ordering, a.target, a.out)
    print(f"{os.path.getsize(a.out / 'model.safetensors')} bytes", flush=True)


if __name__ == "__main__":
    main()
