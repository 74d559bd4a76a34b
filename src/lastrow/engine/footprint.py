"""What an engine takes of a card's memory, in closed form from the config. No torch: `lastrow info` and the engine's own plan
use the same numbers."""

from __future__ import annotations

import math

from lastrow.kv.layout import DTYPE_BYTES
from lastrow.models.config import Gemma4Config
from lastrow.weights.names import expected_shapes

LOGIT_ROWS_BYTES = 1 << 28  # prompt-logprob rows are taken through the head in chunks of at most this many bytes of logits
MAX_ELEMENTS = 1 << 24  # logits the sampler handles at once: bounds the temporaries (about 40 bytes each)
SLACK = 1.25  # on activations: what the allocator rounds up and loses between tensors
SAMPLER_BYTES = 40  # of temporaries per logit that is sampled with a filter
GRAPH_BYTES = 1 << 29  # CUDA context, library workspaces and graph pools


def weight_bytes(config: Gemma4Config, dtype: str, embed_weights: str = "device") -> int:
    """Bytes on the device of every tensor the model uses in `dtype` (decoys of sharing layers not counted).

    embed_weights "host": the per-layer embedding table is in host memory and costs the device nothing."""
    whole = DTYPE_BYTES[dtype] * sum(math.prod(shape) for shape in expected_shapes(config).values())
    return whole - (ple_table_bytes(config, dtype) if embed_weights == "host" else 0)


def ple_table_bytes(config: Gemma4Config, dtype: str) -> int:
    """Bytes of the per-layer embedding table, 0 in models without one."""
    width = config.num_hidden_layers * config.hidden_size_per_layer_input
    return DTYPE_BYTES[dtype] * config.vocab_size_per_layer_input * width if config.has_ple else 0


def activation_bytes(config: Gemma4Config, dtype: str, num_tokens: int, num_sampled: int) -> int:
    """Peak of one step over num_tokens rows of which num_sampled are sampled: the widest layer, the per-layer inputs before the cut,
    logits and the sampler's temporaries, and one chunk of prompt-logprob rows."""
    layers = range(config.num_hidden_layers)
    attention = max((config.num_attention_heads * 3 + config.layer_kv_heads(i) * 4) * config.layer_head_dim(i) for i in layers)
    mlp = 3 * max(config.layer_intermediate_size(i) for i in layers)
    ple = 2 * config.cut * config.hidden_size_per_layer_input
    per_token = DTYPE_BYTES[dtype] * (6 * config.hidden_size + max(attention, mlp) + ple)
    logits = num_sampled * config.vocab_size
    sampler = 4 * logits + SAMPLER_BYTES * min(logits, MAX_ELEMENTS)
    return int(SLACK * num_tokens * per_token) + sampler + 2 * LOGIT_ROWS_BYTES


def kv_bytes_of_card(memory: int, utilization: float, taken: int, weights: int, activations: int) -> int:
    """What a card of `memory` bytes, `taken` of which are in use, leaves for K/V. Negative where the rest does not fit."""
    return int(memory * utilization) - taken - weights - activations - GRAPH_BYTES
