"""The output head: all logits, or only the rows of some labels, or the logsumexp alone (spec section 2.10)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from lastrow.kernels import matmul
from lastrow.kernels._triton import L2E, cdiv, jit, next_power_of_2, round_to, tl
from lastrow.kernels.attention import softmax_step

VOCAB_CHUNK = 16384
VOCAB_BLOCK = 4096  # ids per program of the argmax


def softcap(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(logits / cap) in fp32; cap None: fp32 logits as they are."""
    logits = logits.float()
    return logits if cap is None else cap * torch.tanh(logits / cap)


def reference(h: torch.Tensor, table: torch.Tensor, cap: float | None) -> torch.Tensor:
    """h [R, H] after the final norm, table [V, H] (unscaled token table) -> softcapped fp32 logits [R, V]."""
    return softcap(matmul.reference(h, table), cap)


def reference_labels(h: torch.Tensor, table: torch.Tensor, label_ids: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Logits [R, n] of label_ids [n] only: n rows of the table are read instead of V."""
    return softcap(F.linear(h, table[label_ids.long()]), cap)


def reference_logsumexp(h: torch.Tensor, table: torch.Tensor, cap: float | None) -> torch.Tensor:
    """log sum exp over the whole vocabulary of the softcapped logits, [R] fp32, without holding [R, V]."""
    total = torch.full((h.shape[0],), float("-inf"), device=h.device)
    for chunk in table.split(VOCAB_CHUNK):
        total = torch.logaddexp(total, torch.logsumexp(softcap(matmul.reference(h, chunk), cap), -1))
    return total


# ----------------------------------------------------------------------------------------------------------- Triton kernels
@jit
def soft_cap(x, cap, HAS_CAP: tl.constexpr):
    """cap * tanh(x / cap), by exp2 so that it runs wherever the kernel does."""
    if HAS_CAP:
        e = tl.exp2(tl.abs(x) * (2.0 * L2E / cap))
        y = cap - 2.0 * cap / (e + 1.0)
        x = tl.where(x < 0, -y, y)
    return x


@jit
def softcap_kernel(x_ptr, out_ptr, cap, size, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, soft_cap(x, cap, HAS_CAP), mask=i < size)


def triton(
    h: torch.Tensor, table: torch.Tensor, cap: float | None, linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear
) -> torch.Tensor:
    """`reference`: `linear`, then one pass to fp32 with the softcap."""
    return triton_softcap(linear(h, table), cap)


def triton_softcap(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """`softcap` as `triton` does it, bit for bit."""
    out = torch.empty(logits.shape, device=logits.device, dtype=torch.float32)
    if out.numel():
        softcap_kernel[(cdiv(out.numel(), 2048),)](logits, out, cap or 1.0, out.numel(), cap is not None, 2048, num_warps=8)
    return out


@jit
def row_logsumexp_kernel(logits_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """program: one row, in blocks of ascending ids."""
    row = logits_ptr + tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    m = -float("inf")
    total = 0.0
    for start in range(0, size, BLOCK):
        x = tl.load(row + start + i, mask=start + i < size, other=-float("inf"))
        m_new = tl.maximum(m, tl.max(x, 0))
        total = total * tl.exp2((m - m_new) * L2E) + tl.sum(tl.exp2((x - m_new) * L2E), 0)
        m = m_new
    tl.store(out_ptr + tl.program_id(0), m + tl.log2(total) / L2E)


def reference_row_logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """logits [R, V] fp32 -> log sum exp of each row, [R]."""
    return torch.logsumexp(logits, -1)


def triton_row_logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """`reference_row_logsumexp` in one order of summation, however many rows there are (torch's reduction divides a row among
    blocks when there are few rows)."""
    out = torch.empty(logits.shape[0], device=logits.device, dtype=torch.float32)
    if out.numel():
        row_logsumexp_kernel[(out.numel(),)](logits, out, logits.shape[1], 4096, num_warps=8)
    return out


@jit
def argmax_kernel(logits_ptr, value_ptr, id_ptr, size, BLOCK: tl.constexpr):
    """program (row, block of ids)."""
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + r * size + i, mask=i < size, other=-float("inf")).to(tl.float32)
    value, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    part = r * tl.num_programs(1) + tl.program_id(1)
    tl.store(value_ptr + part, value)
    tl.store(id_ptr + part, tl.program_id(1) * BLOCK + at)


@jit
def combine_argmax_kernel(value_ptr, id_ptr, out_ptr, parts, size, PARTS: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, PARTS)
    value = tl.load(value_ptr + r * parts + i, mask=i < parts, other=-float("inf"))
    ids = tl.load(id_ptr + r * parts + i, mask=i < parts, other=size)
    first = tl.min(tl.where(value == tl.max(value, 0), ids, size - 1), 0)
    tl.store(out_ptr + r, tl.minimum(first, size - 1).to(tl.int64))  # a row of NaN: some id, not one outside


def reference_argmax(logits: torch.Tensor) -> torch.Tensor:
    """logits [R, V] -> the greedy token of each row, [R] int64; ties go to the lowest id. The softcap changes nothing: it is monotone."""
    return logits.argmax(-1)


def triton_argmax(logits: torch.Tensor) -> torch.Tensor:
    """`reference_argmax` over blocks of ids, so that few rows fill the card, too."""
    rows, size = logits.shape
    parts = cdiv(size, VOCAB_BLOCK)
    value = torch.empty(rows, parts, device=logits.device, dtype=torch.float32)
    ids = torch.empty(rows, parts, device=logits.device, dtype=torch.int32)
    out = torch.empty(rows, device=logits.device, dtype=torch.int64)
    if rows:
        argmax_kernel[(rows, parts)](logits, value, ids, size, VOCAB_BLOCK, num_warps=4)
        combine_argmax_kernel[(rows,)](value, ids, out, parts, size, next_power_of_2(parts), num_warps=1)
    return out


@jit(do_not_specialize=["labels"])
def labels_kernel(
    h_ptr, table_ptr, ids_ptr, out_ptr, labels, cap,
    H: tl.constexpr, BLOCK: tl.constexpr, LABELS: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """program (row, LABELS labels): one pass over the hidden state."""
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    r = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * LABELS + tl.arange(0, LABELS)
    ids = tl.load(ids_ptr + n, mask=n < labels, other=0).to(tl.int64)
    acc = tl.zeros([LABELS, BLOCK], tl.float32)
    for k in tl.range(0, H, BLOCK):
        c = k + tl.arange(0, BLOCK)
        h = tl.load(h_ptr + r * H + c, mask=c < H, other=0.0).to(tl.float32)
        w = tl.load(table_ptr + ids[:, None] * H + c[None, :], mask=(n < labels)[:, None] & (c < H)[None, :], other=0.0)
        acc += w.to(tl.float32) * h[None, :]
    logit = round_to(tl.sum(acc, 1), dtype)
    tl.store(out_ptr + r * labels + n, soft_cap(logit, cap, HAS_CAP), mask=n < labels)


def triton_labels(h: torch.Tensor, table: torch.Tensor, label_ids: torch.Tensor, cap: float | None) -> torch.Tensor:
    """`reference_labels` without gathering: the label rows are read in place. Bits do not depend on R or n."""
    rows, hidden = h.shape
    labels = label_ids.shape[0]
    out = torch.empty(rows, labels, device=h.device, dtype=torch.float32)
    if out.numel():
        block = min(1024, next_power_of_2(hidden))
        labels_kernel[(rows, cdiv(labels, 4))](h, table, label_ids, out, labels, cap or 1.0, hidden, block, 4, cap is not None, num_warps=4)
    return out


@jit(do_not_specialize=["rows"])
def logsumexp_kernel(
    h_ptr, table_ptr, part_ptr, rows, V, cap,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """program (BM rows, part): vocabulary tiles part, part + PARTS, ... of BN ids with a running maximum and sum."""
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    m = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    for n0 in tl.range(part * BN, V, PARTS * BN, flatten=True):
        n = n0 + tl.arange(0, BN)
        acc = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, H, BK, num_stages=STAGES):
            c = k + tl.arange(0, BK)
            h = tl.load(h_ptr + r[:, None].to(tl.int64) * H + c[None, :], mask=(r < rows)[:, None] & (c < H)[None, :], other=0.0)
            w = tl.load(table_ptr + n[:, None].to(tl.int64) * H + c[None, :], mask=(n < V)[:, None] & (c < H)[None, :], other=0.0)
            acc = tl.dot(h, w.T, acc, input_precision=PRECISION)
        s = soft_cap(round_to(acc, dtype), cap, HAS_CAP)
        _, _, m, total = softmax_step(tl.where((n < V)[None, :], s, float("-inf")), m, total)
    tl.store(part_ptr + (r * PARTS + part) * 2, m, mask=r < rows)
    tl.store(part_ptr + (r * PARTS + part) * 2 + 1, total, mask=r < rows)


@jit
def combine_logsumexp_kernel(part_ptr, out_ptr, PARTS: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, PARTS)
    m = tl.load(part_ptr + (r * PARTS + i) * 2)
    total = tl.load(part_ptr + (r * PARTS + i) * 2 + 1)
    top = tl.max(m, 0)
    tl.store(out_ptr + r, top + tl.log2(tl.sum(total * tl.exp2((m - top) * L2E), 0)) / L2E)


def triton_logsumexp(h: torch.Tensor, table: torch.Tensor, cap: float | None, *, parts: int = 256) -> torch.Tensor:
    """`reference_logsumexp` in one pass over the table. `parts` is fixed, so the bits do not depend on R."""
    rows, hidden = h.shape
    part = torch.empty(rows, parts, 2, device=h.device, dtype=torch.float32)
    out = torch.empty(rows, device=h.device, dtype=torch.float32)
    if rows:
        exact = h.dtype is torch.float32
        bm = 16 if exact else 64 if rows <= 64 else 128  # a row's sum has the same order in 64 and in 128
        bn, bk = (32, 32) if exact else (128, 64)
        logsumexp_kernel[(cdiv(rows, bm), parts)](
            h, table, part, rows, table.shape[0], cap or 1.0, hidden, bm, bn, bk, parts, cap is not None,
            "ieee" if exact else "tf32", 4, num_warps=4 if bm <= 64 else 8,
        )  # fmt: skip
        combine_logsumexp_kernel[(rows,)](part, out, parts, num_warps=4)
    return out
