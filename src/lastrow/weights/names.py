"""Checkpoint tensor name -> parameter, with the shape it must have (spec section 3). No torch."""

from __future__ import annotations

from lastrow.models.config import Gemma4Config

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
OTHER_PARTS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.", "multi_modal_projector.")
LAYER_NORMS = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "pre_feedforward_norm": "pre_feedforward_layernorm.weight",
    "post_feedforward_norm": "post_feedforward_layernorm.weight",
}


def global_shapes(c: Gemma4Config) -> dict[str, tuple[int, ...]]:
    """Tensors outside the layers, by name after the prefix."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab_size, c.hidden_size), "norm.weight": (c.hidden_size,)}
    if c.has_ple:
        width = c.num_hidden_layers * c.hidden_size_per_layer_input
        shapes["embed_tokens_per_layer.weight"] = (c.vocab_size_per_layer_input, width)
        shapes["per_layer_model_projection.weight"] = (width, c.hidden_size)
        shapes["per_layer_projection_norm.weight"] = (c.hidden_size_per_layer_input,)
    return shapes


def layer_shapes(c: Gemma4Config, i: int) -> dict[str, tuple[int, ...]]:
    """Tensors of layer i that the model uses, by name after `layers.{i}.`."""
    h, d, mlp, p = c.hidden_size, c.layer_head_dim(i), c.layer_intermediate_size(i), c.hidden_size_per_layer_input
    q, kv = c.num_attention_heads * d, c.layer_kv_heads(i) * d
    shapes: dict[str, tuple[int, ...]] = {name: (h,) for name in LAYER_NORMS.values()}
    shapes |= {"self_attn.q_proj.weight": (q, h), "self_attn.o_proj.weight": (h, q), "self_attn.q_norm.weight": (d,)}
    shapes |= {"mlp.gate_proj.weight": (mlp, h), "mlp.up_proj.weight": (mlp, h), "mlp.down_proj.weight": (h, mlp), "layer_scalar": (1,)}
    if c.owns_kv(i):
        shapes |= {"self_attn.k_proj.weight": (kv, h), "self_attn.k_norm.weight": (d,)}
        if not c.layer_k_eq_v(i):
            shapes["self_attn.v_proj.weight"] = (kv, h)
    if p:
        shapes |= {
            "per_layer_input_gate.weight": (p, h),
            "per_layer_projection.weight": (h, p),
            "post_per_layer_input_norm.weight": (h,),
        }
    if c.is_moe:
        e, m = c.num_experts, c.moe_intermediate_size
        shapes |= {"router.scale": (h,), "router.proj.weight": (e, h), "router.per_expert_scale": (e,)}
        shapes |= {"experts.gate_up_proj": (e, 2 * m, h), "experts.down_proj": (e, h, m)}
        extra_norms = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
        shapes |= {f"{name}.weight": (h,) for name in extra_norms}
    return shapes


def expected_shapes(c: Gemma4Config) -> dict[str, tuple[int, ...]]:
    """Every tensor the model uses, by name after the prefix."""
    shapes = global_shapes(c)
    for i in range(c.num_hidden_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(c, i).items()}
    return shapes


def is_decoy(c: Gemma4Config, name: str) -> bool:
    """True for K/V tensors of layers that share: published files carry them, nothing reads them (spec section 3)."""
    parts = name.split(".", 2)
    if len(parts) < 3 or parts[0] != "layers" or not parts[1].isdigit():
        return False
    i = int(parts[1])
    unused = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")
    return i < c.num_hidden_layers and not c.owns_kv(i) and parts[2] in unused


def strip_prefix(names: list[str]) -> tuple[str, dict[str, str]]:
    """Find the prefix of the text model. Returns it and {name after the prefix: full name} of every tensor but those of other
    modalities and the head, which is the token table (spec section 3). A name without the prefix, which nothing reads, is
    returned behind a colon, so that it never stands for one that has it."""
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in names), "model.")
    others = ("lm_head.", *(start + part for start in ("", "model.") for part in OTHER_PARTS))
    own = [name for name in names if not name.startswith(others)]
    return prefix, {name.removeprefix(prefix) if name.startswith(prefix) else f":{name}": name for name in own}
