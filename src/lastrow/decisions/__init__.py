"""Prefill-only work: a state, questions about it, and the probability of every allowed answer.

questions, prompts, labels and plan are pure (no torch, no numpy): the server uses them beside an engine in another process. driver runs
plans on an engine of this process, api is what `LLM.decide`, `score`, `loglikelihood` and `rank` do."""

from lastrow.decisions.questions import DecisionError, Option, Question, parse_questions
from lastrow.decisions.results import Answer, Calibration, DecisionOutput, fit_temperature
from lastrow.decisions.scoring import Loglikelihood, Ranked, RankOutput, ScoreOutput

__all__ = [
    "Answer",
    "Calibration",
    "DecisionError",
    "DecisionOutput",
    "Loglikelihood",
    "Option",
    "Question",
    "RankOutput",
    "Ranked",
    "ScoreOutput",
    "fit_temperature",
    "parse_questions",
]
