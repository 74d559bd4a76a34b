"""One call of every kernel in the shapes of E2B (and where other code paths open, of its larger siblings)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lastrow.kernels import (
    add_norm,
    attention,
    attention_rows,
    attention_ws,
    centroid_head,
    copy_tokens,
    decode_attention,
    decode_attention_warps,
    embedding,
    geglu,
    gemv,
    head,
    matmul,
    ple_gate,
    ple_inputs,
    qkv_epilogue,
    split_linear,
    token_fields,
)
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rows import QueryRows

BF16, EPS = torch.bfloat16, 1e-6
STORAGE = {"auto": BF16, "int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}


def pool(device: str, kv_heads: int, d: int, form: str, blocks: int = 4, block_size: int = 64) -> PagedKV:
    k, v = (torch.zeros(blocks, block_size, kv_heads, d, device=device, dtype=STORAGE[form]) for _ in "kv")
    if form == "auto":
        return PagedKV(k, v)
    return PagedKV(k, v, *(torch.zeros(blocks, block_size, kv_heads, device=device) for _ in "kv"))


def rows(device: str, q_lens: list[int], block_size: int = 64) -> tuple[QueryRows, torch.Tensor]:
    positions = torch.cat([torch.arange(n) for n in q_lens]).int().to(device)
    index = torch.repeat_interleave(torch.arange(len(q_lens)), torch.tensor(q_lens)).int().to(device)
    table = torch.zeros(len(q_lens), -(-max(q_lens) // block_size), dtype=torch.int32, device=device)
    return QueryRows(positions, index, (table, table), tuple(q_lens), tuple(q_lens)), table


def _new(device: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def _attention(kernel: Callable, heads: int, kv_heads: int, d: int, window: int, form: str, **keys) -> Callable[[str], None]:
    def case(device: str) -> None:
        r, table = rows(device, [16, 130])
        kernel(_new(device, r.num_rows, heads, d), pool(device, kv_heads, d, form), r, table, window, **keys)

    return case


def _elementwise(device: str) -> None:
    for h in (1536, 2560):
        x, w = _new(device, 8, h), _new(device, h)
        add_norm.triton(x, x, w, w, _new(device, 1), EPS)
        add_norm.triton(x, x, w, None, None, EPS)
        embedding.triton(_new(device, 8, dtype=torch.int32), x, 39.25, w, EPS)
    ids = _new(device, 8, dtype=torch.int32)
    ple_inputs.triton(_new(device, 8, 14 * 256), ids, _new(device, 4, 35 * 256), _new(device, 256), 0, 1536, EPS)
    ple_gate.triton(_new(device, 8, 256), _new(device, 8, 14, 256), 3)
    geglu.pairs(_new(device, 8, 12288))


def _qkv(heads: int, kv_heads: int, d: int, form: str, k_eq_v: bool = False) -> Callable[[str], None]:
    def case(device: str) -> None:
        qkv = _new(device, 8, (heads + kv_heads * (1 if k_eq_v else 2)) * d)
        ints, w = _new(device, 8, dtype=torch.int32), _new(device, d)
        rope = _new(device, 64, 2, d // 2)
        qkv_epilogue.triton(qkv, ints, rope, w, d, EPS, w, pool(device, kv_heads, d, form), ints, kv_heads, k_eq_v)

    return case


def _matmul(device: str) -> None:
    for m, config in ((1, matmul.SMALL), (200, matmul.MEDIUM), (2048, matmul.LARGE)):
        matmul.triton(_new(device, m, 1536), _new(device, 2560, 1536), config=config)
    matmul.triton(_new(device, 2048, 1536), _new(device, 12288, 1536), geglu=True, config=matmul.LARGE)


def _head(device: str) -> None:
    table = _new(device, 4096, 1536)
    for r in (1, 64, 200):
        head.triton(_new(device, r, 1536), table, 30.0)
        head.triton_labels(_new(device, r, 1536), table, _new(device, 5, dtype=torch.int64), 30.0)
        head.triton_logsumexp(_new(device, r, 1536), table, 30.0)


def _decode(heads: int, kv_heads: int, d: int, window: int, form: str, own: bool = True, long: bool = False) -> Callable[[str], None]:
    def case(device: str) -> None:
        r, table = rows(device, [1, 1])
        config = decode_attention.decode_config(64, 8192, window) if long else None
        width = heads + (2 * kv_heads if own else 0)
        w, slots = _new(device, d), _new(device, 2, dtype=torch.int32)
        args = (_new(device, 2, width * d), r, _new(device, 64, 2, d // 2), w, d, EPS, pool(device, kv_heads, d, form), table, window)
        keys = dict(k_weight=w, slots=slots) if own else {}
        decode_attention.triton(*args, **keys, counters=_new(device, 128, dtype=torch.int32), pdl=True, config=config)

    return case


def _decode_warps(d: int, window: int, form: str, own: bool = True, **config: Any) -> Callable[[str], None]:
    def case(device: str) -> None:
        r, table = rows(device, [1, 1])
        w, slots = _new(device, d), _new(device, 2, dtype=torch.int32)
        width = (10 if own else 8) * d
        qkv = _new(device, 2, 2, width, dtype=torch.float32)
        args = (qkv, r, _new(device, 64, 2, d // 2), w, d, EPS, pool(device, 1, d, form), table, window)
        keys = dict(k_weight=w, slots=slots) if own else {}
        c = decode_attention.WarpsConfig(4, **config) if config else decode_attention.warps_config(64, 8192, window, d)
        assert c is not None
        decode_attention_warps.triton(*args, **keys, counters=_new(device, 128, dtype=torch.int32), pdl=True, config=c)

    return case


def _gemv(device: str) -> None:
    x, w = _new(device, 1, 1536), _new(device, 1536)
    seam = dict(residual=x, post_weight=w, pre_weight=w, scalar=_new(device, 1), pdl=True)
    gemv.triton(x, _new(device, 2560, 1536), **seam)
    gemv.triton(_new(device, 1, 2048), _new(device, 1536, 2048), pdl=True)
    for k in (4096, 6144, 12288):
        gemv.triton(_new(device, 1, k), _new(device, 1536, k), pdl=True)
    for n in (6144, 12288):
        gemv.triton(x, _new(device, 2 * n, 1536), geglu=True, **seam)
    gemv.triton(x, _new(device, 256, 1536), residual=x, post_weight=w, ple=_new(device, 256), pdl=True)
    gemv.triton(_new(device, 1, 256), _new(device, 1536, 256), pdl=True)
    gemv.triton(x, _new(device, 262144, 1536), **seam)
    x, w = _new(device, 1, 2560), _new(device, 2560)
    gemv.triton(x, _new(device, 20480, 2560), geglu=True, residual=x, post_weight=w, pre_weight=w)


def _split_linear(device: str) -> None:
    for m in (2, 17, 64):
        split_linear.triton(_new(device, m, 1536), _new(device, 2560, 1536))
        split_linear.triton(_new(device, m, 1536), _new(device, 12288, 1536), geglu=True)


def _copy_tokens(device: str) -> None:
    for kv_heads, d, form in ((1, 256, "auto"), (1, 512, "int8_per_token_head"), (2, 256, "auto")):
        copy_tokens.triton(pool(device, kv_heads, d, form), _new(device, 3, 4, dtype=torch.int32))


def _token_fields(device: str) -> None:
    def ints(*shape: int) -> torch.Tensor:
        return _new(device, *shape, dtype=torch.int32)

    for lists in (0, 2):
        parts, tables, out = ints(token_fields.PART_FIELDS + lists, 3), ints(2, 65, 128), ints(token_fields.TOKEN_FIELDS, 2048)
        token_fields.triton(ints(2048), parts, ints(64), tables, ints(65), ints(65, 17), 64, out, ints(lists), ints(lists, 128 * lists, 5))


def _centroid_head(device: str) -> None:
    top = _new(device, 4, 32, dtype=torch.int64)
    centroid_head.triton_gather(_new(device, 4, 256), _new(device, 2048, 128, 256), top)


CASES: dict[str, Callable[[str], None]] = {
    "elementwise": _elementwise,
    "matmul": _matmul,
    "gemv": _gemv,
    "head": _head,
    "split_linear": _split_linear,
    "centroid_head": _centroid_head,
    "copy_tokens": _copy_tokens,
    "token_fields": _token_fields,
}
for _form in STORAGE:
    CASES |= {
        f"decode sliding {_form}": _decode(8, 1, 256, 512, _form),
        f"decode full {_form}": _decode(8, 1, 512, 0, _form),
        f"decode long {_form}": _decode(8, 1, 512, 0, _form, long=True),
        f"qkv sliding {_form}": _qkv(8, 1, 256, _form),
        f"qkv full {_form}": _qkv(8, 1, 512, _form),
        f"attention sliding {_form}": _attention(attention.triton, 8, 1, 256, 512, _form),
        f"attention full {_form}": _attention(attention.triton, 8, 1, 512, 0, _form),
        f"rows sliding {_form}": _attention(attention_rows.triton, 8, 1, 256, 512, _form),
        f"rows full {_form}": _attention(attention_rows.triton, 8, 1, 512, 0, _form),
    }
for _form in list(STORAGE)[1:]:
    CASES |= {
        f"warps sliding {_form}": _decode_warps(256, 512, _form),
        f"warps sliding sharing {_form}": _decode_warps(256, 512, _form, own=False),
        f"warps full {_form}": _decode_warps(512, 0, _form),
    }
CASES |= {
    "ws sliding": _attention(attention_ws.triton, 8, 1, 256, 512, "auto"),
    "ws sliding from registers": _attention(attention_ws.triton, 8, 1, 256, 512, "auto", config=attention_ws.WsConfig(64, 256)),
    "ws full": _attention(attention_ws.triton, 8, 1, 512, 0, "auto"),
    "decode sharing": _decode(8, 1, 256, 512, "auto", own=False),
    "decode 31B": _decode(32, 4, 512, 0, "auto"),
    "qkv 31B sliding": _qkv(32, 16, 256, "auto"),
    "qkv 31B full": _qkv(32, 4, 512, "auto", k_eq_v=True),
    "attention E4B sliding": _attention(attention.triton, 8, 2, 256, 512, "auto"),
    "attention 31B full": _attention(attention.triton, 32, 4, 512, 0, "auto"),
    "attention tiny-e": _attention(attention.triton, 4, 1, 32, 128, "auto"),
}
