"""Layers on one fp32 row on a CPU: the same layers as Gemma4Model.attend and after_attention, with buffers made once.

One row's operations on a few hundred numbers cost torch several times what they compute: an allocation, and Python's way to the
kernel. Here norms, rotations and residual adds are numpy's, in place, on memory that torch's products read and write, too. For
`e2b-eighth` such calls were half of the time behind a prompt's cut (docs/benchmarks); the larger a model, the more it is the weights.

No matrix product is numpy's: a large one wakes OpenBLAS' threads, which then wait for those of torch, 8 ms at a time on two cores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lastrow.kernels import attention, kv_cache, matmul
from lastrow.kernels.geglu import gelu
from lastrow.kernels.matmul import RowProduct
from lastrow.kernels.rows import QueryRows
from lastrow.kv.pool import KVPool
from lastrow.models.batch import ForwardBatch

if TYPE_CHECKING:
    from lastrow.models.gemma4 import Gemma4Model

Array = np.ndarray[Any, np.dtype[np.float32]]
Turn = tuple[Array, Array]


def supported(model: Gemma4Model) -> bool:
    """fp32 weights on a CPU, no experts, and sums in any order (batch_invariant has its own)."""
    embed = model.weights.embed
    plain = model.ops.name == "reference" and not model.ops.batch_invariant
    return plain and embed.dtype is torch.float32 and embed.device.type == "cpu" and not model.config.is_moe


def _turn(cos_sin: Array) -> Turn:
    """A position's cos and sin, [2, d/2], as `Heads.rotate` takes them."""
    cos, sin = cos_sin
    return cos, np.stack([-sin, sin])


class Buffer:
    """The same n numbers for torch, [1, n], and for numpy, [n]."""

    def __init__(self, n: int) -> None:
        self.torch = torch.zeros(1, n)
        self.numpy: Array = self.torch.numpy()[0]


class Heads:
    """Room for the heads of one layer's width, [heads, d], and the halves that turn with each other, [heads, 2, d/2]."""

    def __init__(self, raw: Array, d: int) -> None:
        self.raw: Array = raw.reshape(-1, d)
        self.normed: Array = np.empty_like(self.raw)
        self.rotated: Array = np.empty_like(self.raw)
        self.rotated_torch = torch.from_numpy(self.rotated)
        self.size = d
        self._halves, self._turned = self.normed.reshape(-1, 2, d // 2), self.rotated.reshape(-1, 2, d // 2)
        self._swapped = self._halves[:, ::-1]
        self._scratch: Array = np.empty_like(self._halves)

    def norm(self, weight: Array | None, eps: float) -> Array:
        """RMSNorm of each head."""
        x, y = self.raw, self.normed
        np.multiply(x, x, y)
        squares = np.add.reduce(y, 1)
        squares /= self.size
        squares += eps
        np.sqrt(squares, squares)
        np.divide(x, squares[:, None], y)
        return y if weight is None else np.multiply(y, weight, y)

    def rotate(self, cos: Array, signed_sin: Array) -> Array:
        """`normed`, rotated: element j turns with element j + d/2. cos [d/2], signed_sin [2, d/2]: -sin and sin."""
        np.multiply(self._halves, cos, self._turned)
        np.multiply(self._swapped, signed_sin, self._scratch)
        np.add(self._turned, self._scratch, self._turned)
        return self.rotated


@dataclass(slots=True)
class Layer:
    """One layer's products, bound to their buffers, and its norms. own: the product of an owner that stores K and V, and their heads."""

    queries: RowProduct
    own: tuple[RowProduct, Heads, Heads, Heads] | None
    heads: Heads
    k_norm: Array | None
    q_norm: Array
    attended: torch.Tensor
    o: RowProduct
    post_attention_norm: Array
    pre_feedforward_norm: Array
    gate_up: RowProduct
    gate: tuple[torch.Tensor, Array]
    up: Array
    down: RowProduct
    post_feedforward_norm: Array
    ple: tuple[RowProduct, Buffer, RowProduct, Array] | None
    scalar: float
    norm_after: Array


class CPURow:
    """One model's layers for one row at a time. Weights are shared with the model, not copied."""

    def __init__(self, model: Gemma4Model) -> None:
        hidden = model.config.hidden_size
        self.model = model
        self.x, self.h, self.y = Buffer(hidden), Buffer(hidden), Buffer(hidden)
        self._scratch: Array = np.empty(hidden, np.float32)
        self._buffers: dict[tuple[str, int], Buffer] = {}
        self.layers = [self._layer(i) for i in range(model.config.num_hidden_layers)]

    def _buffer(self, name: str, n: int) -> Buffer:
        return self._buffers.setdefault((name, n), Buffer(n))

    def _layer(self, i: int) -> Layer:
        c, w = self.model.config, self.model.weights.layers[i]
        d, kv_heads = c.layer_head_dim(i), c.layer_kv_heads(i)
        width = c.num_attention_heads * d
        q, o = self._buffer("q", width), self._buffer("o", width)
        gate_up = self._buffer("gate up", w.gate_up.shape[0])
        inner = w.gate_up.shape[0] // 2
        gate = (gate_up.torch[:, :inner], gate_up.numpy[:inner])
        own = ple = None
        if c.owns_kv(i):
            whole = self._buffer("qkv", w.qkv.shape[0])
            # with k_eq_v the last rows are the keys' and the values' both
            queries, keys, values = whole.numpy[:width], whole.numpy[width : width + kv_heads * d], whole.numpy[-kv_heads * d :]
            project = matmul.row_product(w.qkv, self.h.torch, whole.torch)
            own = (project, Heads(queries, d), Heads(keys, d), Heads(values, d))
        if w.ple_gate is not None and w.ple_projection is not None and w.post_ple_norm is not None:
            of_layer = self._buffer("per-layer gate", w.ple_gate.shape[0])
            project = matmul.row_product(w.ple_projection, of_layer.torch, self.y.torch)
            ple = (matmul.row_product(w.ple_gate, self.x.torch, of_layer.torch), of_layer, project, w.post_ple_norm.numpy())
        return Layer(
            queries=matmul.row_product(w.qkv[:width], self.h.torch, q.torch),
            own=own,
            heads=Heads(q.numpy, d),
            k_norm=None if w.k_norm is None else w.k_norm.numpy(),
            q_norm=w.q_norm.numpy(),
            attended=o.torch.view(kv_heads, -1, d),
            o=matmul.row_product(w.o, o.torch, self.y.torch),
            post_attention_norm=w.post_attention_norm.numpy(),
            pre_feedforward_norm=w.pre_feedforward_norm.numpy(),
            gate_up=matmul.row_product(w.gate_up, self.h.torch, gate_up.torch),
            gate=gate,
            up=gate_up.numpy[inner:],
            down=matmul.row_product(w.down, gate[0], self.y.torch),
            post_feedforward_norm=w.post_feedforward_norm.numpy(),
            ple=ple,
            scalar=float(w.scalar),
            norm_after=self.model.norm_after(i).numpy(),
        )

    # ------------------------------------------------------------------------------------------------------ a forward
    def decode(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        """One row through all layers: its K/V is stored, its final hidden state [1, H] returned."""
        model, layers = self.model, range(len(self.layers))
        batch.rows.gathered.clear()
        x, h = model.embed(batch.input_ids)
        return self.run_layers(layers, x, h, model.per_layer_inputs(x, batch.input_ids, 0, len(layers)), batch.rows, pool, batch)

    @np.errstate(all="ignore")  # broken weights give NaN without a word, as from torch
    def run_layers(
        self, layers: Iterable[int], x: torch.Tensor, h: torch.Tensor, ple: torch.Tensor | None, rows: QueryRows, pool: KVPool,
        batch: ForwardBatch | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Consecutive layers up to the last one: residual x and normed input h of the first, [1, H] -> final hidden state [1, H].

        ple [1, n, P] of these layers. With `batch`, owners store the row's K/V; without it all K/V is there."""
        model, eps = self.model, self.model.config.rms_norm_eps
        position = int(rows.positions[0])
        rope = {full: _turn(table[position].numpy()) for full, table in model.rope.items()}
        self.x.torch.copy_(x)
        self.h.torch.copy_(h)
        gates = None if ple is None else ple.numpy()[0]
        for n, i in enumerate(layers):
            layer = self.layers[i]
            turn = rope[model.config.is_full(i)]
            if batch is None or layer.own is None:
                layer.queries()
                heads = layer.heads
            else:
                project, heads, keys, values = layer.own
                project()
                self._store(i, layer, keys, values, turn, batch, pool)
            heads.norm(layer.q_norm, eps)
            heads.rotate(*turn)
            self._attend(i, layer, heads, rows, pool)
            layer.o()
            self._add_normed(layer.post_attention_norm)
            self._normed(layer.pre_feedforward_norm)
            layer.gate_up()
            gate, gate_np = layer.gate
            gelu(gate, approximate="tanh", out=gate)
            np.multiply(gate_np, layer.up, gate_np)
            layer.down()
            self._add_normed(layer.post_feedforward_norm)
            if layer.ple is not None and gates is not None:
                make_gate, of_layer, project, norm = layer.ple
                make_gate()
                gelu(of_layer.torch, approximate="tanh", out=of_layer.torch)
                np.multiply(of_layer.numpy, gates[n], of_layer.numpy)
                project()
                self._add_normed(norm)
            np.multiply(self.x.numpy, layer.scalar, self.x.numpy)
            self._normed(layer.norm_after)
        return self.h.torch.clone()

    def _store(self, i: int, layer: Layer, keys: Heads, values: Heads, turn: Turn, batch: ForwardBatch, pool: KVPool) -> None:
        eps = self.model.config.rms_norm_eps
        keys.norm(layer.k_norm, eps)
        k, v = keys.rotate(*turn), values.norm(None, eps)
        kv_cache.store(pool.writer(i), batch.slots[self.model.group(i)], torch.from_numpy(k)[None], torch.from_numpy(v)[None])

    def _attend(self, i: int, layer: Layer, heads: Heads, rows: QueryRows, pool: KVPool) -> None:
        model = self.model
        k, v = attention.keys_of_row(pool.reader(i), rows, 0, rows.block_tables[model.group(i)], model.config.layer_window(i))
        attention.one_row(heads.rotated_torch.view(k.shape[0], -1, heads.size), k, v, out=layer.attended)

    def _add_normed(self, weight: Array) -> None:
        """x += norm(y) * weight"""
        x, y, scratch = self.x.numpy, self.y.numpy, self._scratch
        np.multiply(y, weight, scratch)
        np.multiply(scratch, self._inverse_rms(y), scratch)
        np.add(x, scratch, x)

    def _normed(self, weight: Array) -> None:
        """h = norm(x) * weight"""
        x, h = self.x.numpy, self.h.numpy
        np.multiply(x, weight, h)
        np.multiply(h, self._inverse_rms(x), h)

    def _inverse_rms(self, x: Array) -> float:
        return 1 / math.sqrt(x.dot(x) / x.size + self.model.config.rms_norm_eps)
