"""Decode in one launch against the reference's two steps, stored K/V included."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kernels.compare import randn, relative_error
from kernels.pools import FORMATS, filled_pool, query_rows
from lastrow.kernels import attention, decode_attention, qkv_epilogue
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rope import rope_table
from lastrow.kernels.triton_ops import TritonOps

EPS = 1e-6
SMALL = decode_attention.DecodeConfig(32, 16)
# (kv lengths with the new token, heads, kv heads, head dim, window)
CASES = {
    "one split": ([5, 16], 4, 1, 32, 0),
    "several splits": ([41, 1, 33], 4, 1, 32, 0),
    "window across splits": ([45, 17], 8, 2, 32, 20),
    "one query head each": ([34], 2, 2, 64, 0),
}
REAL = {
    "E2B sliding": ([257, 1, 64, 65, 3000], 8, 1, 256, 512),
    "E2B full": ([257, 1, 64, 65, 3000], 8, 1, 512, 0),
    "E4B sliding": ([700, 129], 8, 2, 256, 512),
    "31B full": ([300, 64], 32, 4, 512, 0),
}


def build(name, cases, form, dtype, device, own, k_eq_v=False, block_size=16):
    kv_lens, heads, kv_heads, d, window = cases[name]
    pool, table = filled_pool(kv_lens, block_size, kv_heads, d, form, dtype, device)
    rows = query_rows([[n - 1] for n in kv_lens], table, len(kv_lens))
    width = heads + (kv_heads * (1 if k_eq_v else 2) if own else 0)
    qkv = randn(len(kv_lens), width * d, dtype=dtype, device=device)
    rope = rope_table(d, 1e4, max(kv_lens), None, dtype, device)
    positions = torch.tensor(kv_lens) - 1
    slots = table.cpu()[torch.arange(len(kv_lens)), positions // block_size] * block_size + positions % block_size
    weights = [(randn(d, dtype=torch.float32) * 0.1 + d**-0.25 * 1.5).to(dtype).to(device) for _ in "qk"]
    args = (qkv, rows, rope, weights[0], d, EPS, pool, table, window)
    keys = dict(k_weight=weights[1], slots=slots.int().to(device), k_eq_v=k_eq_v) if own else {}
    return args, keys


def check(args, keys, limit, run=decode_attention.triton, **config):
    qkv, rows, rope, q_weight, d, eps, pool, table, window = args
    copy = PagedKV(*(None if t is None else t.clone() for t in (pool.k, pool.v, pool.k_scale, pool.v_scale)))
    counters = torch.zeros(64, dtype=torch.int32, device=qkv.device)
    got = run(*args, **keys, counters=counters, **config)
    assert not counters.any()
    own = dict(kv=copy, kv_heads=pool.k.shape[2], **keys) if keys else {}
    q = qkv_epilogue.triton(qkv, rows.positions, rope, q_weight, d, eps, **own)
    for mine, theirs in zip(pool.tensors(), copy.tensors(), strict=True):
        assert torch.equal(mine.float(), theirs.float())
    if qkv.dtype is torch.float32:
        expected = decode_attention.reference(*args, **keys)
    else:  # from the epilogue's bf16 queries (test_qkv_epilogue): what is left is the attention
        expected = attention.reference(q.float(), pool, rows, table, window)
    assert relative_error(got, expected) < limit


@pytest.mark.parametrize("own", [True, False], ids=["owner", "sharing"])
@pytest.mark.parametrize("name", CASES)
def test_one_launch_is_epilogue_then_attention(device, name, own):
    # fp32: other summation order, exp2 instead of exp
    check(*build(name, CASES, "auto", torch.float32, device, own), 2e-5, config=SMALL)


@pytest.mark.parametrize("form", FORMATS[1:])
def test_own_key_is_read_back_from_its_8_bit_slot(device, form):
    check(*build("window across splits", CASES, form, torch.float32, device, True), 2e-5, config=SMALL)


@pytest.mark.parametrize("warps", [1, 2])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["several splits", "window across splits", "one query head each"])
def test_steps_in_flight(device, name, form, warps):
    """The path of long contexts; an 8-bit V changes the order of its columns there, by the number of warps."""
    config = decode_attention.DecodeConfig(32, 16, 3, warps)
    check(*build(name, CASES, form, torch.float32, device, True), 2e-5, config=config)


def test_configurations_by_rows_and_length():
    tiles = decode_attention.decode_config
    assert tiles(64, 8192, 512) == tiles(64, 131072, 512) != tiles(64, 512, 512) == tiles(64, 512)
    assert tiles(16, 8192, 512) != tiles(64, 8192, 512)
    assert [(c.chunk, c.keys) for c in (tiles(rows, 8192) for rows in (64, 16, 1))] == [(1024, 16), (1024, 32), (256, 32)]
    assert [(c.chunk, c.keys) for c in (tiles(rows, 2048) for rows in (64, 16, 1))] == [(1024, 32), (256, 32), (128, 32)]
    assert tiles(1, 1024).chunk == tiles(1, 8192, 512).chunk == 32
    warps = decode_attention.warps_config
    full = [warps(rows, 8192, 0, 512) for rows in (64, 16, 1)]
    assert [c and c.splits for c in full] == [4, 16, 64]
    assert warps(64, 1024, 0, 512) is warps(1, 512, 512, 256) is warps(64, 512, 512, 256) is None
    window = [warps(rows, kv_len, 512, 256) for rows in (64, 16, 1) for kv_len in (1024, 131072)]
    assert [c and c.splits for c in window] == [4, 4, 4, 4, 8, 8]


@pytest.mark.parametrize(
    ("form", "heads", "kv_heads", "d", "context", "kernel"),
    [
        ("int8_per_token_head", 8, 1, 512, 4096, "warps"),
        ("fp8_per_token_head", 8, 1, 512, 4096, "warps"),
        ("fp8_per_token_head", 8, 2, 512, 4096, "warps"),
        ("int8_per_token_head", 8, 1, 512, 512, "tiles"),
        ("auto", 8, 1, 512, 4096, "tiles"),
        ("int8_per_token_head", 16, 1, 512, 4096, "tiles"),
        ("int8_per_token_head", 8, 1, 64, 4096, "tiles"),
    ],
)
@pytest.mark.parametrize("own", [True, False], ids=["owner", "sharing"])
def test_which_kernel_reads_the_keys(monkeypatch, form, heads, kv_heads, d, context, kernel, own):
    ran = []
    ops = TritonOps(device="cpu")
    ops._decode_warps = SimpleNamespace(triton=lambda *a, **keys: ran.append(("warps", keys["config"])))
    monkeypatch.setattr(decode_attention, "triton", lambda *a, **keys: ran.append(("tiles", keys["config"])))
    args, keys = build("case", {"case": ([32, 7], heads, kv_heads, d, 0)}, form, torch.bfloat16, "cpu", own)
    rows = replace(args[1], kv_lens=(context, context))
    ops.decode_attention(args[0], rows, *args[2:], **keys)
    config = decode_attention.warps_config(2 * kv_heads, context, 0, d) if kernel == "warps" else None
    assert ran == [(kernel, config)] and (kernel == "tiles" or config is not None)
    assert not TritonOps(batch_invariant=True, device="cpu").fuses_decode(rows)


def test_value_is_the_raw_key_when_asked(device):
    check(*build("several splits", CASES, "auto", torch.float32, device, True, k_eq_v=True), 2e-5, config=SMALL)


def test_a_padding_row_stores_nothing_and_leaves_the_others_alone(device):
    args, keys = build("several splits", CASES, "auto", torch.float32, device, True)
    pool, before = args[6], args[6].k.clone()
    keys["slots"][1] = -1
    got = decode_attention.triton(*args, **keys, counters=torch.zeros(9, dtype=torch.int32, device=device), config=SMALL)
    assert bool(torch.isfinite(got).all())
    assert int((pool.k != before).flatten(2).any(-1).sum()) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("own", [True, False], ids=["owner", "sharing"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_real_shapes_in_bf16(name, form, own, rows):
    args, keys = build(name, REAL, form, torch.bfloat16, "cuda", own, block_size=64)
    window, pool = args[8], args[6]
    for kv_len in (512, 8192):
        config = decode_attention.decode_config(rows, kv_len, window)
        mine = PagedKV(*(None if t is None else t.clone() for t in (pool.k, pool.v, pool.k_scale, pool.v_scale)))
        # as in test_attention: the result is rounded once, the probabilities once
        check((*args[:6], mine, *args[7:]), keys, 4e-3, pdl=rows > 1, config=config)


WARPS = {256: [dict(warps=4), dict(warps=2), dict(warps=8), dict(warps=2, shared=True)],
         512: [dict(warps=4, shared=True), dict(warps=2, shared=True)]}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("own", [True, False], ids=["owner", "sharing"])
@pytest.mark.parametrize("form", FORMATS[1:])
@pytest.mark.parametrize("name", ["E2B sliding", "E2B full", "E4B sliding"])
@pytest.mark.parametrize("pdl", [False, True])
def test_warps_that_stream_keys_of_their_own(name, form, own, pdl):
    from lastrow.kernels import decode_attention_warps  # Gluon: on a card alone

    args, keys = build(name, REAL, form, torch.bfloat16, "cuda", own, block_size=64)
    for config in WARPS[args[4]]:
        for splits in (1, 4, 50):
            mine = PagedKV(*(None if t is None else t.clone() for t in args[6].tensors()))
            check(
                (*args[:6], mine, *args[7:]), keys, 4e-3, decode_attention_warps.triton, pdl=pdl,
                config=decode_attention.WarpsConfig(splits, **config),
            )  # fmt: skip
