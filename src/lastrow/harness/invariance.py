"""batch_invariant end to end: the same prompts in every company, compared bit for bit.

Compared are the sampled tokens and the exact logprobs of the likeliest tokens of every step: a logprob holds the logsumexp of the
row, so a difference in any logit that could change an answer shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lastrow.core.output import CompletionOutput
from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.llm import LLM

TOP = 20
Bits = tuple[list[int], list[list[tuple[int, float]]]]


def bits(output: CompletionOutput) -> Bits:
    return output.token_ids, [sorted((token, p.logprob) for token, p in step.items()) for step in output.logprobs or ()]


def generate(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[Bits]:
    outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [bits(out.outputs[0]) for out in outs]


def generate_all_rows(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[Bits]:
    """Every prompt row through every layer."""
    for i, ids in enumerate(prompts):
        llm.engine.add_request(f"all-{i}", ids, params, prompt_rows=range(len(ids) - 1))
    done: dict[str, Bits] = {}
    while len(done) < len(prompts):
        done |= {out.request_id: bits(out.outputs[0]) for out in llm.engine.step() if out.finished}
    return [done[f"all-{i}"] for i in range(len(prompts))]


def run(options: dict[str, Any], prompts: Sequence[list[int]], continuation: int = 32, chunk: int = 1000) -> dict[str, int]:
    """How many prompts give identical bits in each company as in one batch of all. options: LLM's, without batch_invariant."""
    params = SamplingParams(temperature=0, max_tokens=continuation, ignore_eos=True, logprobs=TOP)
    llm = LLM(**options, batch_invariant=True, enable_prefix_caching=False)
    together = generate(llm, prompts, params)
    others = {
        "one by one": [generate(llm, [ids], params)[0] for ids in prompts],
        "seven at a time": [b for i in range(0, len(prompts), 7) for b in generate(llm, prompts[i : i + 7], params)],
        "in reverse order": generate(llm, prompts[::-1], params)[::-1],
        "all rows wanted": generate_all_rows(llm, prompts, params),
    }
    del llm
    torch.cuda.empty_cache()
    chunked: dict[str, Any] = options | {"max_num_batched_tokens": chunk, "batch_invariant": True, "enforce_eager": True}
    small = LLM(**chunked)
    others[f"chunks of {chunk} mixed with decodes, eager"] = generate(small, prompts, params)
    others["after prefix hits"] = generate(small, prompts, params)
    return {name: sum(a == b for a, b in zip(together, result, strict=True)) for name, result in others.items()}
