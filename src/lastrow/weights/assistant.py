"""Assistant checkpoint -> AssistantWeights, under the published names (spec section 5.1)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from lastrow.kernels.centroid_head import group_rows
from lastrow.models.assistant_config import AssistantConfig
from lastrow.models.gemma4_assistant import AssistantWeights
from lastrow.models.weights import LayerWeights
from lastrow.weights.loader import Checkpoint, PackGateUp, WeightsError
from lastrow.weights.names import LAYER_NORMS

logger = logging.getLogger("lastrow")
TIED_COPY = "lm_head.weight"  # some writers store the tied head a second time


def layer_shapes(config: AssistantConfig, i: int) -> dict[str, tuple[int, ...]]:
    """Tensors of layer i, by name after `model.layers.{i}.`."""
    c = config.text
    h, d, mlp, q = c.hidden_size, c.layer_head_dim(i), c.intermediate_size, c.num_attention_heads * c.layer_head_dim(i)
    shapes: dict[str, tuple[int, ...]] = {name: (h,) for name in LAYER_NORMS.values()}
    shapes |= {"self_attn.q_proj.weight": (q, h), "self_attn.o_proj.weight": (h, q), "self_attn.q_norm.weight": (d,)}
    return shapes | {
        "mlp.gate_proj.weight": (mlp, h),
        "mlp.up_proj.weight": (mlp, h),
        "mlp.down_proj.weight": (h, mlp),
        "layer_scalar": (1,),
    }


def expected_shapes(config: AssistantConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint: 50 with centroids, 48 without."""
    h, backbone, vocab = config.text.hidden_size, config.backbone_hidden_size, config.text.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (h, 2 * backbone),
        "post_projection.weight": (backbone, h),
        "model.embed_tokens.weight": (vocab, h),
        "model.norm.weight": (h,),
    }
    if config.num_centroids:
        shapes |= {"masked_embedding.centroids.weight": (config.num_centroids, h), "masked_embedding.token_ordering": (vocab,)}
    for i in range(config.text.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes(config, i).items()}
    return shapes


def load_assistant_weights(
    folder: str | Path, config: AssistantConfig, pack_gate_up: PackGateUp, dtype: torch.dtype, device: torch.device | str
) -> AssistantWeights:
    """Load an assistant from `folder`. Raises WeightsError naming what is missing, misshapen or no permutation."""
    checkpoint = Checkpoint(folder)
    expected = expected_shapes(config)
    names = set(checkpoint.names)
    missing = [name for name in expected if name not in names]
    if missing:
        raise WeightsError(f"{checkpoint.folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    for name, shape in expected.items():
        if checkpoint.shape(name) != shape:
            raise WeightsError(f"{checkpoint.folder}: {name} is {list(checkpoint.shape(name))}, the config asks for {list(shape)}")
    extra = sorted(names - set(expected) - {TIED_COPY})
    if extra:
        logger.warning("%s: %d tensors are not part of an assistant and were ignored, the first is %s", folder, len(extra), extra[0])
    return _build(config, {name: checkpoint.tensor(name) for name in expected}, pack_gate_up, dtype, device)


def dummy_assistant_weights(
    config: AssistantConfig, pack_gate_up: PackGateUp, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> AssistantWeights:
    """Random weights of the drafter's shape, for measuring costs without a checkpoint; its drafts are worth nothing."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("token_ordering"):
            tensors[name] = torch.randperm(shape[0], generator=generator)
        elif name.endswith("layer_scalar") or "norm" in name:
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return _build(config, tensors, pack_gate_up, dtype, device)


def _build(
    config: AssistantConfig, tensors: dict[str, torch.Tensor], pack_gate_up: PackGateUp, dtype: torch.dtype, device: torch.device | str
) -> AssistantWeights:
    def get(name: str) -> torch.Tensor:
        return tensors[name].to(device=device, dtype=dtype)

    weights = AssistantWeights(get("pre_projection.weight"), get("post_projection.weight"), get("model.norm.weight"))
    for i in range(config.text.num_hidden_layers):
        prefix = f"model.layers.{i}."
        norms: dict[str, Any] = {field: get(prefix + name) for field, name in LAYER_NORMS.items()}
        weights.layers.append(
            LayerWeights(
                qkv=get(prefix + "self_attn.q_proj.weight"),
                o=get(prefix + "self_attn.o_proj.weight"),
                q_norm=get(prefix + "self_attn.q_norm.weight"),
                k_norm=None,
                gate_up=pack_gate_up(get(prefix + "mlp.gate_proj.weight"), get(prefix + "mlp.up_proj.weight")),
                down=get(prefix + "mlp.down_proj.weight"),
                scalar=get(prefix + "layer_scalar"),
                **norms,
            )
        )
    if not config.num_centroids:
        weights.head = get("model.embed_tokens.weight")
        return weights
    ordering = tensors["masked_embedding.token_ordering"].long()
    if not torch.equal(ordering.sort().values, torch.arange(config.text.vocab_size)):
        raise WeightsError(f"masked_embedding.token_ordering is no permutation of the {config.text.vocab_size} token ids")
    weights.centroids = get("masked_embedding.centroids.weight")
    weights.clusters, weights.cluster_ids = group_rows(get("model.embed_tokens.weight"), ordering.to(device), config.num_centroids)
    return weights
