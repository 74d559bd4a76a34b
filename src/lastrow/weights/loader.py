"""safetensors checkpoint -> ModelWeights: memory-mapped, every problem named before the first tensor is copied."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lastrow.models.config import Gemma4Config
from lastrow.models.weights import LayerWeights, ModelWeights, MoEWeights
from lastrow.progress import track
from lastrow.weights.names import LAYER_NORMS, expected_shapes, is_decoy, strip_prefix

logger = logging.getLogger("lastrow")
PackGateUp = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FLOATS = ("BF16", "F16", "F32", "F64")
SHOWN = 6  # tensor names quoted in one message


class WeightsError(ValueError):
    """A checkpoint whose tensors do not fit the config; the message names file, tensors, what was found and what is needed."""


class Checkpoint:
    """The safetensors files of a folder, sharded or not, behind one name -> tensor view. Files stay memory-mapped."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = {}
        self._file_of: dict[str, str] = {}
        for file in self._file_names():
            try:
                handle = safe_open(self.folder / file, framework="pt")
            except FileNotFoundError:
                raise WeightsError(f"{self.folder / file}: no such file") from None
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{self.folder / file}: not a complete safetensors file ({error}); download it again") from None
            self._files[file] = handle
            for name in handle.keys():  # noqa: SIM118  safe_open is no mapping
                self._file_of[name] = file

    def _file_names(self) -> list[str]:
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            return ["model.safetensors"]
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index}: not a safetensors index ({error!r})") from None
        for file in files:
            if not isinstance(file, str) or not file or Path(file).name != file:
                raise WeightsError(f"{index}: weight_map names {file!r}: the name of a file in the same folder is needed")
        return files

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors writes it: BF16, F32, I8."""
        return self._files[self._file_of[name]].get_slice(name).get_dtype()

    def tensor(self, name: str) -> torch.Tensor:
        """The mapped tensor, on the CPU, in the file's dtype."""
        return self._files[self._file_of[name]].get_tensor(name)


def check_names(config: Gemma4Config, checkpoint: Checkpoint) -> dict[str, str]:
    """{name after the prefix: name in the file} of every tensor the model uses.

    Raises WeightsError naming missing, misshapen and quantized tensors; tensors nobody knows are named in a warning."""
    prefix, found = strip_prefix(checkpoint.names)
    expected = expected_shapes(config)
    missing = [prefix + name for name in expected if name not in found]
    if missing:
        raise WeightsError(f"{checkpoint.folder}: {len(missing)} tensors are missing: {_some(missing)}")
    wrong = [
        f"{found[name]} is {list(checkpoint.shape(found[name]))}, the config asks for {list(shape)}"
        for name, shape in expected.items()
        if checkpoint.shape(found[name]) != shape
    ]
    if wrong:
        raise WeightsError(f"{checkpoint.folder}: {len(wrong)} tensors have the wrong shape: {_some(wrong)}")
    packed = [f"{found[name]} is {kind}" for name in expected if (kind := checkpoint.dtype(found[name])) not in FLOATS]
    if packed:
        raise WeightsError(
            f"{checkpoint.folder}: {len(packed)} tensors are no 16- or 32-bit numbers: {_some(packed)}; quantized files are not read"
        )
    extra = [full for name, full in found.items() if name not in expected and not is_decoy(config, name)]
    if extra:
        logger.warning("%s: %d tensors are not part of this model and were ignored: %s", checkpoint.folder, len(extra), _some(extra))
    return {name: found[name] for name in expected}


def load_model_weights(
    folder: str | Path,
    config: Gemma4Config,
    pack_gate_up: PackGateUp,
    dtype: torch.dtype,
    device: torch.device | str,
    ple_device: torch.device | str | None = None,
) -> ModelWeights:
    """Load the text model from `folder` in `dtype` on `device`. Raises WeightsError, for numbers that are NaN or infinite as well.

    pack_gate_up: the backend's packing of the two MLP weights. ple_device "cpu" keeps the per-layer table in host memory:
    mapped from the file in the file's dtype, so that only touched pages become resident (and its numbers are not checked)."""
    checkpoint = Checkpoint(folder)
    names = check_names(config, checkpoint)

    extremes: dict[str, torch.Tensor] = {}

    def get(name: str) -> torch.Tensor:
        tensor = checkpoint.tensor(names[name]).to(device=device, dtype=dtype)
        extremes[names[name]] = _extremes(tensor)
        return tensor

    ple_device = device if ple_device is None else ple_device
    weights = ModelWeights(embed=get("embed_tokens.weight"), norm=get("norm.weight"))
    if config.has_ple:
        table = checkpoint.tensor(names["embed_tokens_per_layer.weight"])
        if torch.device(ple_device).type != "cpu":
            table = table.to(device=ple_device, dtype=dtype)
            extremes[names["embed_tokens_per_layer.weight"]] = _extremes(table)
        weights.ple_table = table
        weights.ple_model_projection = get("per_layer_model_projection.weight")
        weights.ple_projection_norm = get("per_layer_projection_norm.weight")
    for i in track(range(config.num_hidden_layers), "loading weights"):
        weights.layers.append(pack_layer(config, i, lambda name, i=i: get(f"layers.{i}.{name}"), pack_gate_up))
    _check_finite(checkpoint.folder, extremes, dtype)
    return weights


def _extremes(tensor: torch.Tensor) -> torch.Tensor:
    """Least and greatest of a tensor's numbers, NaN where one is NaN. In parts whose places fit 32 bits."""
    return torch.stack([torch.stack(torch.aminmax(part)) for part in tensor.flatten().split(1 << 28)])


def _check_finite(folder: Path, extremes: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """All of them are read at once, so that a device is waited for once. Raises WeightsError."""
    is_finite = torch.stack([values.isfinite().all() for values in extremes.values()]).tolist()
    if wrong := [name for name, finite in zip(extremes, is_finite, strict=True) if not finite]:
        raise WeightsError(f"{folder}: {len(wrong)} tensors hold NaN or infinity in {str(dtype).removeprefix('torch.')}: {_some(wrong)}")


def pack_layer(config: Gemma4Config, i: int, get: Callable[[str], torch.Tensor], pack_gate_up: PackGateUp) -> LayerWeights:
    """Layer i from `get`, which returns a tensor by its name after `layers.{i}.`."""
    qkv = [get("self_attn.q_proj.weight")]
    if config.owns_kv(i):
        qkv.append(get("self_attn.k_proj.weight"))
        if not config.layer_k_eq_v(i):
            qkv.append(get("self_attn.v_proj.weight"))
    norms: Any = {field: get(name) for field, name in LAYER_NORMS.items()}
    layer = LayerWeights(
        qkv=torch.cat(qkv) if len(qkv) > 1 else qkv[0],
        o=get("self_attn.o_proj.weight"),
        q_norm=get("self_attn.q_norm.weight"),
        k_norm=get("self_attn.k_norm.weight") if config.owns_kv(i) else None,
        gate_up=pack_gate_up(get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")),
        down=get("mlp.down_proj.weight"),
        scalar=get("layer_scalar"),
        **norms,
    )
    if config.has_ple:
        layer.ple_gate = get("per_layer_input_gate.weight")
        layer.ple_projection = get("per_layer_projection.weight")
        layer.post_ple_norm = get("post_per_layer_input_norm.weight")
    if config.is_moe:
        layer.moe = MoEWeights(
            router_scale=get("router.scale"),
            router_proj=get("router.proj.weight"),
            per_expert_scale=get("router.per_expert_scale"),
            gate_up=get("experts.gate_up_proj"),
            down=get("experts.down_proj"),
            pre_norm_2=get("pre_feedforward_layernorm_2.weight"),
            post_norm_1=get("post_feedforward_layernorm_1.weight"),
            post_norm_2=get("post_feedforward_layernorm_2.weight"),
        )
    return layer


def _some(items: list[str]) -> str:
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")
