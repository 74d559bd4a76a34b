"""The published sizes by name, so that `info`, dummy weights and benchmarks need no download. Source: spec section 1.3."""

from __future__ import annotations

from collections.abc import Callable

from lastrow.models.config import FULL, SLIDING, ConfigError, Gemma4Config


def pattern(layers: int, period: int) -> tuple[str, ...]:
    """Every `period`-th layer is full, the others slide."""
    return tuple(FULL if (i + 1) % period == 0 else SLIDING for i in range(layers))


def e2b() -> Gemma4Config:
    return Gemma4Config(
        name="e2b",
        vocab_size=262_144,
        hidden_size=1536,
        num_hidden_layers=35,
        intermediate_size=6144,
        use_double_wide_mlp=True,
        layer_types=pattern(35, 5),
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        num_kv_shared_layers=20,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262_144,
        max_position_embeddings=131_072,
        final_logit_softcapping=30.0,
    )


def e4b() -> Gemma4Config:
    return Gemma4Config(
        name="e4b",
        vocab_size=262_144,
        hidden_size=2560,
        num_hidden_layers=42,
        intermediate_size=10_240,
        layer_types=pattern(42, 6),
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        num_kv_shared_layers=18,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262_144,
        max_position_embeddings=131_072,
        final_logit_softcapping=30.0,
    )


def dense_31b() -> Gemma4Config:
    return Gemma4Config(
        name="31b",
        vocab_size=262_144,
        hidden_size=5376,
        num_hidden_layers=60,
        intermediate_size=21_504,
        layer_types=pattern(60, 6),
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        head_dim=256,
        global_head_dim=512,
        sliding_window=1024,
        max_position_embeddings=262_144,
        final_logit_softcapping=30.0,
    )


def moe_26b_a4b() -> Gemma4Config:
    return Gemma4Config(
        name="26b-a4b",
        vocab_size=262_144,
        hidden_size=2816,
        num_hidden_layers=30,
        intermediate_size=2112,
        layer_types=pattern(30, 6),
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        head_dim=256,
        global_head_dim=512,
        sliding_window=1024,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        max_position_embeddings=262_144,
        final_logit_softcapping=30.0,
    )


def e2b_eighth() -> Gemma4Config:
    """E2B with every width divided by eight and a vocabulary of 32,768: the prefill benchmark of a CPU (fp32)."""
    return Gemma4Config(
        name="e2b-eighth",
        vocab_size=32_768,
        hidden_size=192,
        num_hidden_layers=35,
        intermediate_size=768,
        use_double_wide_mlp=True,
        layer_types=pattern(35, 5),
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        sliding_window=512,
        num_kv_shared_layers=20,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=32_768,
        max_position_embeddings=131_072,
        final_logit_softcapping=30.0,
        dtype="float32",
    )


SHAPES: dict[str, Callable[[], Gemma4Config]] = {
    "e2b": e2b,
    "e4b": e4b,
    "31b": dense_31b,
    "26b-a4b": moe_26b_a4b,
    "e2b-eighth": e2b_eighth,
}


def named_shape(name: str) -> Gemma4Config:
    """The configuration of a named shape. Raises ConfigError for an unknown name."""
    if name not in SHAPES:
        raise ConfigError(f"shape is {name!r}: one of {', '.join(SHAPES)} is needed")
    return SHAPES[name]()
