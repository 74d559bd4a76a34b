"""The parameters of the text model as plain tensors, packed the way the operations read them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class MoEWeights:
    """Router and experts of one layer (spec section 2.9); gate_up [E, 2I, H], down [E, H, I]."""

    router_scale: torch.Tensor
    router_proj: torch.Tensor
    per_expert_scale: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    pre_norm_2: torch.Tensor
    post_norm_1: torch.Tensor
    post_norm_2: torch.Tensor


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. qkv: q rows, then k and v rows on owners (no v rows with k_eq_v), [.., H]. gate_up: packed by the
    backend's geglu. PLE tensors are None in models without per-layer embeddings; k_norm is None on sharing layers."""

    qkv: torch.Tensor
    o: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    pre_feedforward_norm: torch.Tensor
    post_feedforward_norm: torch.Tensor
    scalar: torch.Tensor
    ple_gate: torch.Tensor | None = None
    ple_projection: torch.Tensor | None = None
    post_ple_norm: torch.Tensor | None = None
    moe: MoEWeights | None = None


@dataclass(slots=True)
class ModelWeights:
    """The whole text model. embed [V, H] is also the head. ple_table [V, L*P] may stay in host memory."""

    embed: torch.Tensor
    norm: torch.Tensor
    layers: list[LayerWeights] = field(default_factory=list)
    ple_table: torch.Tensor | None = None
    ple_model_projection: torch.Tensor | None = None
    ple_projection_norm: torch.Tensor | None = None
