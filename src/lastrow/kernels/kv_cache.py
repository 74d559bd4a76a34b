"""The paged K/V of one owner layer, as every operation sees it, and the 8-bit formats in torch (the oracle of the kernels)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

INT8_MAX = 127.0
FP8_MAX = 448.0  # largest float8_e4m3fn
SCALE_FLOOR = 1e-12  # keeps an all-zero head from dividing by zero; its values quantize to 0 and come back as 0


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

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None]


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., head_dim] -> (values in `dtype`, fp32 scale [...]): one scale per token and head, absmax / largest value.

    Non-finite inputs become 0, so that one bad activation cannot turn a shared block into NaN."""
    x = torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0)
    limit = INT8_MAX if dtype is torch.int8 else FP8_MAX
    scale = x.abs().amax(-1).clamp_min(SCALE_FLOOR) / limit
    scaled = (x / scale.unsqueeze(-1)).clamp(-limit, limit)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scale


def store(kv: PagedKV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write k, v [T, kv_heads, head_dim] at slots [T]; a negative slot is padding and writes nothing."""
    if bool((slots < 0).any()):
        keep = slots >= 0
        slots, k, v = slots[keep], k[keep], v[keep]
    slots = slots.long()
    for cache, scale, x in ((kv.k, kv.k_scale, k), (kv.v, kv.v_scale, v)):
        if scale is None:
            cache.flatten(0, 1)[slots] = x.to(cache.dtype)
        else:
            values, s = quantize(x, cache.dtype)
            cache.flatten(0, 1).view(torch.uint8)[slots] = values.view(torch.uint8)
            scale.flatten(0, 1)[slots] = s


def load(kv: PagedKV, blocks: torch.Tensor, first: int, last: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [last - first, kv_heads, head_dim] at positions first .. last-1 of the sequence with block table `blocks`."""
    size = kv.block_size
    wanted = blocks[first // size : (last - 1) // size + 1].long()
    offset = first % size

    def gather(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        x = cache[wanted].flatten(0, 1)[offset : offset + last - first]
        if scale is None:
            return x.to(dtype)
        return (x.float() * scale[wanted].flatten(0, 1)[offset : offset + last - first].unsqueeze(-1)).to(dtype)

    return gather(kv.k, kv.k_scale), gather(kv.v, kv.v_scale)
