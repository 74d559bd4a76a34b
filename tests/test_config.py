"""EngineConfig refuses with a reason; sizes are read as vLLM reads them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lastrow.config import EngineConfig, parse_size
from lastrow.models.config import ConfigError


def test_defaults_are_valid_and_every_field_has_help() -> None:
    config = EngineConfig()
    assert config.model == "tiny-e" and config.enable_prefix_caching
    assert all(item.metadata.get("help") for item in dataclasses.fields(config) if item.name != "model")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float8"}, "dtype is 'float8': one of auto, bfloat16, float32"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
        ({"kv_cache_dtype": "int4"}, "int8_per_token_head"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0: a positive integer"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_model_len": -1}, "max_model_len is -1: None or a positive integer"),
        ({"block_size": 24}, "block_size is 24: a power of two"),
        ({"max_num_batched_tokens": 8}, "at least max_num_seqs=256"),
        ({"gpu_memory_utilization": 1.5}, r"share in \(0, 1\]"),
        ({"seed": 2**70}, "64 bits"),
        ({"shape": "e2b"}, "load_format=dummy"),
        ({"shape": "e9b", "load_format": "dummy"}, "e2b-eighth"),
        ({"shape": "e2b", "load_format": "dummy", "revision": "v1"}, "revision is 'v1': only a hub model has revisions"),
        ({"model": ""}, "a folder, a hub id or tiny-e"),
    ],
)
def test_refused_with_name_value_and_what_is_right(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5k", 1500),
        ("1.5K", 1536),
        ("24G", 24 * 2**30),
        ("2m", 2_000_000),
        ("1T", 2**40),
    ],
)
def test_sizes(text: str, value: int) -> None:
    """vLLM's rule: small letters are powers of 1000, capitals of 1024."""
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "k", "3q", "1.0001k ", "1e3", "0.3", "K3", "--"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_size(text)


def test_device_defaults_give_way_to_what_was_given() -> None:
    assert (EngineConfig().for_device(False).block_size, EngineConfig().for_device(True).block_size) == (16, 64)
    given = EngineConfig(block_size=32, max_num_batched_tokens=512, max_prefill_tokens_while_decoding=100)
    assert given.for_device(True) == given
    bounds = [EngineConfig().for_device(on_gpu).max_prefill_tokens_while_decoding for on_gpu in (False, True)]
    assert bounds == [None, 16_384]
    assert EngineConfig(max_num_seqs=10_000).for_device(False).max_num_batched_tokens == 10_000  # every request decodes in one step
