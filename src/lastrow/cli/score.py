"""`lastrow score`: the log probability of given continuations, for one prompt or a file of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastrow.cli.decide import show_table
from lastrow.cli.options import add_engine_flags, add_model, engine_options

if TYPE_CHECKING:
    from lastrow.decisions.tables import Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="one prompt, as it is (no chat format); - reads standard input")
    parser.add_argument("--choice", action="append", metavar="TEXT", help="a continuation, as it is; give several")
    parser.add_argument("--input", metavar="FILE", help="prompts: .jsonl, .csv or .parquet")
    parser.add_argument("--prompt-field", default="prompt", metavar="NAME", help="the input's column with the prompt (default: prompt)")
    parser.add_argument(
        "--choices-field", default="choices", metavar="NAME", help="the input's column with a list of texts, or its JSON (default: choices)"
    )
    parser.add_argument("--id-field", metavar="NAME", help="a column that is copied to the output")
    parser.add_argument("--output", metavar="FILE", help=".jsonl, .csv or .parquet; an interrupted run continues where it stopped")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    parser.add_argument("--json", action="store_true", help="with --prompt: one JSON object")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> None:
    from lastrow.decisions.filerun import FileRun
    from lastrow.decisions.questions import DecisionError

    if (args.prompt is None) == (args.input is None):
        raise DecisionError("give --prompt TEXT or --input FILE, one of them")
    job = None
    if args.input is None:
        if not args.choice:
            raise DecisionError("--prompt needs at least one --choice TEXT")
    else:
        if args.output is None:
            raise DecisionError("--input needs --output FILE (.jsonl, .csv or .parquet)")
        needed = (args.prompt_field,) if args.choice else (args.prompt_field, args.choices_field)
        settings = ["score", args.choice, engine_options(args), needed]
        columns = {"best": str, "logprob": float, "probability": float}
        job = FileRun(Path(args.input), Path(args.output), settings, needed, args.prompt_field, columns, args.id_field, args.overwrite)
        job.check()
    import lastrow

    llm = lastrow.LLM(**engine_options(args))
    if job is not None:
        _file(args, job, llm)
        return
    output = llm.score(sys.stdin.read() if args.prompt == "-" else args.prompt, args.choice)
    if args.json:
        print(json.dumps(output.to_dict(), ensure_ascii=False))
        return
    rows = zip(output.choices, output.logprobs, output.probabilities, output.num_tokens, strict=True)
    show_table(
        ("choice", "log probability", "among the choices", "tokens"), ([repr(c), f"{log:.4f}", f"{p:.4f}", str(n)] for c, log, p, n in rows)
    )


def _file(args: argparse.Namespace, job: Any, llm: Any) -> None:
    report = job.run(lambda rows: llm.decider.score(_pairs(rows, args)), _flat, lambda _: None)
    print(
        f"{report.num_rows:,} rows, {report.num_errors:,} with an error · {report.rows_per_s:,.1f} items/s · {args.output}", file=sys.stderr
    )


def _pairs(rows: Iterable[Row], args: argparse.Namespace) -> Iterator[Any]:
    for row in rows:
        try:
            yield row.get(args.prompt_field), args.choice or _choices(row.get(args.choices_field))
        except ValueError as error:
            yield error


def _choices(value: Any) -> Any:
    """csv has texts only: a list is written as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"choices is {value!r}: a list of texts, or its JSON, is needed") from None
    return value


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    if "error" in record:
        return {}
    best = record["choices"].index(record["best"])
    return {"best": record["best"], "logprob": record["logprobs"][best], "probability": record["probabilities"][best]}
