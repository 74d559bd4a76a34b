"""The per-layer table stays in its file: start-up does not read it, and what is computed from it is what a copy gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lastrow.config import EngineConfig
from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.llm import LLM
from lastrow.engine.memory import forecast
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.models.config import ConfigError, from_file
from lastrow.models.shapes import named_shape
from lastrow.weights.dummy import dummy_weights
from lastrow.weights.names import global_shapes

WIDTH = 4096  # of one layer's embedding: 4,096 tokens x 10 layers x 4,096 in bf16 are 336 MB
PROMPT = [2, 5, 700, 900, 1100, 4000, 300, 2000]
TOUCHED = (
    "import sys; sys.path.insert(0, {src!r})\n"
    + '''
import json, re
from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.llm import LLM
def mapped():
    """Resident bytes of the checkpoint's mapping."""
    total, inside = 0, False
    for line in open("/proc/self/smaps"):
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.rstrip().endswith("model.safetensors")
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
llm = LLM({folder!r}, embed_weights="host", dtype="float32", kv_cache_memory_bytes=1_000_000, max_num_seqs=4, max_num_batched_tokens=64)
loaded = mapped()
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
out = llm.generate({{"prompt_token_ids": {prompt!r}}}, params, use_tqdm=False)[0]
rss = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([loaded, mapped(), rss, out.outputs[0].token_ids, out.outputs[0].cumulative_logprob]))
'''
)


@pytest.fixture(scope="module")
def wide(tiny_e: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-e with random per-layer embeddings 128 times as wide."""
    folder = tmp_path_factory.mktemp("wide")
    for file in tiny_e.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != "config.json":
            (folder / file.name).symlink_to(file)
    raw = json.loads((tiny_e / "config.json").read_text(encoding="utf-8"))
    raw["text_config"]["hidden_size_per_layer_input"] = WIDTH
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config = from_file(folder)
    with safe_open(tiny_e / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is no mapping
    generator = torch.Generator().manual_seed(0)

    def new(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, scale, generator=generator)

    for name, shape in global_shapes(config).items():
        if "per_layer" in name:
            key = f"model.language_model.{name}"
            tensors[key] = new(shape, 0.02) if "norm" not in name else torch.ones(shape, dtype=torch.bfloat16)
    for i in range(config.num_hidden_layers):
        prefix = f"model.language_model.layers.{i}."
        tensors[prefix + "per_layer_input_gate.weight"] = new((WIDTH, config.hidden_size), 0.05)
        tensors[prefix + "per_layer_projection.weight"] = new((config.hidden_size, WIDTH), 0.05)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_start_up_leaves_the_table_in_the_file_and_answers_are_those_of_a_copy(wide: Path) -> None:
    script = TOUCHED.format(src=str(Path(__file__).parent.parent.parent / "src"), folder=str(wide), prompt=PROMPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    loaded, after, peak, tokens, logprob = json.loads(run.stdout.splitlines()[-1])
    size = (wide / "model.safetensors").stat().st_size
    table = 4096 * 10 * WIDTH * 2
    rest = size - table  # is read once, to become fp32
    assert table > 330_000_000 and loaded < rest + table // 10
    # 11 tokens are looked up, at 81,920 bytes a row; the system maps what it has cached around a touched page, up to 2 MiB
    assert after - loaded + 65_536 >= 11 * 10 * WIDTH * 2 and after - loaded <= 11 * (10 * WIDTH * 2 + 2 * 2**20)
    assert peak < 4 * rest + table  # torch, fp32 weights and all: less than with a second copy of the table
    # the same with the whole table copied into memory in fp32
    llm = LLM(str(wide), dtype="float32", kv_cache_memory_bytes=1_000_000, max_num_seqs=4, max_num_batched_tokens=64)
    weights = llm.engine.runner.model.weights
    assert weights.ple_table.dtype is torch.bfloat16
    weights.ple_table = weights.ple_table.float().clone()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as over there: BLAS divides a batched product among threads, and a sum's order with it
    try:
        out = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].outputs[0]
    finally:
        torch.set_num_threads(threads)
    assert out.token_ids == tokens and out.cumulative_logprob == logprob


def test_the_plan_counts_the_table_where_it_is() -> None:
    """E2B: 262,144 rows of 35 x 256 bf16 values are 4.7 GB (issue 6)."""
    engine = EngineConfig(shape="e2b", load_format="dummy", kv_cache_memory_bytes=1 << 30).for_device(on_gpu=True)
    config, cpu = named_shape("e2b"), torch.device("cpu")
    card = forecast(engine, config, "bfloat16", cpu, 4096)
    host = forecast(replace(engine, embed_weights="host"), config, "bfloat16", cpu, 4096)
    assert card.weight_bytes - host.weight_bytes == host.host_bytes == 4_697_620_480 and card.host_bytes == 0
    assert "4.38 GiB more in host memory" in host.summary()


def test_dummy_weights_are_the_same_wherever_the_table_is() -> None:
    shape = named_shape("e2b-eighth")
    tables = [dummy_weights(shape, ReferenceOps.pack_gate_up, torch.float32, "cpu", 5, place).ple_table for place in (None, "cpu")]
    assert torch.equal(*tables)


def test_a_model_without_the_table_says_so(tiny_e: Path, tmp_path: Path) -> None:
    raw: dict[str, Any] = json.loads((tiny_e / "config.json").read_text(encoding="utf-8"))
    raw["text_config"] |= {"hidden_size_per_layer_input": 0}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json", "model.safetensors", "generation_config.json", "special_tokens_map.json"):
        (tmp_path / file).symlink_to(tiny_e / file)
    with pytest.raises(ConfigError, match=r"embed_weights is 'host': .* has no per-layer embeddings"):
        LLM(str(tmp_path), embed_weights="host")
    with pytest.raises(ConfigError, match="embed_weights is 'disk': one of device, host"):
        EngineConfig(embed_weights="disk")
