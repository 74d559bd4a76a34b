"""Random weights of a real shape, for benchmarks without a download. Results made with them say so."""

from __future__ import annotations

import torch

from lastrow.models.config import Gemma4Config
from lastrow.models.weights import ModelWeights
from lastrow.weights.loader import PackGateUp, pack_layer
from lastrow.weights.names import global_shapes, layer_shapes


def dummy_weights(
    config: Gemma4Config,
    pack_gate_up: PackGateUp,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    ple_device: torch.device | str | None = None,
) -> ModelWeights:
    """Weights of `config`'s shape: linear layers with variance 1/fan_in, norms near 1, layer scalars in [0.7, 1.0], so that
    activations keep a natural size through all layers. The same seed gives the same weights on the same device type."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def make(name: str, shape: tuple[int, ...], on: torch.device | str = device) -> torch.Tensor:
        if name.endswith("layer_scalar"):
            return (0.7 + 0.3 * torch.rand(shape, generator=generator, device=device)).to(dtype)
        if "norm" in name or name in ("router.scale", "router.per_expert_scale"):
            mean = 0.25 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
            return (mean * (1 + 0.1 * torch.randn(shape, generator=generator, device=device))).to(dtype)
        std = shape[-1] ** -0.5 if "embed_tokens_per_layer" not in name else config.hidden_size_per_layer_input**-0.5
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, std, generator=generator).to(on)

    shapes = global_shapes(config)
    weights = ModelWeights(
        embed=make("embed_tokens.weight", shapes["embed_tokens.weight"]), norm=make("norm.weight", shapes["norm.weight"])
    )
    if config.has_ple:
        table = "embed_tokens_per_layer.weight"
        weights.ple_table = make(table, shapes[table], device if ple_device is None else ple_device)
        weights.ple_model_projection = make("per_layer_model_projection.weight", shapes["per_layer_model_projection.weight"])
        weights.ple_projection_norm = make("per_layer_projection_norm.weight", shapes["per_layer_projection_norm.weight"])
    for i in range(config.num_hidden_layers):
        of_layer = layer_shapes(config, i)
        weights.layers.append(pack_layer(config, i, lambda name, of_layer=of_layer: make(name, of_layer[name]), pack_gate_up))
    return weights
