"""transformers as an arm of a GPU benchmark: the same weights, the same prompts, its own generate()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from lastrow.harness.reference import state_from_weights
from lastrow.models.config import Gemma4Config
from lastrow.models.weights import ModelWeights

SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "global_head_dim", "num_global_key_value_heads", "sliding_window", "max_position_embeddings", "num_kv_shared_layers",
    "use_double_wide_mlp", "attention_k_eq_v", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "rms_norm_eps",
    "final_logit_softcapping",
)  # fmt: skip


class GreedyCase(Protocol):
    @property
    def output_len(self) -> int: ...


class TransformersArm:
    """Gemma4ForCausalLM (sdpa, eager) over our tensors; gate and up projections are unpacked copies. dtype: another one than that of
    the weights, which are copied then."""

    def __init__(
        self, config: Gemma4Config, weights: ModelWeights, unpack_gate_up: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        dtype: torch.dtype | None = None, attention: str = "sdpa",
    ) -> None:  # fmt: skip
        from transformers import Gemma4ForCausalLM, Gemma4TextConfig

        arguments: Any = {name: getattr(config, name) for name in SAME} | {"layer_types": list(config.layer_types)}
        hf_config = Gemma4TextConfig(**arguments)
        hf_config._attn_implementation = attention
        embed = weights.embed
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype or embed.dtype)
        try:
            with torch.device(embed.device):
                self.model: Any = Gemma4ForCausalLM(hf_config).eval()
        finally:
            torch.set_default_dtype(before)
        state = state_from_weights(config, weights, unpack_gate_up)
        state = {name: tensor.to(dtype or embed.dtype) for name, tensor in state.items()}
        result = self.model.load_state_dict(state, strict=False, assign=True)
        self.model.tie_weights()
        if result.unexpected_keys or set(result.missing_keys) - {"lm_head.weight"}:
            raise ValueError(f"transformers' model does not fit the shape {config.name!r}: {result}")

    @torch.inference_mode()
    def __call__(self, case: GreedyCase, prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts, device=self.model.device)
        n = case.output_len
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert out.shape[1] == ids.shape[1] + n, "an arm that stops early is no arm"
