"""Layers on one row as a chain of matrix-vector kernels: 7 launches per layer, norms and residual adds inside them.

The same layers as Gemma4Model.attend and after_attention; what stands between two matmuls there is here the front of the
second one. One stream's decoding, and the layers behind the cut for one prompt, are bound by launches and latency, which this
halves (docs/benchmarks)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from lastrow.kernels.rows import QueryRows
from lastrow.kv.pool import KVPool
from lastrow.models.batch import ForwardBatch

if TYPE_CHECKING:
    from lastrow.models.gemma4 import Gemma4Model


def decode(model: Gemma4Model, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
    """One row through all layers: its K/V is stored, its final hidden state [1, H] returned."""
    x, h = model.embed(batch.input_ids)
    layers = range(model.config.num_hidden_layers)
    ple = model.per_layer_inputs(x, batch.input_ids, 0, len(layers))
    return run_layers(model, layers, x, h, ple, batch.rows, pool, batch)


def run_layers(
    model: Gemma4Model,
    layers: Iterable[int],
    x: torch.Tensor,
    h: torch.Tensor,
    ple: torch.Tensor | None,
    rows: QueryRows,
    pool: KVPool,
    batch: ForwardBatch | None = None,
) -> torch.Tensor:
    """Consecutive layers up to the last one: residual x and normed input h of the first, [1, H] -> final hidden state [1, H].

    ple [1, n, P] of these layers. With `batch`, owners store the row's K/V; without it all K/V is there."""
    c, ops, eps = model.config, model.ops, model.config.rms_norm_eps
    first, y, w, i = next(iter(layers)), h, model.weights.layers[0], 0
    front = {}
    for i in layers:
        w, group, d = model.weights.layers[i], model.group(i), c.layer_head_dim(i)
        own = {}
        if batch is not None and c.owns_kv(i):
            own = {"k_weight": w.k_norm, "slots": batch.slots[group], "k_eq_v": c.layer_k_eq_v(i)}
        if front:
            front |= {"residual": x, "pre_weight": w.input_norm}
        qkv, residual = ops.gemv(y, w.qkv if own else w.qkv[: c.num_attention_heads * d], eps=eps, **front)
        x = x if residual is None else residual
        o = ops.decode_attention(
            qkv, rows, model.rope[c.is_full(i)], w.q_norm, d, eps, pool.reader(i), rows.block_tables[group], c.layer_window(i), **own
        )
        y, _ = ops.gemv(o.flatten(1), w.o)
        y, x = ops.gemv(y, w.gate_up, residual=x, post_weight=w.post_attention_norm, pre_weight=w.pre_feedforward_norm, geglu=True, eps=eps)
        y, _ = ops.gemv(y, w.down)
        front: dict[str, Any] = {"post_weight": w.post_feedforward_norm, "scalar": w.scalar}
        if w.ple_gate is not None and w.ple_projection is not None and ple is not None:
            y, x = ops.gemv(y, w.ple_gate, residual=x, post_weight=w.post_feedforward_norm, ple=ple[0, i - first], eps=eps)
            y, _ = ops.gemv(y, w.ple_projection)
            front["post_weight"] = w.post_ple_norm
    last: Any = front
    return ops.add_norm(y, x, last["post_weight"], model.norm_after(i), last["scalar"], eps)[1]
