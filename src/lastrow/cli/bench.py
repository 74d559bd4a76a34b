"""`lastrow bench prefill`: interleaved arms, a null arm, and a record where one is asked for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

LENGTHS = "128,512,1024,2048"


def lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths such as {LENGTHS}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bench", choices=("prefill",), metavar="BENCH", help="prefill: one prompt on a CPU, against all rows and transformers"
    )
    parser.add_argument("--shape", default="e2b-eighth", metavar="NAME", help="named shape with dummy fp32 weights (default: e2b-eighth)")
    parser.add_argument(
        "--lengths", type=lengths, default=lengths(LENGTHS), metavar="N,N", help=f"prompt lengths in tokens (default: {LENGTHS})"
    )
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="times each arm runs at each length (default: 12)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="torch threads (default: torch's own choice)")
    parser.add_argument("--arms", metavar="A,B", help="fast,full,fast again,hf-cut,hf-full or some of them (default: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and prompts (default: 0)")
    parser.add_argument("--record", metavar="DIR", help="write a page with pictures and raw rows into this folder (docs/benchmarks)")
    parser.add_argument("--json", action="store_true", help="the report with all raw rows, with stable keys")


def run(args: argparse.Namespace) -> None:
    from lastrow.harness import bench

    options = {} if args.arms is None else {"arms": tuple(args.arms.split(","))}
    report = bench.run(bench.PrefillBench(args.shape, args.lengths, args.rounds, args.threads, args.seed, **options))
    print(json.dumps(report, indent=1) if args.json else bench.render(report))
    if args.record:
        page = bench.write_record(report, Path(args.record))
        if not args.json:
            print(f"\nrecord: {page}")
