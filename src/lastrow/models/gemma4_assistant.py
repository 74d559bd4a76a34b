"""The Gemma 4 assistant: a small drafter with queries only, which reads the K/V that the target has already written.

    x = concat(target embedding of t, g) @ pre_projection       t: newest token, g: hidden state that predicted it
    four layers, queries at t's position over the target's K/V  nothing is written, draft steps do not see each other
    y = norm(x);  next token from y's head;  next g = y @ post_projection

Spec sections 5.2 to 5.4."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lastrow.kernels.add_norm import rms_norm
from lastrow.kernels.ops import Ops
from lastrow.kernels.rows import QueryRows
from lastrow.kv.pool import KVPool
from lastrow.models.assistant_config import AssistantConfig
from lastrow.models.gemma4 import FULL_GROUP, SLIDING_GROUP, Gemma4Model
from lastrow.models.weights import LayerWeights


@dataclass(slots=True)
class AssistantWeights:
    """pre_projection [h, 2 Hb], post_projection [Hb, h]. The head is either dense (`head` [V, h]) or ordered (`centroids`
    [C, h], `clusters` [C, S, h], `cluster_ids` [C, S] int32). Layers have q rows only in `qkv`."""

    pre_projection: torch.Tensor
    post_projection: torch.Tensor
    norm: torch.Tensor
    layers: list[LayerWeights] = field(default_factory=list)
    head: torch.Tensor | None = None
    centroids: torch.Tensor | None = None
    clusters: torch.Tensor | None = None
    cluster_ids: torch.Tensor | None = None


class Gemma4Assistant:
    """A drafter bound to `target`, whose embedding and RoPE tables it uses. ops: default the target's. Raises ConfigError on a misfit."""

    def __init__(self, config: AssistantConfig, weights: AssistantWeights, target: Gemma4Model, ops: Ops | None = None) -> None:
        self.config = config
        self.weights = weights
        self.target = target
        self.ops = ops or target.ops
        self.target_layers = config.target_layers(target.config)

    @torch.inference_mode()
    def draft(self, token_ids: torch.Tensor, hidden: torch.Tensor, rows: QueryRows, pool: KVPool, num_tokens: int) -> torch.Tensor:
        """Propose the next `num_tokens` tokens of S sequences, greedily: [S, num_tokens] int32.

        token_ids [S]: each sequence's newest token, which the target has not processed, at position L-1. hidden [S, Hb]: the
        target's hidden state after its final norm at the row that predicted it. rows: one row per sequence at position
        L-2, the last one with valid K/V."""
        drafts = []
        for _ in range(num_tokens):
            y, hidden = self.forward(token_ids, hidden, rows, pool)
            token_ids = self.best_token(y)
            drafts.append(token_ids)
        return torch.stack(drafts, 1) if drafts else token_ids.new_empty(len(token_ids), 0)

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, rows: QueryRows, pool: KVPool) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step; arguments as in `draft`. Returns y [S, h] for the head and the next step's hidden [S, Hb].

        Queries turn at L-1 in every step (spec 5.2: transformers and llama.cpp) and read the keys up to L-2: all of them, or
        in sliding layers the last W (vLLM; transformers lets W+1 through)."""
        w, c, ops, eps = self.weights, self.config.text, self.ops, self.config.text.rms_norm_eps
        rows.gathered.clear()
        embedded = self.target.weights.embed[token_ids.long()] * self.target.embed_scale
        x = ops.linear(torch.cat([embedded, hidden], 1), w.pre_projection)
        h = rms_norm(x, w.layers[0].input_norm, eps)
        query_positions = rows.positions + 1
        for i, layer in enumerate(w.layers):
            full = c.is_full(i)
            q = ops.qkv_epilogue(ops.linear(h, layer.qkv), query_positions, self.target.rope[full], layer.q_norm, c.layer_head_dim(i), eps)
            table = rows.block_tables[FULL_GROUP if full else SLIDING_GROUP]
            o = ops.attention(q, pool.reader(self.target_layers[i]), rows, table, c.layer_window(i))
            x, h = ops.add_norm(ops.linear(o.flatten(1), layer.o), x, layer.post_attention_norm, layer.pre_feedforward_norm, None, eps)
            after = w.layers[i + 1].input_norm if i + 1 < len(w.layers) else w.norm
            mlp = ops.linear(ops.geglu(h, layer.gate_up), layer.down)
            x, h = ops.add_norm(mlp, x, layer.post_feedforward_norm, after, layer.scalar, eps)
        return h, ops.linear(h, w.post_projection)

    def candidates(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """y [S, h] -> (candidate ids [S, n] int32, fp32 logits [S, n]) of the ordered head."""
        w = self.weights
        return self.ops.centroid_head(y, w.centroids, w.clusters, w.cluster_ids, self.config.centroid_top_k)

    def best_token(self, y: torch.Tensor) -> torch.Tensor:
        """y [S, h] -> the most likely token of each row, [S] int32."""
        if self.weights.head is not None:
            return self.ops.linear(y, self.weights.head).argmax(-1).to(torch.int32)
        ids, logits = self.candidates(y)
        return ids.gather(1, logits.argmax(-1, keepdim=True)).squeeze(1)
