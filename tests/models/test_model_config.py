"""The config reader against the published tables, against transformers' own config class, and against rules stated by brute force."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastrow.kv.layout import KVLayout
from lastrow.models.config import FULL, SLIDING, ConfigError, Gemma4Config, from_dict, from_file
from lastrow.weights.names import expected_shapes
from models.published import E2B, E4B, G12B, G26B, G31B, PUBLISHED, multimodal

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 8, "global_head_dim": 16, "sliding_window": 4, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("wrap", [multimodal, dict], ids=["multimodal", "text-only"])
def test_published_configs_parse_to_the_table_of_the_spec(name: str, wrap: Any) -> None:
    text = PUBLISHED[name]
    c = from_dict(wrap(text), name)
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                  "head_dim", "global_head_dim", "sliding_window", "max_position_embeddings", "num_kv_shared_layers",
                  "use_double_wide_mlp", "attention_k_eq_v", "hidden_size_per_layer_input", "final_logit_softcapping"):  # fmt: skip
        assert getattr(c, field) == text[field], field
    assert c.layer_types == tuple(text["layer_types"])
    assert (c.rope_theta_sliding, c.rope_theta_full, c.partial_rotary_factor, c.rotated_pairs_full) == (1e4, 1e6, 0.25, 64)
    assert (c.bos_token_id, c.pad_token_id, c.dtype) == (2, 0, "bfloat16")
    assert c.eos_token_ids == ((1, 106) if wrap is multimodal else (1,))
    assert c.num_experts == (128 if name == "26B-A4B" else 0)


# billions of text parameters, tied head counted once (spec section 1.3, computed there from the formulae of section 3)
@pytest.mark.parametrize(
    ("text", "billions"), [(E2B, 4.629), (E4B, 7.463), (G12B, 11.907), (G26B, 25.233), (G31B, 30.697)], ids=list(PUBLISHED)
)
def test_expected_tensors_add_up_to_the_published_parameter_counts(text: dict[str, Any], billions: float) -> None:
    c = from_dict(multimodal(text))
    assert round(sum(math.prod(s) for s in expected_shapes(c).values()) / 1e9, 3) == billions


def test_e2b_has_the_540_text_tensors_of_the_published_file() -> None:
    assert len(expected_shapes(from_dict(multimodal(E2B)))) == 540


# bytes per token in bf16: (every full owner, every sliding owner), spec section 2.8
@pytest.mark.parametrize(
    ("text", "full", "sliding"),
    [(E2B, 6144, 12288), (E4B, 16384, 40960), (G12B, 16384, 327680), (G26B, 20480, 204800), (G31B, 81920, 819200)],
    ids=list(PUBLISHED),
)
def test_kv_bytes_per_token_are_those_of_the_spec(text: dict[str, Any], full: int, sliding: int) -> None:
    layout = KVLayout.of(from_dict(multimodal(text)))
    assert (layout.full_bytes_per_token, layout.sliding_bytes_per_token) == (full, sliding)


def test_sharing_layers_of_e2b_and_e4b_read_the_layers_that_the_spec_names() -> None:
    e2b, e4b = from_dict(E2B), from_dict(E4B)
    assert (e2b.owners, e2b.cut) == (tuple(range(15)), 14)
    assert {e2b.kv_source[i] for i in range(15, 35) if e2b.is_full(i)} == {14}
    assert {e2b.kv_source[i] for i in range(15, 35) if not e2b.is_full(i)} == {13}
    assert (e4b.owners, e4b.cut) == (tuple(range(24)), 23)
    assert {e4b.kv_source[i] for i in range(24, 42) if e4b.is_full(i)} == {23}
    assert {e4b.kv_source[i] for i in range(24, 42) if not e4b.is_full(i)} == {22}
    assert [e2b.layer_intermediate_size(i) for i in (14, 15)] == [6144, 12288]  # double-wide exactly where K/V is shared
    assert [e4b.layer_intermediate_size(i) for i in (23, 24)] == [10240, 10240]


def test_without_sharing_every_layer_owns_and_the_cut_is_the_last_layer() -> None:
    c = from_dict(G31B)
    assert c.kv_source == tuple(range(60)) and c.cut == 59
    assert (c.layer_kv_heads(0), c.layer_kv_heads(59)) == (16, 4)
    assert (c.layer_k_eq_v(0), c.layer_k_eq_v(59)) == (False, True)


@given(st.data())
def test_kv_source_is_the_last_earlier_owner_of_the_same_type(data: st.DataObject) -> None:
    """Spec section 2.8 by brute force: every candidate donor of every layer is tried."""
    kinds = data.draw(st.lists(st.sampled_from([FULL, SLIDING]), min_size=1, max_size=14))
    shared = data.draw(st.integers(0, len(kinds) - 1))
    first_shared = len(kinds) - shared
    if not set(kinds[first_shared:]) <= set(kinds[:first_shared]):
        with pytest.raises(ConfigError, match=r"layer \d+ shares K/V but no earlier owner has type"):
            Gemma4Config(num_hidden_layers=len(kinds), layer_types=tuple(kinds), num_kv_shared_layers=shared, **SMALL)
        return
    c = Gemma4Config(num_hidden_layers=len(kinds), layer_types=tuple(kinds), num_kv_shared_layers=shared, **SMALL)
    for i, kind in enumerate(kinds):
        donors = [i] if i < first_shared else [j for j in range(first_shared) if kinds[j] == kind]
        assert c.kv_source[i] == max(donors)
    assert c.owners == tuple(range(first_shared)) and c.cut == first_shared - 1


# --------------------------------------------------------------------------------------------- transformers' own class
HF_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
           "global_head_dim", "layer_types", "sliding_window", "num_kv_shared_layers", "use_double_wide_mlp", "attention_k_eq_v",
           "num_global_key_value_heads", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "final_logit_softcapping",
           "max_position_embeddings", "rms_norm_eps", "rope_parameters", "enable_moe_block", "num_experts", "top_k_experts",
           "moe_intermediate_size", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip


def hf_text_dict(text: dict[str, Any]) -> dict[str, Any]:
    """What transformers writes for `text`: head shapes moved into `per_layer_config`."""
    transformers = pytest.importorskip("transformers")
    return transformers.Gemma4TextConfig(**{key: text[key] for key in HF_KEYS}).to_dict()


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("through_json", [True, False], ids=["file", "dict"])
def test_what_transformers_writes_parses_like_the_published_file(name: str, through_json: bool) -> None:
    written = hf_text_dict(PUBLISHED[name])
    assert "per_layer_config" in written and "global_head_dim" not in written  # else this test shows nothing
    if through_json:
        written = json.loads(json.dumps(written))  # integer keys become strings
    assert replace(from_dict(written), dtype="bfloat16") == from_dict(PUBLISHED[name] | {"model_type": "gemma4_text"})


@pytest.mark.parametrize("name", ["E2B", "E4B", "31B"])
def test_sharing_agrees_with_the_modes_transformers_derives(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    modes = transformers.Gemma4TextConfig(**{key: PUBLISHED[name][key] for key in HF_KEYS}).kv_sharing_modes
    c = from_dict(PUBLISHED[name])
    assert [mode != "reuse" for mode in modes] == [c.owns_kv(i) for i in range(c.num_hidden_layers)]
    read = {c.kv_source[i] for i in range(c.num_hidden_layers) if not c.owns_kv(i)}
    assert read <= {i for i, mode in enumerate(modes) if mode == "store"}


def test_absent_layer_types_follow_the_class_default_and_the_last_layer_is_full() -> None:
    transformers = pytest.importorskip("transformers")
    for layers in (5, 6, 13):
        hf = transformers.Gemma4TextConfig(num_hidden_layers=layers)
        ours = from_dict({key: value for key, value in (E2B | {"num_hidden_layers": layers, "num_kv_shared_layers": 0}).items()
                          if key != "layer_types"})  # fmt: skip
        assert list(ours.layer_types) == hf.layer_types
    all_sliding = [SLIDING] * 35
    hf = transformers.Gemma4TextConfig(num_hidden_layers=35, layer_types=list(all_sliding))
    assert list(from_dict(E2B | {"layer_types": all_sliding, "num_kv_shared_layers": 0}).layer_types) == hf.layer_types


# ------------------------------------------------------------------------------------------------------------ refusals
WRONG_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "factor": 8.0}}
REFUSED = {
    "another architecture": ({"model_type": "gemma3_text"}, "model_type is 'gemma3_text': lastrow runs gemma4_text"),
    "no layer count": ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    "a size that is no number": ({"hidden_size": "1536"}, "hidden_size is '1536': a positive integer is needed"),
    "a negative window": ({"sliding_window": -1}, "sliding_window is -1: a positive integer is needed"),
    "a norm epsilon that is no number": ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x': a positive number of at most 1 is needed"),
    "a norm epsilon of null": ({"rms_norm_eps": None}, "rms_norm_eps is None"),
    "a softcap of nothing": ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0: a positive number is needed"),
    "a softcap that is no number": ({"final_logit_softcapping": "30"}, "final_logit_softcapping is '30'"),
    "a fraction of a PLE width": ({"hidden_size_per_layer_input": 1.5}, "hidden_size_per_layer_input is 1.5: an integer"),
    "a RoPE base that is no number": ({"rope_parameters": {"full_attention": {"rope_theta": "1e6"}}}, "rope_theta_full is '1e6'"),
    "more rotation than there is": ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 2}}}, "partial_rotary_factor is 2"),
    "a stop id that is no id": ({"eos_token_id": ["x"]}, r"eos_token_id is \['x'\]"),
    "a size that is true": ({"num_attention_heads": True}, "num_attention_heads is True: a positive integer"),
    "layer_types too short": ({"layer_types": [FULL]}, "layer_types has 1 entries for num_hidden_layers=35"),
    "an unknown layer type": ({"layer_types": ["mamba"] * 35}, r"layer_types holds \['mamba'\]"),
    "every layer shared": ({"num_kv_shared_layers": 35}, "at least one layer must own K/V"),
    "a donor is missing": ({"num_kv_shared_layers": 33}, "layer 4 shares K/V but no earlier owner .*: give layers 0-1"),
    "odd head dim": ({"head_dim": 255}, "head dim 255 is odd"),
    "heads do not divide": ({"num_key_value_heads": 3}, "num_attention_heads=8 is no multiple of the 3 K/V heads of layer 0"),
    "k_eq_v with sharing": ({"attention_k_eq_v": True}, "attention_k_eq_v with num_kv_shared_layers"),
    "more active experts than experts": ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 8}, "top_k_experts is 8"),
    "experts without a width": ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}, "moe_intermediate_size is missing"),
    "PLE without a table": ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input is missing"),
    "another activation": ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    "a dtype that no tensor has here": ({"dtype": "int4", "torch_dtype": "int4"}, "dtype is 'int4': one of bfloat16, float16, float32"),
    "a quantized checkpoint": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*gptq"),
    "biases": ({"attention_bias": True}, "attention_bias is true"),
    "an embedding model": ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    "an untied head": ({"tie_word_embeddings": False}, "tie_word_embeddings is false"),
    "a RoPE that is a list": ({"rope_parameters": []}, r"rope_parameters is \[\]: a JSON object"),
    "a layer type's RoPE that is a number": ({"rope_parameters": {"full_attention": 0}}, "rope_parameters.full_attention is 0: a JSON"),
    "another RoPE": ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention.rope_type is 'yarn'"),
    "stretched RoPE": ({"rope_parameters": WRONG_ROPE}, "sliding_attention.factor is 8.0"),
    "no head dim": ({"head_dim": None}, "head_dim is missing"),
    "per_layer_config beyond the model": ({"per_layer_config": {"35": {"head_dim": 512}}}, r"names layers .*: the model has layers 0-34"),
    "per_layer_config of another kind": ({"per_layer_config": [1]}, "per_layer_config is a list"),
    "per_layer_config with other fields": ({"per_layer_config": {"0": {"sliding_window": 4}}}, r"overrides \['sliding_window'\]"),
    "per_layer_config unlike within a type": ({"per_layer_config": {"4": {"head_dim": 64}}}, "full_attention layers different head_dim"),
    "other K/V heads without k_eq_v": (
        {"per_layer_config": {str(i): {"num_key_value_heads": 2} for i in range(4, 35, 5)}}, "without attention_k_eq_v"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_shape_that_cannot_run_is_refused_with_its_reason(case: str) -> None:
    change, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason) as caught:
        from_dict(E2B | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "no such file; a checkpoint folder holds config.json"), ("{", "not readable as JSON"), ("[1]", "holds no JSON object"),
     (json.dumps(E2B | {"layer_types": 7}), "a field has the wrong type"), (json.dumps({"model_type": "llama"}), "model_type is 'llama'")],
)  # fmt: skip
def test_a_bad_file_gives_one_line_with_its_path(tmp_path: Path, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=reason) as caught:
        from_file(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_and_its_file_give_the_same_config_named_after_the_folder(tiny_e: Path) -> None:
    c = from_file(tiny_e)
    assert c == from_file(tiny_e / "config.json") and c.name == "tiny-e"
    assert c.kv_source == (0, 1, 2, 3, 4, 3, 3, 3, 3, 4)  # tiny-e's README
