"""What K/V storage costs, in closed form, from `kv_source` alone. No torch.

Two groups: owners with full attention keep every token, owners with a sliding window keep the last window only. A sharing
layer appears in neither: it reads its source (spec section 2.8)."""

from __future__ import annotations

from dataclasses import dataclass

from lastrow.models.config import Gemma4Config

KV_CACHE_DTYPES = ("auto", "int8_per_token_head", "fp8_per_token_head")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALE_BYTES = 4  # one fp32 scale per token, head and K or V in the 8-bit formats


def bytes_per_token_layer(config: Gemma4Config, layer: int, kv_cache_dtype: str, dtype: str) -> int:
    """Bytes of K and V that owner `layer` stores per token."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}: one of {', '.join(KV_CACHE_DTYPES)} is needed")
    heads, dim = config.layer_kv_heads(layer), config.layer_head_dim(layer)
    per_head = dim * DTYPE_BYTES[dtype] if kv_cache_dtype == "auto" else dim + SCALE_BYTES
    return 2 * heads * per_head


@dataclass(frozen=True)
class KVLayout:
    """Owners by group and their bytes per token (K and V together)."""

    full_layers: tuple[int, ...]
    sliding_layers: tuple[int, ...]
    full_bytes_per_token: int
    sliding_bytes_per_token: int
    sliding_window: int
    kv_cache_dtype: str
    dtype: str

    @classmethod
    def of(cls, config: Gemma4Config, kv_cache_dtype: str = "auto", dtype: str = "bfloat16") -> KVLayout:
        full = tuple(i for i in config.owners if config.is_full(i))
        sliding = tuple(i for i in config.owners if not config.is_full(i))
        return cls(
            full_layers=full,
            sliding_layers=sliding,
            full_bytes_per_token=sum(bytes_per_token_layer(config, i, kv_cache_dtype, dtype) for i in full),
            sliding_bytes_per_token=sum(bytes_per_token_layer(config, i, kv_cache_dtype, dtype) for i in sliding),
            sliding_window=config.sliding_window,
            kv_cache_dtype=kv_cache_dtype,
            dtype=dtype,
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token inside the window; past it only full_bytes_per_token remain."""
        return self.full_bytes_per_token + self.sliding_bytes_per_token

    def sequence_blocks(self, tokens: int, block_size: int) -> tuple[int, int]:
        """(full, sliding) blocks that a sequence of `tokens` holds at rest, the sliding group trimmed to its window."""
        blocks = -(-tokens // block_size)
        first_visible = max(tokens - self.sliding_window + 1, 0) // block_size
        return (blocks if self.full_layers else 0), (blocks - first_visible if self.sliding_layers else 0)


def layouts_by_format(config: Gemma4Config, dtype: str) -> dict[str, KVLayout]:
    """The layout in every storage format; `auto` under the dtype's own name."""
    return {dtype if form == "auto" else form: KVLayout.of(config, form, dtype) for form in KV_CACHE_DTYPES}


def readers(config: Gemma4Config) -> dict[int, list[int]]:
    """Owner -> the other layers that read its K/V."""
    of: dict[int, list[int]] = {owner: [] for owner in config.owners}
    for layer, source in enumerate(config.kv_source):
        if layer != source:
            of[source].append(layer)
    return of


@dataclass(frozen=True)
class KVBudget:
    """Blocks of each pool (the null block 0 included) that a byte budget buys."""

    num_full_blocks: int
    num_sliding_blocks: int
    block_size: int

    @property
    def full_tokens(self) -> int:
        """Tokens the full pool holds; the pool's null block holds none."""
        return max(self.num_full_blocks - 1, 0) * self.block_size

    @property
    def sliding_tokens(self) -> int:
        return max(self.num_sliding_blocks - 1, 0) * self.block_size

    def num_bytes(self, layout: KVLayout) -> int:
        """Bytes of the pools' tensors, null blocks included."""
        full, sliding = self.num_full_blocks * layout.full_bytes_per_token, self.num_sliding_blocks * layout.sliding_bytes_per_token
        return self.block_size * (full + sliding)

    def num_sequences(self, layout: KVLayout, tokens: int) -> int:
        """Sequences of `tokens` tokens that fit at rest, at once."""
        pools = zip((self.num_full_blocks, self.num_sliding_blocks), layout.sequence_blocks(tokens, self.block_size), strict=True)
        return min((blocks - 1) // need for blocks, need in pools if need)


def divide_budget(layout: KVLayout, budget_bytes: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> KVBudget:
    """Split `budget_bytes` between the two pools.

    The sliding group never needs more than each running sequence's window, rounded out to whole blocks, plus one step's
    new tokens; what that leaves goes to the full group. While the budget is too small for that, both groups hold the same
    tokens, so that sequences no longer than the window fill both pools exactly. Raises ValueError when not even one block
    of each fits."""
    full_block, sliding_block = layout.full_bytes_per_token * block_size, layout.sliding_bytes_per_token * block_size
    usable = budget_bytes - full_block - sliding_block  # the two null blocks
    if usable < full_block + sliding_block:
        raise ValueError(
            f"{budget_bytes:,} bytes hold no K/V block of {block_size} tokens ({full_block + sliding_block:,} bytes, and as many for "
            "the null blocks): raise gpu_memory_utilization or kv_cache_memory_bytes"
        )
    even = usable // (full_block + sliding_block)
    if not sliding_block:
        return KVBudget(even + 1, 0, block_size)
    if not full_block:
        return KVBudget(0, even + 1, block_size)
    window_blocks = -(-(layout.sliding_window - 1) // block_size) + 1
    wanted = max_num_seqs * window_blocks + -(-max_num_batched_tokens // block_size)
    sliding = min(even, wanted)
    return KVBudget((usable - sliding * sliding_block) // full_block + 1, sliding + 1, block_size)
