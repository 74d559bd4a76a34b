"""`lastrow bench prefill | prefix | matrix`: interleaved arms, a null arm, and a record where one is asked for."""

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
        "bench", choices=("prefill", "prefix", "matrix"), metavar="BENCH",
        help="prefill: one prompt on a CPU, against all rows and transformers; prefix: a prompt's first token with and without "
        "its beginning in the prefix cache, on a CPU; matrix: whole requests on one GPU, by case and arm",
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
    matrix.add_argument("--cases", metavar="A,B", help="some of the cases, by name (default: all)")
    matrix.add_argument("--report", metavar="FILE", help="show or record an earlier run's --json report instead of measuring")


def run(args: argparse.Namespace) -> None:
    show = {"prefill": _prefill, "prefix": _prefix, "matrix": _matrix}[args.bench]
    report, text, write = show(args)
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

    options = _options(args, "shape", "shared", "prompt", "rounds", "threads", "seed", "kv_cache_dtype")
    report = prefix_bench.run(prefix_bench.PrefixBench(**options))
    return report, prefix_bench.render(report), prefix_bench.write_record


def _matrix(args: argparse.Namespace) -> tuple[dict[str, Any], str, Any]:
    from lastrow.harness import matrix_page

    if args.report:
        try:
            report = json.loads(Path(args.report).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"--report {args.report}: not a report of `lastrow bench matrix --json` ({error})") from None
    else:
        from lastrow.harness import matrix

        report = matrix.run(matrix.MatrixBench(**_options(args, "shape", "cases", "arms", "rounds", "seed")))
    return report, matrix_page.render(report), matrix_page.write_record
