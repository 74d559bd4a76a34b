"""The operations of one NVIDIA card: Triton kernels beside the vendor's matmuls, behind the names of ReferenceOps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F

from lastrow.kernels import (
    add_norm,
    attention,
    attention_rows,
    centroid_head,
    copy_tokens,
    decode_attention,
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
from lastrow.kernels._triton import HAS_TRITON, INTERPRETED
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rows import QueryRows

VENDOR_K = 2048
"""Longest sum that the vendor's matmuls were never seen to split (65 row counts of all E2B shapes, torch 2.11, H200)."""
VENDOR_ROWS = 1000
"""Rows from which they were never seen to split any sum."""
MAX_DECODE_ROWS = 64
"""As far as one launch was measured against three (64 rows: 2.60 against 2.73 ms a step)."""
MAX_KV_HEADS = 64
DTYPES = (torch.bfloat16, torch.float32)


class TritonOps:
    """`counts`: kernel -> calls. batch_invariant: `linear` never lets the number of rows choose a row's order of summation;
    which attention kernel reads a row is then said by `QueryRows.plan`."""

    name = "triton"
    pack_gate_up = staticmethod(geglu.pack)
    unpack_gate_up = staticmethod(geglu.unpack)

    def __init__(
        self,
        batch_invariant: bool = False,
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        check_device(torch.device(device), dtype)
        self.dtype = dtype
        self.batch_invariant = batch_invariant
        self.counts: Counter[str] = Counter()
        self._ws = self._decode_warps = None
        if not INTERPRETED:
            from lastrow.kernels import attention_ws, decode_attention_warps  # Gluon: neither on laptops nor in the interpreter

            self._ws, self._decode_warps = attention_ws, decode_attention_warps
        self._counters: dict[torch.device, torch.Tensor] = {}

    def token_fields(self, *args, **kwargs):
        self.counts["token_fields"] += 1
        token_fields.triton(*args, **kwargs)

    def embedding(self, ids, table, scale, norm_weight, eps):
        self.counts["embedding"] += 1
        return embedding.triton(ids, table, scale, norm_weight, eps)

    def ple_inputs(self, context, ids, table, norm_weight, first_layer, hidden_size, eps):
        self.counts["ple_inputs"] += 1
        return ple_inputs.triton(context, ids, table, norm_weight, first_layer, hidden_size, eps)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [M, K] @ weight [N, K].T. The vendor's matmul; with batch_invariant ours where the vendor's may split K."""
        if self.batch_invariant and x.shape[1] > VENDOR_K and x.shape[0] < VENDOR_ROWS and x.dtype is not torch.float32:
            self.counts["matmul"] += 1
            return matmul.triton(x, weight)
        self.counts["linear"] += 1
        return F.linear(x, weight)

    def deferred_linear(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        """`linear` for another operation of this class to read. For few rows partial sums [splits, M, N] fp32 (split_linear.py),
        which add_norm, qkv_epilogue, ple_inputs and ple_gate add up on their way in; with batch_invariant the one whole sum."""
        if self._has_few_rows(x):
            self.counts["split_linear"] += 1
            return split_linear.triton(x, weight, whole=self.batch_invariant)
        return self.linear(x, weight)

    def _has_few_rows(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= split_linear.MAX_ROWS and x.dtype is torch.bfloat16

    def qkv_epilogue(
        self, qkv, positions, rope, q_weight, head_dim, eps, k_weight: Any = None, kv=None, slots: Any = None, kv_heads=0, k_eq_v=False
    ):
        self.counts["qkv_epilogue"] += 1
        # four warps are quicker for few tokens, with other sums
        warps = 4 if qkv.shape[-2] <= split_linear.MAX_ROWS and not self.batch_invariant else 1
        return qkv_epilogue.triton(qkv, positions, rope, q_weight, head_dim, eps, k_weight, kv, slots, kv_heads, k_eq_v, warps=warps)

    def copy_tokens(self, kv, copies):
        self.counts["copy_tokens"] += 1
        copy_tokens.triton(kv, copies)

    def fuses_decode(self, rows: QueryRows) -> bool:
        """True where `decode_attention` reads these rows: few of them, one per sequence. Its bits are not those of `attention`,
        so batch invariance does without it."""
        single = rows.num_single == len(rows.q_lens) == rows.num_rows
        return single and not self.batch_invariant and rows.plan != "tiled" and 0 < rows.num_rows <= MAX_DECODE_ROWS

    @property
    def has_gemv(self) -> bool:
        return not self.batch_invariant and self.dtype is torch.bfloat16

    def gemv(self, x, weight, **around):
        self.counts["gemv"] += 1
        return gemv.triton(x, weight, pdl=x.is_cuda, **around)

    def attention(self, q: torch.Tensor, kv: PagedKV, rows: QueryRows, block_table: torch.Tensor, window: int) -> torch.Tensor:
        """As attention.reference; `rows` says which sequences go to which kernel (two launches in a mixed batch)."""
        out = torch.empty_like(q)
        split = sum(rows.q_lens[: rows.num_split_sequences])
        if split:
            self.counts["attention_rows"] += 1
            chunk = attention_rows.CHUNK if self.batch_invariant else attention_rows.chunk_size(rows.max_kv_len, attention_rows.CHUNK)
            attention_rows.triton(q[:split], kv, rows, block_table, window, out=out[:split], chunk=chunk)
        if split < sum(rows.q_lens):
            ws = self._ws if self._ws is not None and self._ws.supported(q, kv) else None
            self.counts["attention_ws" if ws else "attention"] += 1
            (ws or attention).triton(q, kv, rows, block_table, window, out=out)
        return out

    def decode_attention(self, qkv, rows, rope, q_weight, head_dim, eps, kv, block_table, window, k_weight=None, slots=None, k_eq_v=False):
        """As decode_attention.reference: `qkv_epilogue` and `attention` in one launch, for at most MAX_DECODE_ROWS rows of as
        many sequences. Not with batch_invariant: its splits are smaller than those of `attention`."""
        config = None
        if self._decode_warps is not None and decode_attention.warps_supported(qkv, q_weight, kv, k_weight is not None, k_eq_v):
            config = decode_attention.warps_config(rows.num_rows * kv.k.shape[2], rows.max_kv_len, window, head_dim)
        kernel: Any = decode_attention if config is None else self._decode_warps
        self.counts["decode_attention" if config is None else "decode_attention_warps"] += 1
        if qkv.device not in self._counters:
            self._counters[qkv.device] = torch.zeros(MAX_DECODE_ROWS * MAX_KV_HEADS, dtype=torch.int32, device=qkv.device)
        return kernel.triton(
            qkv, rows, rope, q_weight, head_dim, eps, kv, block_table, window, k_weight, slots, k_eq_v,
            counters=self._counters[qkv.device], pdl=split_linear.use_pdl(qkv), config=config,
        )  # fmt: skip

    def add_norm(self, h, x, post_weight, pre_weight, scalar, eps):
        """x is overwritten."""
        self.counts["add_norm"] += 1
        return add_norm.triton(h, x, post_weight, pre_weight, scalar, eps)

    def geglu(self, h, gate_up):
        self.counts["geglu"] += 1
        if self._has_few_rows(h):
            return split_linear.triton(h, gate_up, geglu=True)
        return geglu.triton(h, gate_up, self.linear)

    def ple_gate(self, gate, ple, index):
        self.counts["ple_gate"] += 1
        return ple_gate.triton(gate, ple, index)

    def head(self, h, table, cap):
        self.counts["head"] += 1
        return head.triton(h, table, cap, self.linear)

    def softcap(self, logits, cap):
        self.counts["softcap"] += 1
        return head.triton_softcap(logits, cap)

    def row_logsumexp(self, logits):
        self.counts["row_logsumexp"] += 1
        return head.triton_row_logsumexp(logits)

    def argmax(self, logits):
        self.counts["argmax"] += 1
        return head.triton_argmax(logits)

    def head_labels(self, h, table, label_ids, cap):
        self.counts["head_labels"] += 1
        return head.triton_labels(h, table, label_ids, cap)

    def head_logsumexp(self, h, table, cap):
        self.counts["head_logsumexp"] += 1
        return head.triton_logsumexp(h, table, cap)

    def centroid_head(self, y, centroids, clusters, cluster_ids, top_k):
        self.counts["centroid_head"] += 1
        return centroid_head.triton(y, centroids, clusters, cluster_ids, top_k)


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError, naming the flag, where the kernels do not run."""
    if not HAS_TRITON:
        raise ValueError("--backend triton: triton is not installed; pip install 'lastrow[gpu]' or use --backend reference")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {str(dtype).removeprefix('torch.')}: --backend triton runs bfloat16 and float32")
    if INTERPRETED:
        return
    if device.type != "cuda" or torch.version.hip:
        raise ValueError(f"--device {device}: --backend triton needs an NVIDIA GPU; use --backend reference")
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        raise ValueError(
            f"--device {device}: compute capability {capability[0]}.{capability[1]}, --backend triton needs 9.0 or newer "
            "(its kernels load tiles by TMA); use --backend reference"
        )
