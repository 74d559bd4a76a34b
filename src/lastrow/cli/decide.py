"""`lastrow decide`: the probability of every allowed answer to questions about one state or a file of them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastrow.cli.options import add_engine_flags, add_model, engine_options

if TYPE_CHECKING:
    from lastrow.decisions.plan import QuestionSet
    from lastrow.decisions.results import DecisionOutput
    from lastrow.decisions.tables import Row
    from lastrow.engine.llm import LLM

FILE_KEYS = ("questions", "instructions", "prompt_template", "calibration", "truncate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    what = parser.add_argument_group("what is asked")
    what.add_argument("--questions", metavar="FILE", help="yaml or json: a list of questions, or a mapping with questions and options")
    what.add_argument("--ask", metavar="TEXT", help="one question: yes or no, or with --choices one of them")
    what.add_argument("--choices", metavar="A,B", help="answers allowed to --ask")
    what.add_argument("--instructions", metavar="TEXT", help="text of the system turn")
    what.add_argument("--prompt-template", metavar="FILE", help="jinja file in place of the built-in question prompt (docs/decisions.md)")
    about = parser.add_argument_group("about what")
    about.add_argument("--state", metavar="TEXT", help="one state; - reads standard input")
    about.add_argument("--input", metavar="FILE", help="states: .jsonl, .csv or .parquet")
    about.add_argument("--state-field", default="state", metavar="NAME", help="the input's column with the state (default: state)")
    about.add_argument("--id-field", metavar="NAME", help="a column that is copied to the output")
    about.add_argument("--truncate", choices=("left", "right", "middle"), help="where a state that does not fit is cut (default: error)")
    out = parser.add_argument_group("results")
    out.add_argument("--output", metavar="FILE", help=".jsonl, .csv or .parquet; an interrupted run continues where it stopped")
    out.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    out.add_argument("--label-mass", action="store_true", help="probability of all labels together over the whole vocabulary")
    out.add_argument("--diagnostics", action="store_true", help="label mass, and whether the most probable token begins a label")
    out.add_argument("--plot", metavar="FILE", help="histogram of the probabilities: .svg, .png or .pdf")
    out.add_argument("--json", action="store_true", help="with --state: one JSON object")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> None:
    from lastrow.decisions.filerun import FileRun
    from lastrow.decisions.prompts import template_source
    from lastrow.decisions.questions import DecisionError, parse_questions
    from lastrow.decisions.summary import check_plot, columns

    if (args.state is None) == (args.input is None):
        raise DecisionError("give --state TEXT or --input FILE, one of them")
    options = _options(args)
    questions = parse_questions(options.pop("questions"))
    if args.plot:
        check_plot(Path(args.plot))
    job = None
    if args.input is not None:
        if args.output is None:
            raise DecisionError("--input needs --output FILE (.jsonl, .csv or .parquet)")
        template = template_source(options.get("prompt_template"))
        settings = [[asdict(q) for q in questions], options | {"prompt_template": template}, engine_options(args), args.state_field]
        # jsonl keeps the answers nested and has no columns
        flat_columns = {} if args.output.lower().endswith(".jsonl") else columns(questions, args.label_mass, args.diagnostics)
        needed = (args.state_field,)
        job = FileRun(
            Path(args.input), Path(args.output), settings, needed, args.state_field, flat_columns, args.id_field, args.overwrite
        )  # fmt: skip
        job.check()
    elif args.output is not None:
        raise DecisionError("--output is for --input; with --state add --json and redirect")
    import lastrow

    llm = lastrow.LLM(**engine_options(args))
    if job is None:
        _one(args, llm, questions, options)
    else:
        _file(args, job, llm, llm.decider.question_set(questions, **options))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of Decider.question_set and the questions, from the file and the flags; flags win."""
    from lastrow.decisions.questionfile import read_question_file
    from lastrow.decisions.questions import DecisionError

    if (args.questions is None) == (args.ask is None):
        raise DecisionError("give --questions FILE or --ask TEXT, one of them")
    if args.choices is not None and args.ask is None:
        raise DecisionError("--choices are the answers to --ask")
    if args.questions is not None:
        options = read_question_file(Path(args.questions), FILE_KEYS)
    elif args.choices is None:
        options = {"questions": [{"type": "predicate", "instructions": args.ask, "name": "answer"}]}
    else:
        options = {"questions": [{"choices": args.choices.split(","), "instructions": args.ask, "name": "answer"}]}
    for name in ("instructions", "prompt_template", "truncate"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    return options | {"label_mass": args.label_mass, "diagnostics": args.diagnostics}


def _one(args: argparse.Namespace, llm: LLM, questions: Any, options: dict[str, Any]) -> None:
    state = sys.stdin.read() if args.state == "-" else args.state
    made = llm.decider.question_set(questions, **options)
    output = llm.decide(state, made)
    if args.json:
        print(json.dumps(output.to_dict(), ensure_ascii=False))
    else:
        _show_answers(output)
    if args.plot:
        from lastrow.decisions.summary import Summary

        summary = Summary(questions)
        summary.see(output.to_dict())
        summary.plot(Path(args.plot))


def _show_answers(output: DecisionOutput) -> None:
    from rich.console import Console
    from rich.table import Table

    masses = any(answer.label_mass is not None for answer in output.answers)
    table = Table("question", "answer", "probability", *(["label mass"] if masses else []), box=None, header_style="bold")
    for i, answer in enumerate(output.answers):
        shown = f"{answer.score:.3f}" if answer.type == "score" else "abstains" if answer.abstained else answer.texts[answer.best]
        order = sorted(range(len(answer.texts)), key=lambda j: -answer.probabilities[j])[:5]
        chances = ", ".join(f"{answer.texts[j]} {answer.probabilities[j]:.4f}" for j in order)
        table.add_row(answer.name or f"q{i}", shown, chances, *([f"{answer.label_mass:.4f}"] if masses else []))
    Console().print(table)


def _file(args: argparse.Namespace, job: Any, llm: LLM, made: QuestionSet) -> None:
    from lastrow.decisions.questions import DecisionError
    from lastrow.decisions.summary import Summary, flat

    def states(rows: Iterable[Row]) -> Iterator[Any]:
        for row in rows:
            try:
                yield row.get(args.state_field)
            except DecisionError as error:
                yield error

    summary = Summary(made.questions)
    start = time.perf_counter()
    report = job.run(
        lambda rows: llm.decider.decide(states(rows), made),
        lambda record: flat(made.questions, record),
        summary.see,
    )
    show_table(("question", "type", "rows", "answers", "mean", "label mass"), summary.rows())
    new = report.num_rows - report.num_resumed
    parts = [f"{report.num_rows:,} rows, {report.num_errors:,} with an error"]
    if report.num_resumed:
        parts.append(f"{report.num_resumed:,} from an interrupted run")
    parts.append(
        f"{report.rows_per_s:,.1f} items/s, {report.rows_per_s * len(made.questions):,.1f} questions/s" if new else "nothing left to do"
    )
    print(" · ".join([*parts, f"{time.perf_counter() - start:.1f} s", str(args.output)]), file=sys.stderr)
    if args.plot:
        summary.plot(Path(args.plot))


def show_table(names: Iterable[str], rows: Iterable[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*names, box=None, header_style="bold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
