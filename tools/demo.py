"""`make demo`: a completion, a chat and a decision on the bundled tiny-e, with timings and the rows its shared layers ran on."""

from __future__ import annotations

import io
import math
import shlex
import sys
import time

from lastrow import LLM, SamplingParams
from lastrow.cli import main
from lastrow.cli.report import summary

MESSAGE = "Hello, I would like my money back for the broken lamp. It arrived with a crack."
QUESTION = f"Message: {MESSAGE}\n\nWhat does the customer want?\n[A] refund\n[B] address change\n[C] information\nGive only the letter."


def command(*argv: str, stdin: str = "") -> None:
    """Show and run one `lastrow` command line, feeding it `stdin`."""
    shown = f"printf {shlex.quote(stdin)} | " if stdin else ""
    print(f"$ {shown}lastrow {shlex.join(argv)}", flush=True)
    keyboard, sys.stdin = sys.stdin, io.StringIO(stdin.encode().decode("unicode_escape"))
    try:
        if main(argv):
            raise SystemExit(f"lastrow {argv[0]} failed")
    finally:
        sys.stdin = keyboard
    print(flush=True)


def decide() -> None:
    """One decision: the answer's first token, and the probability of each option's letter."""
    print("A decision (Python: LLM.chat, one token, the probabilities of the three letters)")
    print("    " + QUESTION.replace("\n", "\n    "), flush=True)
    llm = LLM("tiny-e")
    letters = {letter: llm.get_tokenizer().encode(letter, add_bos=False)[0] for letter in "ABC"}
    params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=list(letters.values()))
    start = time.perf_counter()
    (output,) = llm.chat([{"role": "user", "content": QUESTION}], params)
    seconds = time.perf_counter() - start
    (logprobs,) = output.outputs[0].logprobs or [{}]
    print(
        f"answer {output.outputs[0].text}; "
        + ", ".join(f"P({letter}) = {math.exp(logprobs[i].logprob):.4f}" for letter, i in letters.items())
    )
    print(summary([output], seconds), file=sys.stderr)


if __name__ == "__main__":
    command("generate", "tiny-e", "In the beginning", "--temperature", "0", "--max-tokens", "40")
    command("chat", "tiny-e", "--temperature", "0", stdin=r"Where in the world is Guyana?\nWhat is 15 - 11?\n")
    decide()
