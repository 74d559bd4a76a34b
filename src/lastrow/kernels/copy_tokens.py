"""A fork's first partial block: tokens copied from block to block inside one layer's K/V, behind that layer's store.

All copies of a step are one launch, so none may read what another writes (engine/block_copies.py sees to it)."""

from __future__ import annotations

import torch

from lastrow.kernels._triton import cdiv, jit, next_power_of_2, tl
from lastrow.kernels.kv_cache import PagedKV

WORDS = 1024  # 4-byte words of one pass
PARTS = 4  # programs of one copy: a whole block of a full layer of E2B is 128 KB


def reference(kv: PagedKV, copies: torch.Tensor) -> None:
    """copies [n, 4] int32: (source block, destination block, first, end). Tokens first .. end-1 of source go to the same places of
    destination; first == end copies nothing."""
    for source, destination, first, end in copies.tolist():
        for t in kv.tensors():
            t[destination, first:end] = t[source, first:end]


@jit
def copy_span(ptr, source, destination, size, part, PARTS: tl.constexpr, WORDS: tl.constexpr):
    """size words from source to destination, both offsets in words; this program's share of PARTS."""
    for start in range(part * WORDS, size, PARTS * WORDS):
        i = start + tl.arange(0, WORDS)
        tl.store(ptr + destination + i, tl.load(ptr + source + i, mask=i < size, other=0), mask=i < size)


@jit
def copy_tokens_kernel(
    copies_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
):  # fmt: skip
    """program (copy, part). WIDTH: words of a token's K; SCALES: of its scales, 0 without."""
    row = copies_ptr + tl.program_id(0) * 4
    first = tl.load(row + 2)
    size = tl.load(row + 3) - first
    source = tl.load(row).to(tl.int64) * BLOCK_SIZE + first
    destination = tl.load(row + 1).to(tl.int64) * BLOCK_SIZE + first
    part = tl.program_id(1)
    copy_span(k_ptr, source * WIDTH, destination * WIDTH, size * WIDTH, part, PARTS, WORDS)
    copy_span(v_ptr, source * WIDTH, destination * WIDTH, size * WIDTH, part, PARTS, WORDS)
    if SCALES > 0:
        copy_span(k_scale_ptr, source * SCALES, destination * SCALES, size * SCALES, part, PARTS, SCALE_WORDS)
        copy_span(v_scale_ptr, source * SCALES, destination * SCALES, size * SCALES, part, PARTS, SCALE_WORDS)


def triton(kv: PagedKV, copies: torch.Tensor) -> None:
    """`reference` in one launch."""
    heads, dim = kv.k.shape[2:]
    bytes_ = heads * dim * kv.k.element_size()
    if bytes_ % 4:
        raise ValueError(f"a token's K is {heads} x {dim} values of {kv.k.element_size()} bytes: the Triton kernels copy whole words of 4")
    if copies.shape[0]:
        k, v, k_scale, v_scale = (None if t is None else t.view(torch.int32) for t in (kv.k, kv.v, kv.k_scale, kv.v_scale))
        scales = heads if kv.is_quantized else 0
        copy_tokens_kernel[(copies.shape[0], PARTS)](
            copies, k, v, k_scale, v_scale, kv.block_size, bytes_ // 4, scales, PARTS, WORDS,
            max(16, next_power_of_2(cdiv(kv.block_size * max(scales, 1), PARTS))), num_warps=4,
        )  # fmt: skip
