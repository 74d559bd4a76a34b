"""Results on disk as they come, so that a killed run goes on where it stopped: nothing lost, nothing twice.

A log is a jsonl file: a first line that says what run it belongs to, then one line per item, in the items' order. A line counts once its
newline is written; half a line, which a kill leaves behind, is cut off."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lastrow.decisions.questions import DecisionError

SYNC_EVERY = 256  # lines between two waits for the disk: a crash of the machine, not of the run, may cost this many


def fingerprint(run: Any) -> str:
    """Of everything that decides a run's results (JSON data)."""
    return hashlib.sha256(json.dumps(run, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()[:24]


class ResultLog:
    """Opens or creates the log of a run. num_done: items it has already.

    Raises DecisionError for a file that is another run's, or no log."""

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.num_done = 0
        self._unsynced = 0
        size = self._check(run) if path.exists() else 0
        self._file = open(path, "ab")  # noqa: SIM115  it lives as long as the log
        self._file.truncate(size)
        if size == 0:
            self._write({"lastrow_run": run})

    def _check(self, run: str) -> int:
        """Bytes of whole lines. A file without a whole line is a new log."""
        size = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                if number == 0:
                    found = _header(line)
                    if found is None:
                        raise DecisionError(f"{self.path} is no log of a run: choose another name, or delete it")
                    if found != run:
                        raise DecisionError(
                            f"{self.path} holds results of another run (other questions, input, model or options): delete it or choose "
                            "another name"
                        )
                else:
                    self.num_done += 1
                size += len(line)
        return size

    def append(self, record: dict[str, Any]) -> None:
        self._write(record)
        self.num_done += 1

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self._unsynced += 1
        if self._unsynced >= SYNC_EVERY:
            os.fsync(self._file.fileno())
            self._unsynced = 0

    def records(self) -> Iterator[dict[str, Any]]:
        """All items' records, in order."""
        with open(self.path, "rb") as file:
            next(file)
            for line in file:
                yield json.loads(line)

    def close(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def _header(line: bytes) -> str | None:
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data.get("lastrow_run") if isinstance(data, dict) else None
