"""On the card: drafts verified in one captured step, and forks that copy their blocks inside one."""

from __future__ import annotations

from typing import Any

import pytest

from lastrow.core.sampling_params import SamplingParams
from lastrow.engine.llm import LLM

pytestmark = pytest.mark.gpu
SMALL = {"device": "cuda", "max_num_seqs": 32, "max_num_batched_tokens": 1024, "max_model_len": 1024, "kv_cache_memory_bytes": 64_000_000}
DRAFTS = {"speculative_config": {"model": "tiny-e-assistant", "num_speculative_tokens": 4, "adaptive": False}}


def answers(llm: LLM, heldout: list[dict[str, Any]]) -> list[list[int]]:
    rows = [row for row in heldout if row["id"] < 2]
    params = [SamplingParams(temperature=0, max_tokens=len(row["output_ids"])) for row in rows]
    return [out.outputs[0].token_ids for out in llm.generate([row["prompt_ids"] for row in rows], params, use_tqdm=False)]


@pytest.mark.parametrize("options", [{}, {"batch_invariant": False}])
def test_drafts_give_the_tokens_of_plain_decoding(heldout: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """In the default mode all of them: drafts turn batch_invariant on."""
    exact = not options
    plain, drafting = LLM("tiny-e", **SMALL, batch_invariant=exact), LLM("tiny-e", **SMALL, **DRAFTS, **options)
    runner = drafting.engine.runner
    follows, execute = [], runner.execute
    runner.execute = lambda out: follows.append(any(part.follows for part in out.scheduled)) or execute(out)
    expected, got = answers(plain, heldout), answers(drafting, heldout)
    assert sum(follows) > 0.5 * len(follows), "the host was waited for"
    assert runner.speculator.stats.num_accepted_tokens > 100 and runner.stats.graphs > runner.stats.eager
    if exact:
        assert got == expected
    else:  # rows of another batch round differently: answers may part at a near-tie of free prose, few do
        assert sum(a == b for a, b in zip(got, expected, strict=True)) >= 0.75 * len(expected)


def test_sampled_requests_follow_drafts_and_draw_what_they_would_without(heldout: list[dict[str, Any]]) -> None:
    """A draw's seed and place go with its token, wherever the drafts before it ended; logprobs are of its row."""
    rows = [row for row in heldout if row["id"] < 2]
    prompts = [row["prompt_ids"] for row in rows]
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=40, logprobs=2) for i in range(len(rows))]
    plain, drafting = LLM("tiny-e", **SMALL, batch_invariant=True), LLM("tiny-e", **SMALL, **DRAFTS)
    follows, execute = [], drafting.engine.runner.execute
    drafting.engine.runner.execute = lambda out: follows.append(any(part.follows for part in out.scheduled)) or execute(out)
    said = [
        [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params, use_tqdm=False)]
        for llm in (plain, drafting)
    ]
    assert sum(follows) > 0.3 * len(follows) and drafting.engine.runner.speculator.stats.num_accepted_tokens > 100
    assert said[0] == said[1]


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_questions_in_one_pass_are_those_asked_alone(batch_invariant: bool) -> None:
    llm = LLM("tiny-e", **SMALL, batch_invariant=batch_invariant)
    questions = [{"type": "predicate", "instructions": f"Is this message about {what}?"} for what in ("money", "a lamp", "spam", "time")]
    state = "Message: I was charged twice for the lamp, and I want my money back before the end of the week."
    together = [answer.probability for answer in llm.decide(state, questions).answers]
    graphs = llm.engine.runner.graphs
    assert llm.engine.runner.model.ops.counts["copy_tokens"] and not any("fork" in reason for reason in graphs.misses)
    alone = [llm.decide(state, [question]).answers[0].probability for question in questions]
    if batch_invariant:
        assert together == alone
    else:
        # bf16: logits of size 8 to 16 are 0.06 apart; a moved sum moves a step of two labels: 0.12 of a log odds, 0.03 of a probability
        assert together == pytest.approx(alone, abs=0.03)
