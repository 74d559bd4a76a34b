"""One backend's operations behind one set of names; chosen explicitly, counted, never swapped silently."""

from __future__ import annotations

from collections import Counter

import torch

from lastrow.kernels import (
    add_norm,
    attention,
    centroid_head,
    copy_tokens,
    decode_attention,
    embedding,
    geglu,
    gemv,
    head,
    matmul,
    ple_gate,
    ple_inputs,
    qkv_epilogue,
    token_fields,
)


class ReferenceOps:
    """Plain torch on any device. `counts`: operation -> calls."""

    name = "reference"
    has_gemv = False
    pack_gate_up = staticmethod(geglu.reference_pack)
    unpack_gate_up = staticmethod(geglu.reference_unpack)

    def __init__(self, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant
        self.counts: Counter[str] = Counter()

    def token_fields(self, *args, **kwargs):
        self.counts["token_fields"] += 1
        token_fields.reference(*args, **kwargs)

    def embedding(self, ids, table, scale, norm_weight, eps):
        self.counts["embedding"] += 1
        return embedding.reference(ids, table, scale, norm_weight, eps)

    def ple_inputs(self, context, ids, table, norm_weight, first_layer, hidden_size, eps):
        self.counts["ple_inputs"] += 1
        return ple_inputs.reference(context, ids, table, norm_weight, first_layer, hidden_size, eps)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.counts["linear"] += 1
        return matmul.reference(x, weight)

    def deferred_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`linear` whose result only another operation of this class reads: a backend may leave sums to that one."""
        return self.linear(x, weight)

    def qkv_epilogue(self, *args, **kwargs):
        self.counts["qkv_epilogue"] += 1
        return qkv_epilogue.reference(*args, **kwargs)

    def copy_tokens(self, kv, copies):
        self.counts["copy_tokens"] += 1
        copy_tokens.reference(kv, copies)

    def fuses_decode(self, rows) -> bool:
        """Whether `decode_attention` takes the place of `qkv_epilogue` and `attention` for these rows."""
        return False

    def attention(self, q, kv, rows, block_table, window):
        self.counts["attention"] += 1
        return attention.reference(q, kv, rows, block_table, window)

    def decode_attention(self, *args, **kwargs):
        self.counts["decode_attention"] += 1
        return decode_attention.reference(*args, **kwargs)

    def gemv(self, x, weight, **around):
        self.counts["gemv"] += 1
        return gemv.reference(x, weight, **around)

    def add_norm(self, h, x, post_weight, pre_weight, scalar, eps):
        self.counts["add_norm"] += 1
        return add_norm.reference(h, x, post_weight, pre_weight, scalar, eps)

    def geglu(self, h, gate_up):
        self.counts["geglu"] += 1
        return geglu.reference(h, gate_up)

    def ple_gate(self, gate, ple, index):
        self.counts["ple_gate"] += 1
        return ple_gate.reference(gate, ple, index)

    def head(self, h, table, cap):
        self.counts["head"] += 1
        return head.reference(h, table, cap)

    def softcap(self, logits, cap):
        self.counts["softcap"] += 1
        return head.softcap(logits, cap)

    def row_logsumexp(self, logits):
        self.counts["row_logsumexp"] += 1
        return head.reference_row_logsumexp(logits)

    def argmax(self, logits):
        self.counts["argmax"] += 1
        return head.reference_argmax(logits)

    def head_labels(self, h, table, label_ids, cap):
        self.counts["head_labels"] += 1
        return head.reference_labels(h, table, label_ids, cap)

    def head_logsumexp(self, h, table, cap):
        self.counts["head_logsumexp"] += 1
        return head.reference_logsumexp(h, table, cap)

    def centroid_head(self, y, centroids, clusters, cluster_ids, top_k):
        self.counts["centroid_head"] += 1
        return centroid_head.reference(y, centroids, clusters, cluster_ids, top_k)
