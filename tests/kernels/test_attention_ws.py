"""The warp-specialised attention kernel against the plain one, whose test holds it to the reference: the same bits."""

from __future__ import annotations

import pytest
import torch

from kernels.compare import relative_error
from kernels.test_attention import BF16, LIMIT, REAL, build, expected, fields
from lastrow.kernels import attention
from lastrow.kernels.rows import QueryRows

pytestmark = pytest.mark.gpu
CASES = {
    **{name: REAL[name] for name in ("E2B sliding", "E2B full", "few rows, long", "few rows, window")},
    # more tiles than programs, so that every program walks several, partial and full ones
    "many prompts, window": ([1024] * 5 + [300, 17], None, 8, 1, 256, 512),
    "many prompts, full": ([1024] * 3 + [300, 17], None, 8, 1, 512, 0),
    "no window at 256": ([2000, 100], None, 8, 1, 256, 0),
    "sixteen heads": ([300], None, 16, 1, 256, 512),
    "one head": ([300, 129], None, 1, 1, 256, 64),
}


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_bits_of_the_plain_kernel(name, parts, persistent):
    from lastrow.kernels import attention_ws

    q, pool, rows, table, window = build(CASES[name], "auto", BF16, "cuda", block_size=64, plan="tiled")
    assert attention_ws.supported(q, pool)
    d = q.shape[2]
    if d == 512 and parts:
        pytest.skip("no shared memory left beside the tiles of head dim 512")
    config = attention_ws.WsConfig(attention_ws.CONFIGS[d].keys, 256, parts=parts, persistent=persistent)
    out = torch.full_like(q, float("nan"))
    attention_ws.triton(q, pool, rows, table, window, out=out, config=config)
    plain = attention.TileConfig(128, config.keys, 256, 8, 1)
    assert torch.equal(out, attention.triton(q, pool, QueryRows(**fields(rows)), table, window, config=plain))
    assert relative_error(out, expected(q, pool, rows, table, window)) < LIMIT[BF16]


def test_other_shapes_are_left_to_the_plain_kernel():
    from lastrow.kernels import attention_ws

    for name, form in (("E4B sliding", "auto"), ("tiny-e", "auto"), ("E2B sliding", "int8_per_token_head")):
        q, pool, *_ = build(REAL[name], form, BF16, "cuda", block_size=64)
        assert not attention_ws.supported(q, pool)


def test_empty_tiles_of_a_graph_bucket_are_passed_over():
    from lastrow.kernels import attention_ws

    q, pool, rows, table, window = build(CASES["many prompts, window"], "auto", BF16, "cuda", block_size=64, plan="tiled")
    whole = attention_ws.triton(q, pool, rows, table, window)
    tiles = rows.tile_list(16)
    padded = torch.cat([tiles[:3], torch.zeros_like(tiles[:200]), tiles[3:], torch.zeros_like(tiles[:7])])
    assert torch.equal(attention_ws.triton(q, pool, QueryRows(**fields(rows, tiles={16: padded})), table, window), whole)
