"""How long an engine takes to be ready on a card: first with empty kernel caches, then with what that start left there.

    PYTHONPATH=src python tools/gpu/start_times.py --out start.jsonl [--shape e2b] [--again 2]

Every start is a process of its own with the options of `lastrow bench matrix`. One JSON line each: `process_s` from the interpreter's
start to an engine that answers, `engine_s` of it inside `LLM(...)`; the rest is importing torch and making a CUDA context. Dummy weights
are drawn on the card, so reading a checkpoint is not in it. A step afterwards shows that nothing is left to compile."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


def one_start(shape: str) -> dict[str, Any]:
    """In the new process."""
    from lastrow.harness.matrix import CASES, MatrixBench, build_arms, generate

    begin = time.perf_counter()
    _, notes = build_arms(MatrixBench(shape=shape, arms=("fast",)))
    ready = time.perf_counter()
    llm = notes["engines"]["fast"]
    case = next(case for case in CASES if case.name == "first token")
    prompt = [[5 + i % 1000 for i in range(case.input_len)]]
    firsts = []
    for _ in range(2):
        start = time.perf_counter()
        generate(llm, case, prompt)
        firsts.append(round(1e3 * (time.perf_counter() - start), 2))
    return {"engine_s": round(ready - begin, 2), "answers_ms": firsts, "ready_at": time.time() - (time.perf_counter() - ready)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="e2b")
    parser.add_argument("--again", type=int, default=2, metavar="N", help="starts after the first")
    parser.add_argument("--caches", type=Path, help="folder of the caches, kept; empty at first (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one_start(args.shape)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.caches or Path(temporary)
        if folder.exists() and any(folder.iterdir()):
            sys.exit(f"{folder} is not empty: the first start would not be a cold one")
        environment = os.environ | {name: str(folder / name.lower()) for name in CACHES}
        for number in range(1 + args.again):
            begin = time.time()
            made = subprocess.run(
                [sys.executable, __file__, "--one", "--shape", args.shape], env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            row = json.loads(made.stdout.splitlines()[-1])
            row = {"start": "cold" if number == 0 else "again", "process_s": round(row.pop("ready_at") - begin, 2), **row}
            print(json.dumps(row), flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
