"""The 8-bit formats: what quantization may lose, no NaN from any input on either backend, and both backends on the trained model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.pools import FORMATS, STORAGE, empty_pool
from lastrow.harness.direct import Chunk, DirectRunner
from lastrow.kernels import attention, kv_cache, qkv_epilogue
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kernels.rope import rope_table
from lastrow.kernels.rows import QueryRows
from lastrow.kernels.triton_ops import TritonOps
from lastrow.models.config import from_file
from lastrow.models.gemma4 import Gemma4Model
from lastrow.weights.loader import load_model_weights

pytestmark = pytest.mark.usefixtures("exact_interpreter")

EIGHT_BITS = FORMATS[1:]
D, HEADS, BLOCK, TOKENS = 32, 2, 16, 14
TABLE = torch.tensor([[1, 0]], dtype=torch.int32)
BIG = torch.finfo(torch.float32).max
EXTREMES = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), BIG, -BIG, 3e38, 1e30, 1e-30, 1.2e-38, 1e-45, 65_504.0, 448.0, 1.0)


def activations(kind: str) -> torch.Tensor:
    """[TOKENS, 3 * HEADS * D]: queries, keys, values before their norms."""
    generator = torch.Generator().manual_seed(len(kind))
    x = torch.randn(TOKENS, 3 * HEADS * D, generator=generator)
    if kind == "zeros":
        return torch.zeros_like(x)
    if kind == "one extreme each":
        for t in range(TOKENS):
            x[t, HEADS * D + 7 * t :: 41] = EXTREMES[t]
        return x
    if kind == "nothing but extremes":
        return torch.tensor(EXTREMES)[torch.randint(len(EXTREMES), x.shape, generator=generator)]
    return x * {"huge": 1e38, "tiny": 1e-38, "ordinary": 1.0}[kind]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["zeros", "one extreme each", "nothing but extremes", "huge", "tiny", "ordinary"])
@pytest.mark.parametrize("form", EIGHT_BITS)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_no_input_puts_anything_but_finite_numbers_into_the_pool_or_what_is_read_from_it(backend: str, form: str, kind: str) -> None:
    """Whatever one request stores, another's ordinary query over the same pool stays finite."""
    pool = empty_pool(2, BLOCK, HEADS, D, form, torch.float32, "cpu")
    positions, slots = torch.arange(TOKENS, dtype=torch.int32), torch.arange(BLOCK, BLOCK + TOKENS, dtype=torch.int32)
    rope, ones = rope_table(D, 10_000.0, TOKENS, None, torch.float32, "cpu"), torch.ones(D)
    store = qkv_epilogue.reference if backend == "reference" else qkv_epilogue.triton
    store(activations(kind), positions, rope, ones, D, 1e-6, ones, pool, slots, HEADS)
    assert all(bool(torch.isfinite(t.float()).all()) for t in pool.tensors())
    rows = QueryRows(positions, torch.zeros(TOKENS, dtype=torch.int32), (TABLE, TABLE), (TOKENS,), (TOKENS,), 0)
    q = torch.randn(TOKENS, HEADS, D, generator=torch.Generator().manual_seed(0))
    read = attention.reference if backend == "reference" else attention.triton
    for window in (0, 5):
        assert bool(torch.isfinite(read(q, pool, rows, TABLE, window)).all())


@pytest.mark.parametrize("form", EIGHT_BITS)
def test_values_at_the_end_of_fp32_come_back_finite(form: str) -> None:
    """Found by this test: the largest fp32 over 127, rounded up, times 127 is infinite."""
    values, scale = kv_cache.quantize(torch.tensor([[BIG, -BIG, 1.0, 0.0], [3.38e38, 0.0, 0.0, 1.0]]), STORAGE[form])
    back = values.float() * scale[:, None]
    assert bool(torch.isfinite(back).all()) and back[0, 0] > 2.9e38 and back[0, 1] < -2.9e38
    assert bool(torch.isfinite(back.to(torch.bfloat16)).all())


@pytest.mark.parametrize(("form", "bound"), [("int8_per_token_head", 0.5 / 127), ("fp8_per_token_head", 2.0**-4)])
def test_the_error_of_a_value_is_half_a_quantum(form: str, bound: float) -> None:
    """int8: half a step of absmax/127. fp8 e4m3: 3 mantissa bits, so 2^-4 of the value itself (and 2^-10 of the smallest step below)."""
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 9, 500)[:, None]
    values, scale = kv_cache.quantize(x, STORAGE[form])
    error, largest = (values.float() * scale[:, None] - x).abs(), x.abs().amax(1, keepdim=True)
    allowed = bound * largest if form.startswith("int8") else torch.maximum(bound * x.abs(), largest / 448 * 2.0**-10)
    assert bool((error <= allowed * (1 + 1e-5)).all())
    assert bool((values.float().abs().amax(1) == (127 if form.startswith("int8") else 448)).all())  # the largest value uses the whole range


@pytest.fixture(scope="module")
def models(tiny_e: Path, exact_interpreter: None) -> dict[str, Gemma4Model]:
    torch.set_num_threads(1)
    config, made = from_file(tiny_e), {}
    for ops in (ReferenceOps(), TritonOps(device="cpu", dtype=torch.float32)):
        made[ops.name] = Gemma4Model(config, load_model_weights(tiny_e, config, ops.pack_gate_up, torch.float32, "cpu"), ops, 1024)
    return made


@pytest.mark.parametrize("form", EIGHT_BITS)
def test_the_kernels_say_what_the_reference_says(models: dict[str, Gemma4Model], heldout: list[dict[str, Any]], form: str) -> None:
    """tiny-e, a prompt prefilled in two chunks, then a token decoded: reference against TritonOps, both in 8 bits. Sharing layers read
    their source's scales, or nothing would fit."""
    row = min((row for row in heldout if row["task"] == "yesno"), key=lambda row: len(row["prompt_ids"]))
    ids, n = row["prompt_ids"] + row["output_ids"][:1], len(row["prompt_ids"])
    logits = {}
    for name, model in models.items():
        runner = DirectRunner(model, len(ids) + 16, kv_cache_dtype=form)
        runner.forward([Chunk(ids[:20])])
        parts = [runner.logits([Chunk(ids[20:n], 20, [n - 21])])]
        parts += [runner.logits([Chunk([ids[i]], i, [0])]) for i in range(n, len(ids))]
        logits[name] = torch.cat(parts)
    # sums in another order flip a quantum now and then: 1/127 of a head's largest value (int8), 1/16 of a value (fp8)
    difference = float((logits["reference"] - logits["triton"]).abs().max())
    assert 0 < difference < (0.2 if form.startswith("int8") else 1.0)
    assert logits["triton"].argmax(-1).tolist() == row["output_ids"][:2]
    exact = DirectRunner(models["reference"], len(ids) + 16).all_logits(ids, range(n - 1, len(ids)))
    error = float((logits["reference"] - exact).abs().max())
    assert 1e-4 < error < 2.0 and math.isfinite(error)  # it is another format, and close
