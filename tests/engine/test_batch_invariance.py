"""batch_invariant on the reference backend: a request's tokens and logprobs are the same bits in any company (tests/gpu has the
same on the card, with the kernels)."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
import torch

from lastrow import LLM, SamplingParams
from lastrow.config import EngineConfig
from lastrow.engine.build import sums_in_fixed_order
from lastrow.engine.invariance import NotInvariant, check_invariance
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.models.config import ConfigError
from lastrow.models.shapes import named_shape

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, list[int]]]:
    text = (resources.files("lastrow") / "assets/tiny-e/heldout.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    chosen = [row for row in rows if row["id"] in (0, 7) and row["task"] not in ("retrieval", "think")]
    return [{"prompt_token_ids": row["prompt_ids"]} for row in chosen]


def bits(llm: LLM, prompts: list[dict[str, list[int]]]) -> list[Any]:
    """Tokens and the exact logprobs of the five likeliest of each."""
    outs = [out.outputs[0] for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    return [(o.token_ids, [sorted((i, p.logprob) for i, p in step.items()) for step in o.logprobs or ()]) for o in outs]


def test_alone_batched_chunked_and_after_a_prefix_hit(prompts):
    llm = LLM("tiny-e", batch_invariant=True)
    batched = bits(llm, prompts)
    assert bits(llm, prompts[::-1])[::-1] == batched, "the second run, in another order, finds its prompts in the prefix cache"
    alone = LLM("tiny-e", batch_invariant=True, enable_prefix_caching=False, max_num_seqs=1)
    assert bits(alone, prompts) == batched
    chunked = LLM("tiny-e", batch_invariant=True, enable_prefix_caching=False, max_num_seqs=5, max_num_batched_tokens=37)
    assert bits(chunked, prompts) == batched


def test_all_rows_wanted_gives_the_same_bits(prompts):
    llm = LLM("tiny-e", batch_invariant=True, enable_prefix_caching=False)
    plain = bits(llm, prompts)
    for i, prompt in enumerate(prompts):
        ids = prompt["prompt_token_ids"]
        llm.engine.add_request(str(i), ids, GREEDY, prompt_rows=range(len(ids) - 1))
    done = {}
    while llm.engine.has_unfinished_requests:
        done |= {out.request_id: out.outputs[0] for out in llm.engine.step() if out.finished}
    assert [done[str(i)].token_ids for i in range(len(prompts))] == [tokens for tokens, _ in plain]
    for i, (_, logprobs) in enumerate(plain):
        assert [sorted((t, p.logprob) for t, p in step.items()) for step in done[str(i)].logprobs] == logprobs


def test_the_start_up_test_finds_a_matmul_that_depends_on_the_batch():
    llm = LLM("tiny-e", batch_invariant=True)
    model = llm.engine.runner.model

    class Sloppy(ReferenceOps):
        def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            y = super().linear(x, weight)
            return y if x.shape[0] > 100 else y * (1 + 2**-20)

    assert check_invariance(model.ops, model.weights, model.config) > 50
    with pytest.raises(NotInvariant, match="other bits alone"):
        check_invariance(Sloppy(), model.weights, model.config)


def test_drafts_in_bf16_need_it_and_only_an_explicit_no_does_without() -> None:
    drafts: dict[str, Any] = {"speculative_config": {"method": "ngram"}}

    def chosen(shape: str, dtype: str = "bfloat16", device: str = "cuda", **options: Any) -> bool:
        return sums_in_fixed_order(EngineConfig(**options), named_shape(shape), dtype, torch.device(device))

    assert chosen("e2b", **drafts) and chosen("e2b", batch_invariant=True)
    assert not chosen("e2b") and not chosen("e2b", batch_invariant=False, **drafts) and not chosen("e2b", "float32", **drafts)
    cannot: list[dict[str, Any]] = [{"shape": "e2b", "device": "cpu"}, {"shape": "e2b", "backend": "reference"}, {"shape": "26b-a4b"}]
    for case in cannot:
        with pytest.raises(ConfigError, match=r"speculative_config: in bfloat16 .*--no-batch-invariant"):
            chosen(**case, **drafts)
        assert not chosen(**case, **drafts, batch_invariant=False) and not chosen(**case, **drafts, dtype="float32")
    with pytest.raises(ConfigError, match="batch_invariant: the experts"):
        chosen("26b-a4b", batch_invariant=True)
