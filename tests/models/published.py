"""Text configs of the five published models, as their config.json spells them (spec sections 1.2 and 1.3)."""

from __future__ import annotations

from typing import Any

COMMON = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    },
}


def text_config(
    hidden: int, layers: int, mlp: int, heads: int, kv_heads: int, sliding_per_full: int, window: int, positions: int, **more: Any
) -> dict[str, Any]:
    kinds = ["full_attention" if (i + 1) % (sliding_per_full + 1) == 0 else "sliding_attention" for i in range(layers)]
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "layer_types": kinds,
        "sliding_window": window,
        "max_position_embeddings": positions,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 262144,
        "use_double_wide_mlp": False,
        "use_bidirectional_attention": None,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    }
    return COMMON | sizes | more


BIG: dict[str, Any] = {"attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
MOE: dict[str, Any] = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
E2B = text_config(1536, 35, 6144, 8, 1, 4, 512, 131072, num_kv_shared_layers=20, use_double_wide_mlp=True, hidden_size_per_layer_input=256)
E4B = text_config(2560, 42, 10240, 8, 2, 5, 512, 131072, num_kv_shared_layers=18, hidden_size_per_layer_input=256)
G12B = text_config(3840, 48, 15360, 16, 8, 5, 1024, 262144, num_global_key_value_heads=1, **(BIG | {"model_type": "gemma4_unified_text"}))
G26B = text_config(2816, 30, 2112, 16, 8, 5, 1024, 262144, num_global_key_value_heads=2, **BIG, **MOE)
G31B = text_config(5376, 60, 21504, 32, 16, 5, 1024, 262144, num_global_key_value_heads=4, **BIG)
PUBLISHED = {"E2B": E2B, "E4B": E4B, "12B": G12B, "26B-A4B": G26B, "31B": G31B}


def multimodal(text: dict[str, Any]) -> dict[str, Any]:
    """The published wrapping: the text part in `text_config`, the stop ids of the file's top level."""
    kind = text["model_type"].removesuffix("_text")
    return {"model_type": kind, "eos_token_id": [1, 106], "tie_word_embeddings": True, "vision_config": {}, "text_config": text}
