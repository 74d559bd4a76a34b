"""The command line: `lastrow COMMAND [MODEL] ...`. Nothing here imports torch before a command needs it.

A command is a module with `add_arguments(parser)` and `run(args) -> int | None`, named in COMMANDS.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import lastrow

COMMANDS = {
    "generate": "complete prompts",
    "chat": "talk to a model",
    "decide": "answer questions about states with probabilities",
    "score": "log probabilities of given continuations",
    "serve": "an OpenAI-compatible server",
    "info": "what a model is, what it costs, what fits (needs no weights)",
    "parity": "check a checkpoint against transformers, itself and recorded outputs",
    "bench": "measure speed, arms interleaved, and write a record",
}
USER_ERROR, INTERRUPTED = 2, 130


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line and no abbreviated options."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.HelpFormatter, **options)  # pyright: ignore[reportArgumentType]

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (`{self.prog} --help` lists what there is)")


def fail(message: str) -> NoReturn:
    """Every mistake of the user's ends here: one line on stderr, exit code 2."""
    line = " ".join(message.split())
    print(f"lastrow: error: {line}", file=sys.stderr)
    raise SystemExit(USER_ERROR)


def top_parser() -> argparse.ArgumentParser:
    """Names the commands; builds none of them, which keeps `lastrow --help` fast."""
    parser = Parser(prog="lastrow", description="Inference for the Gemma 4 family that computes only the rows somebody will read.")
    parser.add_argument("--version", action="version", version=f"lastrow {lastrow.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


def run_command(name: str, argv: Sequence[str]) -> int:
    """Parse one command's arguments, options and positionals in any order, and run it."""
    module = import_module(f"lastrow.cli.{name}")
    summary = COMMANDS[name]
    parser = Parser(prog=f"lastrow {name}", description=summary[0].upper() + summary[1:] + ".")
    module.add_arguments(parser)
    return module.run(parser.parse_intermixed_args(argv)) or 0


def _drop_output() -> None:
    """Send what stdout still holds nowhere: Python would fail on it again while it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, or the command's own code; 2 after a user's mistake, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv or argv[0] not in COMMANDS:
            parser = top_parser()
            parser.parse_args(argv)
            parser.error(f"no command: one of {', '.join(COMMANDS)} is needed")
        code = run_command(argv[0], argv[1:])
        if sys.stdout is not None:  # closed by the caller: `lastrow ... >&-`
            sys.stdout.flush()
        return code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `lastrow ... | head`: the reader has seen enough
        _drop_output()
        return 0
    except (ValueError, OSError) as error:  # ConfigError, TokenizerError, WeightsError, SamplingParams: all say what is wrong
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _drop_output()
        try:
            fail(str(error) or type(error).__name__)
        except SystemExit:
            return USER_ERROR
