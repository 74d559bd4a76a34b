"""Products of few rows whose sums are not split: are their bits those of the vendor's large matmul, and what does a tile cost?

    PYTHONPATH=src python tools/gpu/whole_sums.py > whole-sums.jsonl

What batch_invariant stands on (`split_linear.split_config(whole=True)`). A line of JSON per weight of E2B and number of rows: for each tile
[equal bits, us], us only for 1 and 64 rows, in a CUDA graph over copies of the weight, so that the L2 cache does not answer. Beside them
the split sums of the default mode, the tiles of matmul.py and the vendor's matmul."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F

from lastrow.kernels import matmul, split_linear
from lastrow.kernels._triton import TensorDescriptor, cdiv
from lastrow.kernels.split_linear import SplitConfig

H, LARGE = 1536, 16384
WEIGHTS = {
    "qkv, 256": (2560, H), "qkv, 512": (5120, H), "q, 256": (2048, H), "q, 512": (4096, H), "o, 256": (H, 2048), "o, 512": (H, 4096),
    "down, 6144": (H, 6144), "down, 12288": (H, 12288), "ple gate": (256, H), "ple projection": (H, 256), "ple before the cut": (3840, H),
    "ple behind it": (5120, H), "kv": (512, H),
}  # fmt: skip
TILES = [
    SplitConfig(64, 128, 1, 4), SplitConfig(64, 128, 1, 6), SplitConfig(64, 128, 1, 8), SplitConfig(64, 128, 1, 3, 2),
    SplitConfig(64, 256, 1, 4), SplitConfig(32, 128, 1, 8), SplitConfig(32, 256, 1, 4), SplitConfig(16, 128, 1, 12),
    SplitConfig(16, 256, 1, 6), SplitConfig(16, 128, 1, 8, 2), SplitConfig(128, 128, 1, 4),
]  # fmt: skip


def multiply(x: torch.Tensor, weight: torch.Tensor, c: SplitConfig) -> torch.Tensor:
    """As split_linear.triton with this tile, [1, M, N]."""
    (m, k), n = x.shape, weight.shape[0]
    rows = 16 if m <= 16 else 32 if m <= 32 else 64
    out = torch.empty(1, m, n, device=x.device, dtype=torch.float32)
    x_desc = TensorDescriptor(x, [m, k], [k, 1], [rows, c.k])
    w_desc = TensorDescriptor(weight, [n, k], [k, 1], [c.n, c.k])
    split_linear.split_linear_kernel[(cdiv(n, c.n), 1)](
        x_desc, w_desc, weight, k, out, m, n, rows, c.n, c.k, k, False, c.stages, c.ahead, "tf32", True, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out


def microseconds(call: Callable[[torch.Tensor], Any], weights: list[torch.Tensor]) -> float:
    """Median of five replays, of one call."""

    def run() -> None:
        for weight in weights:
            call(weight)

    run()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return round(sorted(times)[2] / len(weights) * 1e3, 2)


def main() -> None:
    for name, (n, k) in WEIGHTS.items():
        copies = max(2, min(12, int(4e8 / (2 * n * k))))
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for _ in range(copies)]
        x = torch.randn(LARGE, k, device="cuda", dtype=torch.bfloat16)
        expected = F.linear(x, weights[0])

        def compiled(case: tuple[int, SplitConfig], x: torch.Tensor = x, weights: list[torch.Tensor] = weights) -> str | None:
            try:
                multiply(x[: case[0]].contiguous(), weights[0], case[1])
            except Exception as error:  # a tile that does not fit is a result, too
                return str(error).splitlines()[0][:60]
            return None

        cases = [(rows, tile) for rows in (1, 5, 16, 64) for tile in TILES]
        with ThreadPoolExecutor(16, initializer=torch.cuda.set_device, initargs=(0,)) as threads:
            failed = dict(zip(cases, threads.map(compiled, cases), strict=True))
        torch.cuda.synchronize()
        for rows in (1, 5, 16, 64):
            few, timed = x[:rows].contiguous(), rows in (1, 64)
            line: dict[str, Any] = {"weight": name, "rows": rows}
            others = {"vendor": lambda w, few=few: F.linear(few, w), "matmul": lambda w, few=few: matmul.triton(few, w)}
            for tile in TILES:
                label = f"{tile.n} x {tile.k}, {tile.stages} stages, {tile.ahead} ahead"
                if failed[rows, tile]:
                    line[label] = failed[rows, tile]
                    continue
                equal = torch.equal(multiply(few, weights[0], tile)[0].bfloat16(), expected[:rows])
                us = microseconds(lambda w, few=few, tile=tile: multiply(few, w, tile), weights) if timed else None
                line[label] = [equal, us]
            for label, call in others.items():
                line[label] = [torch.equal(call(weights[0]), expected[:rows]), microseconds(call, weights) if timed else None]
            if timed:
                splits = split_linear.split_config(n, k, rows=rows).splits
                line["split"] = [splits, microseconds(lambda w, few=few: split_linear.triton(few, w), weights)]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
