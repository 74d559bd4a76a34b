"""The ordered head of a drafter: score the groups, then only the tokens of the best groups (spec section 5.3).

The table is stored by group, so that the rows of a chosen group are one contiguous read."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lastrow.kernels._triton import cdiv, jit, next_power_of_2, tl

BLOCK_ROWS = 32  # candidate rows of one program: 32 x 256 bf16 values keep 16 KB of loads in flight
BLOCK_HIDDEN = 256


def group_rows(table: torch.Tensor, token_ordering: torch.Tensor, num_centroids: int) -> tuple[torch.Tensor, torch.Tensor]:
    """table [V, h], token_ordering [V] -> (clusters [C, S, h], cluster_ids [C, S] int32): the head's rows by group."""
    order = token_ordering.long()
    clusters = table[order].view(num_centroids, -1, table.shape[1]).contiguous()
    return clusters, order.view(num_centroids, -1).to(torch.int32)


def top_groups(y: torch.Tensor, centroids: torch.Tensor, top_k: int) -> torch.Tensor:
    """y [N, h], centroids [C, h] -> the top_k best groups of each row, [N, top_k] int64."""
    return F.linear(y, centroids).topk(top_k, -1).indices


def reference(
    y: torch.Tensor, centroids: torch.Tensor, clusters: torch.Tensor, cluster_ids: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [N, h] -> (candidate ids [N, top_k * S] int32, their logits [N, top_k * S] fp32).

    Holds the gathered rows, [N, top_k * S, h]; the kernel does not."""
    top = top_groups(y, centroids, top_k)
    return cluster_ids[top].flatten(1), reference_gather(y, clusters, top).flatten(1)


def reference_gather(y: torch.Tensor, clusters: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """y [N, h], clusters [C, S, h], top [N, k] -> logits of the chosen groups' tokens, [N, k, S] fp32."""
    return torch.einsum("nh,nksh->nks", y.float(), clusters[top].float())


@jit
def gather_gemv_kernel(y, clusters, top, logits, hidden, size, top_k, ROWS: tl.constexpr, COLS: tl.constexpr):
    # one program: ROWS rows of one chosen group against one query
    query, slot, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = tl.load(top + query * top_k + slot)
    row = part * ROWS + tl.arange(0, ROWS)
    base = clusters + (group * size + row)[:, None] * hidden
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, hidden, COLS):
        col = first + tl.arange(0, COLS)
        inside = col < hidden
        weight = tl.load(base + col[None, :], mask=(row < size)[:, None] & inside[None, :], other=0.0)
        x = tl.load(y + query * hidden + col, mask=inside, other=0.0)
        total += tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    tl.store(logits + (query * top_k + slot) * size + row, total, mask=row < size)


def triton(
    y: torch.Tensor, centroids: torch.Tensor, clusters: torch.Tensor, cluster_ids: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as `reference`: candidate rows are streamed once and accumulated in fp32, nothing of size [N, top_k * S, h] exists."""
    top = top_groups(y, centroids, top_k)
    return cluster_ids[top].flatten(1), triton_gather(y, clusters, top).flatten(1)


def triton_gather(y: torch.Tensor, clusters: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """`reference_gather`. The order of a row's sum depends on h alone, never on N."""
    (n, top_k), (size, hidden) = top.shape, clusters.shape[1:]
    logits = torch.empty(n, top_k, size, dtype=torch.float32, device=y.device)
    cols = min(BLOCK_HIDDEN, next_power_of_2(hidden))
    rows = min(BLOCK_ROWS, next_power_of_2(size))
    if n:
        grid = (n, top_k, cdiv(size, rows))
        gather_gemv_kernel[grid](y.contiguous(), clusters, top, logits, hidden, size, top_k, ROWS=rows, COLS=cols)
    return logits
