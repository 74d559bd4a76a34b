"""The matmuls with a folded epilogue against matmul and reference epilogue."""

from __future__ import annotations

import pytest
import torch

from kernels.compare import assert_rounded, randn
from kernels.pools import empty_pool
from lastrow.kernels import fused_matmul
from lastrow.kernels.fused_matmul import FusedConfig
from lastrow.kernels.rope import rope_table

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def sizes(device, dtype):
    """On the card bf16 runs the real shapes; fp32 is for the interpreter."""
    if device == "cuda" and dtype is torch.float32:
        pytest.skip("fp32 goes through the separate kernels on the card")
    return device == "cpu"


@DTYPES
@pytest.mark.parametrize("heads, kv_heads", [(4, 1), (2, 2)])
def test_qkv_with_its_epilogue(device, dtype, heads, kv_heads):
    small = sizes(device, dtype)
    t, hidden, d = (37, 96, 32) if small else (1030, 1536, 256)
    h, weight = randn(t, hidden, dtype=dtype, device=device), randn((heads + 2 * kv_heads) * d, hidden, dtype=dtype, device=device)
    positions = torch.randint(0, 90, (t,), dtype=torch.int32).to(device)
    slots = torch.randperm(t).int()
    slots[3] = -1
    rope = rope_table(d, 1e4, 96, None, dtype, device)
    q_weight, k_weight = (randn(d, dtype=dtype, device=device) for _ in "qk")
    pools = [empty_pool(t // 16 + 1, 16, kv_heads, d, "auto", dtype, device) for _ in "ab"]
    args = (h, weight * hidden**-0.5, positions, rope, q_weight, d, 1e-6, k_weight)
    expected = fused_matmul.reference_qkv(*args, pools[0], slots.to(device), kv_heads)
    got = fused_matmul.triton_qkv(*args, pools[1], slots.to(device), kv_heads, config=FusedConfig(16, 32, 2, 4, 2) if small else None)
    # the projection's rounding may fall the other way (1), then as in test_qkv_epilogue (3)
    assert_rounded(got, expected, roundings=4)
    written = slots[slots >= 0].long().to(device)
    assert_rounded(pools[1].k.flatten(0, 1)[written], pools[0].k.flatten(0, 1)[written], roundings=4)
    assert_rounded(pools[1].v.flatten(0, 1)[written], pools[0].v.flatten(0, 1)[written], roundings=2)


@DTYPES
def test_ple_gate_behind_its_matmul(device, dtype):
    small = sizes(device, dtype)
    t, hidden, p = (37, 96, 32) if small else (1030, 1536, 256)
    x, weight, ple = (randn(*s, dtype=dtype, device=device) for s in ((t, hidden), (p, hidden), (t, 3, p)))
    args = (x, weight * hidden**-0.5, ple, 1)
    got = fused_matmul.triton_ple_gate(*args, config=FusedConfig(16, 32, 1, 4, 2) if small else None)
    assert_rounded(got, fused_matmul.reference_ple_gate(*args), roundings=3)  # the projection, gelu, the product
