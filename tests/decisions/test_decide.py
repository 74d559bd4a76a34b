"""LLM.decide: right by transformers, one pass for all questions, and errors that stay with their state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lastrow.decisions import DecisionError, DecisionOutput
from lastrow.decisions.api import TOKENIZE_AHEAD
from lastrow.decisions.driver import JobDriver
from lastrow.decisions.plan import QuestionSet
from lastrow.decisions.scoring import label_tokens_job
from lastrow.engine.llm import LLM

# The bound. Measured on 200 held-out decisions: 8e-6 (tools/decisions/table.py); fp32 sums in another order.
TOLERANCE = 1e-4
# Sums in another order, over labels of up to three tokens; measured 3e-5 at most. A wrong token or row moves some score by more than 0.01.
LOG_TOLERANCE = 1e-3
PROSE = "The red lamp arrived on Monday and the box holds a manual. "
TEAM = {"name": "team", "type": "choice", "instructions": "Which team should handle this?", "choices": ["Billing", "Shipping", "Sales"]}
SPAM = {"name": "spam", "type": "predicate", "instructions": "Is this message spam?"}
URGENT = {"name": "urgent", "type": "score", "instructions": "How urgent is this?", "levels": ["low", "normal", "high", "critical"]}
WORDS = {
    "name": "words",
    "instructions": "Which?",
    "choices": ["Account access", "Account closing", "Sales", "no", "no way"],
    "labels": "words",
}
TOPICS = ["sports", "food", "music", "rain", "snow", "tea"]
MIXED = [TEAM, SPAM, URGENT, WORDS]
STATES = ["Message: I was charged twice for the lamp.", "my parcel with the lamp has not arrived", "Fire in the server room, act now!"]


def probabilities(output: DecisionOutput) -> list[float]:
    return [p for answer in output.answers for p in answer.probabilities]


def log_scores(output: DecisionOutput) -> list[float]:
    """They show what saturated probabilities hide."""
    return [log for answer in output.answers for log in answer.log_scores]


# ------------------------------------------------------------------------------------------------------ right and useful
def test_probabilities_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    import held_out

    items = [held_out.held_out(kind, seed) for kind in held_out.KINDS for seed in range(900, 905)]
    for item in items:
        output = llm.decide(item.state, [item.question], label_mass=True)
        expected = torch.tensor(reference.label_logs(item)).double()
        assert output.answers[0].probabilities == pytest.approx(torch.softmax(expected, 0).tolist(), abs=TOLERANCE), item
        assert output.answers[0].label_mass == pytest.approx(expected.exp().sum().item(), abs=TOLERANCE)


def test_held_out_decisions_are_answered_right(llm: LLM) -> None:
    """At least 90 % (issue 5); 120 of 120 when this was written, so a fall to 114 is a fault and not a draw."""
    import held_out

    kinds = ("choice", "predicate", "score")
    items = [held_out.held_out(kind, seed) for kind in kinds for seed in range(40)]
    right = sum(llm.decide(item.state, [item.question]).answers[0].best == item.right for item in items)
    assert right >= 0.95 * len(items)


def test_argmax_is_label_is_what_transformers_says(llm: LLM, reference: Any) -> None:
    import held_out

    found = set()
    items = [held_out.held_out(kind, seed) for kind in ("choice", "words") for seed in range(4)]
    items.append(held_out.with_options("choice", PROSE * 3, PROSE, ["x y", "z"], "z"))
    for item in items:
        answer = llm.decide(item.state, [item.question], diagnostics=True).answers[0]
        top = int(reference.next_token_logs(item).argmax())
        firsts = {llm.get_tokenizer().encode("\n" + label, add_bos=False)[1] for label in item.labels}
        assert answer.argmax_is_label is (top in firsts)
        found.add(answer.argmax_is_label)
    assert found == {True, False}  # else the test shows nothing


# ------------------------------------------------------------------------------------------------------ one pass
def test_20_questions_over_1000_tokens_cost_one_prefill_and_20_tails() -> None:
    llm = LLM("tiny-e", max_model_len=2048, enable_prefix_caching=False)
    state = PROSE * 77
    questions = [{"type": "predicate", "instructions": f"Is this about {word}?"} for word in TOPICS]
    questions = (questions + [TEAM, SPAM, URGENT] * 5)[:20]
    questions = [{key: value for key, value in q.items() if key != "name"} for q in questions]
    made = llm.decider.question_set(questions)
    plan = made.plan(state)
    parent, tails = plan.units[0], plan.units[1:]
    stats = llm.engine.runner.stats
    before = stats.rows_given, stats.rows_computed, stats.steps
    output = llm.decide(state, made)
    given, computed, steps = (now - then for now, then in zip((stats.rows_given, stats.rows_computed, stats.steps), before, strict=True))
    lengths = [len(unit.prompt_token_ids) for unit in tails]
    assert len(parent.prompt_token_ids) > 1000 and len(tails) == 20
    # the state once, and of each question only what is its own, counted from the prompts themselves
    assert given == len(parent.prompt_token_ids) + sum(length - len(parent.prompt_token_ids) for length in lengths)
    assert given < 0.12 * sum(lengths)  # what one request per question computes
    assert computed == 20  # sharing layers ran on the label rows and nothing else
    assert steps == 1 and output.num_prompt_tokens == given


def test_tokens_are_those_of_the_whole_prompt_and_the_fork_is_at_the_last_shared_one(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    made: QuestionSet = llm.decider.question_set(MIXED)
    plan = made.plan(STATES[0])
    texts = [tokenizer.decode(p.root, skip_special_tokens=False).removeprefix("<bos>") for p in plan.prompts]
    assert texts[1] == f"<|turn>user\n{STATES[0]}\n\nIs this message spam? Answer yes or no.<turn|>\n<|turn>model\n"
    assert [tokenizer.encode(text) for text in texts] == [p.root for p in plan.prompts]
    shared = len(plan.units[0].prompt_token_ids)
    assert all(p.root[:shared] == plan.units[0].prompt_token_ids for p in plan.prompts)
    assert len({p.root[shared] for p in plan.prompts}) > 1


def test_one_bos_whatever_the_texts_hold(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """States, questions, documents, contexts and choices that hold <bos>, and prompt templates that write one themselves or begin with
    the state."""
    given: list[list[int]] = []
    add_request = llm.engine.add_request

    def spy(request_id: str, ids: list[int], *args: Any, **kwargs: Any) -> None:
        given.append(list(ids))
        add_request(request_id, ids, *args, **kwargs)

    monkeypatch.setattr(llm.engine, "add_request", spy)
    text, asked = "<bos>a <bos> b", [{"type": "predicate", "instructions": "Is <bos> in it?"}]
    for chat, template in ((True, None), (True, "<bos>{{ state }}: {{ question.text }}"), (False, "<bos>{{ state }}: {{ question.text }}"),
                           (False, "{{ state }}: {{ question.text }}")):  # fmt: skip
        llm.decide(text, asked, chat=chat, prompt_template=template)
        assert text in llm.get_tokenizer().decode(given[-1][1:], skip_special_tokens=False)
    encode = llm.get_tokenizer().encode
    for prompt in ("<bos>In the", "In <bos> the", "<bos>"):
        llm.score(prompt, [" <bos>king", "<bos>", "x"])
        llm.loglikelihood([(prompt, "<bos>king")], use_tqdm=False)
        whole = [2, *encode(prompt.removeprefix("<bos>") + "<bos>king", add_bos=False)]
        assert given[-1] == whole[: len(given[-1])] and len(given[-1]) >= len(encode(prompt))
    llm.rank("a <bos>?", ["<bos>", "x <bos>"])
    for query, item in (("<bos>In", "<bos>the"), ("", "<bos>the")):
        list(JobDriver(llm.engine).run([label_tokens_job(llm.decider.splicer, query, [item], [5], False, 128)]))
    assert len(given) > 10
    for ids in given:
        assert ids[0] == 2 and ids.count(2) == 1, llm.get_tokenizer().decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 4, "max_num_batched_tokens": 48}, {"enable_prefix_caching": False, "block_size": 8}]
)
def test_together_or_one_question_at_a_time_is_the_same(llm: LLM, options: dict[str, Any]) -> None:
    """Forks at any place of a block, over chunks, through more sequences than run at once, and label tries."""
    engine = LLM("tiny-e", max_model_len=512, **options) if options else llm
    together = engine.decide(STATES, MIXED, label_mass=True, use_tqdm=False)
    for state, output in zip(STATES, together, strict=True):
        alone = [llm.decide(state, [question], label_mass=True).answers[0] for question in MIXED]
        assert log_scores(output) == pytest.approx([log for answer in alone for log in answer.log_scores], abs=LOG_TOLERANCE)
        assert [a.label_mass for a in output.answers] == pytest.approx([a.label_mass for a in alone], abs=1e-5)
    engine.engine.scheduler.kv.check_integrity(())


def test_a_step_in_flight_changes_nothing(llm: LLM) -> None:
    """On a GPU results are read one step late: forks and second reads are then queued behind a step that still runs."""
    late = LLM("tiny-e", max_model_len=512, max_num_batched_tokens=128, max_num_seqs=8)
    late.engine.depth = 1
    outputs = late.decide(STATES * 4, MIXED, diagnostics=True, use_tqdm=False)
    expected = llm.decide(STATES, MIXED, diagnostics=True, use_tqdm=False)
    for i, output in enumerate(outputs):
        assert log_scores(output) == pytest.approx(log_scores(expected[i % 3]), abs=LOG_TOLERANCE)
        assert [a.argmax_is_label for a in output.answers] == [a.argmax_is_label for a in expected[i % 3].answers]
    late.engine.scheduler.kv.check_integrity(())


def test_forks_that_lose_their_blocks_are_computed_again(llm: LLM) -> None:
    """Blocks for little more than one prompt: what forks share is taken back before they start."""
    block = 16 * 2 * (64 * 2 + 32 * 2 * 4)
    small = LLM("tiny-e", max_model_len=256, kv_cache_memory_bytes=22 * block, max_num_seqs=64, enable_prefix_caching=False)
    states = [PROSE * 6 + state for state in STATES]
    made = small.decider.question_set(MIXED)
    planned = sum(unit.num_own_tokens for state in states * 2 for unit in made.plan(state).units)
    outputs = small.decide(states * 2, made, use_tqdm=False)
    assert small.engine.runner.stats.rows_given > planned  # else the pool was large enough
    expected = llm.decide(states, MIXED, use_tqdm=False)
    for i, output in enumerate(outputs):
        assert log_scores(output) == pytest.approx(log_scores(expected[i % 3]), abs=LOG_TOLERANCE)
    small.engine.scheduler.kv.check_integrity(())


def test_batch_invariant_gives_the_same_bits_in_any_company() -> None:
    exact = LLM("tiny-e", max_model_len=512, batch_invariant=True)
    alone = [probabilities(exact.decide(state, MIXED, label_mass=True)) for state in STATES]
    for question in range(len(MIXED)):  # nor do the other questions count
        answer = exact.decide(STATES[1], [MIXED[question]], label_mass=True).answers[0]
        start = sum(len(other.get("choices", other.get("levels", "yn"))) for other in MIXED[:question])
        assert answer.probabilities == alone[1][start : start + len(answer.probabilities)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2, 1)):
        outputs = exact.decide([STATES[i] for i in order], MIXED, label_mass=True, use_tqdm=False)
        assert [probabilities(output) for output in outputs] == [alone[i] for i in order]


# ------------------------------------------------------------------------------------------------------ many states
def test_errors_stay_with_their_state(llm: LLM) -> None:
    states: list[Any] = [STATES[0], "", None, {"ticket": float("inf")}, "x " * 3000, "\ud800", STATES[1]]
    outputs = llm.decide(states, [TEAM], use_tqdm=False)
    assert [output.index for output in outputs] == list(range(7))
    assert [output.error is None for output in outputs] == [True, False, False, False, False, False, True]
    wanted = [
        "the state is empty",
        "state is None",
        "state is no JSON",
        "the window has 2048: shorten it, or ask for truncate",
        "surrogate",
    ]
    assert all(part in (output.error or "") for part, output in zip(wanted, outputs[1:6], strict=True))
    assert outputs[6]["team"].choice == "Shipping"
    with pytest.raises(DecisionError, match="the state is empty"):
        llm.decide(" ", [TEAM])


def test_an_iterator_is_read_as_the_engine_has_room() -> None:
    llm = LLM("tiny-e", max_model_len=256, max_num_seqs=16)
    taken = 0

    def states() -> Iterator[str]:
        nonlocal taken
        for i in itertools.count():
            taken += 1
            yield f"order {i}: {STATES[i % 3]}"

    outputs = llm.decide(states(), [TEAM])
    first = list(itertools.islice(outputs, 150))
    assert [output.index for output in first] == list(range(150))
    limits = llm.engine.scheduler.config
    assert taken <= 150 + 3 * limits.max_num_seqs + 2 * TOKENIZE_AHEAD
    outputs.close()
    assert not llm.engine.has_unfinished_requests


def _broken(items: list[Any], error: Exception | None = None) -> Iterator[Any]:
    yield from items
    raise error or RuntimeError("no more")


@pytest.mark.parametrize("error", [RuntimeError("no more"), DecisionError("no more")])
def test_results_come_before_the_exception_of_the_input(llm: LLM, error: Exception) -> None:
    for items, run in ((STATES, lambda states: llm.decide(states, [TEAM])), (["a", "b"], lambda prompts: llm.score(prompts, [" x", " y"]))):
        results = run(_broken(items, error))
        assert [next(results).error for _ in items] == [None] * len(items)
        with pytest.raises(type(error), match="no more"):
            next(results)
        assert not llm.engine.has_unfinished_requests


@pytest.mark.parametrize("state", [7, None, b"bytes", 1.5])
def test_what_is_no_state_is_refused_at_once(llm: LLM, state: Any) -> None:
    with pytest.raises(DecisionError, match="a text, JSON data, or an iterable of them is needed"):
        llm.decide(state, [TEAM])


def test_lists_show_their_progress_on_a_terminal(llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for run, word in (
        (lambda: llm.decide(STATES, [TEAM]), "deciding"),
        (lambda: llm.score(["a", "b"], [" x", " y"]), "scoring"),
        (lambda: llm.loglikelihood([("a", " x")]), "scoring"),
    ):
        run()
        shown = capsys.readouterr()
        assert word in shown.err and "100%" in shown.err and shown.out == ""


def test_a_partial_output_file_is_continued(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = llm.decide(STATES, [TEAM, SPAM], use_tqdm=False)
    started = llm.decide(iter(STATES), [TEAM, SPAM], output=path)
    next(started)
    started.close()
    assert len(path.read_text().splitlines()) == 2  # the header and one state
    with open(path, "ab") as file:
        file.write(b'{"answers": [{"type"')  # what a kill leaves
    asked: list[str] = []

    def states() -> Iterator[str]:
        for state in STATES:
            asked.append(state)
            yield state

    before = llm.engine.scheduler.counters.finished_requests
    resumed = list(llm.decide(states(), [TEAM, SPAM], output=path))
    assert [probabilities(o) for o in resumed] == [pytest.approx(probabilities(o), abs=1e-6) for o in whole]
    assert llm.engine.scheduler.counters.finished_requests - before == 2 * 3  # two states of a parent and two tails
    assert [o.index for o in resumed] == [0, 1, 2] and len(path.read_text().splitlines()) == 4
    other = tmp_path / "other.jsonl"
    with pytest.raises(RuntimeError):
        list(llm.decide(_broken(STATES[:1]), [TEAM], output=other))
    assert [(o.index, o.error is None) for o in llm.decide([STATES[0], "", STATES[1]], [TEAM], output=other, use_tqdm=False)] == [
        (0, True),
        (1, False),
        (2, True),
    ]
    made = llm.decider.question_set([TEAM, SPAM], calibration={"temperature": 2.0})
    for questions in ([TEAM], made):  # a set made before brings options of its own
        with pytest.raises(DecisionError, match="results of another run"):
            llm.decide(STATES, questions, output=path, use_tqdm=False)


@pytest.mark.parametrize("cut", ["left", "right", "middle"])
def test_a_state_beyond_the_window_is_cut_where_asked(cut: Any) -> None:
    llm = LLM("tiny-e", max_model_len=128)
    words = " ".join(f"w{i}" for i in range(400))
    made = llm.decider.question_set([TEAM, SPAM], truncate=cut)
    plan = made.plan(words)
    text = llm.get_tokenizer().decode(plan.prompts[0].root)
    assert plan.truncated and 120 <= max(len(p.root) for p in plan.prompts) <= 128  # as much as fits, but for a retokenized seam
    assert ("w0" in text.split(), "w399" in text.split()) == {"left": (False, True), "right": (True, False), "middle": (True, True)}[cut]
    assert ("[...]" in text) is (cut == "middle")
    output = llm.decide(words, made)
    assert output.truncated and math.fsum(output["team"].probabilities) == pytest.approx(1.0)
    emoji = llm.decide("🙂" * 300, [TEAM], truncate=cut)
    assert emoji.truncated and "�" not in llm.get_tokenizer().decode(made.plan("🙂" * 300).prompts[0].root)
    with pytest.raises(DecisionError, match="truncate is 'top'"):
        llm.decide("x", [TEAM], truncate="top")
    long = {"instructions": "w " * 100, "choices": ["a", "b"]}
    with pytest.raises(DecisionError, match="there is no room for the state"):
        llm.decide("x y z", [long], truncate=cut)


# ------------------------------------------------------------------------------------------------------ options
def test_prior_correction_takes_away_what_an_empty_state_gets(llm: LLM) -> None:
    plain = llm.decide("N/A", MIXED)
    corrected = llm.decide("N/A", MIXED, calibration={"prior": True})
    for before, answer in zip(plain.answers, corrected.answers, strict=True):
        assert answer.probabilities == pytest.approx([1 / len(answer.values)] * len(answer.values), abs=1e-5)
        assert max(before.probabilities) > 1.1 / len(answer.values)


def test_instructions_and_a_prompt_of_ones_own(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("Mail:\n{{ state }}\n--\n{{ question.text }} ({% for o in question.options %}{{ o.label }}={{ o.text }} {% endfor %})")
    made = llm.decider.question_set([TEAM], prompt_template=file, instructions="Be strict.")
    text = llm.get_tokenizer().decode(made.plan("hello").prompts[0].root, skip_special_tokens=False)
    assert text == (
        "<bos><|turn>system\nBe strict.<turn|>\n<|turn>user\nMail:\nhello\n--\nWhich team should handle this? "
        "(A=Billing B=Shipping C=Sales )<turn|>\n<|turn>model\n"
    )
    raw = llm.decider.question_set([TEAM], prompt_template="{{ state }} | {{ question.text }} Answer:", chat=False)
    plan = raw.plan("hello")
    assert llm.get_tokenizer().decode(plan.prompts[0].root) == "hello | Which team should handle this? Answer:"
    assert [llm.get_tokenizer().decode(list(leaf.tokens)) for leaf in plan.prompts[0].trie.leaves] == [" A", " B", " C"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_template": "{{ question.text }}"}, "writes the state 0 times"),
        ({"prompt_template": "{{ state }} {{ state }}?"}, "writes the state 2 times"),
        ({"prompt_template": "{{ state | upper | lower }}?"}, "writes the state 0 times"),
        ({"prompt_template": "{{ question.text }} {{ state }}", "chat": False}, "ends with the state"),
        ({"prompt_template": "{{ state }"}, "chat template, line 1"),
        ({"prompt_template": "/nowhere/x.jinja"}, "prompt template /nowhere/x.jinja: not readable"),
        ({"prompt_template": 7}, "prompt_template is 7: a jinja file"),
        ({"instructions": ["a"]}, "instructions is ['a']: a text"),
        ({"calibration": {"temperature": {"tem": 2.0}}}, "calibration.temperature names 'tem', and no question has this name: team"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "thinking must be off"),
    ],
)
def test_prompts_that_cannot_be_used(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        llm.decide("x", [TEAM], **options)
    assert message in str(raised.value)
