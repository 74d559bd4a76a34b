"""`lastrow decide` and `lastrow score` over a file: a log beside the output as results come, the output at the end."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lastrow.decisions.log import ResultLog, fingerprint
from lastrow.decisions.questions import DecisionError
from lastrow.decisions.tables import OUTPUTS, Columns, Row, check_suffix, count_rows, read_rows, write_rows
from lastrow.progress import track

# Names in a record of `decide` or `score`.
OWN_COLUMNS = ("row", "error", "answers", "usage", "truncated", "best", "choices", "logprobs", "probabilities", "num_tokens")


@dataclass(frozen=True, slots=True)
class RunReport:
    """num_resumed: rows that an earlier, interrupted run had done. seconds: of this run's rows, without loading the model."""

    num_rows: int
    num_resumed: int
    num_errors: int
    seconds: float

    @property
    def rows_per_s(self) -> float:
        return (self.num_rows - self.num_resumed) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class FileRun:
    """One run over a file. needed, text_field: see tables.read_rows. columns: of a csv or parquet output, see tables.write_rows. id_field:
    a column that is copied to the output. settings: whatever else decides the results (JSON data): together with the input's content it
    says whether a log is this run's."""

    input: Path
    output: Path
    settings: Any
    needed: tuple[str, ...]
    text_field: str
    columns: Columns
    id_field: str | None = None
    overwrite: bool = False

    @property
    def log_path(self) -> Path:
        return self.output.with_name(self.output.name + ".partial.jsonl")

    def check(self) -> None:
        """Refuses, before a model is loaded, what cannot work. Raises DecisionError."""
        check_suffix(self.output, OUTPUTS, "--output")
        next(self._rows(), None)
        if self.output.exists() and self.output.samefile(self.input):
            raise DecisionError(f"--output {self.output} is the input: choose another name")
        if taken := [name for name in (*OWN_COLUMNS, *self.columns) if name == self.id_field]:
            raise DecisionError(f"--id-field {taken[0]}: the output has this name for its own; rename the input's column")
        if taken := [name for name in self.columns if name in ("row", "error")]:
            raise DecisionError(f"a question is named {taken[0]!r}, as a column of every output is: give it another name, or write .jsonl")
        if not self.output.parent.is_dir():
            raise DecisionError(f"--output {self.output}: the folder {self.output.parent} does not exist")
        if self.output.exists() and not self.log_path.exists() and not self.overwrite:
            raise DecisionError(f"--output {self.output} exists: choose another name, or add --overwrite")

    def run(
        self,
        work: Callable[[Iterable[Row]], Iterator[Any]],
        flat: Callable[[dict[str, Any]], dict[str, Any]],
        see: Callable[[dict[str, Any]], None],
    ) -> RunReport:
        """work: rows -> one output object per row, in order. flat: see tables.write_rows. see: called with every row's record,
        those of an interrupted run included."""
        with open(self.input, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        log = ResultLog(self.log_path, fingerprint([self.settings, content, self.id_field]))
        try:
            resumed, start = log.num_done, time.perf_counter()
            for record in self._new_records(work, resumed):
                log.append(record)
            seconds = time.perf_counter() - start
            errors = 0

            def records() -> Iterator[dict[str, Any]]:
                nonlocal errors
                for record in log.records():
                    errors += "error" in record
                    see(record)
                    yield record

            names = {"row": int, **({self.id_field: str} if self.id_field else {}), **self.columns, "error": str}
            write_rows(self.output, records(), names, lambda record: flat(record) | self._fixed(record))
        finally:
            log.close()
        self.log_path.unlink()
        return RunReport(log.num_done, resumed, errors, seconds)

    def _rows(self) -> Iterator[Row]:
        return read_rows(self.input, (*self.needed, *([self.id_field] if self.id_field else [])), self.text_field)

    def _new_records(self, work: Callable[[Iterable[Row]], Iterator[Any]], done: int) -> Iterator[dict[str, Any]]:
        running: deque[Row] = deque()

        def rows() -> Iterator[Row]:
            for row in islice(self._rows(), done, None):
                running.append(row)
                yield row

        total = count_rows(self.input)
        for output in track(work(rows()), "rows", total=None if total is None else max(total - done, 0)):
            row = running.popleft()
            name = {} if self.id_field is None else {self.id_field: _as_text(row.values.get(self.id_field))}
            yield {"row": row.number, **name, **output.to_dict()}

    def _fixed(self, record: dict[str, Any]) -> dict[str, Any]:
        return {name: record.get(name) for name in ("row", "error", *([self.id_field] if self.id_field else []))}


def _as_text(value: Any) -> str | None:
    return None if value is None else str(value).encode("utf-8", "replace").decode()
