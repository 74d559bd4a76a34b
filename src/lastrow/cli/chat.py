"""`lastrow chat`: turns read from the terminal or, one a line, from a pipe; answers are streamed."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from lastrow.cli.options import add_engine_flags, add_model, add_sampling_flags, engine_options, sampling_params
from lastrow.cli.report import summary

if TYPE_CHECKING:
    from lastrow.core.output import RequestOutput
    from lastrow.core.sampling_params import SamplingParams
    from lastrow.engine.llm import LLM

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves"
DIM, PLAIN = "\033[2m", "\033[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=False, help="let the model think first (default: off)")
    parser.add_argument(
        "--timings", action=argparse.BooleanOptionalAction, default=True, help="a line on stderr after every turn (default: on)"
    )
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> None:
    import lastrow

    llm = lastrow.LLM(**engine_options(args, text=True))
    params = sampling_params(args, llm.get_default_sampling_params(), skip_special_tokens=False)
    system = [{"role": "system", "content": args.system}] if args.system else []
    messages: list[dict[str, Any]] = list(system)
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    while (line := _read_turn()) is not None:
        if line == "/reset":
            messages = list(system)
        elif line:
            messages.append({"role": "user", "content": line})
            start = time.perf_counter()
            answer, output = _answer(llm, messages, params, args.thinking)
            messages.append({"role": "assistant", "content": answer})
            if args.timings:
                print(summary([output], time.perf_counter() - start), file=sys.stderr)


def _read_turn() -> str | None:
    """The next turn; None at the end of the input."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line in ("/exit", "/quit") else line


def _answer(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams, thinking: bool) -> tuple[str, RequestOutput]:
    """Stream one answer to stdout. Returns its text without the thinking, and the finished request."""
    prompt_ids = llm.get_tokenizer().apply_chat_template(messages, enable_thinking=thinking)
    show = Display(color=sys.stdout.isatty())
    output = None
    for output in llm.stream({"prompt_token_ids": prompt_ids}, params):
        print(show.update(output.outputs[0].text, output.finished), end="", flush=True)
    if output is None:
        raise ValueError("the engine ended without an answer")
    print(flush=True)  # before the summary also where both go into one pipe
    return show.answer, output


class Display:
    """Splits a growing text with special tokens into thinking and answer; a marker cut in half is held back.

    answer: the text outside <|channel> ... <channel|>."""

    OPEN, CLOSE = "<|channel>", "<channel|>"
    ENDS = ("<turn|>", "<eos>", "<|tool_response>")

    def __init__(self, color: bool) -> None:
        self.answer = ""
        self._color = color
        self._shown = 0
        self._thinking = False

    def update(self, text: str, finished: bool) -> str:
        """What to print now. text: the whole output so far."""
        for end in self.ENDS:
            text = text.removesuffix(end)
        printed = []
        while True:
            marker = self.CLOSE if self._thinking else self.OPEN
            at = text.find(marker, self._shown)
            stop = at if at >= 0 else len(text) - (0 if finished else _overlap(text[self._shown :], marker))
            piece = text[self._shown : stop]
            printed.append(piece)
            if not self._thinking:
                self.answer += piece
            self._shown = stop
            if at < 0:
                break
            self._shown += len(marker)
            printed.append(self._style(not self._thinking))
            self._thinking = not self._thinking
        if finished and self._thinking:
            printed.append(self._style(False))
        return "".join(printed)

    def _style(self, thinking: bool) -> str:
        if self._color:
            return DIM if thinking else PLAIN + "\n"
        return "[" if thinking else "]\n"


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of `marker`."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)
