"""The whole model on TritonOps against ReferenceOps: prefill in one step, in chunks mixed with decodes, and rows alone."""

from __future__ import annotations

import pytest
import torch

from kernels.compare import relative_error
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kernels.gemv import GemvConfig
from lastrow.kernels.rows import QueryRows
from lastrow.kernels.triton_ops import TritonOps, check_device
from lastrow.kv.layout import KVBudget
from lastrow.kv.pool import KVPool
from lastrow.models.batch import ForwardBatch
from lastrow.models.config import FULL, SLIDING, Gemma4Config
from lastrow.models.gemma4 import Gemma4Model
from lastrow.weights.dummy import dummy_weights

TINY = Gemma4Config(
    vocab_size=97, hidden_size=48, num_hidden_layers=4, intermediate_size=80, layer_types=(SLIDING, FULL, SLIDING, FULL),
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, global_head_dim=64, sliding_window=12, max_position_embeddings=128,
    num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=32, vocab_size_per_layer_input=97,
    final_logit_softcapping=30.0,
)  # fmt: skip
BLOCK, BLOCKS = 16, 12


def model(ops, device, dtype):
    weights = dummy_weights(TINY, ops.pack_gate_up, dtype, "cpu", seed=3)
    for owner in [weights, *weights.layers]:
        for name in owner.__slots__:
            if isinstance(value := getattr(owner, name), torch.Tensor):
                setattr(owner, name, value.to(device))
    return Gemma4Model(TINY, weights, ops, 128)


def run(m, steps, ids, form, device, dtype, plans=("auto", "auto")):
    """Each step: [(sequence, first position, end, wanted positions), ...], single rows first -> logits of all wanted rows."""
    pool = KVPool(TINY, KVBudget(BLOCKS, BLOCKS, BLOCK), form, dtype, device)
    table = torch.tensor([[3, 1, 4, 2, 0], [5, 9, 6, 8, 0]], dtype=torch.int32, device=device)
    out = []
    for step in steps:

        def rows(parts, plan):
            flat = [p for _, positions in parts for p in positions]
            return QueryRows(
                torch.tensor(flat, dtype=torch.int32, device=device),
                torch.tensor([s for s, positions in parts for _ in positions], dtype=torch.int32, device=device),
                (table, table), tuple(len(p) for _, p in parts), tuple(p[-1] + 1 for _, p in parts),
                next((i for i, (_, p) in enumerate(parts) if len(p) > 1), len(parts)), plan=plan,
            )  # fmt: skip

        every = rows([(s, list(range(a, b))) for s, a, b, _ in step], plans[0])
        place = {(s, p): i for i, (s, p) in enumerate((s, p) for s, a, b, _ in step for p in range(a, b))}
        wanted = [(s, w) for s, _, _, w in step if w]
        indices = torch.tensor([place[s, p] for s, w in wanted for p in w], device=device) if wanted else None
        slots = table[every.seq_index.long(), every.positions.long() // BLOCK] * BLOCK + every.positions % BLOCK
        input_ids = ids.to(device)[every.seq_index.long(), every.positions.long()]
        behind = rows(wanted, plans[1]) if wanted else None
        hidden = m.forward(ForwardBatch(input_ids, every, (slots, slots), indices, behind), pool)
        if hidden is not None:
            out.append(m.logits(hidden))
    return torch.cat(out)


WHOLE = [[(0, 0, 18, [17]), (1, 0, 8, [2, 6, 7])]]
CHUNKED = [[(0, 0, 10, [])], [(1, 0, 6, [2]), (0, 10, 17, [])], [(0, 17, 18, [17]), (1, 6, 8, [6, 7])]]


def test_the_model_agrees_with_the_reference_backend(device):
    ids = torch.randint(0, 97, (2, 40))
    expected = run(model(ReferenceOps(), "cpu", torch.float32), WHOLE, ids, "auto", "cpu", torch.float32)
    ops = TritonOps(device=device, dtype=torch.float32)
    got = run(model(ops, device, torch.float32), WHOLE, ids, "auto", device, torch.float32).cpu()
    # fp32 sums in another order through 4 layers; logits are of size 1
    assert relative_error(got, expected) < 1e-4
    assert ops.counts["attention"] and ops.counts["attention_rows"] and ops.counts["qkv_epilogue"]


@pytest.mark.parametrize("form", ["int8_per_token_head"])
def test_chunks_mixed_with_decodes_give_the_bits_of_whole_prompts(device, form):
    """With the plans of batch invariance. On the CPU torch's own matmul changes its sums with the row count, so there the
    comparison is close instead of equal."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    ids = torch.randint(0, 97, (2, 40))
    m = model(TritonOps(True, device, dtype), device, dtype)
    whole = run(m, WHOLE, ids, form, device, dtype, ("tiled", "rows"))
    chunked = run(m, CHUNKED, ids, form, device, dtype, ("tiled", "rows"))
    of_chunked = [(s, p) for step in CHUNKED for s, _, _, w in step for p in w]
    of_whole = [(s, p) for step in WHOLE for s, _, _, w in step for p in w]
    chunked = chunked[[of_chunked.index(row) for row in of_whole]]
    if device == "cpu":
        # a flipped int8 quantum is 1/127 of a head's largest value
        assert relative_error(chunked, whole) < (1e-4 if form == "auto" else 2e-2)
    else:
        assert torch.equal(chunked, whole)


def test_unsupported_devices_and_dtypes_are_named(monkeypatch):
    with pytest.raises(ValueError, match="--dtype float16: --backend triton runs bfloat16 and float32"):
        check_device(torch.device("cuda"), torch.float16)
    monkeypatch.setattr("lastrow.kernels.triton_ops.INTERPRETED", False)
    with pytest.raises(ValueError, match="--device cpu: --backend triton needs an NVIDIA GPU"):
        check_device(torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr("lastrow.kernels.triton_ops.HAS_TRITON", False)
    with pytest.raises(ValueError, match="triton is not installed"):
        check_device(torch.device("cuda"), torch.bfloat16)


ONE_BY_ONE = [[(0, 0, 9, [8])], *([(0, p, p + 1, [p])] for p in range(9, 11))]


def test_one_row_through_the_matrix_vector_chain(device, monkeypatch):
    """A prompt's last row behind the cut, then decoding: the chain of single_row.py against the general path in fp32."""
    if device == "cpu":  # fewer, larger programs: the interpreter's time is their number
        monkeypatch.setattr("lastrow.kernels.gemv.gemv_config", lambda *_, **__: GemvConfig(rows=64))
    ids = torch.randint(0, 97, (2, 40))
    exact = run(model(ReferenceOps(), "cpu", torch.float32), ONE_BY_ONE, ids, "auto", "cpu", torch.float32)
    rounded = run(model(ReferenceOps(), "cpu", torch.bfloat16), ONE_BY_ONE, ids, "auto", "cpu", torch.bfloat16)
    ops = TritonOps(device=device, dtype=torch.bfloat16)
    got = run(model(ops, device, torch.bfloat16), ONE_BY_ONE, ids, "auto", device, torch.bfloat16).cpu()
    assert ops.counts["gemv"] and not ops.counts["add_norm"] > 2 * TINY.num_hidden_layers * 3
    # the same roundings in another order of summation: no further from the exact answer than torch's own bf16 run, times two
    assert relative_error(got, exact) < 2 * relative_error(rounded, exact)
