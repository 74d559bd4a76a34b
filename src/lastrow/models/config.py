"""The text configuration of a Gemma 4 checkpoint as plain data, and the one list everything else is derived from.

Nothing here imports torch: `lastrow info`, the KV layout and the scheduler read the model's shape from this module alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

FULL = "full_attention"
SLIDING = "sliding_attention"
TEXT_MODEL_TYPES = ("gemma4_text", "gemma4_unified_text", "gemma4", "gemma4_unified")
DTYPES = ("bfloat16", "float16", "float32")  # of a checkpoint


class ConfigError(ValueError):
    """A configuration that this engine cannot run; the message says which field, what it holds and what would be right."""


@dataclass(frozen=True)
class Gemma4Config:
    """Text part of a Gemma 4 config.json (spec section 1). Sizes are in elements, thetas are RoPE bases."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    global_head_dim: int
    sliding_window: int
    max_position_embeddings: int
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta_sliding: float = 10_000.0
    rope_theta_full: float = 1_000_000.0
    partial_rotary_factor: float = 0.25
    final_logit_softcapping: float | None = None
    num_experts: int = 0
    top_k_experts: int = 0
    moe_intermediate_size: int = 0
    bos_token_id: int = 2
    pad_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1, 106)
    dtype: str = "bfloat16"
    name: str = ""

    def __post_init__(self) -> None:
        check(self)

    # ---------------------------------------------------------------------------------------------- who owns K/V
    @cached_property
    def kv_source(self) -> tuple[int, ...]:
        """`kv_source[i] == i`: layer i writes its own K/V. `kv_source[i] == j`: layer i reads what layer j wrote.

        A sharing layer reads the last owner of its own attention type (spec section 2.8)."""
        first_shared = self.num_hidden_layers - self.num_kv_shared_layers
        last_owner: dict[str, int] = {}
        source: list[int] = []
        for i, kind in enumerate(self.layer_types):
            if i < first_shared:
                last_owner[kind] = i
            source.append(last_owner[kind])
        return tuple(source)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Layers that write K/V, ascending."""
        return tuple(i for i, source in enumerate(self.kv_source) if source == i)

    @cached_property
    def cut(self) -> int:
        """The last owner: it writes K/V for every row; its queries and all that follows run on wanted rows only."""
        return self.owners[-1]

    def owns_kv(self, layer: int) -> bool:
        return self.kv_source[layer] == layer

    # ---------------------------------------------------------------------------------------------- shapes by layer
    def is_full(self, layer: int) -> bool:
        return self.layer_types[layer] == FULL

    def layer_head_dim(self, layer: int) -> int:
        return self.global_head_dim if self.is_full(layer) else self.head_dim

    def layer_kv_heads(self, layer: int) -> int:
        if self.is_full(layer) and self.attention_k_eq_v and self.num_global_key_value_heads:
            return self.num_global_key_value_heads
        return self.num_key_value_heads

    def layer_k_eq_v(self, layer: int) -> bool:
        """True where the value is the raw key projection (spec section 2.5)."""
        return self.attention_k_eq_v and self.is_full(layer)

    def layer_window(self, layer: int) -> int:
        """Keys a query of this layer sees, itself included; 0 means all."""
        return 0 if self.is_full(layer) else self.sliding_window

    def layer_intermediate_size(self, layer: int) -> int:
        wide = self.use_double_wide_mlp and not self.owns_kv(layer)
        return self.intermediate_size * (2 if wide else 1)

    @property
    def has_ple(self) -> bool:
        return self.hidden_size_per_layer_input > 0

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def rotated_pairs_full(self) -> int:
        """Pairs of a full layer's head that rotate ("proportional" RoPE, spec section 2.6)."""
        return int(self.partial_rotary_factor * self.global_head_dim // 2)


def check(c: Gemma4Config) -> None:
    """Refuse, with the reason, any shape the engine cannot run. Raises ConfigError."""

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ConfigError(message)

    for field in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "global_head_dim",
        "sliding_window",
        "max_position_embeddings",
    ):
        value = getattr(c, field)
        need(_is_integer(value) and value > 0, f"{field} is {value!r}: a positive integer is needed")
    _check_numbers(c, need)
    need(
        len(c.layer_types) == c.num_hidden_layers,
        f"layer_types has {len(c.layer_types)} entries for num_hidden_layers={c.num_hidden_layers}: one per layer is needed",
    )
    unknown = sorted(set(c.layer_types) - {FULL, SLIDING})
    need(not unknown, f"layer_types holds {unknown}: only {SLIDING!r} and {FULL!r} exist in Gemma 4")
    need(
        0 <= c.num_kv_shared_layers < c.num_hidden_layers,
        f"num_kv_shared_layers is {c.num_kv_shared_layers} of {c.num_hidden_layers} layers: at least one layer must own K/V",
    )
    first_shared = c.num_hidden_layers - c.num_kv_shared_layers
    for i in range(first_shared, c.num_hidden_layers):
        need(
            c.layer_types[i] in c.layer_types[:first_shared],
            f"layer {i} shares K/V but no earlier owner has type {c.layer_types[i]!r}: "
            f"give layers 0-{first_shared - 1} one layer of that type or lower num_kv_shared_layers",
        )
    need(c.dtype in DTYPES, f"dtype is {c.dtype!r}: one of {', '.join(DTYPES)} is needed; quantized checkpoints are not read")
    for dim in (c.head_dim, c.global_head_dim):
        need(dim % 2 == 0, f"head dim {dim} is odd: RoPE rotates pairs")
    for layer in range(c.num_hidden_layers):
        heads = c.layer_kv_heads(layer)
        need(
            c.num_attention_heads % heads == 0,
            f"num_attention_heads={c.num_attention_heads} is no multiple of the {heads} K/V heads of layer {layer}",
        )
    need(not (c.attention_k_eq_v and c.num_kv_shared_layers), "attention_k_eq_v with num_kv_shared_layers > 0: no Gemma 4 has both")
    if c.is_moe:
        need(0 < c.top_k_experts <= c.num_experts, f"top_k_experts is {c.top_k_experts} of num_experts={c.num_experts}")
        need(c.moe_intermediate_size > 0, "moe_intermediate_size is missing for a model with experts")
    if c.has_ple:
        need(c.vocab_size_per_layer_input > 0, "vocab_size_per_layer_input is missing for a model with per-layer embeddings")


def _check_numbers(c: Gemma4Config, need: Callable[[bool, str], None]) -> None:
    for field in (
        "num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_experts", "top_k_experts",
        "moe_intermediate_size", "bos_token_id", "pad_token_id",
    ):  # fmt: skip
        value = getattr(c, field)
        need(_is_integer(value) and value >= 0, f"{field} is {value!r}: an integer of at least 0 is needed")
    ids = c.eos_token_ids
    need(all(_is_integer(i) and i >= 0 for i in ids), f"eos_token_id is {list(ids)}: an id or a list of ids is needed")
    for field, most in (
        ("rms_norm_eps", 1.0), ("rope_theta_sliding", math.inf), ("rope_theta_full", math.inf), ("partial_rotary_factor", 1.0),
        ("final_logit_softcapping", math.inf),
    ):  # fmt: skip
        value = getattr(c, field)
        if value is None and field == "final_logit_softcapping":
            continue
        ok = isinstance(value, float | int) and value is not True and 0 < value <= most
        need(ok, f"{field} is {value!r}: a positive number{'' if most == math.inf else ' of at most 1'} is needed")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# -------------------------------------------------------------------------------------------------- config.json
def from_dict(raw: dict[str, Any], name: str = "") -> Gemma4Config:
    """Parse a config.json: multimodal (`text_config`) or text-only, published keys or `per_layer_config`.

    Raises ConfigError with the offending field."""
    text = raw.get("text_config") or raw
    kind = text.get("model_type", raw.get("model_type"))
    if str(raw.get("model_type")).endswith("_assistant"):
        raise ConfigError(f"model_type is {raw['model_type']!r}: a drafter; give its target, and the drafter as speculative_config's model")
    if kind not in TEXT_MODEL_TYPES:
        raise ConfigError(f"model_type is {kind!r}: lastrow runs {', '.join(TEXT_MODEL_TYPES)} and nothing else")
    layers = _required(text, "num_hidden_layers", kind)
    layer_types = text.get("layer_types")
    if layer_types is None:  # the rule of the class defaults, spec section 1.2
        layer_types = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(layers)]
    layer_types = [*layer_types[:-1], FULL]  # transformers forces the last layer, whatever the file says
    heads = _head_shapes(text, tuple(layer_types))
    if (text.get("hidden_activation") or "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ConfigError(f"hidden_activation is {text['hidden_activation']!r}: only 'gelu_pytorch_tanh' is supported")
    if quantized := _first(raw.get("quantization_config"), text.get("quantization_config"), {}):
        raise ConfigError(f"quantization_config is {str(quantized)[:80]}: quantized checkpoints are not read; give one in 16 or 32 bits")
    if text.get("attention_bias"):
        raise ConfigError("attention_bias is true: Gemma 4 has no biases and the engine reads none")
    if text.get("use_bidirectional_attention") == "all":
        raise ConfigError("use_bidirectional_attention is 'all' (an embedding model): lastrow runs causal models only")
    if not raw.get("tie_word_embeddings", text.get("tie_word_embeddings", True)):
        raise ConfigError("tie_word_embeddings is false: the head of Gemma 4 is its token table")
    rope = _object(text, "rope_parameters", "rope_parameters")
    sliding_rope = _object(rope, SLIDING, f"rope_parameters.{SLIDING}")
    full_rope = _object(rope, FULL, f"rope_parameters.{FULL}")
    _check_rope(sliding_rope, "default", SLIDING)
    _check_rope(full_rope, "proportional", FULL)
    moe = bool(text.get("enable_moe_block"))
    return Gemma4Config(
        vocab_size=_required(text, "vocab_size", kind),
        hidden_size=_required(text, "hidden_size", kind),
        num_hidden_layers=layers,
        intermediate_size=_required(text, "intermediate_size", kind),
        layer_types=tuple(layer_types),
        num_attention_heads=_required(text, "num_attention_heads", kind),
        sliding_window=_required(text, "sliding_window", kind),
        max_position_embeddings=_required(text, "max_position_embeddings", kind),
        num_kv_shared_layers=text.get("num_kv_shared_layers") or 0,
        use_double_wide_mlp=bool(text.get("use_double_wide_mlp")),
        attention_k_eq_v=bool(text.get("attention_k_eq_v")),
        hidden_size_per_layer_input=text.get("hidden_size_per_layer_input") or 0,
        vocab_size_per_layer_input=text.get("vocab_size_per_layer_input") or 0,
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        rope_theta_sliding=sliding_rope.get("rope_theta", 10_000.0),
        rope_theta_full=full_rope.get("rope_theta", 1_000_000.0),
        partial_rotary_factor=full_rope.get("partial_rotary_factor", 1.0 if full_rope else 0.25),
        final_logit_softcapping=text.get("final_logit_softcapping"),
        num_experts=(text.get("num_experts") or 0) if moe else 0,
        top_k_experts=(text.get("top_k_experts") or 0) if moe else 0,
        moe_intermediate_size=(text.get("moe_intermediate_size") or 0) if moe else 0,
        bos_token_id=_first(raw.get("bos_token_id"), text.get("bos_token_id"), 2),
        pad_token_id=_first(raw.get("pad_token_id"), text.get("pad_token_id"), 0),
        eos_token_ids=_id_tuple(_first(raw.get("eos_token_id"), text.get("eos_token_id"), 1)),
        dtype=str(_first(text.get("dtype"), text.get("torch_dtype"), raw.get("dtype"), raw.get("torch_dtype"), "bfloat16")),
        name=name,
        **heads,
    )


def from_file(path: str | Path) -> Gemma4Config:
    """Read `path`, a config.json or a folder that holds one. Raises ConfigError with the path in the message."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        raw: object = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; a checkpoint folder holds config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: holds no JSON object")
    try:
        return from_dict(cast("dict[str, Any]", raw), name=file.parent.name)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise ConfigError(f"{file}: a field has the wrong type ({error})") from None


def _head_shapes(text: dict[str, Any], layer_types: tuple[str, ...]) -> dict[str, Any]:
    """head_dim, global_head_dim and K/V head counts, from the published keys or from `per_layer_config`.

    transformers >= 5.15 write `per_layer_config`, a dict from layer index to the values that differ from the top level."""
    shapes = {key: text.get(key) for key in ("head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads")}
    table = text.get("per_layer_config")
    per_layer = [] if table is None else _per_layer_table(table, len(layer_types))
    for key, kind, target in (
        ("head_dim", SLIDING, "head_dim"),
        ("head_dim", FULL, "global_head_dim"),
        ("num_key_value_heads", SLIDING, "num_key_value_heads"),
        ("num_key_value_heads", FULL, "num_global_key_value_heads"),
    ):
        default = text.get(target) if text.get(target) is not None else text.get(key)
        values = {entry.get(key, default) for entry, t in zip(per_layer, layer_types, strict=False) if t == kind}
        if len(values) > 1:
            raise ConfigError(
                f"per_layer_config gives {kind} layers different {key}: {sorted(map(str, values))}; one value per type is supported"
            )
        if values:
            shapes[target] = values.pop()
    if shapes["num_key_value_heads"] is None and shapes["num_global_key_value_heads"] is not None:
        shapes["num_key_value_heads"] = shapes["num_global_key_value_heads"]
    if not text.get("attention_k_eq_v"):
        glob = shapes["num_global_key_value_heads"]
        if glob is not None and per_layer and glob != shapes["num_key_value_heads"]:
            raise ConfigError(
                f"full layers have {glob} K/V heads and sliding ones {shapes['num_key_value_heads']} "
                "without attention_k_eq_v: no Gemma 4 has that"
            )
        shapes["num_global_key_value_heads"] = None
    for key in ("head_dim", "global_head_dim", "num_key_value_heads"):
        if shapes[key] is None:
            raise ConfigError(f"{key} is missing (neither at the top level nor in per_layer_config)")
    return shapes


def _per_layer_table(found: object, layers: int) -> list[dict[str, Any]]:
    if not isinstance(found, dict):
        raise ConfigError(f"per_layer_config is a {type(found).__name__}: a JSON object from layer index to overrides is needed")
    table = cast("dict[str | int, dict[str, Any] | None]", found)
    beyond = sorted(str(key) for key in table if not str(key).isdigit() or int(key) >= layers)
    if beyond:
        raise ConfigError(f"per_layer_config names layers {beyond}: the model has layers 0-{layers - 1}")
    by_layer: dict[int, dict[str, Any]] = {
        int(key): entry or {} for key, entry in table.items()
    }  # transformers pads the keys: "04" in a model of 35 layers
    other = sorted({name for entry in by_layer.values() for name in entry} - {"head_dim", "num_key_value_heads"})
    if other:
        raise ConfigError(f"per_layer_config overrides {other}: only head_dim and num_key_value_heads differ between Gemma 4 layers")
    return [by_layer.get(i, {}) for i in range(layers)]


def _check_rope(rope: dict[str, Any], expected: str, kind: str) -> None:
    got = rope.get("rope_type", expected)
    if got != expected:
        raise ConfigError(f"rope_parameters.{kind}.rope_type is {got!r}: Gemma 4 uses {expected!r}")
    if rope.get("factor", 1.0) != 1.0:
        raise ConfigError(f"rope_parameters.{kind}.factor is {rope['factor']}: stretched positions are not supported, only 1.0")


def _object(text: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = text.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{where} is {str(value)[:80]}: a JSON object is needed")
    return cast("dict[str, Any]", value or {})


def _required(text: dict[str, Any], key: str, kind: str) -> int:
    value = text.get(key)
    if value is None:
        raise ConfigError(f"{key} is missing from the {kind} config")
    return value


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _id_tuple(value: int | list[int]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else (value,)
