"""LLM.score, loglikelihood and rank against transformers, and lm-eval's model against lm-eval's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lastrow.core.sampling_params import SamplingParams
from lastrow.decisions import DecisionError
from lastrow.engine.llm import LLM

# fp32 sums in another order over several tokens; measured 5e-5 at most over three prompts
TOLERANCE = 2e-4
PROMPT = "And it came to pass in those days, that the"
CHOICES = [" king", " king of Israel", " king of Judah", " LORD", " people were gathered together", " people"]


def continuation_logs(reference: Any, ids: list[int], start: int) -> tuple[float, bool]:
    table = reference.log_softmax(ids)
    logs = [table[at - 1, ids[at]].item() for at in range(start, len(ids))]
    return sum(logs), all(int(table[at - 1].argmax()) == ids[at] for at in range(start, len(ids)))


def test_choices_of_any_length_and_with_shared_beginnings(llm: LLM, reference: Any) -> None:
    output = llm.score(PROMPT, CHOICES)
    encode = llm.get_tokenizer().encode
    expected = [continuation_logs(reference, encode(PROMPT + choice), len(encode(PROMPT)))[0] for choice in CHOICES]
    assert output.logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert output.probabilities == pytest.approx(torch.softmax(torch.tensor(expected).double(), 0).tolist(), abs=TOLERANCE)
    assert output.num_tokens == [len(encode(PROMPT + c)) - len(encode(PROMPT)) for c in CHOICES] and output.best == expected.index(
        max(expected)
    )
    ids = llm.score(encode(PROMPT), [encode(PROMPT + c)[len(encode(PROMPT)) :] for c in CHOICES])
    assert ids.logprobs == pytest.approx(output.logprobs, abs=1e-6)


def test_shared_beginnings_are_computed_once(llm: LLM) -> None:
    fresh = LLM("tiny-e", max_model_len=256, enable_prefix_caching=False)
    encode = fresh.get_tokenizer().encode
    prompt = len(encode(PROMPT))
    labels = [tuple(encode(PROMPT + c)[prompt:]) for c in CHOICES]
    inner = {label[:depth] for label in labels for depth in range(1, len(label))}
    fresh.score(PROMPT, CHOICES)
    assert fresh.engine.runner.stats.rows_given == prompt + len(inner)
    assert fresh.engine.runner.stats.rows_computed == 1 + len(inner)


def test_many_prompts_and_errors_in_their_places(llm: LLM) -> None:
    outputs = llm.score([PROMPT, "", PROMPT], [" king", " LORD"], use_tqdm=False)
    assert [o.error is None for o in outputs] == [True, False, True] and outputs[0].logprobs == pytest.approx(outputs[2].logprobs, abs=1e-5)
    pairs = [
        (PROMPT, [" a", " a"]),
        (PROMPT, []),
        (PROMPT, ["x", ""]),
        (PROMPT, "xy"),
        (PROMPT, [7]),
        ("w " * 3000, ["x"]),
        (PROMPT, [" a", " b"]),
    ]
    errors = [output.error for output in llm.score(iter(pairs))]
    wanted = [
        "choices must differ",
        "a list of 1 to 255",
        "choices[1] is empty",
        "choices is a text",
        "both as texts",
        "the window has 2048",
    ]
    assert errors[6] is None and all(part in (error or "") for part, error in zip(wanted, errors[:6], strict=True)), errors
    with pytest.raises(DecisionError, match="choices must differ"):
        llm.score(PROMPT, [" a", " a"])
    for prompt, choices in ((PROMPT, None), (7, [" a"]), (None, None)):
        with pytest.raises(DecisionError, match=r"prompt is .*is needed"):
            llm.score(prompt, choices)
    assert "is no pair: (prompt, choices)" in (llm.score([PROMPT], use_tqdm=False)[0].error or "")


def test_log_likelihoods_and_whether_they_are_greedy(llm: LLM, reference: Any) -> None:
    encode = llm.get_tokenizer().encode
    pairs = [(PROMPT, choice) for choice in CHOICES] + [("The capital ", "of"), ("In the beginning", " God created the heaven")]
    greedy = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids
    results = llm.loglikelihood([*pairs, (encode(PROMPT), greedy)], use_tqdm=False)
    for (context, continuation), result in zip(pairs, results, strict=False):
        kept = context.rstrip()
        log, is_greedy = continuation_logs(reference, encode(context + continuation), len(encode(kept)))
        assert result.logprob == pytest.approx(log, abs=TOLERANCE) and result.is_greedy is is_greedy
    assert results[-1].is_greedy and not all(r.is_greedy for r in results)
    bad = [([], [5]), (PROMPT, ""), ("a", "b"), (PROMPT,), PROMPT, (7, 8)]
    wanted = [
        "a context",
        "a continuation",
        "'b' melts into the context's last token",
        "is no pair",
        "is no pair",
        "must both be texts, or both token ids",
    ]
    for pair, message in zip(bad, wanted, strict=True):
        with pytest.raises(DecisionError, match=message):
            llm.loglikelihood([pair], use_tqdm=False)


def test_log_likelihoods_go_on_behind_a_partial_file(llm: LLM, tmp_path: Path) -> None:
    path, pairs = tmp_path / "pairs.jsonl", [(PROMPT, choice) for choice in CHOICES] + [("In the beginning", " God")]
    whole = llm.loglikelihood(pairs, use_tqdm=False)
    with pytest.raises(DecisionError, match="is no pair"):
        list(llm.loglikelihood(iter([*pairs[:6], "oops"]), output=path))
    assert len(path.read_text().splitlines()) == 1 + 6  # the six pairs of one context, behind the header
    before = llm.engine.scheduler.counters.finished_requests
    resumed = llm.loglikelihood(pairs, output=path, use_tqdm=False)
    assert llm.engine.scheduler.counters.finished_requests == before + 1
    assert [r.logprob for r in resumed] == pytest.approx([r.logprob for r in whole], abs=1e-5)
    assert [(r.is_greedy, r.num_tokens) for r in resumed] == [(r.is_greedy, r.num_tokens) for r in whole]


def test_neighbours_share_their_context(llm: LLM) -> None:
    fresh = LLM("tiny-e", max_model_len=256, enable_prefix_caching=False)
    encode = fresh.get_tokenizer().encode
    lengths = [len(encode(PROMPT + choice)) - len(encode(PROMPT)) for choice in CHOICES]
    fresh.loglikelihood([(PROMPT, choice) for choice in CHOICES], use_tqdm=False)
    # the context but for its last token once; each continuation computes that token and itself, and only its own rows go behind the cut
    assert fresh.engine.runner.stats.rows_given == len(encode(PROMPT)) - 1 + sum(length + 1 for length in lengths)
    assert fresh.engine.runner.stats.rows_computed == sum(lengths)


def test_rank_is_the_relevance_question_of_each_document_alone(llm: LLM, reference: Any) -> None:
    documents = ["The lamp is red.", "Snow will fall in Cork.", "  My order of the lamp is late.", "Snow will fall in Cork."]
    ranked = llm.rank("What color is the lamp?", documents)
    scores = [r.relevance_score for r in ranked]
    assert sorted(r.index for r in ranked) == [0, 1, 2, 3] and scores == sorted(scores, reverse=True)
    for entry in ranked:
        document = f"Document:\n{entry.document.strip()}\n\n"
        text = f"Query: What color is the lamp?\n\n{document}Does the document answer the query? Answer yes or no."
        prompt = reference.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        table = reference.log_softmax(reference.tokenizer(prompt, add_special_tokens=False).input_ids)[-1]
        ids = [i for i in (llm.get_tokenizer().encode(t, add_bos=False) for t in ("yes", "no", "Yes", "No")) if len(i) == 1]
        yes, no = (sum(table[i[0]].exp().item() for i in ids if llm.get_tokenizer().decode(i).lower() == word) for word in ("yes", "no"))
        assert entry.relevance_score == pytest.approx(yes / (yes + no), abs=1e-4)
    assert [r.index for r in llm.rank("x", ["b", "b", "b"], top_n=2)] == [0, 1]  # equals stay in order
    for bad, message in (([], "documents is empty"), (["a", " "], r"documents\[1\]"), (["w " * 3000], r"documents\[0\] and the query")):
        if bad:
            with pytest.raises(DecisionError, match=message):
                llm.rank("x", bad)
    assert llm.rank("x", []) == []
    assert [r.document for r in llm.rank("lamp", iter(documents))] == [r.document for r in llm.rank("lamp", documents)]
    for query, given, top_n, message in (
        ("x", "abc", None, "documents is 'abc'"),
        (None, ["a"], None, "query is None"),
        ("x", ["a"], -1, "top_n"),
    ):
        with pytest.raises(DecisionError, match=message):
            llm.rank(query, given, top_n=top_n)  # pyright: ignore[reportArgumentType]


def test_more_documents_than_one_job_holds(llm: LLM) -> None:
    documents = [f"order {i % 7} of the lamp" for i in range(150)]
    scores = {r.index: r.relevance_score for r in llm.rank("order 3", documents)}
    assert all(scores[i] == pytest.approx(scores[i % 7], abs=1e-5) for i in range(150))


# ------------------------------------------------------------------------------------------------------ lm-eval
def test_lm_eval_gets_the_numbers_of_its_own_transformers_model(reference: Any, heldout: list[dict[str, Any]]) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")  # lm-eval's `hf` needs it
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from lastrow.decisions.lm_eval_adapter import LastrowLM

    theirs = HFLM(pretrained=reference.model, tokenizer=reference.tokenizer, batch_size=1, max_length=127)
    ours = LastrowLM("tiny-e", max_model_len=128)

    def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
        return [Instance(kind, {}, arguments_, i) for i, arguments_ in enumerate(arguments)]

    rows = [row for row in heldout if row["task"] == "yesno"][:6]
    # tiny-e's tokenizer writes no <bos> of its own, so the texts bring it; the last pairs do not fit the window
    pairs = [(row["prompt"], choice) for row in rows for choice in ("yes", "no", "A", "B")]
    pairs += [("<bos>" + PROMPT, choice) for choice in CHOICES] + [("", "Moses said"), ("<bos>" + PROMPT + " ", "king")]
    pairs += [("<bos>" + "And the king said. " * 60, " And the people")]
    ours_logs, their_logs = (lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True) for lm in (ours, theirs))
    assert [log for log, _ in ours_logs] == pytest.approx([log for log, _ in their_logs], abs=TOLERANCE)
    assert [bool(greedy) for _, greedy in ours_logs] == [bool(greedy) for _, greedy in their_logs]
    texts = [("And Moses said unto the people, behold. " * 30,), ("In the beginning",)]
    ours_sums, their_sums = (
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True) for lm in (ours, theirs)
    )
    assert ours_sums == pytest.approx(their_sums, rel=1e-5)
    chats = [row for row in heldout if row["task"] == "chat"][:4]
    asked = [(row["prompt"], {"until": ["<turn|>"], "max_gen_toks": 24}) for row in chats]
    assert ours.generate_until(requests("generate_until", *asked), disable_tqdm=True) == [
        r["output"].removesuffix("<turn|>") for r in chats
    ]
    messages = chats[0]["conversation"]["messages"]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages) and ours.chat_template(True)


def test_score_outputs_survive_json(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    first = llm.score([PROMPT, ""], [" king", " LORD"], output=path, use_tqdm=False)
    again = llm.score([PROMPT, ""], [" king", " LORD"], output=path, use_tqdm=False)
    assert [o.to_dict() for o in again] == [o.to_dict() for o in first] and json.loads(path.read_text().splitlines()[2])["error"]
