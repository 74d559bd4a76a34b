"""Behind the q/k/v projections: split, per-head norms, RoPE, and the store into the paged pool (spec section 2.5)."""

from __future__ import annotations

import torch

from lastrow.kernels import kv_cache
from lastrow.kernels._triton import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, round_to, tl
from lastrow.kernels.add_norm import rms_norm
from lastrow.kernels.kv_cache import PagedKV, store_heads
from lastrow.kernels.rope import apply_rope
from lastrow.kernels.split_linear import load_sum, pdl_launch, splits_of, use_pdl


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
    cos_sin = rope.index_select(0, positions)
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    stored = 0 if kv is None else kv_heads * (1 if k_eq_v else 2)
    num_q = heads.shape[1] - stored
    num_turned = num_q if kv is None else num_q + kv_heads
    # one norm for all heads and one rotation: the few numbers of keys and values would take almost as long alone
    weights = [w.expand(n, head_dim) for w, n in ((q_weight, num_q), (k_weight, num_turned - num_q)) if w is not None]
    if heads.shape[1] > num_turned:
        weights.append(qkv.new_ones(1).expand(heads.shape[1] - num_turned, head_dim))
    normed = rms_norm(heads, weights[0] if len(weights) == 1 else torch.cat(weights), eps)
    turned = apply_rope(normed[:, :num_turned], cos_sin)
    if kv is not None and slots is not None:
        values = rms_norm(heads[:, num_q:], None, eps) if k_eq_v else normed[:, num_turned:]
        kv_cache.store(kv, slots, turned[:, num_q:], values)
    return None if q_weight is None else turned[:, :num_q]


@jit
def load_heads(src, h, mask, plane, D: tl.constexpr, SPLITS: tl.constexpr, dtype: tl.constexpr):
    """Both halves of heads h [n], fp32, and their sum of squares; `load_sum` says what plane and SPLITS are."""
    j = tl.arange(0, D // 2)
    a = load_sum(src, h[:, None] * D + j[None, :], mask[:, None], plane, SPLITS, dtype)
    b = load_sum(src, h[:, None] * D + D // 2 + j[None, :], mask[:, None], plane, SPLITS, dtype)
    return a, b, tl.sum(a * a, 1) + tl.sum(b * b, 1)


@jit
def norm_rope(a, b, rstd, weight_ptr, cos, sin, D: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm with weight (rounded to dtype), then rotate-half RoPE: element j turns with element j + D/2. fp32."""
    j = tl.arange(0, D // 2)
    a = round_to(a * rstd[:, None] * tl.load(weight_ptr + j).to(tl.float32)[None, :], dtype)
    b = round_to(b * rstd[:, None] * tl.load(weight_ptr + D // 2 + j).to(tl.float32)[None, :], dtype)
    return a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :]


@jit(do_not_specialize=["plane"])
def qkv_epilogue_kernel(
    qkv_ptr, qkv_stride, q_ptr, positions_ptr, slots_ptr, rope_ptr, q_weight_ptr, k_weight_ptr,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, plane, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    K_EQ_V: tl.constexpr, QUANT_MAX: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token per program: Q_HEADS query heads to q, KV_HEADS keys and values to the pool, each possibly none."""
    dtype: tl.constexpr = rope_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, D // 2)
    position = tl.load(positions_ptr + t).to(tl.int64)
    cos = tl.load(rope_ptr + position * D + j).to(tl.float32)
    sin = tl.load(rope_ptr + position * D + D // 2 + j).to(tl.float32)
    src = qkv_ptr + t * qkv_stride
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if KV_HEADS > 0:
        # their first block is on its way while the queries are computed: behind the queries' stores it could not be loaded earlier
        slot = tl.load(slots_ptr + t).to(tl.int64)
        first = tl.arange(0, BLOCK_KV)
        k_src = src + Q_HEADS * D
        v_src = k_src if K_EQ_V else k_src + KV_HEADS * D
        ka, kb, k_squares = load_heads(k_src, first, first < KV_HEADS, plane, D, SPLITS, dtype)
        va, vb, v_squares = load_heads(v_src, first, first < KV_HEADS, plane, D, SPLITS, dtype)
    for h0 in tl.static_range(0, Q_HEADS, BLOCK_Q):
        h = h0 + tl.arange(0, BLOCK_Q)
        a, b, squares = load_heads(src, h, h < Q_HEADS, plane, D, SPLITS, dtype)
        a, b = norm_rope(a, b, 1.0 / tl.sqrt(squares / D + eps), q_weight_ptr, cos, sin, D, dtype)
        target = q_ptr + (t * Q_HEADS + h)[:, None] * D + j[None, :]
        tl.store(target, a.to(dtype), mask=(h < Q_HEADS)[:, None])
        tl.store(target + D // 2, b.to(dtype), mask=(h < Q_HEADS)[:, None])
    if KV_HEADS > 0:
        for h0 in tl.static_range(0, KV_HEADS, BLOCK_KV):
            h = h0 + tl.arange(0, BLOCK_KV)
            keep = (h < KV_HEADS) & (slot >= 0)
            if h0 > 0:
                ka, kb, k_squares = load_heads(k_src, h, h < KV_HEADS, plane, D, SPLITS, dtype)
                va, vb, v_squares = load_heads(v_src, h, h < KV_HEADS, plane, D, SPLITS, dtype)
            ka, kb = norm_rope(ka, kb, 1.0 / tl.sqrt(k_squares / D + eps), k_weight_ptr, cos, sin, D, dtype)
            store_heads(round_to(ka, dtype), round_to(kb, dtype), k_ptr, k_scale_ptr, slot, h, keep, KV_HEADS, D, QUANT_MAX)
            rstd = 1.0 / tl.sqrt(v_squares / D + eps)
            va = round_to(va * rstd[:, None], dtype)
            vb = round_to(vb * rstd[:, None], dtype)
            store_heads(va, vb, v_ptr, v_scale_ptr, slot, h, keep, KV_HEADS, D, QUANT_MAX)


def triton(
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
    *,
    warps: int = 1,
) -> torch.Tensor | None:
    """`reference` in one pass; the rotation is fp32 with one rounding at its end, and stored K/V are finite in every format.
    qkv may be partial sums, [splits, T, ..] (split_linear.py). warps: of a token; all of them sum a key's
    head together, so its bits depend on them."""
    tokens, width = qkv.shape[-2:]
    stored = 0 if kv is None else kv_heads
    q_heads = width // head_dim - stored * (1 if k_eq_v else 2)
    q = None if q_weight is None else torch.empty(tokens, q_heads, head_dim, device=qkv.device, dtype=rope.dtype)
    if tokens:
        pdl = use_pdl(qkv)
        k, v, k_scale, v_scale = (None,) * 4 if kv is None else (kv.k, kv.v, kv.k_scale, kv.v_scale)
        qkv_epilogue_kernel[(tokens,)](
            qkv, qkv.stride(-2), q, positions, slots, rope, q_weight, k_weight, k, v, k_scale, v_scale, tokens * width, eps,
            q_heads, stored, head_dim, min(8, next_power_of_2(max(q_heads, 1))), min(8, next_power_of_2(max(stored, 1))),
            k_eq_v, 0.0 if kv is None else kv.quant_max, splits_of(qkv), pdl, num_warps=warps, **pdl_launch(pdl),
        )  # fmt: skip
    return q
