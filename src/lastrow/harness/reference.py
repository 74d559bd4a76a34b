"""transformers as the reference: random models of any shape, and weights carried over in both directions. Imported lazily."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lastrow.kernels import geglu
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.models.config import Gemma4Config, from_dict
from lastrow.models.gemma4 import Gemma4Model
from lastrow.models.weights import LayerWeights, ModelWeights
from lastrow.weights.loader import PackGateUp, pack_layer
from lastrow.weights.names import LAYER_NORMS, expected_shapes

UnpackGateUp = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
FULL, SLIDING = "full_attention", "sliding_attention"
BASE: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 10, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "layer_types": ([SLIDING] * 4 + [FULL]) * 2,
    "sliding_window": 6, "num_kv_shared_layers": 5, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 199, "final_logit_softcapping": 30.0, "max_position_embeddings": 512,
}  # fmt: skip
NO_SHARING: dict[str, Any] = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0}
K_EQ_V = NO_SHARING | {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
E4B_LIKE: dict[str, Any] = {
    "num_hidden_layers": 12, "layer_types": ([SLIDING] * 5 + [FULL]) * 2, "num_kv_shared_layers": 6, "num_key_value_heads": 2,
    "use_double_wide_mlp": False,
}  # fmt: skip
ODD: dict[str, Any] = {
    "vocab_size": 131, "vocab_size_per_layer_input": 137, "hidden_size": 42, "intermediate_size": 37, "num_hidden_layers": 7,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 6, "global_head_dim": 22, "sliding_window": 7,
    "layer_types": [SLIDING, FULL, FULL, SLIDING, SLIDING, FULL, FULL], "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 5,
    "use_double_wide_mlp": False,
}  # fmt: skip
RANDOM_SHAPES: dict[str, dict[str, Any]] = {
    "E2B-like, double-wide MLP": BASE,
    "E4B-like, 5:1, 2 K/V heads": BASE | E4B_LIKE,
    "no PLE": BASE | NO_SHARING,
    "31B-like, k_eq_v": BASE | K_EQ_V,
    "26B-like, experts": BASE | K_EQ_V | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24},
    "odd sizes and window 7": BASE | ODD,
    "two layers, one owner": BASE | {"num_hidden_layers": 2, "layer_types": [FULL, FULL], "num_kv_shared_layers": 1},
}


def transformers_version() -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def random_reference(shape: dict[str, Any], seed: int = 0, attention: str = "eager") -> tuple[Any, Gemma4Config]:
    """A transformers Gemma4ForCausalLM of `shape` (Gemma4TextConfig arguments) in fp32 and our config of it.

    Norms are 1 ± 0.3 and layer scalars 0.6 to 1.2, so that a norm or scalar in the wrong place shows. q and k norms are half
    that: scores of natural size, so that rounding is not blown up by near-ties of a sharp softmax."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(seed)
    arguments: Any = shape | {"layer_types": list(shape["layer_types"])}  # transformers changes the list it gets
    hf_config = Gemma4TextConfig(**arguments)
    hf_config._attn_implementation = attention
    model = Gemma4ForCausalLM(hf_config).eval().float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "scale" in name:
                mean = 0.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
                p.copy_(mean * (1 + 0.3 * torch.randn_like(p)))
            else:
                p.copy_(torch.randn_like(p) * (0.2 if "embed" in name else 0.15))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.6 + 0.6 * torch.rand_like(buffer))
    model.tie_weights()
    return model, from_dict(hf_config.to_dict())


def load_reference(folder: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    """The checkpoint in `folder` as transformers loads it: the multimodal class for published files, else the text class."""
    from transformers import AutoConfig, Gemma4ForCausalLM, Gemma4ForConditionalGeneration

    config = AutoConfig.from_pretrained(folder)
    cls = Gemma4ForConditionalGeneration if hasattr(config, "text_config") else Gemma4ForCausalLM
    return cls.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()


@torch.inference_mode()
def reference_logits(model: Any, ids: list[int], **more: Any) -> torch.Tensor:
    """fp32 logits [T, V] of every row of one prompt, by transformers."""
    return model(input_ids=torch.tensor([ids], device=model.device), use_cache=False, **more).logits[0].float()


def weights_from_state(config: Gemma4Config, state: dict[str, torch.Tensor], pack_gate_up: PackGateUp) -> ModelWeights:
    """Our weights from a transformers state dict (names with the prefix `model.`); tensors are shared where no packing is needed."""

    def get(name: str) -> torch.Tensor:
        return state[f"model.{name}"]

    weights = ModelWeights(embed=get("embed_tokens.weight"), norm=get("norm.weight"))
    if config.has_ple:
        weights.ple_table = get("embed_tokens_per_layer.weight")
        weights.ple_model_projection = get("per_layer_model_projection.weight")
        weights.ple_projection_norm = get("per_layer_projection_norm.weight")
    for i in range(config.num_hidden_layers):
        weights.layers.append(pack_layer(config, i, lambda name, i=i: get(f"layers.{i}.{name}"), pack_gate_up))
    return weights


def model_of(reference: Any, config: Gemma4Config, max_positions: int = 512, ops: ReferenceOps | None = None) -> Gemma4Model:
    """Our model with the weights of a transformers text model."""
    ops = ops or ReferenceOps()
    return Gemma4Model(config, weights_from_state(config, reference.state_dict(), ops.pack_gate_up), ops, max_positions)


def state_from_weights(
    config: Gemma4Config, weights: ModelWeights, unpack_gate_up: UnpackGateUp = geglu.reference_unpack
) -> dict[str, torch.Tensor]:
    """The transformers state dict of our weights: every tensor of `expected_shapes`, named `model.…`. unpack_gate_up: of the
    backend that packed them. Models with experts are not covered."""
    state = {"embed_tokens.weight": weights.embed, "norm.weight": weights.norm}
    if config.has_ple:
        state["embed_tokens_per_layer.weight"] = _present(weights.ple_table)
        state["per_layer_model_projection.weight"] = _present(weights.ple_model_projection)
        state["per_layer_projection_norm.weight"] = _present(weights.ple_projection_norm)
    for i, layer in enumerate(weights.layers):
        state |= {f"layers.{i}.{name}": tensor for name, tensor in _layer_state(config, i, layer, unpack_gate_up).items()}
    wrong = [name for name, shape in expected_shapes(config).items() if name not in state or tuple(state[name].shape) != shape]
    if wrong:
        raise ValueError(f"these weights do not spell out {len(wrong)} tensors of the config, the first is {wrong[0]}")
    return {f"model.{name}": tensor for name, tensor in state.items()}


def _layer_state(config: Gemma4Config, i: int, layer: LayerWeights, unpack_gate_up: UnpackGateUp) -> dict[str, torch.Tensor]:
    query, kv = config.num_attention_heads * config.layer_head_dim(i), config.layer_kv_heads(i) * config.layer_head_dim(i)
    gate, up = unpack_gate_up(layer.gate_up)
    state = {name: getattr(layer, field) for field, name in LAYER_NORMS.items()}
    state |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": layer.down, "layer_scalar": layer.scalar}
    state |= {"self_attn.q_proj.weight": layer.qkv[:query], "self_attn.o_proj.weight": layer.o, "self_attn.q_norm.weight": layer.q_norm}
    if config.owns_kv(i):
        state["self_attn.k_proj.weight"] = layer.qkv[query : query + kv]
        state["self_attn.k_norm.weight"] = _present(layer.k_norm)
        if not config.layer_k_eq_v(i):
            state["self_attn.v_proj.weight"] = layer.qkv[query + kv :]
    if config.has_ple:
        state["per_layer_input_gate.weight"] = _present(layer.ple_gate)
        state["per_layer_projection.weight"] = _present(layer.ple_projection)
        state["post_per_layer_input_norm.weight"] = _present(layer.post_ple_norm)
    return state


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise ValueError("a tensor that the config asks for is missing from these weights")
    return tensor
