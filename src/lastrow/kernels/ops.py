"""What a backend offers the model: one name per operation, the same for every backend.

The files beside this one describe each operation at its `reference`. `ReferenceOps` (dispatch.py) is torch everywhere,
`TritonOps` (triton_ops.py) an NVIDIA card."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import torch

from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rows import QueryRows


class Ops(Protocol):
    """counts: operation -> calls. has_gemv: whether one row may run as models/single_row.py. Every method may be called with
    tensors on the backend's device only. Both tensors given to add_norm, and the context given to ple_inputs, may be overwritten."""

    name: str
    batch_invariant: bool
    counts: Counter[str]

    @property
    def has_gemv(self) -> bool: ...

    def pack_gate_up(self, gate: torch.Tensor, up: torch.Tensor, /) -> torch.Tensor: ...

    def unpack_gate_up(self, gate_up: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]: ...

    def token_fields(
        self,
        ids: torch.Tensor,
        parts: torch.Tensor,
        new_blocks: torch.Tensor,
        tables: torch.Tensor,
        last_sampled: torch.Tensor,
        coming: torch.Tensor,
        block_size: int,
        out: torch.Tensor,
        tile_rows: torch.Tensor,
        tiles: torch.Tensor,
    ) -> None: ...

    def embedding(
        self, ids: torch.Tensor, table: torch.Tensor, scale: float, norm_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def ple_inputs(
        self,
        context: torch.Tensor,
        ids: torch.Tensor,
        table: torch.Tensor,
        norm_weight: torch.Tensor,
        first_layer: int,
        hidden_size: int,
        eps: float,
    ) -> torch.Tensor: ...

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def deferred_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def qkv_epilogue(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        q_weight: torch.Tensor | None,
        head_dim: int,
        eps: float,
        k_weight: torch.Tensor | None = None,
        kv: PagedKV | None = None,
        slots: torch.Tensor | None = None,
        kv_heads: int = 0,
        k_eq_v: bool = False,
    ) -> Any: ...

    def copy_tokens(self, kv: PagedKV, copies: torch.Tensor) -> None: ...

    def fuses_decode(self, rows: QueryRows) -> bool: ...

    def attention(self, q: torch.Tensor, kv: PagedKV, rows: QueryRows, block_table: torch.Tensor, window: int) -> torch.Tensor: ...

    def decode_attention(
        self,
        qkv: torch.Tensor,
        rows: QueryRows,
        rope: torch.Tensor,
        q_weight: torch.Tensor,
        head_dim: int,
        eps: float,
        kv: PagedKV,
        block_table: torch.Tensor,
        window: int,
        k_weight: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        k_eq_v: bool = False,
    ) -> torch.Tensor: ...

    def gemv(self, x: torch.Tensor, weight: torch.Tensor, **around: Any) -> tuple[torch.Tensor, Any]: ...

    def add_norm(
        self,
        h: torch.Tensor,
        x: torch.Tensor,
        post_weight: torch.Tensor,
        pre_weight: torch.Tensor | None,
        scalar: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, Any]: ...

    def geglu(self, h: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor: ...

    def ple_gate(self, gate: torch.Tensor, ple: torch.Tensor, index: int) -> torch.Tensor: ...

    def head(self, h: torch.Tensor, table: torch.Tensor, cap: float | None) -> torch.Tensor: ...

    def softcap(self, logits: torch.Tensor, cap: float | None) -> torch.Tensor: ...

    def row_logsumexp(self, logits: torch.Tensor) -> torch.Tensor: ...

    def argmax(self, logits: torch.Tensor) -> torch.Tensor: ...

    def head_labels(self, h: torch.Tensor, table: torch.Tensor, label_ids: torch.Tensor, cap: float | None) -> torch.Tensor: ...

    def head_logsumexp(self, h: torch.Tensor, table: torch.Tensor, cap: float | None) -> torch.Tensor: ...

    def centroid_head(self, y: torch.Tensor, centroids: Any, clusters: Any, cluster_ids: Any, top_k: int) -> Any: ...
