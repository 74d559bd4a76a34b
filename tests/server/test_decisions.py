"""The prefill-only endpoints of a real server, by the openai client and over HTTP; numbers are those of LLM in this process."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import httpx
import openai
import pytest

from lastrow.decisions import DecisionError
from lastrow.engine.llm import LLM
from lastrow.server.decision_protocol import decision_input

TICKET = "Message: I was charged twice for the lamp."
QUESTIONS: list[Any] = [
    {
        "type": "choice", "name": "team", "instructions": "Which team should handle this?",
        "choices": [{"value": "Billing"}, {"value": "Shipping", "description": "parcels"}, {"value": True}, {"value": "true"}],
    },
    {"type": "predicate", "instructions": [{"type": "input_text", "text": "Is this message spam?"}]},
    {"type": "score", "name": "urgency", "instructions": "How urgent is this?", "levels": [{"label": "low"}, {"label": "high"}]},
]  # fmt: skip
# fp32 sums in another order, by company: logits differ by up to 2e-4 (measured 4e-5), a probability by at most half of that. States that
# differ in one number give answers 1e-3 to 0.4 apart.
CLOSE = 1e-4
IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-e", max_model_len=1024)


def test_the_openai_client_decides(client: openai.OpenAI, llm: LLM) -> None:
    decision = client.decisions.create(model="tiny-e", input=TICKET, questions=QUESTIONS)
    assert type(decision).__name__ == "Decision" and decision.model == "tiny-e"
    team, spam, urgency = decision.answers
    expected = llm.decide(TICKET, QUESTIONS)
    assert team.type == "choice" and spam.type == "predicate" and urgency.type == "score"
    assert (team.name, spam.name, urgency.name) == ("team", None, "urgency")
    # a boolean and a text with the same letters come back as what they are
    assert [entry.value for entry in team.probabilities] == ["Billing", "Shipping", True, "true"]
    assert [type(entry.value) for entry in team.probabilities] == [str, str, bool, str]
    assert [e.probability for e in team.probabilities] == pytest.approx(expected["team"].probabilities, abs=CLOSE)
    assert team.choice == expected["team"].choice and team.confidence == pytest.approx(expected["team"].confidence, abs=CLOSE)
    assert spam.probability == pytest.approx(expected[1].probability, abs=CLOSE)
    assert [(e.value, e.label) for e in urgency.probabilities] == [(0, "low"), (1, "high")]
    assert urgency.score == pytest.approx(expected["urgency"].score, abs=CLOSE)
    usage = decision.usage
    assert usage.output_tokens == 0 and usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens == expected.num_prompt_tokens
    details = usage.input_tokens_details
    assert details.cache_write_tokens + details.cached_tokens == usage.input_tokens


def test_messages_calls_and_json_as_input(client: openai.OpenAI, llm: LLM) -> None:
    one: Any = [{"role": "user", "content": [{"type": "input_text", "text": TICKET}, {"type": "input_json", "data": {"id": 7}}]}]
    answer = client.decisions.create(model="tiny-e", input=one, questions=QUESTIONS[1:2]).answers[0]
    assert answer.probability == pytest.approx(llm.decide(TICKET + '\n{"id": 7}', QUESTIONS[1:2])[0].probability, abs=CLOSE)
    items: Any = [
        {"role": "developer", "content": "Be strict."},
        {"role": "user", "content": "Where is my lamp?"},
        {"type": "function_call", "name": "track", "call_id": "c1", "arguments": '{"id": 7}'},
        {"type": "function_call_output", "call_id": "c1", "output": "lost"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "It is lost."}, {"type": "refusal", "refusal": "No more."}]},
    ]
    state, system = decision_input(items)
    assert system == ["Be strict."]
    assert state == 'user: Where is my lamp?\ntool call: track({"id": 7})\noutput of track: lost\nassistant: It is lost.\nNo more.'
    answer = client.decisions.create(model="tiny-e", input=items, questions=QUESTIONS[1:2]).answers[0]
    assert answer.probability == pytest.approx(llm.decide(state, QUESTIONS[1:2], instructions="Be strict.")[0].probability, abs=CLOSE)
    for bad in (
        [],
        [{"role": "system", "content": "x"}],
        [{**items[3], "call_id": "c9"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user"}],
    ):
        with pytest.raises(DecisionError, match="input"):
            decision_input(bad)


def test_200_questions_and_255_choices_are_one_request(server: Any, llm: LLM) -> None:
    """Where others stop at 64 and 26. The server's steps hold 128 tokens: states, forks and tries go through many chunks."""
    many = [{"type": "predicate", "instructions": f"Is this about {i}?"} for i in range(199)]
    many.append({"type": "choice", "instructions": "Which?", "choices": [{"value": f"o{i}"} for i in range(100)]})
    response = server.post("/v1/decisions", {"model": "tiny-e", "input": TICKET * 3, "questions": many})
    assert response.status_code == 200, response.text
    answers = response.json()["answers"]
    expected = llm.decide(TICKET * 3, many)
    assert len(answers) == 200
    for i in (0, 7, 198):
        assert answers[i]["probability"] == pytest.approx(expected[i].probability, abs=CLOSE)
    assert [e["probability"] for e in answers[199]["probabilities"]] == pytest.approx(expected[199].probabilities, abs=CLOSE)
    wide = [{"type": "choice", "instructions": "?", "choices": [{"value": f"{i}"} for i in range(255)], "labels": "words"}]
    answer = server.post("/v1/decisions", {"input": TICKET, "questions": wide}).json()["answers"][0]
    assert len(answer["probabilities"]) == 255 and sum(e["probability"] for e in answer["probabilities"]) == pytest.approx(1.0)
    server.wait_idle()


def test_many_clients_at_once_get_their_own_answers(server: Any, llm: LLM) -> None:
    states = [f"{TICKET} My order number is {i}." for i in range(24)]

    def ask(state: str) -> list[float]:
        body = server.post("/v1/decisions", {"input": state, "questions": QUESTIONS}).json()
        return [entry["probability"] for entry in body["answers"][0]["probabilities"]]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, states))
    for state, answer in zip(states[::6], answers[::6], strict=True):
        assert answer == pytest.approx(llm.decide(state, QUESTIONS)["team"].probabilities, abs=CLOSE)
    server.wait_idle()


def test_system_one(server: Any, llm: LLM) -> None:
    body = {
        "model": "tiny-e",
        "state": {"ticket": "I was charged twice"},
        "instructions": "Be strict.",
        "questions": {
            "team": {"type": "choice", "instructions": "Which team?", "criteria": {"Billing": "money", "Shipping": None}},
            "spam": {"type": "noul", "instructions": "Is this message spam?", "criteria": None},
            "tone": {"type": "score", "instructions": "How upset?", "criteria": ["calm", "annoyed", "furious"]},
        },
    }
    answer = server.post("/v1/systemone", body).json()
    questions = [
        {"name": "team", "instructions": "Which team?", "choices": [{"value": "Billing", "description": "money"}, "Shipping"]},
        {"name": "spam", "instructions": "Is this message spam?"},
        {"name": "tone", "instructions": "How upset?", "levels": ["calm", "annoyed", "furious"]},
    ]
    expected = llm.decide(body["state"], questions, instructions="Be strict.", diagnostics=True)
    assert answer["object"] == "structured_decision" and list(answer["answers"]) == ["team", "spam", "tone"]
    team, spam, tone = answer["answers"].values()
    assert team["choice"] == expected["team"].choice and list(team["probabilities"].values()) == pytest.approx(
        expected["team"].probabilities, abs=1e-5
    )
    assert spam["noul"] == pytest.approx(expected["spam"].probability, abs=CLOSE)
    assert tone["legend"] == {"0": "calm", "1": "annoyed", "2": "furious"} and tone["score"] == pytest.approx(
        expected["tone"].score, abs=1e-4
    )
    for name, diagnostics in answer["diagnostics"].items():
        assert diagnostics["label_mass"] == pytest.approx(expected[name].label_mass, abs=CLOSE)
        assert diagnostics["argmax_is_label"] is expected[name].argmax_is_label
        confidence = expected[name].confidence * (expected[name].label_mass or 0)
        assert answer["answers"][name]["confidence"] == pytest.approx(confidence, abs=CLOSE)
    assert answer["usage"]["output_tokens"] == 0 and answer["usage"]["input_tokens"] > 0


def test_extra_fields_of_decisions(server: Any, llm: LLM) -> None:
    long = "w " * 3000 + TICKET
    options = {"truncate": "left", "diagnostics": True, "calibration": {"prior": True, "abstain_below": 1.0}, "instructions": "Be strict."}
    answer = server.post("/v1/decisions", {"input": long, "questions": QUESTIONS, **options}).json()["answers"][0]
    expected = llm.decide(long, QUESTIONS, **options)["team"]
    assert [e["probability"] for e in answer["probabilities"]] == pytest.approx(expected.probabilities, abs=1e-4)
    assert answer["abstained"] is True and answer["argmax_is_label"] is expected.argmax_is_label
    assert answer["label_mass"] == pytest.approx(expected.label_mass, abs=CLOSE)


def test_scores(server: Any, llm: LLM) -> None:
    made = server.post("/v1/score", {"prompt": "In the", "choices": [" beginning", " end of the days"]}).json()
    expected = llm.score("In the", [" beginning", " end of the days"])
    assert [d["logprob"] for d in made["data"]] == pytest.approx(expected.logprobs, abs=1e-4)
    assert made["usage"]["prompt_tokens"] == expected.num_prompt_tokens
    encode = llm.get_tokenizer().encode
    labels = [encode(text, add_bos=False)[0] for text in (" the", " a")]
    items = [" beginning of", " end of"]
    wanted = [llm.loglikelihood([(encode("In the" + item), [label]) for label in labels], use_tqdm=False) for item in items]
    body = {"query": "In the", "items": items, "label_token_ids": labels}
    plain = server.post("/v1/score", body).json()["scores"]
    for row, logs in zip(plain, wanted, strict=True):
        assert row == pytest.approx([2.718281828459045**r.logprob for r in logs], abs=CLOSE)
    softened = server.post("/v1/score", {**body, "apply_softmax": True}).json()["scores"]
    assert [row[0] for row in softened] == pytest.approx([row[0] / sum(row) for row in plain], abs=CLOSE)
    generative = server.post("/generative_scoring", body).json()
    assert [d["score"] for d in generative["data"]] == pytest.approx([row[0] for row in softened], abs=CLOSE)
    ids = server.post("/v1/score", {**body, "query": encode("In the"), "items": [encode(i, add_bos=False) for i in items]}).json()["scores"]
    assert ids[0] == pytest.approx(plain[0], abs=CLOSE)


def test_rerank_and_pairs(server: Any, llm: LLM) -> None:
    documents = ["The lamp is red.", "Snow will fall in Cork.", "My order of the lamp is late."]
    made = server.post(
        "/v1/rerank", {"query": "lamp", "documents": [documents[0], {"text": documents[1]}, documents[2]], "top_n": 2}
    ).json()
    expected = llm.rank("lamp", documents)
    assert [r["index"] for r in made["results"]] == [r.index for r in expected][:2]
    assert [r["relevance_score"] for r in made["results"]] == pytest.approx([r.relevance_score for r in expected][:2], abs=CLOSE)
    assert made["results"][0]["document"]["text"] == documents[made["results"][0]["index"]] and made["usage"]["total_tokens"] > 0
    pairs = server.post("/v1/score", {"text_1": "lamp", "text_2": documents}).json()["data"]
    scores = {r.index: r.relevance_score for r in expected}
    assert [d["score"] for d in pairs] == pytest.approx([scores[i] for i in range(3)], abs=CLOSE)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("decisions", {"input": "x", "questions": []}, "there are 0 questions: 1 to 200"),
        ("decisions", {"input": "x", "questions": [QUESTIONS[1]] * 201}, "there are 201 questions"),
        ("decisions", {"input": " ", "questions": QUESTIONS}, "the state is empty"),
        ("decisions", {"input": "w " * 3000, "questions": QUESTIONS}, "the window has 1024"),
        ("decisions", {"input": "x", "questions": [{**QUESTIONS[0], "choices": [{"value": "a"}, {"value": "a"}]}]}, "options must differ"),
        ("decisions", {"input": "x", "questions": [{**QUESTIONS[0], "labels": ["a b", "a▁b", "c", "d"]}]}, "the same tokens"),
        ("decisions", {"input": IMAGE, "questions": QUESTIONS}, "is of type 'input_image'"),
        ("decisions", {"input": "x", "questions": QUESTIONS, "chat_template_kwargs": {"enable_thinking": True}}, "thinking must be off"),
        ("decisions", {"input": "x", "questions": QUESTIONS, "truncate": "top"}, "truncate"),
        ("decisions", {"input": 7, "questions": QUESTIONS}, "input"),
        ("decisions", {"questions": QUESTIONS}, "input"),
        ("decisions", {"input": "x", "questions": [{**QUESTIONS[0], "labels": [1, 2, 3, 4]}]}, "labels[0] is 1: a text"),
        ("decisions", {"input": "x", "questions": QUESTIONS, "calibration": {"prior": 5}}, "calibration.prior is 5"),
        ("decisions", {"input": "x", "questions": QUESTIONS, "calibration": {"temperature": {"x": 2}}}, "no question has this name: team"),
        ("score", {"text_1": [], "text_2": []}, "text_2 is empty"),
        ("systemone", {"state": "x", "questions": {"a": {"type": "predicate", "instructions": "x"}}}, "questions.a.type is 'predicate'"),
        ("systemone", {"state": "x", "questions": {"a": {"type": "choice", "instructions": "x"}}}, "questions.a.criteria is None"),
        ("systemone", {"state": None, "questions": {"a": {"type": "noul", "instructions": "x"}}}, "state is None"),
        ("score", {"prompt": "x"}, "give prompt and choices; or query"),
        ("score", {"prompt": "x", "choices": ["a", "a"]}, "choices must differ"),
        ("score", {"query": "x", "items": ["y"], "label_token_ids": [99999]}, "label_token_ids holds 99999"),
        ("score", {"query": "x", "items": ["y"], "label_token_ids": []}, "at least one label token id"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 has 2 texts and text_2 has 1"),
        ("rerank", {"query": "x", "documents": []}, "documents has 0 entries"),
        ("rerank", {"query": "x", "documents": ["a", ""]}, "documents[1] is empty"),
        ("rerank", {"query": "x", "documents": [{"title": "a"}]}, "documents[0] has no text"),
    ],
)  # fmt: skip
def test_mistakes_are_400_and_say_what_is_wrong(server: Any, path: str, body: Any, message: str) -> None:
    assert message in server.error(f"/v1/{path}", body)


def test_another_model_is_404_and_a_client_that_leaves_ends_its_work(server: Any) -> None:
    assert "not served here" in server.error("/v1/decisions", {"model": "x", "input": "x", "questions": QUESTIONS}, 404)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/decisions", json={"input": "w " * 900, "questions": QUESTIONS[1:2] * 200}, timeout=0.2)
    server.wait_idle()
