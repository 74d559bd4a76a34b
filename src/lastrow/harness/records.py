"""Benchmark records: a Markdown page with its raw rows and pictures beside it, and the arithmetic every record shares.

docs/benchmarks/<topic>-<date>.md             the page
docs/benchmarks/data/<topic>-<date>/rows.jsonl  one line for the conditions, then one per measurement
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

VERSIONED = ("torch", "triton", "transformers", "vllm", "numpy")


def environment(**more: Any) -> dict[str, Any]:
    """Where and on what a measurement ran: commit, versions, processor, load average, time. `more` is added at the end."""
    load = os.getloadavg()
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": " ".join([_program(), *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": {name: version for name in VERSIONED if (version := _version(name))},
        **_card(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in load],
        **more,
    }


def machine(conditions: Mapping[str, Any]) -> str:
    """What a page's name says of where it was measured: h200, gpu or cpu."""
    gpu = conditions.get("gpu")
    return "cpu" if gpu is None else "h200" if "H200" in gpu else "gpu"


def _program() -> str:
    script = Path(sys.argv[0])
    return "lastrow" if script.name in ("lastrow", "__main__.py") else f"python {script}" if script.suffix == ".py" else script.name


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """Short hash of the source tree's commit, with `+changes` where files under src differ from it; `unknown` outside git."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _card() -> dict[str, Any]:
    """The GPU's name, where the measurement may have used one."""
    torch = sys.modules.get("torch")
    return {"gpu": torch.cuda.get_device_name()} if torch is not None and torch.cuda.is_available() else {}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


# ---------------------------------------------------------------------------------------------------------- arithmetic
Arm = Callable[[], Any]


def interleave(arms: Mapping[str, Arm], rounds: int, warm_ups: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """Rows {round, position, arm, seconds}: every arm once a round in the order of `rounds_order`, a GPU's work waited for. What an arm
    returns, where it is a dict, joins its row, as do `fields`."""
    torch = sys.modules.get("torch")
    wait = torch.cuda.synchronize if torch is not None and torch.cuda.is_available() else lambda: None
    for arm in arms.values():
        for _ in range(warm_ups):
            arm()
    rows: list[dict[str, Any]] = []
    for number, order in enumerate(rounds_order(tuple(arms), rounds)):
        for position, name in enumerate(order):
            wait()
            start = time.perf_counter()
            more = arms[name]()
            wait()
            seconds = round(time.perf_counter() - start, 6)
            row = {"round": number, "position": position, "arm": name, "seconds": seconds}
            rows.append(row | fields | (more if isinstance(more, dict) else {}))
    return rows


def values_of(rows: Sequence[dict[str, Any]], arm: str, key: str = "seconds") -> list[Any]:
    """`key` of an arm's rows by round: what `Ratio.of` takes."""
    return [row[key] for row in sorted(rows, key=lambda row: row["round"]) if row["arm"] == arm]


def rounds_order(arms: Sequence[str], rounds: int) -> list[list[str]]:
    """Order of the arms in each round: rotated by one every second round and reversed every other (A B B A), so that drift,
    warm caches and neighbours fall on every arm alike."""
    order = []
    for r in range(rounds):
        shift = (r // 2) % len(arms)
        turn = [*arms[shift:], *arms[:shift]]
        order.append(turn if r % 2 == 0 else turn[::-1])
    return order


@dataclass(frozen=True)
class Ratio:
    """How often `arm` fits into `base`: per-round quotients of the two, which ran a moment apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, base: Sequence[float], arm: Sequence[float]) -> Ratio:
        """Quotients base / arm. low and high are the quartiles (the extremes of fewer than four rounds)."""
        quotients = sorted(b / a for b, a in zip(base, arm, strict=True))
        if len(quotients) < 4:
            return cls(statistics.median(quotients), quotients[0], quotients[-1])
        low, _, high = statistics.quantiles(quotients, n=4)
        return cls(statistics.median(quotients), low, high)

    def beyond(self, null: Ratio) -> bool:
        """True where this ratio's quartiles lie outside those of a null arm: only then does the record call it a difference."""
        return self.low > null.high or self.high < null.low

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


# ---------------------------------------------------------------------------------------------------------------- pages
def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


@dataclass
class Record:
    """One page. sections: (title, Markdown); figures: (file name, caption), drawn by the caller into `data_folder`."""

    topic: str
    title: str
    summary: str
    environment: dict[str, Any]
    rows: list[dict[str, Any]]
    not_measured: list[str]
    sections: list[tuple[str, str]] = field(default_factory=list)
    figures: list[tuple[str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.environment['date'][:10]}"

    def data_folder(self, folder: Path) -> Path:
        """folder/data/<name>, made if absent."""
        path = folder / "data" / self.name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, folder: Path) -> Path:
        """Write the raw rows and the page; returns the page's path."""
        data = self.data_folder(folder)
        lines = [{"environment": self.environment}, *self.rows]
        (data / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        page = folder / f"{self.name}.md"
        page.write_text(self.markdown(), encoding="utf-8")
        return page

    def markdown(self) -> str:
        """The page. "Not measured" stands in every record, so that nobody reads more into it than was run."""
        parts = [f"# {self.title}", self.summary]
        parts += [f"![{caption}](data/{self.name}/{file})" for file, caption in self.figures]
        parts += [f"## {title}\n\n{body}" for title, body in self.sections]
        parts.append("## Not measured\n\n" + "\n".join(f"* {line}" for line in self.not_measured))
        conditions = [[key.replace("_", " "), _cell(value)] for key, value in self.environment.items()]
        parts.append("## Conditions\n\n" + markdown_table(["", ""], conditions))
        parts.append(f"Raw rows: [`data/{self.name}/rows.jsonl`](data/{self.name}/rows.jsonl).")
        return "\n\n".join(parts) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    return f"`{value}`" if isinstance(value, str) and " " in value else str(value)
