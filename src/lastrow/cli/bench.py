"""`lastrow bench NAME`: interleaved arms, a null arm, and a record where one is asked for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lastrow.config import KV_CACHE_DTYPES

LENGTHS = "128,512,1024,2048"


def lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths such as {LENGTHS}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bench", choices=tuple(BENCHES), metavar="BENCH",
        help="prefill: one prompt on a CPU, against all rows and transformers; prefix: a prompt's first token with and without "
        "its beginning in the prefix cache; matrix: whole requests on one GPU, by case and arm; speculative: one stream with drafts and "
        "simulated acceptance; kv: formats of the K/V cache, the per-layer table in host memory, a long prompt; mixed: time between two "
        "tokens of streams while prompts arrive",
    )  # fmt: skip
    parser.add_argument("--shape", metavar="NAME", help="named shape with dummy weights (default: e2b-eighth in fp32; matrix: e2b in bf16)")
    parser.add_argument(
        "--arms", "--arm", metavar="A,B", help="some of the arms (prefill: all; matrix: fast,null,full of those and invariant,hf)"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="measured runs of each arm (default: prefill 12, prefix 8, matrix 4)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and prompts (default: 0)")
    parser.add_argument("--record", metavar="DIR", help="write a page with pictures and raw rows into this folder (docs/benchmarks)")
    parser.add_argument("--json", action="store_true", help="the report with all raw rows, with stable keys")
    prefill = parser.add_argument_group("prefill")
    prefill.add_argument("--lengths", type=lengths, default=lengths(LENGTHS), metavar="N,N", help=f"prompt tokens (default: {LENGTHS})")
    prefill.add_argument("--threads", type=int, default=0, metavar="N", help="torch threads (default: torch's own choice)")
    prefix = parser.add_argument_group("prefix (and --threads)")
    prefix.add_argument("--shared", type=int, metavar="N", help="tokens that prompts have in common (default: 4096)")
    prefix.add_argument("--prompt", type=int, metavar="N", help="tokens of a whole prompt (default: 4500)")
    prefix.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, metavar="|".join(KV_CACHE_DTYPES), help="K/V format (default: auto)")
    matrix = parser.add_argument_group("matrix")
    matrix.add_argument("--cases", metavar="A,B", help="some of the cases (matrix, kv: of the parts), by name (default: all)")
    parser.add_argument(
        "--report", metavar="FILE", help="show or record an earlier run's --json report instead of measuring (all but prefill)"
    )


def run(args: argparse.Namespace) -> None:
    report, text, write = BENCHES[args.bench](args)
    print(json.dumps(report, indent=1) if args.json else text)
    if args.record:
        page = write(report, Path(args.record))
        if not args.json:
            print(f"\nrecord: {page}")


def _options(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options that were given, lists split at commas; the others keep the bench's defaults."""
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return {name: tuple(value.split(",")) if name in ("arms", "cases") else value for name, value in given.items()}


def _prefill(args: argparse.Namespace) -> tuple[dict[str, Any], str, Any]:
    from lastrow.harness import bench

    report = bench.run(bench.PrefillBench(**_options(args, "shape", "lengths", "rounds", "threads", "seed", "arms")))
    return report, bench.render(report), bench.write_record


def _prefix(args: argparse.Namespace) -> tuple[dict[str, Any], str, Any]:
    from lastrow.harness import prefix_bench

    return _measured_or_read(
        args, prefix_bench, prefix_bench.PrefixBench, "shape", "shared", "prompt", "rounds", "threads", "seed", "kv_cache_dtype"
    )  # fmt: skip


def _matrix(args: argparse.Namespace) -> tuple[dict[str, Any], str, Any]:
    from lastrow.harness import matrix_page

    if args.report:
        report = _read(args.report, "matrix")
    else:
        from lastrow.harness import matrix

        report = matrix.run(matrix.MatrixBench(**_options(args, "shape", "cases", "arms", "rounds", "seed")))
    return report, matrix_page.render(report), matrix_page.write_record


def _speculative(args: argparse.Namespace) -> tuple[dict[str, Any], str, Any]:
    from lastrow.harness import speculative_bench

    return _measured_or_read(args, speculative_bench, speculative_bench.SpeculativeBench, "shape", "rounds", "seed")


def _kv(args: argparse.Namespace) -> tuple[dict[str, Any], str, Any]:
    from lastrow.harness import kv_bench

    return _measured_or_read(args, kv_bench, kv_bench.KVBench, "shape", "cases", "rounds", "seed")


def _mixed(args: argparse.Namespace) -> tuple[dict[str, Any], str, Any]:
    from lastrow.harness import mixed_bench

    return _measured_or_read(args, mixed_bench, mixed_bench.MixedBench, "shape", "rounds", "seed")


def _measured_or_read(args: argparse.Namespace, module: Any, options: Any, *names: str) -> tuple[dict[str, Any], str, Any]:
    report = _read(args.report, args.bench) if args.report else module.run(options(**_options(args, *names)))
    return report, module.render(report), module.write_record


def _read(file: str, bench: str) -> dict[str, Any]:
    try:
        report = json.loads(Path(file).read_text(encoding="utf-8"))
        if report["bench"] != bench:
            raise ValueError(f"it is one of {report['bench']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--report {file}: not a report of `lastrow bench {bench} --json` ({error})") from None
    return report


BENCHES = {"prefill": _prefill, "prefix": _prefix, "matrix": _matrix, "speculative": _speculative, "kv": _kv, "mixed": _mixed}
