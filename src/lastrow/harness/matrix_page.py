"""The table and the record page of `lastrow bench matrix`, from its report: no GPU needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lastrow.harness import plots
from lastrow.harness.records import Ratio, Record, markdown_table

UNITS = {"total": "tok/s, prompt and output", "output": "output tok/s", "latency": "ms"}


def render(report: dict[str, Any]) -> str:
    """Values by case and arm, then the verdicts."""
    return f"{_values(report)}\n\n{_verdict(report)}"


def _values(report: dict[str, Any]) -> str:
    arms = list(report["arms"])
    columns = ["case", "in / out, bs", "score", "asked", "aim", *arms, "share of the limit"]
    rows = []
    for r in report["results"]:
        values = [_number(r["value"].get(arm)) for arm in arms]
        cells = [r["case"], f"{r['input_len']} / {r['output_len']}, {r['bs']}", UNITS[r["score"]], _number(r["asked"]), _number(r["aim"])]
        rows.append([*cells, *values, f"{r['limit_share']:.0%}"])
    return markdown_table(columns, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def _verdict(report: dict[str, Any]) -> str:
    lines = []
    for r in report["results"]:
        value, asked = r["value"]["fast"], r["asked"]
        reached = value <= asked if r["score"] == "latency" else value >= asked
        ratios = _ratios(report, r["case"])
        against = [f"{arm} takes {ratio} of its time" for arm, ratio in ratios.items() if arm != "null"]
        null = f"null arm {ratios['null']}" if "null" in ratios else "no null arm"
        lines.append(
            f"* {r['case']}: {'reached' if reached else 'missed'} ({_number(value)} of {_number(asked)}); {', '.join([*against, null])}."
        )
    return "\n".join(lines)


def _ratios(report: dict[str, Any], case: str) -> dict[str, Ratio]:
    """Time of each arm over the time of `fast` in the same round."""
    rows = [row for row in report["rows"] if row["case"] == case]
    of = {arm: {row["round"]: row["latency_s"] for row in rows if row["arm"] == arm} for arm in report["arms"]}
    result = {}
    for arm, times in of.items():
        if arm != "fast" and times:
            rounds = sorted(times)
            result[arm] = Ratio.of([times[r] for r in rounds], [of["fast"][r] for r in rounds])
    return result


def write_record(report: dict[str, Any], folder: Path, profile: str = "") -> Path:
    """The record under `folder`, named after the card and the day; returns the page's path. profile: a section of its own."""
    env = report["environment"]
    gpu = env["gpu"].removeprefix("NVIDIA ").lower().replace(" ", "-")
    summary = (
        f"Shape `{env['shape']}`, dummy weights of the real size, bf16, on one {env['gpu']}. Whole requests through `LLM.generate`: random "
        f"prompts, greedy, prefix caching off, two warm-ups, medians of {env['rounds']} interleaved rounds. Dummy weights do the same work "
        "as trained ones; they say nothing about answers."
    )
    record = Record(f"matrix-{gpu}", "Whole requests on one GPU", summary, env, report["rows"], not_measured(report))
    record.sections = [
        ("Arms", "\n".join(f"* `{name}`: {text}" for name, text in report["arms"].items())),
        ("Results", render(report)),
        ("Beside other engines", _others(report)),
        ("Start-up and graphs", _start(report)),
    ]
    if profile:
        record.sections.append(("Where the time goes", profile))
    data = record.data_folder(folder)
    for kind, file in (("total", "throughput.svg"), ("output", "decoding.svg")):
        results = [r for r in report["results"] if r["score"] == kind]
        if results:
            names = [*(arm for arm in report["arms"] if arm != "null"), *dict.fromkeys(name for r in results for name in r["others"])]
            bars = {name: [r["value"].get(name, r["others"].get(name)) for r in results] for name in names}
            plots.bars(data / file, UNITS[kind], [r["case"] for r in results], bars, UNITS[kind])
            record.figures.append(
                (file, f"{UNITS[kind]} by case; other engines' figures are the issue's, from their own runs on such a card")
            )
    return record.write(folder)


def _others(report: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name for r in report["results"] for name in r["others"]))
    rows = []
    for r in report["results"]:
        ours = r["value"]["fast"]
        cells = []
        for name in names:
            other = r["others"].get(name)
            times = None if other is None else other / ours if r["score"] == "latency" else ours / other
            cells.append("-" if other is None else f"{_number(other)} ({times:.2f}x)")
        rows.append([r["case"], _number(ours), *cells])
    return (
        "Figures of other engines are issue 3's, measured on the same kind of card in other runs (vLLM 0.26 with FA4, compiled, its best "
        "token budget; transformers with sdpa): context, not arms of this run, where `hf` is not among the arms. In brackets: how many "
        "times faster `fast` is.\n\n" + markdown_table(["case", "fast, this run", *names], rows)
    )


def _start(report: dict[str, Any]) -> str:
    lines = [f"* Engine `{name}` ready in {seconds} s." for name, seconds in report["environment"]["start_seconds"].items()]
    for name, use in report["graphs"].items():
        why = ", ".join(f"{reason}: {count}" for reason, count in use["misses"].items()) or "none"
        lines.append(f"* Engine `{name}`: {use['steps']} steps, {use['replayed']} replayed, {use['eager']} eager (graph misses: {why}).")
    return "\n".join(lines)


def not_measured(report: dict[str, Any]) -> list[str]:
    absent = [name for name in ("full", "invariant", "hf") if name not in report["arms"]]
    return [
        *(f"`{name}`: not among this run's arms" for name in absent),
        "vLLM in this run: its figures are from other runs on such a card",
        "trained weights, real prompts, sampling other than greedy",
        "other cards, several cards, contexts over 4,352 tokens in this table",
    ]
