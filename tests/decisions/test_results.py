"""Probabilities, calibration, and the numbers of an answer."""

from __future__ import annotations

import json
import math
import random

import pytest

from lastrow.decisions.labels import LabelScores
from lastrow.decisions.questions import DecisionError, parse_questions
from lastrow.decisions.results import Answer, Calibration, DecisionOutput, fit_temperature, make_answer, mean_log, softmax

LEVELS = parse_questions([{"type": "score", "instructions": "x", "levels": ["low", "mid", "high"], "name": "s"}])[0]


def logs(*probabilities: float) -> LabelScores:
    return LabelScores([math.log(p) for p in probabilities], True)


def test_an_answer_without_calibration() -> None:
    answer = make_answer(LEVELS, logs(0.1, 0.2, 0.5), Calibration(), None)
    assert answer.probabilities == pytest.approx([0.125, 0.25, 0.625])
    assert answer.score == pytest.approx(0.25 + 2 * 0.625) and answer.choice == 2 and answer.confidence == pytest.approx(0.625)
    assert answer.label_mass == pytest.approx(0.8) and not answer.abstained


def test_prior_temperature_and_threshold() -> None:
    prior = mean_log([logs(0.2, 0.2, 0.6), logs(0.1, 0.3, 0.6)])
    assert [math.exp(p) for p in prior] == pytest.approx([0.15, 0.25, 0.6])
    corrected = make_answer(LEVELS, logs(0.15, 0.25, 0.6), Calibration(), prior)
    assert corrected.probabilities == pytest.approx([1 / 3] * 3)  # what a state without content gets is taken away whole
    hot = make_answer(LEVELS, logs(0.1, 0.2, 0.7), Calibration(temperature={"s": 2.0, "other": 9.0}), None)
    roots = [math.sqrt(p) for p in (0.1, 0.2, 0.7)]
    assert hot.probabilities == pytest.approx([r / sum(roots) for r in roots])
    shy = make_answer(LEVELS, logs(0.3, 0.3, 0.4), Calibration(abstain_below=0.5), None)
    assert shy.abstained and shy.choice is None and shy.to_dict()["abstained"] is True


def test_extreme_logits_give_no_nan() -> None:
    for values in ([1e4, -1e4], [-1e30, -1e30], [30.0, 30.0], [-1e308, 0.0]):
        made = softmax(values)
        assert all(0.0 <= p <= 1.0 for p in made) and math.fsum(made) == pytest.approx(1.0)
    # a temperature by which every log score is infinite
    assert make_answer(LEVELS, logs(0.1, 0.2, 0.5), Calibration(temperature=1e-320), None).probabilities == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"temperature": 0}, "calibration.temperature is 0"),
        ({"temperature": float("nan")}, "calibration.temperature is nan"),
        ({"temperature": {"a": -1.0}}, "calibration.temperature"),
        ({"abstain_below": 1.5}, "calibration.abstain_below is 1.5"),
        ({"abstain_below": True}, "calibration.abstain_below is True"),
        ({"prior": [7]}, "calibration.prior is [7]: true, or a text"),
        ({"prior": 7}, "calibration.prior is 7"),
        ({"prior": {"a": 1}}, "calibration.prior is {'a': 1}"),
        ({"prior": ["N/A", " "]}, "calibration.prior"),
        ({1: 2, "bias": 1}, "calibration.1 is not known"),
        ({"bias": 1}, "calibration.bias is not known"),
        (7, "calibration is 7"),
    ],
)
def test_bad_calibrations(value: object, message: str) -> None:
    with pytest.raises(DecisionError) as raised:
        Calibration.of(value)  # pyright: ignore[reportArgumentType]
    assert message in str(raised.value)


def test_fit_temperature_finds_the_one_that_the_data_was_drawn_with() -> None:
    r = random.Random(5)
    table, right = [], []
    for _ in range(4000):
        log_scores = [r.gauss(0, 3) for _ in range(4)]
        table.append(log_scores)
        right.append(r.choices(range(4), softmax([log / 2.5 for log in log_scores]))[0])
    # standard error of log t over 4,000 draws, measured by repetition: 0.02
    assert fit_temperature(table, right) == pytest.approx(2.5, rel=0.08)
    with pytest.raises(DecisionError, match="0 answers"):
        fit_temperature([], [])


def test_outputs_survive_json() -> None:
    answers = [
        make_answer(LEVELS, logs(0.1, 0.2, 0.5), Calibration(), None, True),
        make_answer(parse_questions([{"type": "predicate", "instructions": "x"}])[0], logs(0.3, 0.6), Calibration(), None),
        make_answer(
            parse_questions([{"instructions": "x", "choices": ["true", True]}])[0], logs(0.3, 0.6), Calibration(abstain_below=0.9), None
        ),
    ]
    output = DecisionOutput(3, answers, None, 12, 4, True)
    again = DecisionOutput.from_dict(3, json.loads(json.dumps(output.to_dict())))
    assert [a.to_dict() for a in again.answers[::2]] == [a.to_dict() for a in output.answers[::2]]
    assert again.answers[1].probabilities == pytest.approx(output.answers[1].probabilities)  # false is 1 - true
    assert (again.num_prompt_tokens, again.num_cached_tokens, again.truncated) == (12, 4, True)
    assert [a.choice for a in again.answers] == [2, False, None]
    failed = DecisionOutput(0, error="no")
    assert DecisionOutput.from_dict(0, failed.to_dict()) == failed
    with pytest.raises(DecisionError, match="state 0 has no answers: no"):
        failed["x"]
    with pytest.raises(KeyError, match="no question is named 'zz'"):
        output["zz"]
    assert isinstance(output["s"], Answer) and output[1].probability == pytest.approx(1 / 3)
