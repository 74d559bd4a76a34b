"""Configuration of a Gemma 4 assistant (the multi-token-prediction drafter) and the layers of the target it reads.

No torch. Spec section 5.1."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lastrow.models import config as text_config
from lastrow.models.config import FULL, SLIDING, ConfigError, Gemma4Config

ASSISTANT_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclass(frozen=True)
class AssistantConfig:
    """text: shapes of the drafter's own layers; its K/V fields say what the layers expect to read, none of them owns any.

    backbone_hidden_size: hidden size of the target. num_centroids: groups of the ordered head, 0 for a dense head;
    centroid_top_k: groups whose tokens are scored. num_draft_tokens: the checkpoint's own advice, None without one."""

    text: Gemma4Config
    backbone_hidden_size: int
    num_centroids: int = 0
    centroid_top_k: int = 0
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.num_centroids:
            return
        if self.text.vocab_size % self.num_centroids:
            raise ConfigError(f"num_centroids is {self.num_centroids}: a divisor of vocab_size={self.text.vocab_size} is needed")
        if not 0 < self.centroid_top_k <= self.num_centroids:
            raise ConfigError(f"centroid_intermediate_top_k is {self.centroid_top_k}: 1 to num_centroids={self.num_centroids} is needed")

    def target_layers(self, target: Gemma4Config) -> tuple[int, ...]:
        """For each layer of the drafter, the owner layer of `target` whose K/V it reads: the source of the target's last
        layer of the same attention type. Raises ConfigError where the two models do not fit together."""
        self._check_target(target)
        source = {kind: target.kv_source[i] for i, kind in enumerate(target.layer_types)}
        missing = sorted(set(self.text.layer_types) - set(source))
        if missing:
            raise ConfigError(f"the assistant has {missing[0]} layers, the target {target.name or 'model'} has none to read from")
        layers = tuple(source[kind] for kind in self.text.layer_types)
        for i, j in enumerate(layers):
            for name in ("layer_head_dim", "layer_kv_heads"):
                mine, theirs = getattr(self.text, name)(i), getattr(target, name)(j)
                if mine != theirs:
                    raise ConfigError(
                        f"layer {i} of the assistant has {name.removeprefix('layer_')} {mine}, layer {j} of the target, whose "
                        f"K/V it reads, has {theirs}: take the assistant of this target"
                    )
        return layers

    def _check_target(self, target: Gemma4Config) -> None:
        for field, mine, theirs in (
            ("backbone_hidden_size", self.backbone_hidden_size, target.hidden_size),
            ("vocab_size", self.text.vocab_size, target.vocab_size),
            ("sliding_window", self.text.sliding_window, target.sliding_window),
        ):
            if mine != theirs:
                raise ConfigError(f"{field} of the assistant is {mine}, the target needs {theirs}: take the assistant of this target")


def published_shape(target: Gemma4Config) -> AssistantConfig:
    """The shape of the published drafter of `target` (spec section 5.1): for measuring costs without its checkpoint."""
    small = target.has_ple
    hidden, mlp = (256, 2048) if small else (1024, 8192)
    text = replace(
        target, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=4, layer_types=(SLIDING, SLIDING, SLIDING, FULL),
        num_attention_heads=4 if small else max(16, target.num_attention_heads), num_kv_shared_layers=0, use_double_wide_mlp=False,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, final_logit_softcapping=None, num_experts=0, top_k_experts=0,
        moe_intermediate_size=0,
    )  # fmt: skip
    return AssistantConfig(text, target.hidden_size, 2048 if small else 0, 32 if small else 0)


def from_dict(raw: dict[str, Any], name: str = "") -> AssistantConfig:
    """Parse an assistant's config.json. Raises ConfigError with the offending field."""
    kind = raw.get("model_type")
    if kind not in ASSISTANT_MODEL_TYPES:
        raise ConfigError(f"model_type is {kind!r}: an assistant's is {' or '.join(ASSISTANT_MODEL_TYPES)}")
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError("text_config is missing: an assistant's config.json holds its layers' shape there")
    shared, layers = text.get("num_kv_shared_layers"), text.get("num_hidden_layers")
    if shared not in (None, 0, layers):
        raise ConfigError(f"num_kv_shared_layers is {shared} of {layers} layers: every layer of an assistant reads the target's K/V")
    for key in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        if text.get(key):
            raise ConfigError(f"{key} is {text[key]!r}: no assistant has it")
    # The rule "some layer must own K/V" is for models that stand alone.
    shapes = text_config.from_dict({**text, "num_kv_shared_layers": 0, "model_type": "gemma4_text"}, name=name)
    ordered = bool(raw.get("use_ordered_embeddings"))
    if "backbone_hidden_size" not in raw:
        raise ConfigError("backbone_hidden_size is missing: the hidden size of the target is needed")
    return AssistantConfig(
        text=shapes,
        backbone_hidden_size=raw["backbone_hidden_size"],
        num_centroids=raw.get("num_centroids", 2048) if ordered else 0,
        centroid_top_k=raw.get("centroid_intermediate_top_k", 32) if ordered else 0,
    )


def from_folder(folder: str | Path) -> AssistantConfig:
    """Read config.json and, where there is one, generation_config.json of `folder`. Raises ConfigError with the path."""
    folder = Path(folder)
    raw = _read_object(folder / "config.json")
    advice = folder / "generation_config.json"
    try:
        config = from_dict(raw, name=folder.name)
        tokens = _read_object(advice).get("num_assistant_tokens") if advice.exists() else None
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from None
    return AssistantConfig(config.text, config.backbone_hidden_size, config.num_centroids, config.centroid_top_k, tokens)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; an assistant checkpoint is a folder with config.json and model.safetensors") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: holds a {type(raw).__name__}, a JSON object is needed")
    return raw
