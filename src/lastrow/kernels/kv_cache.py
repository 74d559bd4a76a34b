"""The paged K/V of one owner layer, as every operation sees it, and the 8-bit formats in torch (the oracle of the kernels)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lastrow.kernels._triton import jit, tl

INT8_MAX = 127.0
FP8_MAX = 448.0  # largest float8_e4m3fn
SCALE_FLOOR = 1e-12  # keeps an all-zero head from dividing by zero; its values quantize to 0 and come back as 0
SCALE_CEILING = 3e38  # the largest fp32 over 127, rounded, times 127 is infinite


@dataclass(frozen=True, slots=True)
class PagedKV:
    """k, v: [num_blocks, block_size, kv_heads, head_dim] in the pool's dtype (activation dtype, int8 or float8_e4m3fn).

    k_scale, v_scale: [num_blocks, block_size, kv_heads] fp32 in the 8-bit formats, else None. A slot is
    block * block_size + offset."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @property
    def is_quantized(self) -> bool:
        return self.k_scale is not None

    @property
    def quant_max(self) -> float:
        """Largest stored value of an 8-bit format; 0 in the activation dtype."""
        if self.k_scale is None:
            return 0.0
        return INT8_MAX if self.k.dtype is torch.int8 else FP8_MAX

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None]


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., head_dim] -> (values in `dtype`, fp32 scale [...]): one scale per token and head, absmax / largest value.

    Non-finite inputs become 0, so that one bad activation cannot turn a shared block into NaN."""
    x = torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0)
    limit = INT8_MAX if dtype is torch.int8 else FP8_MAX
    scale = x.abs().amax(-1).clamp(SCALE_FLOOR, SCALE_CEILING) / limit
    scaled = (x / scale.unsqueeze(-1)).clamp(-limit, limit)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scale


def store(kv: PagedKV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write k, v [T, kv_heads, head_dim] at slots [T]; a negative slot is padding and writes nothing."""
    if slots.numel() and int(slots.min()) < 0:
        keep = slots >= 0
        slots, k, v = slots[keep], k[keep], v[keep]
    slots = slots.long()
    for cache, scale, x in ((kv.k, kv.k_scale, k), (kv.v, kv.v_scale, v)):
        if scale is None:
            cache.flatten(0, 1).index_copy_(0, slots, x.to(cache.dtype))
        else:
            values, s = quantize(x, cache.dtype)
            cache.flatten(0, 1).view(torch.uint8)[slots] = values.view(torch.uint8)
            scale.flatten(0, 1)[slots] = s


def load(kv: PagedKV, blocks: torch.Tensor, first: int, last: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [last - first, kv_heads, head_dim] at positions first .. last-1 of the sequence with block table `blocks`."""
    size = kv.block_size
    wanted = blocks[first // size : (last - 1) // size + 1]
    offset = first % size

    def gather(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        x = cache.index_select(0, wanted).flatten(0, 1)[offset : offset + last - first]
        if scale is None:
            return x.to(dtype)
        return (x.float() * scale.index_select(0, wanted).flatten(0, 1)[offset : offset + last - first].unsqueeze(-1)).to(dtype)

    return gather(kv.k, kv.k_scale), gather(kv.v, kv.v_scale)


@jit
def finite(x):
    """Non-finite values become 0. Attention multiplies masked keys by 0, and 0 * NaN would spread from a stale slot to
    whoever gets its block next, so the kernels store finite K/V in every format."""
    return tl.where(tl.abs(x) <= 3.4028234663852886e38, x, 0.0)


@jit
def store_heads(
    a, b, cache_ptr, scale_ptr, slot, h, keep, KV_HEADS: tl.constexpr, D: tl.constexpr, QUANT_MAX: tl.constexpr
):  # fmt: skip
    """Store the two halves a, b [n, D/2] (fp32, rounded to the activation dtype) of K/V heads h [n] at `slot` where keep [n]."""
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    row = slot * KV_HEADS + h
    target = cache_ptr + row[:, None] * D + tl.arange(0, D // 2)[None, :]
    a = finite(a)
    b = finite(b)
    if QUANT_MAX > 0:
        largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        scale = tl.div_rn(tl.minimum(tl.maximum(largest, 1e-12), 3e38), tl.full(largest.shape, QUANT_MAX, tl.float32))
        tl.store(scale_ptr + row, scale, mask=keep)
        a = quantized(a, scale, QUANT_MAX, dtype)
        b = quantized(b, scale, QUANT_MAX, dtype)
    tl.store(target, a.to(dtype), mask=keep[:, None])
    tl.store(target + D // 2, b.to(dtype), mask=keep[:, None])


@jit
def quantized(x, scale, QUANT_MAX: tl.constexpr, dtype: tl.constexpr):
    """x [n, d] / scale [n], clamped; for int8 rounded half to even by adding and taking away 1.5 * 2^23."""
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    x = tl.minimum(tl.maximum(x, -QUANT_MAX), QUANT_MAX)
    if dtype == tl.int8:
        x = (x + 12582912.0) - 12582912.0
    return x
