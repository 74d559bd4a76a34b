"""Behind the q/k/v projections: split, per-head norms, RoPE, and the store into the paged pool (spec section 2.5)."""

from __future__ import annotations

import torch

from lastrow.kernels import kv_cache
from lastrow.kernels.add_norm import rms_norm
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rope import apply_rope


def reference(
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
) -> torch.Tensor | None:
    """qkv [T, (q heads + k heads + v heads) * head_dim]: q heads only where q_weight is given, k and v heads only where kv
    is given (with k_eq_v no v heads: the value is the raw key). positions, slots [T] int32; rope from `rope_table`.

    Writes K (normed, rotated) and V (normed without weight) of every row at its slot; a negative slot writes nothing.
    Returns q [T, heads, head_dim] normed and rotated, or None without q_weight."""
    tokens = qkv.shape[0]
    cos_sin = rope[positions.long()]
    heads = qkv.view(tokens, -1, head_dim)
    stored = 0 if kv is None else kv_heads * (1 if k_eq_v else 2)
    num_q = heads.shape[1] - stored
    if kv is not None:
        raw_k = heads[:, num_q : num_q + kv_heads]
        raw_v = raw_k if k_eq_v else heads[:, num_q + kv_heads :]
        k = apply_rope(rms_norm(raw_k, k_weight, eps), cos_sin)
        kv_cache.store(kv, slots, k, rms_norm(raw_v, None, eps))
    return None if q_weight is None else apply_rope(rms_norm(heads[:, :num_q], q_weight, eps), cos_sin)
