"""`lastrow decide` and `lastrow score` over files: formats, a killed run, the log, the table and the picture."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lastrow
from lastrow.cli import main
from lastrow.decisions.log import ResultLog
from lastrow.decisions.questions import DecisionError, parse_questions
from lastrow.decisions.summary import Summary, columns, flat
from lastrow.decisions.tables import read_rows
from lastrow.engine.llm import LLM

ROOT = Path(__file__).parent.parent.parent
QUESTIONS = [
    {"name": "team", "type": "choice", "instructions": "Which team should handle this?", "choices": ["Billing", "Shipping", True]},
    {"name": "spam", "type": "predicate", "instructions": "Is this message spam?"},
    {"type": "score", "instructions": "How urgent is this?", "levels": ["low", "high"]},
]
STATES = ["Message: I was charged twice for the lamp.", "my parcel with the lamp has not arrived", 'He said "hi",\nthen left.', ""]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("q.json").write_text(json.dumps(QUESTIONS))
    Path("s.jsonl").write_text("".join(json.dumps({"id": f"n{i}", "state": state}) + "\n" for i, state in enumerate(STATES)))
    return tmp_path


def decide(*arguments: str) -> int:
    return main(["decide", *arguments, "--max-model-len", "512"])


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("lastrow: error: ")
    return lines[0]


def records(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------ formats
def test_the_same_rows_in_every_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": [f"n{i}" for i in range(4)], "state": STATES}), "s.parquet")
    with open("s.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "state"])
        writer.writerows([f"n{i}", state] for i, state in enumerate(STATES))
    for kind in ("jsonl", "csv", "parquet"):
        assert decide("--input", f"s.{kind}", "--questions", "q.json", "--output", f"o.{kind}", "--id-field", "id", "--diagnostics") == 0
    made = records("o.jsonl")
    assert [r["row"] for r in made] == [0, 1, 2, 3] and [r["id"] for r in made] == ["n0", "n1", "n2", "n3"]
    assert made[3]["error"] == "the state is empty: a text is needed" and "error" not in made[2]
    team, spam, urgent = made[0]["answers"]
    assert team["choice"] == "Billing" and team["argmax_is_label"] is True and 0 < spam["label_mass"] <= 1 and urgent["name"] is None
    questions = parse_questions(QUESTIONS)
    wanted = [flat(questions, record) for record in made]
    table = parquet.read_table("o.parquet").to_pylist()
    names = {"row", "id", *columns(questions, True, True), "error"}
    assert set(table[0]) == names and "team.p.true" in names and "q2.p.high" in names
    with open("o.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) == names
    for record, row, text in zip(wanted, table, rows, strict=True):
        for name, value in record.items():
            assert row[name] == (pytest.approx(value, abs=1e-5) if isinstance(value, float) else value)
            assert float(text[name]) == pytest.approx(value, abs=1e-5) if isinstance(value, float) else text[name] == str(value)
    assert table[3]["team"] is None and table[3]["error"] == rows[3]["error"] == made[3]["error"]
    shown = capsys.readouterr()
    assert "team" in shown.out and "label mass" in shown.out and "4 rows, 1 with an error" in shown.err and "items/s" in shown.err
    assert not list(folder.glob("*.partial.jsonl")) and not list(folder.glob("*.tmp"))


def test_rows_that_cannot_be_read_get_their_line(folder: Path) -> None:
    Path("bad.jsonl").write_bytes(
        b'{"state": "fine"}\n\n{oops\n"a text alone"\n7\n{"id": 3}\n{"state": null}\n\xff\xfe\n{"state": ["a"]}\n'
    )
    assert decide("--input", "bad.jsonl", "--questions", "q.json", "--output", "o.jsonl") == 0
    made = records("o.jsonl")
    assert [r["row"] for r in made] == list(range(8)) and ["error" in r for r in made] == [
        False,
        True,
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    wanted = {
        1: "line 3 is no JSON",
        3: "line 5 is a int",
        4: "has no field 'state': it has id",
        5: "state is None",
        6: "line 8 is no JSON",
    }
    assert all(part in made[i]["error"] for i, part in wanted.items())


# ------------------------------------------------------------------------------------------------------ killed runs
def test_a_killed_run_continues_where_it_stopped(folder: Path, llm: LLM) -> None:
    count = 400
    states = [f"order {i}: {STATES[i % 3]}" for i in range(count)]
    Path("many.jsonl").write_text("".join(json.dumps({"id": i, "state": state}) + "\n" for i, state in enumerate(states)))
    arguments = ["--input", "many.jsonl", "--ask", "Is this message spam?", "--output", "out.jsonl", "--id-field", "id"]
    arguments += ["--max-num-seqs", "16", "--max-model-len", "512"]
    command = [sys.executable, "-m", "lastrow", "decide", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    log = folder / "out.jsonl.partial.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 20):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = log.read_bytes()
    done = before.count(b"\n") - 1
    assert 20 <= done < count and not Path("out.jsonl").exists()  # else it was not killed in its middle
    assert main(["decide", *arguments]) == 0
    made = records("out.jsonl")
    assert [(r["row"], r["id"]) for r in made] == [(i, str(i)) for i in range(count)]
    assert Path("out.jsonl").read_bytes().startswith(b"".join(before.splitlines(keepends=True)[1 : 1 + done]))  # kept, not made again
    around = [*range(3), *range(done - 4, done + 4), count - 1]
    direct = llm.decide([states[i] for i in around], [{"instructions": "Is this message spam?"}], use_tqdm=False)
    assert [made[i]["answers"][0]["probability"] for i in around] == pytest.approx([o.answers[0].probability for o in direct], abs=1e-5)


def test_a_log_continues_after_every_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever a kill cuts the log, the run ends with every row once."""
    arguments = ("--input", "s.jsonl", "--questions", "q.json", "--output", "o.jsonl")
    assert decide(*arguments) == 0
    whole = records("o.jsonl")
    Path("o.jsonl").unlink()
    log = folder / "o.jsonl.partial.jsonl"
    assert run_and_keep_log(log, arguments)
    full = log.read_bytes()
    ends = [i + 1 for i, byte in enumerate(full) if byte == 10]
    for cut in (0, 5, ends[0], ends[0] + 1, ends[1], ends[2] - 1, ends[2], len(full) - 1, len(full)):
        log.write_bytes(full[:cut])
        assert decide(*arguments, "--overwrite") == 0
        assert [r["row"] for r in records("o.jsonl")] == [0, 1, 2, 3]
        for made, wanted in zip(records("o.jsonl"), whole, strict=True):
            assert made.get("error") == wanted.get("error")
            for a, b in zip(made.get("answers", ()), wanted.get("answers", ()), strict=True):
                assert a["confidence"] == pytest.approx(b["confidence"], abs=1e-5)
        assert not log.exists()


def run_and_keep_log(log: Path, arguments: tuple[str, ...]) -> bool:
    """As if the run had been killed between the last row and the output: what the output holds, behind the log's header."""
    assert decide(*arguments, "--overwrite") == 0
    lines = Path("o.jsonl").read_bytes()
    for header in _headers(log, arguments):
        log.write_bytes(header + lines)
    return True


def _headers(log: Path, arguments: tuple[str, ...]) -> list[bytes]:
    seen: list[bytes] = []
    original = ResultLog.close

    def close(self: ResultLog) -> None:
        original(self)
        seen.append(self.path.read_bytes().splitlines(keepends=True)[0])

    ResultLog.close = close  # type: ignore[method-assign]
    try:
        assert decide(*arguments, "--overwrite") == 0
    finally:
        ResultLog.close = original  # type: ignore[method-assign]
    return seen


def test_logs_of_other_runs_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    log = ResultLog(path, "run a")
    log.append({"n": 1})
    log.close()
    with pytest.raises(DecisionError, match="results of another run"):
        ResultLog(path, "run b")
    assert ResultLog(path, "run a").num_done == 1
    for text in ('{"state": "my data"}\n', "hello\n", "[1]\n"):
        path.write_text(text)
        with pytest.raises(DecisionError, match="is no log of a run"):
            ResultLog(path, "run a")
        assert path.read_text() == text
    with pytest.raises(ValueError):
        log = ResultLog(tmp_path / "y.jsonl", "r")
        log.append({"p": float("nan")})


# ------------------------------------------------------------------------------------------------------ command line
def test_one_state_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decide("--state", STATES[0], "--questions", "q.json", "--diagnostics", "--plot", "one.svg") == 0
    shown = capsys.readouterr().out
    assert "Billing" in shown and "label mass" in shown and Path("one.svg").read_text().startswith("<?xml")
    assert decide("--state", STATES[0], "--ask", "Which team?", "--choices", "Billing,Sales", "--json") == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["choice"] in ("Billing", "Sales")
    assert main(["score", "--prompt", "In the", "--choice", " beginning", "--choice", " end", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == " beginning"


def test_scores_over_a_file(folder: Path) -> None:
    Path("p.csv").write_text('prompt,choices\nIn the,"["" beginning"", "" end""]"\nIn the,oops\n')
    assert main(["score", "--input", "p.csv", "--output", "o.csv"]) == 0
    with open("o.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["best"] == " beginning" and float(rows[0]["probability"]) > 0.5 and "choices is 'oops'" in rows[1]["error"]


def test_a_question_file_with_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    Path("mine.jinja").write_text("{{ state }}\n--\n{{ question.text }}")
    Path("q.yaml").write_text(
        "prompt_template: mine.jinja\ncalibration: {temperature: 2.0, abstain_below: 0.999}\nquestions:\n"
        "- {name: a, instructions: 'Which?', choices: [x, y]}\n"
    )
    assert decide("--state", "hello", "--questions", "q.yaml", "--json") == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["abstained"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--questions", "q.json"], "give --state TEXT or --input FILE, one of them"),
        (["--state", "x"], "give --questions FILE or --ask TEXT"),
        (["--state", "x", "--ask", "y", "--output", "o.csv"], "--output is for --input"),
        (["--input", "s.jsonl", "--ask", "y"], "--input needs --output"),
        (["--input", "s.jsonl", "--ask", "y", "--output", "o.txt"], "must end in .jsonl, .csv, .parquet"),
        (["--input", "s.txt", "--ask", "y", "--output", "o.csv"], "--input s.txt: the name must end in"),
        (["--input", "no.csv", "--ask", "y", "--output", "o.csv"], "--input no.csv: no such file"),
        (["--input", "c.csv", "--ask", "y", "--output", "o.csv"], "c.csv has no column 'state': it has a, b"),
        (["--input", "s.jsonl", "--ask", "y", "--output", "no/o.csv"], "the folder no does not exist"),
        (["--input", "s.jsonl", "--ask", "y", "--output", "c.csv"], "c.csv exists: choose another name, or add --overwrite"),
        (["--state", "x", "--ask", "y", "--plot", "h.bmp"], "--plot h.bmp: the name must end in .svg, .png, .pdf"),
        (["--state", "x", "--ask", "y", "--choices", "a"], "has 1 entries: 2 to 255"),
        (["--state", "x", "--questions", "no.json"], "--questions no.json: not readable"),
        (["--state", "x", "--questions", "c.csv"], "--questions c.csv: a list of questions"),
        (["--state", "x", "--questions", "k.json"], "the key 'question' is not known"),
        (["--state", " ", "--ask", "y"], "the state is empty"),
        (["--state", "x", "--ask", "y", "--plot", "no/h.svg"], "--plot no/h.svg: the folder no does not exist"),
        (["--input", "s.jsonl", "--ask", "y", "--output", "./s.jsonl", "--overwrite"], "--output s.jsonl is the input"),
        (["--input", "i.csv", "--ask", "y", "--output", "o.csv", "--id-field", "id"], "i.csv has no column 'id'"),
        (["--input", "s.jsonl", "--ask", "y", "--output", "o.csv", "--id-field", "row"], "--id-field row: the output has this name"),
        (["--input", "s.jsonl", "--ask", "y", "--output", "o.csv", "--id-field", "answer"], "--id-field answer: the output has"),
        (["--input", "s.jsonl", "--ask", "y", "--output", "o.jsonl", "--id-field", "answers"], "--id-field answers: the output has"),
        (["--input", "s.jsonl", "--questions", "row.json", "--output", "o.csv"], "a question is named 'row'"),
        (["--input", "s.jsonl", "--questions", "twice.json", "--output", "o.parquet"], "two columns would be named 'q1'"),
        (["--input", "s.jsonl", "--questions", "true.json", "--output", "o.csv"], "two columns would be named 'k.p.true'"),
    ],
)
def test_mistakes_get_one_line(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    Path("c.csv").write_text("a,b\n1,2\n")
    Path("k.json").write_text('{"questions": [], "question": 1}')
    Path("i.csv").write_text("state\nx\n")
    Path("row.json").write_text(json.dumps([{"name": "row", "instructions": "x"}]))
    Path("twice.json").write_text(json.dumps([{"name": "q1", "instructions": "x"}, {"instructions": "x"}]))
    Path("true.json").write_text(json.dumps([{"name": "k", "instructions": "x", "choices": ["true", True]}]))
    assert message in error_of(capsys, "decide", *arguments)


def test_jsonl_and_csv_need_no_pyarrow(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert decide("--input", "s.jsonl", "--questions", "q.json", "--output", "o.csv") == 0
    Path("p.parquet").write_bytes(b"")
    assert "pip install 'lastrow[data]'" in error_of(capsys, "decide", "--input", "p.parquet", "--ask", "y", "--output", "x.csv")
    Path("q.yaml").write_text("[]")
    assert "yaml needs pyyaml" in error_of(capsys, "decide", "--state", "x", "--questions", "q.yaml")


def test_rows_of_a_csv_with_a_byte_order_mark_and_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xef\xbb\xbfstate,n\n" + b"w" * 200_000 + b",1\nshort\n")
    rows = list(read_rows(path, ("state",), "state"))
    assert len(rows[0].get("state")) == 200_000 and rows[1].values == {"state": "short"}


def test_broken_csv_and_parquet_say_where(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('state\nfine\n"a"b\n"open\nx\n')  # a mark in the wrong place, and one that nothing closes
    rows = list(read_rows(path, ("state",), "state"))
    assert [row.number for row in rows] == [0, 1, 2] and rows[0].get("state") == "fine" and rows[0].error is None
    assert "line 3 is no CSV" in (rows[1].error or "") and "line 4 is no CSV (unexpected end of data)" in (rows[2].error or "")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    whole = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"state": [f"state {i}" * 9 for i in range(4000)]}), whole, row_group_size=1024)
    data = bytearray(whole.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 2000] = bytes(2000)
    whole.write_bytes(data)
    found = []
    with pytest.raises(DecisionError, match=r"x\.parquet: not readable from row \d+ on"):
        for row in read_rows(whole, ("state",), "state"):
            found.append(row.get("state"))
    assert found == [f"state {i}" * 9 for i in range(len(found))] and len(found) >= 1024


def test_a_log_is_of_one_content_of_the_input(
    folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input of the same name and size whose states were changed is another one."""
    arguments = ("decide", "--input", "s.jsonl", "--questions", "q.json", "--output", "o.jsonl", "--max-model-len", "512")
    monkeypatch.setattr(lastrow, "LLM", lambda **_: llm)
    monkeypatch.setattr("lastrow.decisions.filerun.write_rows", _stop)
    with pytest.raises(RuntimeError, match="killed"):
        main(list(arguments))
    Path("s.jsonl").write_text(Path("s.jsonl").read_text().replace("lamp", "desk"))
    assert "results of another run (other questions, input" in error_of(capsys, *arguments)


def _stop(*_: Any) -> None:
    raise RuntimeError("killed")


def test_the_summary_counts_what_it_saw(tmp_path: Path) -> None:
    questions = parse_questions(QUESTIONS)
    summary = Summary(questions)
    for p in (0.0, 0.2, 0.9, 1.0):
        entries = [{"value": value, "probability": q} for value, q in (("Billing", p), ("Shipping", 1 - p), (True, 0.0))]
        best = max(entries, key=lambda entry: entry["probability"])
        answers = [
            {"type": "choice", "choice": best["value"], "confidence": best["probability"], "probabilities": entries},
            {"type": "predicate", "probability": p, "confidence": max(p, 1 - p), "label_mass": 0.5},
            {"type": "score", "score": p, "level": round(p), "confidence": max(p, 1 - p)},
        ]
        summary.see({"row": 0, "answers": answers})
    summary.see({"row": 4, "error": "no"})
    assert summary.rows()[0][:4] == ["team", "choice", "4", "Shipping 50%, Billing 50%"]
    assert summary.rows()[1] == ["spam", "predicate", "4", "no 50%, yes 50%", "0.525", "0.5000"]
    assert summary.questions[1].bins[0] == 1 and summary.questions[1].bins[-1] == 1 and sum(summary.questions[1].bins) == 4
    summary.plot(tmp_path / "h.png")
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
