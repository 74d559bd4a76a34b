"""Time every kernel on one card against its reference and its rivals, in one process.

    PYTHONPATH=src python tools/gpu/bench_kernels.py --out kernels.jsonl [--dry] [SECTION...]

A line of JSON per case: median milliseconds and TFLOP/s or TB/s of each variant, timed interleaved in ABBA order (the card is
power-limited and drifts: only interleaved variants compare), and the relative error of each against fp32 torch on fresh
random bf16 inputs. --dry runs everything once, untimed, to fill Triton's cache; sections may be dry-run in parallel."""

# ruff: noqa: B023 - variants are called before the loop that made them goes on
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from lastrow.kernels import (
    add_norm,
    attention,
    attention_rows,
    attention_ws,
    centroid_head,
    decode_attention,
    decode_attention_warps,
    embedding,
    geglu,
    gemv,
    head,
    kv_cache,
    matmul,
    ple_gate,
    ple_inputs,
    qkv_epilogue,
    split_linear,
)
from lastrow.kernels.kv_cache import PagedKV
from lastrow.kernels.rope import rope_table
from lastrow.kernels.rows import QueryRows

BF16, EPS, H = torch.bfloat16, 1e-6, 1536
BLOCK_SIZE = 64
Variants = dict[str, Callable[[], Any]]


class Bench:
    """Where results go, and how things are timed."""

    def __init__(self, out: Path | None, dry: bool, rounds: int) -> None:
        self.out, self.dry, self.rounds = out, dry, rounds

    def record(self, section: str, case: str, **fields: Any) -> None:
        line = json.dumps({"section": section, "case": case, **fields})
        print(line, flush=True)
        if self.out is not None and not self.dry:
            with self.out.open("a") as file:
                file.write(line + "\n")

    def compare(
        self, section: str, case: str, variants: Variants, *, unit: str, work: float, expected: torch.Tensor | None = None,
        view: Callable[[Any], torch.Tensor] | None = None, graph: int = 0,
    ) -> None:  # fmt: skip
        """unit: "TFLOP/s" or "TB/s"; work: FLOP or bytes of one call. expected: fp32, compared with view(result). graph: the
        variant does this many calls of the operation and is replayed as a CUDA graph (small kernels)."""
        runs, errors = {}, {}
        for name, run in variants.items():
            try:
                result = run()
                torch.cuda.synchronize()
                if expected is not None:
                    errors[name] = relative_error((view or (lambda x: x))(result), expected)
                if not self.dry:
                    runs[name] = graphed(run) if graph else run
            except Exception as error:
                traceback.print_exc()
                errors[name] = f"{type(error).__name__}: {str(error)[:200]}"
        times: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(0 if self.dry else self.rounds):
            for name in list(runs) if i % 2 == 0 else reversed(runs):
                times[name] += timed(runs[name])
        scale = 1 / max(graph, 1)
        medians = {name: statistics.median(t) * scale for name, t in times.items()}
        self.record(
            section, case, unit=unit, error=errors, ms={name: round(ms, 5) for name, ms in medians.items()},
            rate={name: round(work / ms / 1e9, 2 if unit == "TFLOP/s" else 3) for name, ms in medians.items()},
        )  # fmt: skip


def timed(run: Callable[[], Any], calls: int = 5) -> list[float]:
    """Milliseconds of single calls, launched ahead of a device sleep so that host time stays out."""
    run()
    out = []
    for _ in range(calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(400_000)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        out.append(start.elapsed_time(end))
    return out


def graphed(run: Callable[[], Any]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.kept = run()  # type: ignore[attr-defined]
    return graph.replay


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    return round(error, 6) if error == error else float("inf")


def rnd(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(BF16)


def near_one(n: int) -> torch.Tensor:
    return (1 + 0.1 * torch.randn(n, device="cuda")).to(BF16)


# ------------------------------------------------------------------------------------------------------------- attention
def prompts(lens: list[int], d: int, kv_heads: int = 1) -> tuple[PagedKV, QueryRows, torch.Tensor]:
    per = [-(-n // BLOCK_SIZE) for n in lens]
    order = torch.randperm(sum(per)).int() + 1
    table = torch.zeros(len(lens), max(per) + 1, dtype=torch.int32)
    first = 0
    for i, n in enumerate(per):
        table[i, :n] = order[first : first + n]
        first += n
    kv = PagedKV(*(rnd(sum(per) + 1, BLOCK_SIZE, kv_heads, d, scale=s) for s in (16 / d, 1)))
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lens]).cuda()
    index = torch.repeat_interleave(torch.arange(len(lens), dtype=torch.int32), torch.tensor(lens)).cuda()
    table = table.cuda()
    return kv, QueryRows(positions, index, (table, table), tuple(lens), tuple(lens), plan="tiled"), table


def attention_flops(lens: list[int], d: int, window: int, heads: int = 8) -> float:
    """4 d per query head and visible key."""
    visible = sum(n * (n + 1) // 2 - max(n - window, 0) * (n - window + 1) // 2 * bool(window) for n in lens)
    return 4.0 * d * heads * visible


def bench_attention(b: Bench) -> None:
    for d, window in ((256, 512), (512, 0), (256, 0)):
        ws = attention_ws.CONFIGS[d]
        for name, lens in (("1024x64", [1024] * 64), ("1024x16", [1024] * 16), ("4096x16", [4096] * 16), ("128x64", [128] * 64),
                           ("odd", [1, 7, 513, 1030, 700] * 8)):  # fmt: skip
            if window == 0 and d == 256 and name != "4096x16":
                continue
            kv, rows, table = prompts(lens, d)
            q = rnd(rows.num_rows, 8, d, scale=0.25)
            plain, special = attention.triton, attention_ws.triton
            args = (q, kv, rows, table, window)
            configs = {
                f"ws, {'persistent' if persistent else 'a tile each'}{', TMA out' if parts else ''}": attention_ws.WsConfig(
                    ws.keys, 256, parts=parts, persistent=persistent
                )
                for persistent in (True, False)
                for parts in ((0, 2) if d == 256 else (0,))
            }
            variants: Variants = {
                "tiled": lambda: plain(*args),
                "ws": lambda: special(*args),
                **{name: lambda c=c: special(*args, config=c) for name, c in configs.items()},
            }
            few = sum(lens[:5])  # the reference on the first sequences
            small = QueryRows(rows.positions[:few], rows.seq_index[:few], rows.block_tables, rows.q_lens[:5], rows.kv_lens[:5])
            expected = attention.reference(q[:few].float(), kv, small, table, window)
            b.compare("attention", f"d{d} window {window} {name}", variants, unit="TFLOP/s",
                      work=attention_flops(lens, d, window), expected=expected, view=lambda x, few=few: x[:few])  # fmt: skip


def bench_rows(b: Bench) -> None:
    for d, window in ((256, 512), (512, 0)):
        for context in (256, 1024, 4096):
            for r in (1, 16, 64):
                kv, every, table = prompts([context] * r, d)
                index = torch.arange(r, dtype=torch.int32, device="cuda")
                rows = QueryRows(torch.full_like(index, context - 1), index, every.block_tables, (1,) * r, (context,) * r, r)
                q, w, rope = rnd(r, 8, d, scale=0.25), near_one(d), rope_table(d, 1e4, context, None, BF16, "cuda")
                counters = torch.zeros(1024, dtype=torch.int32, device="cuda")
                qkv, slots = rnd(r, 10 * d), torch.full_like(index, -1)
                args = (qkv, rows, rope, w, d, EPS, kv, table, window)
                copies = 10

                def repeat(run: Callable[[], Any], copies: int = copies) -> Callable[[], Any]:
                    return lambda: [run() for _ in range(copies)][-1]

                keys = min(context, window or context)
                b.compare(
                    "rows", f"d{d} window {window} context {context} rows {r}",
                    {
                        **{f"split {chunk}": repeat(lambda chunk=chunk: attention_rows.triton(q, kv, rows, table, window, chunk=chunk))
                           for chunk in (64, 128, 256)},
                        "epilogue + split 128": repeat(lambda: [
                            qkv_epilogue.triton(qkv, rows.positions, rope, w, d, EPS, w, kv, slots, 1),
                            attention_rows.triton(q, kv, rows, table, window)][1]),
                        **{f"one launch {c.chunk}": repeat(lambda c=c: decode_attention.triton(
                            *args, k_weight=w, slots=slots, counters=counters, config=c))
                           for c in (decode_attention.DecodeConfig(64, 64), decode_attention.DecodeConfig(128, 64, 2))},
                        "one launch, PDL": repeat(lambda: decode_attention.triton(
                            *args, k_weight=w, slots=slots, counters=counters, pdl=True)),
                    },
                    unit="TB/s", work=4.0 * d * keys * r, graph=copies,
                )  # fmt: skip


FORMS = {"auto": BF16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Beside the configuration that is chosen, by head dim and rows: chunk, keys, stages, warps of decode_attention for bf16; splits, warps,
# shared of decode_attention_warps.
TILES = {
    (512, 64): ((1024, 32, 3, 4),),
    (512, 16): ((512, 32, 3, 4),),
    (512, 1): ((128, 32, 3, 4), (64, 64, 1, 8)),
    (256, 64): ((256, 32, 3, 4), (128, 64, 2, 8)),
    (256, 16): ((128, 32, 3, 4), (64, 64, 1, 8)),
    (256, 1): ((128, 32, 3, 4),),
}
WARPS = {
    (512, 64): ((8, 2, True),),
    (512, 16): ((8, 4, True),),
    (512, 1): ((32, 4, True),),
    (256, 64): ((2, 8),),
    (256, 16): ((8, 4),),
    (256, 1): ((4, 4),),
}


def bench_decode(b: Bench) -> None:
    """decode_attention over long contexts: kernels and configurations by storage format, each call behind its qkv projection as in a
    step, launched as there; "projections" is that chain alone. Copies of a call read other keys and
    weights, so that the L2 cache does not answer. Names: tiles chunk/keys/stages/warps; warps splits/warps."""
    tile, warp = decode_attention.DecodeConfig, decode_attention.WarpsConfig
    for d, window, context in ((512, 0, 7936), (256, 512, 7936)):
        bucket = triton.next_power_of_2(context)  # a configuration is chosen by the length of a graph's bucket
        full, every, table = prompts([context] * 64, d)
        w, rope = near_one(d), rope_table(d, 1e4, context, None, BF16, "cuda")
        weights = [rnd(10 * d, H, scale=H**-0.5) for _ in range(8)]
        counters = torch.zeros(1024, dtype=torch.int32, device="cuda")
        pools = {}
        for form, storage in FORMS.items():
            pools[form] = full
            if storage is not BF16:
                (k, ks), (v, vs) = (kv_cache.quantize(x, storage) for x in (full.k, full.v))
                pools[form] = PagedKV(k, v, ks, vs)

        def call(kv: PagedKV, qkv: torch.Tensor, rows: QueryRows, slots: torch.Tensor, config: Any) -> torch.Tensor:
            kernel = decode_attention if isinstance(config, tile) else decode_attention_warps
            return kernel.triton(qkv, rows, rope, w, d, EPS, kv, table, window, w, slots, counters=counters, pdl=True, config=config)

        def compiled(case: tuple[PagedKV, Any, int]) -> None:
            kv, config, r = case
            slots = torch.full((1,), -1, dtype=torch.int32, device="cuda")
            rows = QueryRows(slots + context, slots + 1, every.block_tables, (1,), (context,), 1)
            with contextlib.suppress(Exception):  # compare() says what does not fit
                call(kv, split_linear.triton(rnd(r, H), weights[0])[:, :1].contiguous(), rows, slots, config)

        def variants(kv: PagedKV, r: int) -> dict[str, Any]:
            """Configurations by name."""
            chosen = decode_attention.warps_config(r, bucket, window, d) if kv.is_quantized else None
            if kv.is_quantized:  # both formats are the same bytes: one of them gets every variant
                others = [warp(*shape) for shape in WARPS[d, r] if kv.k.dtype is torch.int8]
            else:
                others = [tile(*shape) for shape in TILES[d, r]]
            tiles = decode_attention.decode_config(r, bucket, window)
            out = {}
            for c in dict.fromkeys((chosen or tiles, tiles, *others)):
                name = "chosen " * (c == (chosen or tiles))
                if isinstance(c, tile):
                    name += f"tiles {c.chunk}/{c.keys}/{c.stages}/{c.warps}"
                else:
                    name += f"warps {c.splits}/{c.warps}{' shared' * c.shared}"
                out[name] = c
            return out

        # chunks and splits are no constants of a kernel: one launch per other field, and number of partial sums, compiles it
        sums = {r: split_linear.split_config(10 * d, H, rows=r).splits for r in (64, 16, 1)}
        cases = {
            (form, dataclasses.replace(c, **{"chunk" if isinstance(c, tile) else "splits": 1}), sums[r]): (kv, c, r)
            for form, kv in pools.items() for r in (64, 16, 1) for c in variants(kv, r).values()
        }  # fmt: skip
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(compiled, cases.values()))
        torch.cuda.synchronize()
        for r in (64, 16, 1):
            x, slots = rnd(r, H), torch.full((r,), -1, dtype=torch.int32, device="cuda")
            copies = 2 if r * (window or context) > 100_000 else 8
            index = torch.arange(r, dtype=torch.int32, device="cuda")
            calls = [QueryRows(torch.full_like(index, context - 1 - (600 * i if window else 0)), (index + r * i) % 64,
                               every.block_tables, (1,) * r, (bucket,) * r, r) for i in range(copies)]  # fmt: skip
            b.compare("decode", f"projections d{d} rows {r}", {"split_linear": lambda: [
                split_linear.triton(x, weight) for weight in weights[:copies]]}, unit="TB/s", work=20.0 * d * H, graph=copies)  # fmt: skip
            few = min(r, 2)
            q = qkv_epilogue.triton(split_linear.triton(x, weights[0])[..., : 8 * d].contiguous(), calls[0].positions, rope, w, d, EPS)
            small = QueryRows(calls[0].positions[:few], index[:few], every.block_tables, (1,) * few, (context,) * few)
            assert q is not None
            for form, kv in pools.items():

                def run(config: Any) -> torch.Tensor:
                    outs = [call(kv, split_linear.triton(x, weight), rows, slots, config)
                            for rows, weight in zip(calls, weights, strict=False)]  # fmt: skip
                    return outs[0]

                b.compare(
                    "decode", f"{form} d{d} window {window} context {context} rows {r}",
                    {name: lambda c=c: run(c) for name, c in variants(kv, r).items()},
                    unit="TB/s", work=2.0 * r * (window or context) * (d * kv.k.element_size() + (4 if kv.is_quantized else 0)),
                    expected=attention.reference(q[:few].float(), kv, small, table, window), view=lambda x, few=few: x[:few],
                    graph=copies,
                )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- elementwise
def bench_elementwise(b: Bench, m: int = 32768) -> None:
    h, x, w1, w2, scalar = rnd(m, H), rnd(m, H), near_one(H), near_one(H), torch.tensor([0.7], device="cuda", dtype=BF16)
    few = slice(0, 2048)
    expected = add_norm.reference(h[few].float(), x[few].float(), w1.float(), w2.float(), scalar.float(), EPS)[1]
    residual = x.clone()  # overwritten again and again: only the first result counts
    configs = {f"rows {r} warps {w}": (r, w) for r, w in ((1, 2), (1, 4), (2, 4), (1, 8))}
    add_norm.triton(h, residual.copy_(x), w1, w2, scalar, EPS)
    for name, (r, w) in configs.items():
        got = add_norm.triton(h, x.clone(), w1, w2, scalar, EPS, rows=r, warps=w)[1]
        b.record("elementwise", f"add_norm check {name}", error=relative_error(got[few], expected))
    for pre in (w2, None):
        b.compare("elementwise", f"add_norm {'with' if pre is not None else 'without'} next norm",
                  {n: lambda r=r, w=w, pre=pre: add_norm.triton(h, residual, w1, pre, None, EPS, rows=r, warps=w)
                   for n, (r, w) in configs.items()}, unit="TB/s", work=m * H * (8 if pre is not None else 6))  # fmt: skip
    table, ids = rnd(65536, 35 * 256, scale=0.06), torch.randint(0, 65536, (m,), device="cuda", dtype=torch.int32)
    context, w = rnd(m, 14 * 256, scale=30), near_one(256)
    args = (context, ids, table, w, 0, H, EPS)
    expected = ple_inputs.reference(context[few].float(), ids[few], table.float(), w.float(), 0, H, EPS)
    b.compare("elementwise", "ple_inputs", {f"layers {n} warps {wr}": lambda n=n, wr=wr: ple_inputs.triton(
        *args, layers_per_program=n, warps=wr) for n, wr in ((2, 2), (1, 1), (4, 4))}, unit="TB/s", work=m * 14 * 256 * 6,
        expected=expected, view=lambda y: y[few])  # fmt: skip
    gate, ple = rnd(m, 256), rnd(m, 14, 256)
    b.compare("elementwise", "ple_gate", {f"warps {w}": lambda w=w: ple_gate.triton(gate, ple, 3, warps=w)
              for w in (4, 8)}, unit="TB/s", work=m * 256 * 6,
              expected=ple_gate.reference(gate.float(), ple.float(), 3))  # fmt: skip
    embed = rnd(65536, H, scale=0.03)
    b.compare("elementwise", "embedding", {"triton": lambda: embedding.triton(ids, embed, 39.25, w1, EPS)[1]}, unit="TB/s",
              work=m * H * 6, expected=embedding.reference(ids, embed.float(), 39.25, w1.float(), EPS)[1])  # fmt: skip
    for d, form in ((256, BF16), (512, BF16), (256, torch.int8), (256, torch.float8_e4m3fn)):
        qkv, rope, w = rnd(m, 10 * d), rope_table(d, 1e4, 8192, None, BF16, "cuda"), near_one(d)
        positions, slots = torch.randint(0, 8192, (m,), device="cuda").int(), torch.randperm(m, device="cuda").int()
        k, v = (torch.zeros(m // 64, 64, 1, d, device="cuda", dtype=form) for _ in "kv")
        scales = (None, None) if form is BF16 else tuple(torch.zeros(m // 64, 64, 1, device="cuda") for _ in "kv")
        kv = PagedKV(k, v, *scales)
        expected = qkv_epilogue.reference(qkv[few, : 8 * d].float(), positions[few], rope.float(), w.float(), d, EPS)
        b.compare("elementwise", f"qkv_epilogue d{d} {form}", {f"warps {n}": lambda n=n: qkv_epilogue.triton(
            qkv, positions, rope, w, d, EPS, w, kv, slots, 1, warps=n) for n in (1, 2, 4)}, unit="TB/s",
            work=m * d * (18 * 2 + 2 * kv.k.element_size()), expected=expected, view=lambda y: y[few])  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- matmuls
SHAPES = {"qkv_slide": (1536, 2560), "o_slide": (2048, 1536), "qkv_full": (1536, 5120), "o_full": (4096, 1536), "down": (6144, 1536)}


def bench_matmul(b: Bench) -> None:
    for m in (16384, 1024):
        for name, (k, n) in SHAPES.items():
            x, w = rnd(m, k), rnd(n, k, scale=k**-0.5)
            expected = x[:512].float() @ w.float().T
            b.compare("matmul", f"{name} M {m}", {"vendor": lambda: F.linear(x, w), "triton": lambda: matmul.triton(x, w)},
                      unit="TFLOP/s", work=2.0 * m * k * n, expected=expected, view=lambda y: y[:512])  # fmt: skip
    for m in (128, 256, 512, 1024, 2048, 16384, 65536):
        x, gate, up = rnd(m, H), rnd(6144, H, scale=0.03), rnd(6144, H, scale=0.03)
        packed = geglu.pack(gate, up)
        expected = geglu.reference(x[:512].float(), geglu.reference_pack(gate, up).float())
        config = matmul.MatmulConfig
        b.compare(
            "matmul", f"gate_up + GeGLU M {m}",
            {
                "vendor + kernel": lambda: geglu.pairs(F.linear(x, packed)),
                "fused": lambda: matmul.triton(x, packed, geglu=True, config=matmul.LARGE),
                "fused group 16": lambda: matmul.triton(x, packed, geglu=True, config=config(group=16)),
                "fused group 4": lambda: matmul.triton(x, packed, geglu=True, config=config(group=4)),
                "fused 128x128": lambda: matmul.triton(x, packed, geglu=True, config=config(n=128)),
            },
            unit="TFLOP/s", work=4.0 * m * H * 6144, expected=expected, view=lambda y: y[:512],
        )  # fmt: skip
        same = torch.equal(geglu.pairs(F.linear(x, packed)), matmul.triton(x, packed, geglu=True, config=matmul.LARGE))
        b.record("matmul", f"gate_up + GeGLU M {m}: fused has the vendor's bits", same=same)


def bench_invariance(b: Bench) -> None:
    """Row counts at which the vendor's bits differ from those at 16,384 rows: what `TritonOps.linear` avoids."""
    for name, (k, n) in {**SHAPES, "gate_up": (1536, 12288), "gate_up_wide": (1536, 24576), "down_wide": (12288, 1536),
                         "ple_gate": (1536, 256), "ple_projection": (256, 1536), "head": (1536, 262144)}.items():  # fmt: skip
        rows = 2048 if name == "head" else 16384
        x, w = rnd(rows, k), rnd(n, k, scale=k**-0.5)
        whole = F.linear(x, w)
        counts = sorted({1, 2, 3, 5, 7, 8, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 192, 200, 256, 300, 384, 500, 512, 700, 768,
                         900, 999, 1000, 1024, 1500, 2000})  # fmt: skip
        differ = [m for m in counts if not torch.equal(F.linear(x[:m], w), whole[:m])]
        ours = [m for m in (1, 64, 300, 1000) if not torch.equal(matmul.triton(x[:m], w), whole[:m])]
        b.record("invariance", name, k=k, vendor_differs_at=differ, triton_differs_from_vendor_at=ours)


def bench_gemv(b: Bench) -> None:
    """One row, in a graph over enough weights to miss the L2."""
    seam = dict(residual=rnd(1, H), post_weight=near_one(H), pre_weight=near_one(H))
    uses: dict[str, tuple[int, int, dict[str, Any]]] = {
        "qkv": (1536, 2560, seam), "o": (2048, 1536, {}), "o_full": (4096, 1536, {}), "down": (6144, 1536, {}),
        "gate_up": (1536, 6144, {**seam, "geglu": True}), "gate_up_wide": (1536, 12288, {**seam, "geglu": True}),
        "down_wide": (12288, 1536, {}), "ple_projection": (256, 1536, {}), "head": (1536, 262144, seam),
        "ple_gate": (1536, 256, {"residual": seam["residual"], "post_weight": seam["post_weight"], "ple": rnd(256)}),
    }  # fmt: skip
    for name, (k, n, keys) in uses.items():
        height = n * (2 if keys.get("geglu") else 1)
        copies = max(2, min(32, int(3e8 / (height * k * 2))))
        weights, x = [rnd(height, k, scale=k**-0.5) for _ in range(copies)], rnd(1, k)

        def chain(one: Callable[[torch.Tensor], Any], weights: list[torch.Tensor] = weights) -> Callable[[], Any]:
            return lambda: [one(w) for w in reversed(weights)][-1]

        expected = gemv.reference(x.float(), weights[0].float(), **{key: v.float() if isinstance(v, torch.Tensor) else v
                                  for key, v in keys.items()})[0]  # fmt: skip
        variants: Variants = {
            "gemv": chain(lambda w: gemv.triton(x, w, **keys)[0]),
            "gemv PDL": chain(lambda w: gemv.triton(x, w, **keys, pdl=True)[0]),
        }
        if not keys:
            variants["vendor"] = chain(lambda w: F.linear(x, w))
            variants["split"] = chain(lambda w: split_linear.triton(x, w))
        b.compare("gemv", name, variants, unit="TB/s", work=2.0 * height * k, expected=expected,
                  view=lambda y: y.sum(0) if y.dim() == 3 else y, graph=copies)  # fmt: skip


def bench_head(b: Bench) -> None:
    table = rnd(262144, H, scale=0.026)
    for r in (1, 16, 64, 1024):
        h = rnd(r, H)
        labels = torch.randint(0, 262144, (16,), device="cuda")
        logits = h[:64].float() @ table.float().T
        nbytes = 2.0 * 262144 * H
        b.compare("head", f"logits R {r}", {"vendor + softcap": lambda: head.triton(h, table, 30.0), "vendor, argmax":
                  lambda: F.linear(h, table).argmax(-1)}, unit="TB/s", work=nbytes)  # fmt: skip
        b.compare("head", f"logsumexp R {r}", {"stream": lambda: head.triton_logsumexp(h, table, 30.0), "logits, then torch":
                  lambda: torch.logsumexp(head.triton(h, table, 30.0), -1)}, unit="TB/s", work=nbytes,
                  expected=torch.logsumexp(head.softcap(logits, 30.0), -1), view=lambda y: y[:64])  # fmt: skip
        b.compare("head", f"16 labels R {r}", {"labels": lambda: head.triton_labels(h, table, labels, 30.0)}, unit="TB/s",
                  work=2.0 * 16 * H, expected=head.softcap(logits, 30.0)[:, labels], view=lambda y: y[:64])  # fmt: skip


def bench_centroid(b: Bench) -> None:
    """The drafter's head: 32 of 2,048 groups of 128 tokens, h = 256. gather + einsum is what transformers and vLLM do; the whole head
    adds the same scores of the groups and topk to both. Memory: the most that a call holds beside its inputs."""
    groups, size, hidden, top_k = 2048, 128, 256, 32
    clusters, centroids = rnd(groups, size, hidden, scale=hidden**-0.5), rnd(groups, hidden, scale=hidden**-0.5)
    ids = torch.randperm(groups * size, device="cuda").int().view(groups, size)
    for t in (1, 4, 16, 64):
        ys = [rnd(t, hidden) for _ in range(20)]  # other groups at every call: 20 x 2 MB a row do not stay in the L2
        tops = [centroid_head.top_groups(y, centroids, top_k) for y in ys]

        def einsum(y: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
            return torch.einsum("nh,nksh->nks", y, clusters[top])

        def whole(gather: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], y: torch.Tensor) -> torch.Tensor:
            top = centroid_head.top_groups(y, centroids, top_k)
            logits = gather(y, top).flatten(1)
            return ids[top].flatten(1).gather(1, logits.argmax(-1, keepdim=True))

        def ours(y: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
            return centroid_head.triton_gather(y, clusters, top)

        kinds = {"einsum": einsum, "kernel": ours, "kernel again": ours}
        work = 2.0 * t * top_k * size * hidden
        b.compare("centroid", f"gathered rows T {t}",
                  {name: lambda f=f: [f(y, top) for y, top in zip(ys, tops, strict=True)] for name, f in kinds.items()}, unit="TB/s",
                  work=work, graph=len(ys), view=lambda x: x[0],
                  expected=centroid_head.reference_gather(ys[0], clusters, tops[0]))  # fmt: skip
        b.compare("centroid", f"whole head T {t}", {name: lambda f=f: [whole(f, y) for y in ys] for name, f in kinds.items()},
                  unit="TB/s", work=work, graph=len(ys))  # fmt: skip
        peaks = {name: peak_bytes(lambda f=f: f(ys[0], tops[0])) for name, f in kinds.items()}
        b.record("centroid", f"memory T {t}", bytes=peaks, less=round(1 - peaks["kernel"] / peaks["einsum"], 5))


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes that a call holds beside what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


SECTIONS = {
    "attention": bench_attention, "rows": bench_rows, "decode": bench_decode, "elementwise": bench_elementwise, "matmul": bench_matmul,
    "invariance": bench_invariance, "gemv": bench_gemv, "head": bench_head,
    "centroid": bench_centroid,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    parser.add_argument("--dry", action="store_true", help="run everything once, untimed")
    parser.add_argument("--rounds", type=int, default=4, help="ABBA rounds of 5 calls each")
    args = parser.parse_args()
    unknown = sorted(set(args.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"no section {', '.join(unknown)}: {', '.join(SECTIONS)}")
    bench = Bench(args.out, args.dry, args.rounds)
    torch.manual_seed(0)
    failed = False
    for name in args.sections or SECTIONS:
        start = time.time()
        try:
            SECTIONS[name](bench)
        except Exception:
            failed = True
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"{name}: {time.time() - start:.1f} s", file=sys.stderr, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
