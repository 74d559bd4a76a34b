"""The Gemma 4 text model: every row up to the last layer that writes K/V, then only the rows somebody reads.

    x = embed(ids)                                  every row
    x = self_decoder(x)                             layers 0 .. cut-1, every row; each owner writes its K/V
    write K/V of the cut layer                      every row, nothing else of that layer
    y = cross_decoder(x[wanted])                    the cut layer's query half and every sharing layer, wanted rows
    return norm(y)                                  [R, H]

There is no second path: "full prefill" is this code with every row wanted. Numerics: spec section 2."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lastrow.kernels.add_norm import rms_norm
from lastrow.kernels.ops import Ops
from lastrow.kernels.rope import rope_table
from lastrow.kernels.rows import QueryRows
from lastrow.kv.pool import KVPool
from lastrow.models import cpu_row, single_row
from lastrow.models.batch import ForwardBatch
from lastrow.models.config import Gemma4Config
from lastrow.models.weights import ModelWeights, MoEWeights

FULL_GROUP, SLIDING_GROUP = 0, 1


class Gemma4Model:
    """config, weights and one backend's operations. `max_positions`: length of the RoPE tables, in tokens."""

    def __init__(self, config: Gemma4Config, weights: ModelWeights, ops: Ops, max_positions: int) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        embed = weights.embed
        # transformers holds sqrt(H) in the weights' dtype: 39.25 for E2B in bf16, not 39.1918 (spec section 2.2)
        self.embed_scale = float(torch.tensor(config.hidden_size**0.5).to(embed.dtype))
        self.rope = {
            True: rope_table(
                config.global_head_dim, config.rope_theta_full, max_positions, config.rotated_pairs_full, embed.dtype, embed.device
            ),
            False: rope_table(config.head_dim, config.rope_theta_sliding, max_positions, None, embed.dtype, embed.device),
        }
        self.cpu_row = cpu_row.CPURow(self) if cpu_row.supported(self) else None

    def __getstate__(self) -> dict[str, Any]:
        """Without cpu_row, only whether there is one: in a copy numpy's half of its buffers and torch's would part, unnoticed."""
        return self.__dict__ | {"cpu_row": self.cpu_row is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.cpu_row = cpu_row.CPURow(self) if state["cpu_row"] else None

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor | None:
        """Write the K/V of every row of `batch` into `pool`; return the final hidden state (after the last norm) of the
        wanted rows, [R, H], or None when no row is wanted."""
        if batch.wanted is not None and self.cpu_row is not None and batch.rows.num_rows == 1 and batch.copies == (None, None):
            return self.cpu_row.decode(batch, pool)
        if batch.wanted is not None and self.is_single_row(batch.rows):
            return single_row.decode(self, batch, pool)
        x, h = self.self_decoder(batch, pool)
        take = batch.logits_indices
        if take is None or batch.wanted is None:
            return None
        if take.shape[0] == x.shape[0]:  # ascending and as many as there are: every row
            return self.cross_decoder(x, h, batch.input_ids, batch.wanted, pool)
        return self.cross_decoder(x[take], h[take], batch.input_ids[take], batch.wanted, pool)

    def self_decoder(self, batch: ForwardBatch, pool: KVPool) -> tuple[torch.Tensor, torch.Tensor]:
        """Layers before the cut on every row and the cut layer's K/V. Returns that layer's residual and normed input, [T, H]."""
        cut = self.config.cut
        batch.rows.gathered.clear()
        x, h = self.embed(batch.input_ids)
        ple = self.per_layer_inputs(x, batch.input_ids, 0, cut)
        for i in range(cut):
            o = self.attend(i, h, batch.rows, pool, batch)
            x, h = self.after_attention(i, o, x, ple, i)
        self.write_kv(cut, h, batch, pool)
        return x, h

    def cross_decoder(self, x: torch.Tensor, h: torch.Tensor, ids: torch.Tensor, rows: QueryRows, pool: KVPool) -> torch.Tensor:
        """The cut layer's query half and every sharing layer on the wanted rows: x, h [R, H], ids [R] -> [R, H]."""
        cut, layers = self.config.cut, self.config.num_hidden_layers
        rows.gathered.clear()
        embedded, _ = self.embed(ids) if self.config.has_ple else (x, h)
        ple = self.per_layer_inputs(embedded, ids, cut, layers)
        if self.cpu_row is not None and rows.num_rows == 1:
            return self.cpu_row.run_layers(range(cut, layers), x, h, ple, rows, pool)
        if self.is_single_row(rows):
            return single_row.run_layers(self, range(cut, layers), x, h, ple, rows, pool)
        for i in range(cut, layers):
            o = self.attend(i, h, rows, pool)
            x, h = self.after_attention(i, o, x, ple, i - cut)
        return h

    def is_single_row(self, rows: QueryRows) -> bool:
        """True where the chain of matrix-vector kernels of single_row.py runs these rows."""
        return rows.num_rows == 1 and self.ops.fuses_decode(rows) and self.ops.has_gemv and not self.config.is_moe

    # ------------------------------------------------------------------------------------------------- the parts
    def group(self, layer: int) -> int:
        return FULL_GROUP if self.config.is_full(layer) else SLIDING_GROUP

    def embed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [T] -> scaled embedding and the first layer's normed input, [T, H]."""
        first = self.weights.layers[0].input_norm
        return self.ops.embedding(ids, self.weights.embed, self.embed_scale, first, self.config.rms_norm_eps)

    def per_layer_inputs(self, embedded: torch.Tensor, ids: torch.Tensor, first: int, end: int) -> torch.Tensor | None:
        """PLE of layers first .. end-1 for these rows only, [T, end-first, P]; None in models without it."""
        if not self.config.has_ple or first == end:
            return None
        w, p = self.weights, self.config.hidden_size_per_layer_input
        assert w.ple_model_projection is not None and w.ple_table is not None and w.ple_projection_norm is not None
        context = self.ops.deferred_linear(embedded, w.ple_model_projection[first * p : end * p])
        return self.ops.ple_inputs(
            context, ids, w.ple_table, w.ple_projection_norm, first, self.config.hidden_size, self.config.rms_norm_eps
        )

    def attend(self, i: int, h: torch.Tensor, rows: QueryRows, pool: KVPool, batch: ForwardBatch | None = None) -> torch.Tensor:
        """Attention output of layer i on `rows`, [N, heads, d]. With `batch`, whose rows they are, the layer's K and V of every
        row are stored first; without it they are there already: the layer shares, or its K/V was written on its own."""
        c, w, group = self.config, self.weights.layers[i], self.group(i)
        rope, d, eps, table = self.rope[c.is_full(i)], c.layer_head_dim(i), c.rms_norm_eps, rows.block_tables[group]
        own = {} if batch is None else {"k_weight": w.k_norm, "slots": batch.slots[group], "k_eq_v": c.layer_k_eq_v(i)}
        qkv = self.ops.deferred_linear(h, w.qkv[: c.num_attention_heads * d] if batch is None else w.qkv)
        if self.ops.fuses_decode(rows):
            return self.ops.decode_attention(qkv, rows, rope, w.q_norm, d, eps, pool.reader(i), table, c.layer_window(i), **own)
        if batch is not None:
            own |= {"kv": pool.writer(i), "kv_heads": c.layer_kv_heads(i)}
        q = self.ops.qkv_epilogue(qkv, rows.positions, rope, w.q_norm, d, eps, **own)
        if batch is not None:
            self.copy_tokens(i, batch, pool)
        return self.ops.attention(q, pool.reader(i), rows, table, c.layer_window(i))

    def write_kv(self, i: int, h: torch.Tensor, batch: ForwardBatch, pool: KVPool) -> None:
        """K and V of owner i for every row, no query."""
        c, w = self.config, self.weights.layers[i]
        query_rows = c.num_attention_heads * c.layer_head_dim(i)
        self.ops.qkv_epilogue(
            self.ops.deferred_linear(h, w.qkv[query_rows:]), batch.rows.positions, self.rope[c.is_full(i)], None, c.layer_head_dim(i),
            c.rms_norm_eps, k_weight=w.k_norm, kv=pool.writer(i), slots=batch.slots[self.group(i)],
            kv_heads=c.layer_kv_heads(i), k_eq_v=c.layer_k_eq_v(i),
        )  # fmt: skip
        self.copy_tokens(i, batch, pool)

    def copy_tokens(self, i: int, batch: ForwardBatch, pool: KVPool) -> None:
        """The partial blocks of this step's forks, in owner i."""
        copies = batch.copies[self.group(i)]
        if copies is not None:
            self.ops.copy_tokens(pool.writer(i), copies)

    def after_attention(
        self, i: int, o: torch.Tensor, x: torch.Tensor, ple: torch.Tensor | None, ple_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the attention output of layer i to its end. Returns the residual and the next block's normed input (the final
        norm behind the last layer), [T, H]."""
        w, ops, eps = self.weights.layers[i], self.ops, self.config.rms_norm_eps
        after = self.norm_after(i)
        x, h = ops.add_norm(ops.deferred_linear(o.flatten(1), w.o), x, w.post_attention_norm, w.pre_feedforward_norm, None, eps)
        act = ops.geglu(h, w.gate_up)
        mlp = ops.deferred_linear(act, w.down) if w.moe is None else self.mix_experts(w.moe, ops.linear(act, w.down), x)
        if w.ple_gate is None or w.ple_projection is None or w.post_ple_norm is None or ple is None:
            return ops.add_norm(mlp, x, w.post_feedforward_norm, after, w.scalar, eps)
        x, _ = ops.add_norm(mlp, x, w.post_feedforward_norm, None, None, eps)
        gated = ops.ple_gate(ops.deferred_linear(x, w.ple_gate), ple, ple_index)
        return ops.add_norm(ops.deferred_linear(gated, w.ple_projection), x, w.post_ple_norm, after, w.scalar, eps)

    def norm_after(self, i: int) -> torch.Tensor:
        """Weight of the norm behind layer i: the next layer's input norm, or the final one."""
        layers = self.weights.layers
        return layers[i + 1].input_norm if i + 1 < len(layers) else self.weights.norm

    def mix_experts(self, moe: MoEWeights, dense: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """26B-A4B: the dense branch plus the top-k experts, routed by the residual before the MLP (spec section 2.9)."""
        c, eps = self.config, self.config.rms_norm_eps
        routed = rms_norm(residual, None, eps) * moe.router_scale * c.hidden_size**-0.5
        weight, expert = F.linear(routed, moe.router_proj).float().softmax(-1).topk(c.top_k_experts, -1)
        weight = weight / weight.sum(-1, keepdim=True) * moe.per_expert_scale[expert].float()
        u = rms_norm(residual, moe.pre_norm_2, eps)
        out = torch.zeros_like(residual, dtype=torch.float32)
        for e in expert.unique().tolist():
            token, place = (expert == e).nonzero(as_tuple=True)
            gate, up = F.linear(u[token], moe.gate_up[e]).chunk(2, -1)
            y = F.linear(F.gelu(gate, approximate="tanh") * up, moe.down[e])
            out.index_add_(0, token, y.float() * weight[token, place, None])
        return rms_norm(dense, moe.post_norm_1, eps) + rms_norm(out.to(dense.dtype), moe.post_norm_2, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] after the final norm -> softcapped fp32 logits [R, V]."""
        return self.ops.head(hidden, self.weights.embed, self.config.final_logit_softcapping)

    def raw_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [R, H] -> logits [R, V] before the softcap, in the weights' dtype: their argmax is already the greedy token."""
        return torch.mm(hidden, self.weights.embed.t(), out=out)

    def softcap(self, raw_logits: torch.Tensor) -> torch.Tensor:
        """[R, V] from `raw_logits` -> softcapped fp32 logits, as `logits` gives them."""
        return self.ops.softcap(raw_logits, self.config.final_logit_softcapping)

    def row_logsumexp(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [R, V] fp32 -> logsumexp of each row, [R]."""
        return self.ops.row_logsumexp(logits)

    def label_logits(self, hidden: torch.Tensor, label_ids: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> softcapped fp32 logits [R, n] of label_ids [n] int64 only."""
        return self.ops.head_labels(hidden, self.weights.embed, label_ids, self.config.final_logit_softcapping)

    def logsumexp(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> logsumexp of the softcapped logits over the whole vocabulary, [R] fp32."""
        return self.ops.head_logsumexp(hidden, self.weights.embed, self.config.final_logit_softcapping)
