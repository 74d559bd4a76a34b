"""The drafter on TritonOps against the drafter on ReferenceOps, over the same K/V."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.compare import relative_error
from kernels.test_triton_ops import TINY
from lastrow.harness.direct import Chunk, DirectRunner
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kernels.rows import QueryRows
from lastrow.kernels.triton_ops import TritonOps
from lastrow.models.assistant_config import AssistantConfig
from lastrow.models.config import FULL, SLIDING
from lastrow.models.gemma4 import Gemma4Model
from lastrow.models.gemma4_assistant import Gemma4Assistant
from lastrow.weights.assistant import dummy_assistant_weights
from lastrow.weights.dummy import dummy_weights

TARGET = replace(TINY, vocab_size=96, vocab_size_per_layer_input=96)
SHAPE = replace(
    TARGET, hidden_size=32, intermediate_size=64, num_hidden_layers=4, layer_types=(SLIDING, SLIDING, SLIDING, FULL),
    num_kv_shared_layers=0, use_double_wide_mlp=False, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
    final_logit_softcapping=None,
)  # fmt: skip
ORDERED = AssistantConfig(SHAPE, backbone_hidden_size=48, num_centroids=12, centroid_top_k=4)
LENGTHS = (40, 7, 1)


def drafter(ops, config: AssistantConfig, dtype: torch.dtype, device: str) -> Gemma4Assistant:
    target = Gemma4Model(TARGET, dummy_weights(TARGET, ops.pack_gate_up, dtype, device, seed=3), ops, 64)
    return Gemma4Assistant(config, dummy_assistant_weights(config, ops.pack_gate_up, dtype, device, seed=4), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ordered", [True, False], ids=["centroids", "dense head"])
def test_drafts_on_triton_are_those_of_the_reference(device: str, dtype: torch.dtype, ordered: bool) -> None:
    config = ORDERED if ordered else AssistantConfig(SHAPE, backbone_hidden_size=48)
    reference = drafter(ReferenceOps(), config, dtype, device)
    kernels = drafter(TritonOps(device=device, dtype=dtype), config, dtype, device)
    runner = DirectRunner(reference.target, 48, sequences=len(LENGTHS))
    hidden = runner.forward([Chunk(torch.randint(3, 90, (n,)).tolist(), 0, [n - 1], i) for i, n in enumerate(LENGTHS)])
    token = runner.model.logits(hidden).argmax(-1).to(torch.int32)
    last = torch.tensor(LENGTHS, dtype=torch.int32, device=device) - 1
    rows = QueryRows(last, torch.arange(3, dtype=torch.int32, device=device), runner.tables, (1,) * 3, LENGTHS, 3)
    with torch.inference_mode():
        expected, got = reference.forward(token, hidden, rows, runner.pool), kernels.forward(token, hidden, rows, runner.pool)
    # fp32: sums of up to 128 terms in another order, four layers deep. bf16: one moved rounding per operation and layer, as in
    # test_triton_ops.py; measured 3.2e-7 and 0.75 %
    allowed = 3e-6 if dtype is torch.float32 else 0.03
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < allowed
    if dtype is torch.float32:
        drafts = kernels.draft(token, hidden, rows, runner.pool, 2)
        assert torch.equal(drafts, reference.draft(token, hidden, rows, runner.pool, 2))
