"""Acceptance of a drafter on the held-out prompts, and whether greedy outputs stay what they are. Through the engine, in fp32.

    python eval_assistant.py --assistant DIR [--tokens 4] [--heldout FILE] [--limit N]

Two numbers per verification: accepted length, the drafts that stood plus one (vLLM's mean acceptance length; drafts behind a stop token
do not count as standing), and tokens emitted, which a stop token among the drafts cuts."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch

from lastrow import LLM, SamplingParams
from lastrow.core.stats import SpecDecodeStats

HELDOUT = Path(__file__).parents[2] / "src" / "lastrow" / "assets" / "tiny-e" / "heldout.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--assistant", help="folder; without it the n-gram proposer")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--heldout", type=Path, default=HELDOUT)
    parser.add_argument("--limit", type=int, default=40, help="prompts a task")
    parser.add_argument("--threads", type=int, default=1)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    by_task = defaultdict(list)
    for line in a.heldout.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_task[row["task"]].append(row)
    method = {"model": a.assistant} if a.assistant else {"method": "ngram"}
    llm = LLM("tiny-e", max_model_len=1200, speculative_config={**method, "num_speculative_tokens": a.tokens, "adaptive": False})
    speculator, total, same_in_all = llm.engine.runner.speculator, SpecDecodeStats(), 0
    for task, rows in by_task.items():
        rows = rows[: a.limit]
        params = [SamplingParams(temperature=0.0, max_tokens=48 if task in ("prose", "recite") else 200) for _ in rows]
        s = speculator.stats = SpecDecodeStats()
        outputs = llm.generate([row["prompt_ids"] for row in rows], params)
        same = sum(out.outputs[0].token_ids == row["output_ids"] for out, row in zip(outputs, rows, strict=True))
        rates = " ".join(f"{rate:.2f}" for rate in s.acceptance_rates)
        print(f"{task:12} {same}/{len(rows)} same, {describe(s)}; by position {rates}", flush=True)
        same_in_all += same
        for name in ("num_drafts", "num_accepted_tokens", "num_emitted_tokens"):
            setattr(total, name, getattr(total, name) + getattr(s, name))
    print(f"all          {same_in_all}/{sum(len(rows[: a.limit]) for rows in by_task.values())} same, {describe(total)}")


def describe(s: SpecDecodeStats) -> str:
    accepted = 1 + s.num_accepted_tokens / max(s.num_drafts, 1)
    return f"{s.num_drafts:5} verifications, accepted length {accepted:.3f}, emitted {s.mean_accepted_length:.3f}"


if __name__ == "__main__":
    main()
