"""Both attention kernels against the reference, over the same cases: scattered blocks, leftovers behind a sequence's end,
windows, subsets of rows, several sequences, K/V heads, formats."""

from __future__ import annotations

import pytest
import torch

from kernels.compare import randn, relative_error
from kernels.pools import FORMATS, filled_pool, query_rows
from lastrow.kernels import attention, attention_rows
from lastrow.kernels.attention import TileConfig
from lastrow.kernels.rows import QueryRows, max_tiles

BF16, FP32 = torch.bfloat16, torch.float32
# bf16: the result is rounded once and the probabilities once before the second product (2 * 2^-9 = 3.9e-3 at worst).
# fp32: sums in another order, and exp2 of the interpreter and the card are good to a few units.
LIMIT = {BF16: 4e-3, FP32: 2e-5}

CASES = {
    # name: (kv lengths, positions of the query rows per sequence or None for all, heads, kv heads, head dim, window)
    "whole prompts, odd lengths": ([1, 7, 33], None, 4, 1, 32, 0),
    "window inside a block": ([33, 3], None, 4, 1, 32, 9),
    "exactly one window": ([16, 17], None, 4, 1, 32, 16),
    "a later chunk": ([45], [list(range(29, 45))], 8, 1, 32, 0),
    "subset of rows": ([50, 20], [[0, 3, 17, 31, 49], [5, 19]], 8, 1, 64, 20),
    "last rows": ([50, 16, 1], [[49], [15], [0]], 8, 1, 32, 16),
    "two K/V heads": ([34, 5], None, 4, 2, 32, 0),
    "one query head per K/V head": ([20, 17], None, 2, 2, 32, 12),
    "sixteen heads per K/V head": ([19], None, 16, 1, 32, 0),
    "block boundary": ([16, 32], [[15], [15, 16, 31]], 4, 1, 32, 0),
    "a sequence without rows": ([20, 9, 12], [[19], [], [3, 11]], 4, 1, 32, 0),
    "head dim 256": ([21], [[0, 20]], 8, 1, 256, 8),
    "head dim 512": ([18], [[17]], 8, 1, 512, 0),
}
REAL = {
    "E2B sliding": ([1, 7, 513, 1030, 512], None, 8, 1, 256, 512),
    "E2B full": ([1, 130, 1030], None, 8, 1, 512, 0),
    "E4B sliding": ([700, 129], None, 8, 2, 256, 512),
    "12B sliding": ([300], None, 16, 8, 256, 1024),
    "31B full": ([260], None, 32, 4, 512, 0),
    "few rows, long": ([4097, 2000, 65], [[4096], [0, 1999], [63, 64]], 8, 1, 512, 0),
    "few rows, window": ([4097, 2000, 65], [[4096], [0, 1999], [63, 64]], 8, 1, 256, 512),
    "tiny-e": ([300, 77], None, 4, 1, 32, 128),
}


def build(case, form, dtype, device, block_size=16, **fields):
    kv_lens, positions, heads, kv_heads, d, window = case
    pool, table = filled_pool(kv_lens, block_size, kv_heads, d, form, dtype, device)
    rows = query_rows(positions or [list(range(n)) for n in kv_lens], table, **fields)
    q = randn(rows.num_rows, heads, d, dtype=dtype, device=device, scale=d**-0.25)
    return q, pool, rows, table, window


def build_for(kernel, case, form, dtype, device, **fields):
    """The split kernel, a program per row and split, gets some rows of each sequence instead of all: in the interpreter the first,
    a middle and the last, on the card every eighth, too (all of them at real shapes are minutes each under racecheck)."""
    kv_lens, positions, *rest = case
    if kernel is split and positions is None:
        step = 8 if device == "cuda" else max(kv_lens)
        positions = [sorted({*range(0, n, step), n // 2, n - 1}) for n in kv_lens]
    return build((kv_lens, positions, *rest), form, dtype, device, **fields)


def expected(q, pool, rows, table, window):
    """The reference with fp32 queries: dequantized keys and values, no rounding of its own."""
    return attention.reference(q.float(), pool, rows, table, window)


def tiled(q, pool, rows, table, window, config=None):
    small = TileConfig(16, 16, min(q.shape[2], 256), 4, 1) if q.device.type == "cpu" else None
    rows = QueryRows(**{**{f: getattr(rows, f) for f in rows.__slots__}, "plan": "tiled", "tiles": {}})
    out = torch.full_like(q, float("nan"))
    return attention.triton(q, pool, rows, table, window, out=out, config=config or small)


def split(q, pool, rows, table, window, chunk=32, **config):
    out = torch.full_like(q, float("nan"))
    return attention_rows.triton(q, pool, rows, table, window, out=out, chunk=chunk if q.device.type == "cpu" else 128, **config)


def one_row_at_a_time(q, pool, rows, table, window):
    """In fp64, from the pool's slots: what the reference is held against."""
    out, size, group = torch.empty_like(q, dtype=torch.float64), pool.block_size, q.shape[1] // pool.k.shape[2]
    for i, position in enumerate(rows.positions.tolist()):
        at = torch.arange(max(position - window + 1, 0) if window else 0, position + 1)
        slots = table[int(rows.seq_index[i])][at // size].long() * size + at % size
        k, v = (x.flatten(0, 1)[slots].double().repeat_interleave(group, 1) for x in (pool.k, pool.v))
        out[i] = torch.einsum("hn,nhd->hd", torch.einsum("hd,nhd->hn", q[i].double(), k).softmax(-1), v)
    return out


MANY_ROWS = {  # more than one chunk
    "two chunks": ([150, 70], None, 4, 1, 32, 0),
    "two chunks, two K/V heads": ([150, 70], None, 4, 2, 32, 0),
    "a window smaller than a chunk": ([150, 70], None, 4, 1, 32, 40),
    "a window larger than a chunk": ([230], None, 4, 1, 32, 100),
    "a later chunk in a window": ([230], [list(range(90, 230))], 8, 1, 32, 100),
    "every other row": ([230], [list(range(61, 230, 2))], 4, 1, 32, 50),
    "every other row of all keys": ([200, 3], [list(range(1, 200, 2)), [0, 1, 2]], 4, 1, 32, 0),
}


@pytest.mark.parametrize("path", ["products", "sdpa", "sdpa in bf16"])
@pytest.mark.parametrize("name", [*CASES, *MANY_ROWS])
def test_the_reference_is_the_sum_over_each_rows_keys(monkeypatch, name, path):
    q, pool, rows, table, window = build((CASES | MANY_ROWS)[name], "auto", BF16 if "bf16" in path else FP32, "cpu")
    calls = []
    if path == "products":
        monkeypatch.setattr(attention, "PRODUCT_ROWS", 2)
    elif path == "sdpa":
        monkeypatch.setattr(attention, "SCORES", 0)
    sdpa = attention.F.scaled_dot_product_attention
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or sdpa(*a, **k))
    q = torch.cat([q, torch.full_like(q[:, :1], float("nan"))], 1)[:, :-1]  # out of a wider tensor, as qkv_epilogue gives it
    got = attention.reference(q, pool, rows, table, window)
    several = max(rows.q_lens) > 1 and (path == "sdpa" or pool.k.shape[2] > 1)
    assert bool(calls) == (path == "sdpa in bf16" or several)
    assert relative_error(got.double(), one_row_at_a_time(q, pool, rows, table, window)) < LIMIT[q.dtype]


KERNELS = pytest.mark.parametrize("kernel", [tiled, split])


@KERNELS
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference_in_fp32(device, kernel, name):
    args = build_for(kernel, CASES[name], "auto", FP32, device)
    assert relative_error(kernel(*args), expected(*args)) < LIMIT[FP32]


@KERNELS
@pytest.mark.parametrize("name", ["window inside a block", "two K/V heads", "subset of rows"])
def test_agrees_with_the_reference_in_bf16(device, kernel, name):
    args = build_for(kernel, CASES[name], "auto", BF16, device)
    assert relative_error(kernel(*args), expected(*args)) < LIMIT[BF16]


@KERNELS
@pytest.mark.parametrize("form", FORMATS[1:])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_quantized_pools_are_dequantized_inside(device, kernel, form, dtype):
    """Against the reference on the same stored bytes, so the format's own error does not count."""
    args = build_for(kernel, ([33, 18], None, 4, 2, 32, 12), form, dtype, device)
    assert relative_error(kernel(*args), expected(*args)) < LIMIT[dtype]


@pytest.mark.gpu
@KERNELS
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", REAL)
def test_real_shapes_in_bf16(kernel, form, name):
    args = build_for(kernel, REAL[name], form, BF16, "cuda", block_size=64)
    assert relative_error(kernel(*args), expected(*args)) < LIMIT[BF16]


@KERNELS
def test_a_rows_bits_do_not_depend_on_its_company(device, kernel):
    """Whole prompt, its second half as a later chunk, one row alone, other block numbers: the same bits."""
    dtype = FP32 if device == "cpu" else BF16
    case = ([33, 18], None, 4, 1, 32, 12) if device == "cpu" else ([700, 130], None, 8, 1, 256, 512)
    q, pool, rows, table, window = build(case, "auto", dtype, device, block_size=16 if device == "cpu" else 64)
    whole = kernel(q, pool, rows, table, window)
    n = case[0][0]
    for part in (list(range(n // 2 + 1, n)), [n - 1], [0, n // 2, n - 1])[kernel is split and device == "cpu" :]:
        alone = query_rows([part], table)
        assert torch.equal(kernel(q[part].contiguous(), pool, alone, table, window), whole[part])


def assert_same(a, b):
    """Bits in the interpreter. On the card another kernel or tile may add a row's probabilities in another order: a bf16 rounding
    falls the other way in a few of a thousand values."""
    if a.device.type == "cpu":
        assert torch.equal(a, b)
    else:
        assert relative_error(a, b) < 1e-3 and float((a != b).float().mean()) < 0.02


def test_tile_size_does_not_change_bits(device):
    dtype = FP32 if device == "cpu" else BF16
    args = build(([40, 23], None, 4, 1, 32, 12), "auto", dtype, device)
    keys = 16
    outs = [tiled(*args, config=TileConfig(rows, keys, 32, 4, 1)) for rows in (16, 64)]
    assert_same(*outs)


def test_one_split_gives_the_bits_of_the_tiled_kernel(device):
    dtype = FP32 if device == "cpu" else BF16
    args = build(([30, 5], [[29], [4]], 4, 1, 32, 0), "auto", dtype, device)
    one = split(*args, chunk=64, keys=16)
    assert_same(one, tiled(*args, config=TileConfig(16, 16, 32, 4, 1)))


def test_padding_rows_and_tiles_of_a_graph_bucket_do_no_harm(device):
    """Rows past the real ones have position 0 and the null block; empty tiles store nothing; the bound on keys may be loose."""
    q, pool, rows, table, window = build(([17, 9], None, 4, 1, 32, 12), "auto", FP32, device)
    n, bt = rows.num_rows, 4
    real = QueryRows(**fields(rows, plan="tiled")).tile_list(bt)
    bucket = max_tiles(n + 5, len(rows.q_lens) + 1, bt)
    padded = torch.nn.functional.pad(real, (0, 0, 0, bucket - len(real)))
    assert bucket > len(real)
    grown = QueryRows(**fields(
        rows, plan="tiled", tiles={bt: padded}, kv_lens=(99, 99),
        positions=torch.nn.functional.pad(rows.positions, (0, 5)), seq_index=torch.nn.functional.pad(rows.seq_index, (0, 5)),
    ))  # fmt: skip
    q_grown = torch.cat([q, randn(5, 4, 32, device=device)])
    out = torch.full_like(q_grown, 7.0)
    attention.triton(q_grown, pool, grown, table, window, out=out, config=TileConfig(16, 16, 32, 4, 1))
    assert bool((out[n:] == 7.0).all())
    assert relative_error(out[:n], expected(q, pool, rows, table, window)) < LIMIT[FP32]
    few = split(q_grown, pool, grown, table, window)
    assert relative_error(few[:n], expected(q, pool, rows, table, window)) < LIMIT[FP32] and bool(torch.isfinite(few).all())


def fields(rows: QueryRows, **changes) -> dict:
    return {**{f: getattr(rows, f) for f in rows.__slots__}, "tiles": {}, **changes}


def test_max_tiles_bounds_every_division():
    index, table = torch.arange(40, dtype=torch.int32), torch.zeros(40, 10, dtype=torch.int32)
    for q_lens in ([40], [1] * 40, [17, 23], [1, 38, 1], [16, 16, 8]):
        tiles = QueryRows(index, index, (table, table), tuple(q_lens), tuple(q_lens), plan="tiled").tile_list(16)
        assert len(tiles) <= max_tiles(40, len(q_lens), 16)
        assert sorted((a, a + n) for a, n in tiles[:, :2].tolist())[-1][1] == 40 and tiles[:, 1].sum() == 40


def test_unusable_shapes_are_refused_with_the_reason(device):
    with pytest.raises(ValueError, match=r"block_size is 24: .* multiple of 16"):
        attention.tile_config(32, 24, BF16, False)
    with pytest.raises(ValueError, match="6 query heads on 2 K/V heads"):
        attention.rows_per_tile(6, 2, attention.tile_config(32, 16, BF16, False))
