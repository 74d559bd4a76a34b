"""Variants of the few-row kernels inside a whole decode step: captured, checked against the first, timed interleaved.

    PYTHONPATH=src python tools/gpu/decode_steps.py --out steps.jsonl [--rows 64,16,1] [--context 256]

A kernel that wins alone may lose in the chain (weights loaded ahead, shared memory held by kernels that wait), so configurations are
chosen by the time of the step. `VARIANTS` says which are tried; the first is what the engine uses. A line of JSON per variant: median and
range of the milliseconds of a replay, times the first, and the relative difference of the final hidden state from the first's (0 where
sums keep their order; random weights amplify other orders)."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lastrow.engine.cuda_graphs import CUDAGraphs, GraphBuckets
from lastrow.engine.llm import LLM
from lastrow.kernels import decode_attention, split_linear
from lastrow.kernels.decode_attention import DecodeConfig
from lastrow.kernels.split_linear import SplitConfig

ROUNDS, REPLAYS = 6, 12
CONFIG = split_linear.split_config
Split = Callable[[SplitConfig, int, int, bool], SplitConfig]


@dataclass(frozen=True)
class Variant:
    """split: from the usual configuration of a weight [n, k] (and whether GeGLU follows) to another. attention: of every layer."""

    split: Split | None = None
    attention: DecodeConfig | None = None


def small(**changes: int) -> Split:
    """Changes for weights that are neither gate and up nor a long sum."""
    return lambda c, n, k, geglu: c if geglu or k >= split_linear.LONG_K else replace(c, **changes)


def gate(**changes: int) -> Split:
    return lambda c, n, k, geglu: replace(c, **changes) if geglu else c


def long(**changes: int) -> Split:
    return lambda c, n, k, geglu: replace(c, **changes) if k >= split_linear.LONG_K else c


VARIANTS: dict[str, Variant] = {
    "as it is": Variant(),
    "null": Variant(),
    "gate and up: 128 weight rows": Variant(gate(n=128)),
    "gate and up: 4 stages": Variant(gate(stages=4)),
    "long sums: 8 splits": Variant(long(splits=8)),
    "long sums: 3 stages": Variant(long(stages=3)),
    "others: nothing ahead": Variant(small(ahead=0)),
    "others: one step ahead": Variant(small(ahead=1)),
    "attention: 32 keys a split": Variant(attention=DecodeConfig(32, 32)),
    "attention: 64 keys a split": Variant(attention=DecodeConfig(64, 64)),
    "attention: 128 keys a split": Variant(attention=DecodeConfig(128, 64, 2)),
    "as it is, again": Variant(),
}


@contextmanager
def applied(variant: Variant):
    def split_config(n: int, k: int, geglu: bool = False, *rest: Any) -> SplitConfig:
        usual = CONFIG(n, k, geglu, *rest)
        return usual if variant.split is None else variant.split(usual, n, k, geglu)

    usual = decode_attention.decode_config
    attention = variant.attention
    with (
        mock.patch.object(split_linear, "split_config", split_config),
        mock.patch.object(decode_attention, "decode_config", usual if attention is None else lambda *_: attention),
    ):
        yield


class Steps:
    """Decode steps of one engine without requests: every row reads K/V of its own blocks, `context` tokens long."""

    def __init__(self, shape: str, rows: int, context: int) -> None:
        self.llm = LLM(
            shape=shape, load_format="dummy", max_model_len=2048, max_num_seqs=rows, enable_prefix_caching=False, enforce_eager=True,
            kv_cache_memory_bytes=8 << 30,
        )  # fmt: skip
        self.runner, self.context = self.llm.engine.runner, context
        blocks = -(-context // self.runner.inputs.block_size)
        for table in self.runner.inputs.block_tables:
            table.zero_()
            own = torch.arange(rows * blocks, dtype=torch.int32, device=table.device)
            table[:rows, :blocks] = 1 + own.view(rows, blocks)

    @torch.inference_mode()
    def capture(self, rows: int, variant: Variant) -> tuple[Callable[[], Any], torch.Tensor]:
        """A replay, which writes its fields first, and the hidden state it leaves."""
        inputs, last = self.runner.inputs, self.context - 1
        bucket = 1 << max(last.bit_length(), 9)
        graphs = CUDAGraphs(self.runner.model, self.runner.pool, inputs, GraphBuckets((64,), (rows,), (bucket,)))
        with applied(variant):
            graphs._capture_whole(rows, bucket)
        replay, fields = graphs.whole_step(rows, self.context, follow=False)
        t = fields.t
        index = torch.arange(rows + 1, dtype=torch.int32, device=t["ids"].device)
        # a token each at position `last`, all block table entries known; behind them what stands for padding
        parts = torch.stack((index, torch.full_like(index, last), index, torch.full_like(index, last + 1), torch.zeros_like(index)))

        def fill() -> None:
            t["ids"].copy_(index[:rows] * 977 + 3)
            t["parts"].view(inputs.part_fields, -1)[: len(parts)].copy_(parts)
            t["row_slots"].fill_(inputs.null_slot)

        def run() -> Any:
            fill()  # all graphs read their fields in the same memory
            return replay

        hidden = run()()[0].float().clone()
        return run, hidden


def measure(steps: Steps, rows: int) -> list[dict[str, Any]]:
    made: dict[str, tuple[Callable[[], Any], torch.Tensor]] = {}
    failed: list[dict[str, Any]] = []
    for name, variant in VARIANTS.items():
        try:
            made[name] = steps.capture(rows, variant)
        except Exception as error:  # a configuration that does not fit the card is a result, too
            failed.append({"rows": rows, "variant": name, "error": str(error).splitlines()[0][:200]})
            torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in made}
    for round_ in range(ROUNDS):
        for name in list(made)[:: 1 if round_ % 2 == 0 else -1]:
            replay = made[name][0]()
            replay()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(REPLAYS):
                replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / REPLAYS)
    base, expected = statistics.median(times["as it is"]), made["as it is"][1]
    lines = []
    for name, ms in times.items():
        difference = float((made[name][1] - expected).norm() / expected.norm())
        lines.append({"rows": rows, "context": steps.context, "variant": name, "ms": round(statistics.median(ms), 4),
                      "least": round(min(ms), 4), "most": round(max(ms), 4), "times": round(statistics.median(ms) / base, 4),
                      "difference": difference})  # fmt: skip
    return lines + failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="e2b")
    parser.add_argument("--rows", default="64,16,1")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [int(n) for n in args.rows.split(",")]
    steps = Steps(args.shape, max(rows), args.context)
    for n in rows:
        for line in measure(steps, n):
            text = json.dumps(line)
            print(text, flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as out:
                    out.write(text + "\n")


if __name__ == "__main__":
    main()
