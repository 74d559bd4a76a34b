"""Checkpoints on disk, good and bad: one random model written in every layout, read back and compared tensor by tensor."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lastrow.harness.direct import DirectRunner
from lastrow.harness.reference import state_from_weights
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.models.config import FULL, SLIDING, Gemma4Config, from_dict, from_file
from lastrow.models.gemma4 import Gemma4Model
from lastrow.models.weights import ModelWeights
from lastrow.weights.dummy import dummy_weights
from lastrow.weights.loader import WeightsError, load_model_weights
from lastrow.weights.names import expected_shapes, layer_shapes
from models.published import G26B, PUBLISHED

PACK = ReferenceOps.pack_gate_up
CONFIG = Gemma4Config(
    vocab_size=50, hidden_size=16, num_hidden_layers=4, intermediate_size=24, layer_types=(SLIDING, FULL, SLIDING, FULL),
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, global_head_dim=12, sliding_window=4, max_position_embeddings=64,
    num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=6, vocab_size_per_layer_input=50,
)  # fmt: skip
State = dict[str, torch.Tensor]


def state(prefix: str = "model.") -> State:
    """Every tensor of a random model, by the name `prefix` + rest."""
    made = state_from_weights(CONFIG, dummy_weights(CONFIG, PACK, torch.float32, "cpu", seed=5))
    return {prefix + name.removeprefix("model."): tensor.contiguous().clone() for name, tensor in made.items()}


def write(folder: Path, tensors: State) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_sharded(folder: Path, tensors: State, shards: int = 3) -> Path:
    names = sorted(tensors)
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, **more: str) -> ModelWeights:
    return load_model_weights(folder, CONFIG, PACK, dtype, "cpu", **more)


def assert_holds(weights: ModelWeights, expected: State) -> None:
    """`weights` spell out exactly the tensors of `expected` (names with `model.`)."""
    found = state_from_weights(CONFIG, weights)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("layout", [write, write_sharded], ids=["one file", "sharded"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "language_model.", "model.", ""])
def test_every_layout_and_name_style_gives_the_same_weights(layout: Callable, prefix: str, tmp_path: Path) -> None:
    assert_holds(load(layout(tmp_path, state(prefix))), state())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["embed_tokens.weight", "norm.weight", "layers.3.mlp.down_proj.weight", "layers.0.layer_scalar"])
def test_weights_that_are_no_numbers_are_named(name: str, value: float, tmp_path: Path) -> None:
    """They make every logit NaN, and a model of NaN answers with padding."""
    tensors = state()
    tensors["model." + name].view(-1)[-1] = value
    with pytest.raises(WeightsError, match=f"1 tensors hold NaN or infinity in float32: model.{name}$"):
        load(write(tmp_path, tensors))


def test_a_dtype_too_small_for_the_weights_is_named(tmp_path: Path) -> None:
    tensors = state()
    tensors["model.norm.weight"][0] = 1e6
    load(write(tmp_path, tensors), torch.bfloat16)
    with pytest.raises(WeightsError, match=r"infinity in float16: model\.norm\.weight"):
        load(tmp_path, torch.float16)


def test_other_modalities_and_a_stored_head_are_left_out_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = {
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight": torch.zeros(3, 3),
        "model.audio_tower.layers.0.norm_out.weight": torch.zeros(3),
        "model.embed_vision.embedding_projection.weight": torch.zeros(3, 3),
        "lm_head.weight": torch.zeros(50, 16),
    }
    with caplog.at_level(logging.WARNING, "lastrow"):
        assert_holds(load(write(tmp_path, state("model.language_model.") | other)), state())
    assert not caplog.records


def test_decoys_of_sharing_layers_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Published files carry K/V weights of layers that read another layer's K/V (spec section 3)."""
    decoys = {}
    for i, dim in ((2, 8), (3, 12)):
        decoys |= {f"model.layers.{i}.self_attn.{n}_proj.weight": torch.randn(dim, 16) * 9 for n in "kv"}
        decoys[f"model.layers.{i}.self_attn.k_norm.weight"] = torch.randn(dim)
    with caplog.at_level(logging.WARNING, "lastrow"):
        assert_holds(load(write(tmp_path, state() | decoys)), state())
    assert not caplog.records


def test_tiny_e_has_decoys_and_the_model_never_sees_them(tiny_e: Path) -> None:
    config = from_file(tiny_e)
    weights = load_model_weights(tiny_e, config, PACK, torch.float32, "cpu")
    assert [w.k_norm is not None for w in weights.layers] == [True] * 5 + [False] * 5
    assert [w.qkv.shape[0] for w in weights.layers[5:]] == [128, 128, 128, 128, 256]  # query rows alone


def test_unknown_tensors_are_named_in_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"model.layers.0.self_attn.q_proj.lora_A": torch.zeros(2), "model.layers.9.layer_scalar": torch.ones(1)}
    with caplog.at_level(logging.WARNING, "lastrow"):
        load(write(tmp_path, state() | extra))
    [record] = caplog.records
    assert "2 tensors are not part of this model" in record.message
    assert all(name in record.message for name in extra)


def test_tensors_beside_the_text_model_are_named_too_and_never_stand_in_for_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("clean", "strays"):
        (tmp_path / name).mkdir()
    clean = load(write(tmp_path / "clean", state()))
    strays = {"norm.weight": torch.full_like(state()["model.norm.weight"], 9.0), "language_model.foo.weight": torch.zeros(3)}
    others = {"vision_tower.x.weight": torch.zeros(2), "model.embed_audio.y.weight": torch.zeros(2)}
    with caplog.at_level(logging.WARNING, "lastrow"):
        weights = load(write(tmp_path / "strays", state() | strays | others))
    [record] = caplog.records
    assert all(name in record.message for name in strays) and not any(name in record.message for name in others)
    assert torch.equal(weights.norm, clean.norm)


# -------------------------------------------------------------------------------------------------------- bad files
def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(WeightsError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    for part in parts:
        assert part in message


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = state("model.language_model.")
    for name in ("layers.1.mlp.up_proj.weight", "norm.weight"):
        del tensors["model.language_model." + name]
    refused(
        write(tmp_path, tensors),
        "2 tensors are missing",
        "model.language_model.layers.1.mlp.up_proj.weight",
        "model.language_model.norm.weight",
    )


def test_a_long_list_of_missing_tensors_is_cut(tmp_path: Path) -> None:
    refused(write(tmp_path, {"model.embed_tokens.weight": state()["model.embed_tokens.weight"]}), "and", "more")


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = state()
    tensors["model.layers.3.self_attn.o_proj.weight"] = torch.zeros(24, 16)
    refused(write(tmp_path, tensors), "model.layers.3.self_attn.o_proj.weight is [24, 16], the config asks for [16, 24]")


@pytest.mark.parametrize("keep", [0, 5, 4000], ids=["empty", "cut in the header length", "cut in the data"])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    file = write(tmp_path, state()) / "model.safetensors"
    assert file.stat().st_size > 4000
    file.write_bytes(file.read_bytes()[:keep])
    refused(tmp_path, "model.safetensors: not a complete safetensors file", "download it again")


def test_an_absent_file_and_an_absent_shard_are_named(tmp_path: Path) -> None:
    refused(tmp_path, "model.safetensors: no such file")
    write_sharded(tmp_path, state())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors: no such file")


@pytest.mark.parametrize("file", ["1", '"../../etc/passwd"', '"/etc/passwd"', '"sub/model.safetensors"', '""'])
def test_an_index_that_names_anything_but_a_file_of_the_folder_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": {file}}}}}', encoding="utf-8")
    with pytest.raises(WeightsError, match=r"index\.json: weight_map names .*: the name of a file in the same folder is needed$"):
        load(tmp_path)


def test_quantized_tensors_are_named(tmp_path: Path) -> None:
    tensors = state()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    with pytest.raises(WeightsError, match=r"1 tensors are no 16- or 32-bit numbers: model\.norm\.weight is I8; quantized"):
        load(write(tmp_path, tensors))


@pytest.mark.parametrize("index", ["{", "[]", '{"metadata": {}}'])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    refused(tmp_path, "model.safetensors.index.json: not a safetensors index")


# ------------------------------------------------------------------------------------------------------ dtype, memory
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_arrive_in_the_dtype_that_was_asked_for(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in state().items()}
    weights = load(write(tmp_path, tensors), wanted)
    found = state_from_weights(CONFIG, weights)
    for name, tensor in found.items():
        if name != "model.embed_tokens_per_layer.weight":
            assert tensor.dtype is wanted, name
            assert torch.equal(tensor, tensors[name].to(wanted)), name


def test_the_ple_table_in_host_memory_is_the_mapped_file_in_its_own_dtype(tmp_path: Path) -> None:
    """4.7 GB in E2B: it must not be copied or converted on loading. Mapped pages show the file's later content, a copy would not."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in state().items()}
    table = load(write(tmp_path, tensors), torch.float32, ple_device="cpu").ple_table
    assert table is not None and table.dtype is torch.bfloat16
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    stored = tensors["model.embed_tokens_per_layer.weight"].view(torch.int16).numpy().tobytes()
    with open(file, "r+b") as handle:
        handle.seek(content.index(stored))
        handle.write(bytes(len(stored)))
    assert not table.any()


def test_a_bf16_table_feeds_an_fp32_model(tmp_path: Path) -> None:
    tensors = state()
    name = "model.embed_tokens_per_layer.weight"
    tensors[name] = tensors[name].to(torch.bfloat16)
    ids = [3, 1, 4, 1, 5]
    mapped = load(write(tmp_path, tensors))
    converted = load(tmp_path)
    assert converted.ple_table is not None
    converted.ple_table = converted.ple_table.float()
    logits = [DirectRunner(Gemma4Model(CONFIG, w, ReferenceOps(), 64), 16).all_logits(ids) for w in (mapped, converted)]
    assert torch.equal(*logits)  # bf16 -> fp32 is exact, on whichever side of the gather


# -------------------------------------------------------------------------------------------------------------- names
def test_expected_names_of_experts_are_those_of_the_spec() -> None:
    """Spec section 3: neither expert tensor ends in `.weight`; full layers have no v_proj."""
    config = from_dict(G26B)
    layer = layer_shapes(config, 0)
    assert layer["experts.gate_up_proj"] == (128, 1408, 2816) and layer["experts.down_proj"] == (128, 2816, 704)
    assert layer["router.proj.weight"] == (128, 2816) and layer["router.scale"] == (2816,)
    assert "self_attn.v_proj.weight" in layer and "self_attn.v_proj.weight" not in layer_shapes(config, 5)


@pytest.mark.parametrize("name", ["E2B", "E4B", "31B", "26B-A4B"])
def test_expected_names_and_shapes_are_those_of_the_transformers_class(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    text = PUBLISHED[name]
    hf_config = transformers.Gemma4TextConfig(**{key: value for key, value in text.items() if key != "model_type"})
    with torch.device("meta"):
        hf = transformers.Gemma4ForCausalLM(hf_config)
    theirs = {key: tuple(tensor.shape) for key, tensor in hf.state_dict().items() if key != "lm_head.weight"}
    assert theirs == {f"model.{key}": shape for key, shape in expected_shapes(from_dict(text)).items()}


def test_dummy_weights_repeat_with_their_seed_and_keep_activations_in_range() -> None:
    first, again, other = (dummy_weights(CONFIG, PACK, torch.float32, "cpu", seed=s) for s in (1, 1, 2))
    assert torch.equal(first.layers[2].gate_up, again.layers[2].gate_up) and not torch.equal(
        first.layers[2].gate_up, other.layers[2].gate_up
    )
    hidden = DirectRunner(Gemma4Model(CONFIG, first, ReferenceOps(), 64), 64).all_logits(list(range(3, 50)))
    assert torch.isfinite(hidden).all() and 0.1 < float(hidden.std()) < 10
