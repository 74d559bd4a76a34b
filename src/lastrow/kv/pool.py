"""The K/V tensors: owners have storage, nobody else does."""

from __future__ import annotations

import torch

from lastrow.kernels.kv_cache import PagedKV
from lastrow.kv.layout import KVBudget
from lastrow.models.config import Gemma4Config

STORAGE_DTYPES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}


class KVPool:
    """K and V of every owner layer, [blocks of its group, block_size, kv_heads, head_dim] each.

    `reader(layer)` works for every layer and resolves `kv_source`; `writer(layer)` exists for owners only. Block 0 of each
    group is the null block: padding and passed-over table entries point at it."""

    def __init__(
        self,
        config: Gemma4Config,
        budget: KVBudget,
        kv_cache_dtype: str = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.budget = budget
        storage = STORAGE_DTYPES.get(kv_cache_dtype, dtype)
        self._owned: dict[int, PagedKV] = {}
        for layer in config.owners:
            blocks = budget.num_full_blocks if config.is_full(layer) else budget.num_sliding_blocks
            heads, dim = config.layer_kv_heads(layer), config.layer_head_dim(layer)
            k, v = (torch.zeros(blocks, budget.block_size, heads, dim, dtype=storage, device=device) for _ in "kv")
            scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
            if kv_cache_dtype in STORAGE_DTYPES:
                scales = (k.new_zeros(k.shape[:3], dtype=torch.float32), k.new_zeros(k.shape[:3], dtype=torch.float32))
            self._owned[layer] = PagedKV(k, v, *scales)

    def reader(self, layer: int) -> PagedKV:
        """K/V that `layer` attends to: its own, or its source's."""
        return self._owned[self.config.kv_source[layer]]

    def writer(self, layer: int) -> PagedKV:
        """K/V that `layer` writes. Raises KeyError for a layer that shares: it has nothing to write to."""
        return self._owned[layer]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for kv in self._owned.values() for t in kv.tensors())
