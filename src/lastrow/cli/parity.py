"""`lastrow parity`: checks against transformers, itself and recorded outputs; with an 8-bit --kv-cache-dtype a table of what that format
changes instead. Exit code 0 when every check passed, 1 when one failed or could not run, 2 for bad input."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lastrow.cli.options import add_engine_flags, add_model, engine_options
from lastrow.config import EngineConfig

ENGINE = ("revision", "shape", "dtype", "device", "backend", "block_size", "kv_cache_dtype", "batch_invariant")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--heldout", type=Path, metavar="FILE", help="JSONL of prompt_ids and output_ids (default: heldout.jsonl in the model's folder)"
    )
    parser.add_argument(
        "--items", type=int, metavar="N", help="held-out prompts a task whose logits are compared (default: 2; all for a K/V format)"
    )
    parser.add_argument("--skip-transformers", action="store_true", help="leave out the checks that need transformers")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random prompts and random models (default: 0)")
    parser.add_argument(
        "--logprobs", action="store_true",
        help="log probabilities of the engine as it runs by default against transformers in fp32 and against all rows",
    )  # fmt: skip
    parser.add_argument("--record", type=Path, metavar="DIR", help="with --logprobs: write a page and its rows into this folder")
    parser.add_argument("--json", action="store_true", help="the report, with stable keys")
    add_engine_flags(parser, only=ENGINE)


def run(args: argparse.Namespace) -> int:
    options = EngineConfig(**{name: value for name, value in engine_options(args).items() if name != "seed"})
    if options.kv_cache_dtype != "auto":
        from lastrow.harness import kv_accuracy

        report = kv_accuracy.run(options, args.items, args.seed)
        print(json.dumps(report, indent=1) if args.json else kv_accuracy.render(report))
        return 0 if report["passed"] else 1
    if args.logprobs:
        from lastrow.harness import logprob_parity

        report = logprob_parity.run(options, args.items, args.seed)
        print(json.dumps(report, indent=1) if args.json else logprob_parity.render(report))
        if args.record:
            logprob_parity.write_record(report, args.record)
        return 0 if report["passed"] else 1
    from lastrow.harness import parity

    items = 2 if args.items is None else args.items
    report = parity.run(parity.ParityOptions(options, args.heldout, items, args.skip_transformers, args.seed))
    print(json.dumps(report, indent=1) if args.json else parity.render(report))
    return 0 if report["passed"] else 1
