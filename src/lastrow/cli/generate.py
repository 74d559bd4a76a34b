"""`lastrow generate`: plain completion of prompts, without a chat template."""

from __future__ import annotations

import argparse
import json
import sys
import time

from lastrow.cli.options import add_engine_flags, add_model, add_sampling_flags, engine_options, sampling_params
from lastrow.cli.report import document, summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to complete; none: standard input is one prompt")
    parser.add_argument("--lines", action="store_true", help="every line of standard input is a prompt of its own")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="completions per prompt (default: 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt, with stable keys")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> None:
    options = engine_options(args, text=True)
    prompts = args.prompts or _from_stdin(args.lines)
    import lastrow

    llm = lastrow.LLM(**options)
    params = sampling_params(args, llm.get_default_sampling_params(), n=args.n)
    start = time.perf_counter()
    if len(prompts) == 1 and args.n == 1 and not args.json:
        outputs, shown = [], 0
        for output in llm.stream(prompts[0], params):
            text = output.outputs[0].text
            print(text[shown:], end="", flush=True)
            outputs, shown = [output], len(text)
        print()
    else:
        outputs = llm.generate(prompts, params)
        for output in outputs:
            if args.json:
                print(json.dumps(document(output), ensure_ascii=False))
                continue
            for completion in output.outputs:
                print(f"[{output.prompt}] {completion.text}")
    print(end="", flush=True)  # before the summary also where both go into one pipe
    print(summary(outputs, time.perf_counter() - start), file=sys.stderr)


def _from_stdin(lines: bool) -> list[str]:
    if sys.stdin.isatty():
        raise ValueError("no prompt: give texts after MODEL or pipe one in (`lastrow generate tiny-e 'In the beginning'`)")
    text = sys.stdin.read()
    prompts = [line for line in text.splitlines() if line] if lines else [text.removesuffix("\n")] if text.strip() else []
    if not prompts:
        raise ValueError("no prompt: standard input is empty")
    return prompts
