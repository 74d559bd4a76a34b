"""SamplingParams takes what vLLM's takes and names what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from lastrow.core.sampling_params import SamplingParams

WRONG: dict[str, list[Any]] = {
    "n": [0, -1, 1.5, True, "2", None, float("inf")],
    "temperature": [-0.1, 101, "hot", None, float("nan"), float("inf"), True, [1.0]],
    "top_p": [0.0, 1.01, -1, "x", None, float("nan")],
    "top_k": [-2, 1.5, "x", None, float("inf")],
    "min_p": [-0.1, 1.1, None, float("nan")],
    "presence_penalty": [2.1, -2.1, "x", float("nan")],
    "frequency_penalty": [2.1, -2.1, None, float("nan")],
    "repetition_penalty": [0.0, -1.0, 101, "x", float("nan")],
    "seed": [2**64, -(2**63) - 1, 1.5, "x", True],
    "stop": ["", ["a", ""], [1], 5, 0, {"a": 1}],
    "stop_token_ids": ["ab", [1.5], [None], 7, {1: 2}],
    "bad_words": [[""], [1], 5],
    "logit_bias": [{1: 101}, {1: float("nan")}, {"a": 1}, {1: "x"}, [1], {1.5: 1}],
    "allowed_token_ids": [[], ["a"], 5, "ab"],
    "ignore_eos": [None, "no", 1],
    "min_tokens": [-1, 17, 1.5, None],
    "max_tokens": [-1, 0, 1.5, "x", float("inf")],
    "logprobs": [-2, 129, 1.5, "x", True],
    "prompt_logprobs": [-2, 129, 1.5],
    "logprob_token_ids": [[], list(range(129)), ["a"], 5],
    "include_stop_str_in_output": [None],
    "skip_special_tokens": ["yes"],
}
RIGHT: dict[str, list[Any]] = {
    "n": [1, 300, np.int64(2)],
    "temperature": [0, 1e-30, 100, np.float32(0.5)],
    "top_k": [-1, 0, 1, 2**40],
    "seed": [None, 0, -(2**63), 2**64 - 1, np.uint64(2**64 - 1)],
    "stop": [None, [], "a", ("a", "b")],
    "stop_token_ids": [None, [], (1, 2), {3}, np.array([4, 5])],
    "bad_words": [None, ["a"]],
    "logit_bias": [None, {}, {1: -100, 2: 100.0}, {"5": 1}, {np.int64(3): np.float32(1)}],
    "max_tokens": [None, 16],
    "logprobs": [None, -1, 0, 128],
    "logprob_token_ids": [None, [5, 5]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values], ids=repr)
def test_what_is_wrong_is_named_with_its_value_and_what_would_be_right(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is .*: .*(needed|nothing|at once|kept out|to return)$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in RIGHT.items() for value in values], ids=repr)
def test_what_is_right_is_taken(name: str, value: Any) -> None:
    SamplingParams(**{name: value})


def test_fields_come_out_in_one_form_and_copies_are_equal() -> None:
    params = SamplingParams(stop="a", logit_bias={"5": 1}, top_k=-1, seed=3)  # type: ignore[dict-item]
    assert (params.stop, params.logit_bias, params.top_k) == (["a"], {5: 1.0}, 0)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
