"""Relaxed acceptance changes tokens inside a thought, only there, and only where the draft is near the best."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from engine.stub_engine import stub_engine, stub_logits
from engine.test_spec_decode import GREEDY, run, speculating, tokens
from lastrow.config import EngineConfig
from lastrow.engine.llm import LLM
from lastrow.engine.relaxed_acceptance import RelaxedAcceptance
from lastrow.models.config import ConfigError

START, END = 30, 31
LONG = replace(GREEDY, max_tokens=60)


def relaxed(share: float, prompt: list[int], right: float = 0.2) -> list[int]:
    engine, _ = speculating(right)
    engine.runner.relaxed = RelaxedAcceptance(share, START, END)
    output = tokens(run(engine, [(prompt, LONG)]))[0][0]
    assert not engine.runner.relaxed._seen
    return output


def plain(prompt: list[int]) -> list[int]:
    return tokens(run(stub_engine(), [(prompt, LONG)]))[0][0]


def test_inside_a_thought_near_drafts_stay_and_far_ones_do_not() -> None:
    prompt = [3, START, 5]
    output = relaxed(0.05, prompt)
    assert output != plain(prompt)
    text, inside, others = list(prompt), True, 0
    for token in output:
        logits = stub_logits(text)
        best = int(logits.argmax())
        if token != best:
            others += 1
            assert inside and token not in (START, END)
            assert logits[token] >= logits[best] + math.log(0.05)
        inside = (token == START) if token in (START, END) else inside
        text.append(token)
    assert others >= 2


def test_logprobs_are_those_of_the_drafts_that_stay() -> None:
    """One was sampled by the target, another one is the output: reported is the other one."""
    prompt = [3, START, 5]
    for fields in ({"logprobs": 0}, {"logprobs": 1, "presence_penalty": 0.3}):
        engine, _ = speculating(0.2)
        engine.runner.relaxed = RelaxedAcceptance(0.05, START, END)
        (output,) = run(engine, [(prompt, replace(LONG, **fields))])[0]
        assert output.logprobs is not None and output.token_ids != plain(prompt)
        text, worse = list(prompt), 0
        for token, entry in zip(output.token_ids, output.logprobs, strict=True):
            logprobs = torch.from_numpy(stub_logits(text)).log_softmax(-1)
            assert entry[token].logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
            assert entry[token].rank == 1 + int((logprobs > logprobs[token]).sum())
            worse += entry[token].rank > 1
            text.append(token)
        assert worse >= 2


def test_outside_a_thought_and_with_share_one_nothing_changes() -> None:
    for prompt in ([3, 4, 5], [3, START, END]):
        output = plain(prompt)
        end = output.index(START) + 1 if START in output else len(output)
        assert relaxed(0.001, prompt)[:end] == output[:end]
    assert relaxed(1.0, [3, START, 5]) == plain([3, START, 5])


def test_the_option_needs_drafts_and_a_share() -> None:
    with pytest.raises(ConfigError, match=r"relaxed_acceptance is 0\.3: speculative_config is needed"):
        EngineConfig(relaxed_acceptance=0.3)
    with pytest.raises(ConfigError, match=r"relaxed_acceptance is 0.0: None or a share in \(0, 1\]"):
        EngineConfig(relaxed_acceptance=0.0, speculative_config={"method": "ngram"})


def test_the_option_reaches_the_runner_of_a_model_that_thinks() -> None:
    llm = LLM("tiny-e", speculative_config={"method": "ngram"}, relaxed_acceptance=0.3)
    made = llm.engine.runner.relaxed
    assert made is not None and made.share == 0.3
    marks = llm.get_tokenizer().special_ids
    assert (made.channel_start, made.channel_end) == (marks["channel_start"], marks["channel_end"])
