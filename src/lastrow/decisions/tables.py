"""Rows in, rows out: jsonl, csv and parquet. csv and jsonl need nothing installed, parquet needs pyarrow (the extra `data`)."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lastrow.decisions.questions import DecisionError

INPUTS, OUTPUTS = (".jsonl", ".csv", ".parquet"), (".jsonl", ".csv", ".parquet")
BATCH_ROWS = 1024
NO_PYARROW = "parquet needs pyarrow: pip install 'lastrow[data]', or use jsonl or csv"


@dataclass(frozen=True, slots=True)
class Row:
    """One input row. error: why it has no values, in one line; such a row still gets its line of output."""

    number: int
    values: Mapping[str, Any]
    error: str | None = None

    def get(self, field: str) -> Any:
        """A field's value. Raises DecisionError for a row that was not readable, or that lacks it."""
        if self.error is not None:
            raise DecisionError(self.error)
        if field not in self.values:
            raise DecisionError(f"row {self.number} has no field {field!r}: it has {', '.join(map(str, self.values)) or 'none'}")
        return self.values[field]


def check_suffix(path: Path, known: Sequence[str], option: str) -> str:
    if path.suffix.lower() not in known:
        raise DecisionError(f"{option} {path}: the name must end in {', '.join(known)}")
    return path.suffix.lower()


def read_rows(path: Path, needed: Sequence[str], text_field: str) -> Iterator[Row]:
    """The rows of a file. needed: columns without which no row can be used (csv and parquet: an error at once). text_field: what a
    jsonl line that is a text alone is the value of. Raises DecisionError or OSError."""
    kind = check_suffix(path, INPUTS, "--input")
    if not path.is_file():
        raise DecisionError(f"--input {path}: no such file")
    if kind == ".jsonl":
        return _read_jsonl(path, text_field)
    return _read_csv(path, needed) if kind == ".csv" else _read_parquet(path, needed)


def count_rows(path: Path) -> int | None:
    """Rows of a file where that is cheap to say."""
    if path.suffix.lower() == ".parquet":
        return _parquet().ParquetFile(path).metadata.num_rows
    if path.suffix.lower() == ".jsonl":
        with open(path, "rb") as file:
            return sum(1 for line in file if line.strip())
    return None


def _read_jsonl(path: Path, text_field: str) -> Iterator[Row]:
    with open(path, "rb") as file:
        number = 0
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            yield _jsonl_row(number, line_number, line, text_field)
            number += 1


def _jsonl_row(number: int, line_number: int, line: bytes, text_field: str) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Row(number, {}, f"line {line_number} is no JSON ({error})")
    if isinstance(value, str):
        return Row(number, {text_field: value})
    if isinstance(value, dict):
        return Row(number, value)
    return Row(number, {}, f"line {line_number} is a {type(value).__name__}: an object with {text_field!r}, or a text, is needed")


def _read_csv(path: Path, needed: Sequence[str]) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        # strict: a quotation mark that nothing closes is an error, instead of one row that holds the rest of the file
        reader = csv.DictReader(file, strict=True)
        try:
            names = reader.fieldnames or ()
        except csv.Error as error:
            raise DecisionError(f"--input {path}: the first line holds no column names ({error})") from None
        _check_columns(path, names, needed)
        number = 0
        while True:
            line = reader.reader.line_num + 1
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Row(number, {}, f"the row that begins in line {line} is no CSV ({error})")
            else:
                yield Row(number, {key: value for key, value in values.items() if key is not None and value is not None})
            number += 1


def _read_parquet(path: Path, needed: Sequence[str]) -> Iterator[Row]:
    try:
        file = _parquet().ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DecisionError(f"--input {path}: not readable as parquet ({error})") from None
    _check_columns(path, file.schema_arrow.names, needed)
    number = 0
    batches = file.iter_batches(batch_size=BATCH_ROWS)
    while True:
        try:
            batch = next(batches, None)
        except (OSError, ValueError) as error:
            raise DecisionError(f"--input {path}: not readable from row {number} on ({error})") from None
        if batch is None:
            return
        for values in batch.to_pylist():
            yield Row(number, values)
            number += 1


def _check_columns(path: Path, names: Iterable[str], needed: Sequence[str]) -> None:
    if missing := [name for name in needed if name not in names]:
        raise DecisionError(f"--input {path} has no column {missing[0]!r}: it has {', '.join(names) or 'none'}")


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DecisionError(NO_PYARROW) from None
    return parquet


# ------------------------------------------------------------------------------------------------------ output
Columns = Mapping[str, type]


def write_rows(path: Path, records: Iterator[dict[str, Any]], columns: Columns, flat: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Records into a file that appears whole or not at all. jsonl: as they are; csv and parquet: `flat` gives each its columns."""
    part = path.with_name(path.name + ".tmp")
    kind = path.suffix.lower()
    if kind == ".jsonl":
        with open(part, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    elif kind == ".csv":
        with open(part, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(columns))
            writer.writeheader()
            writer.writerows(flat(record) for record in records)
    else:
        _write_parquet(part, map(flat, records), columns)
    with open(part, "rb") as file:
        os.fsync(file.fileno())  # the log goes when the output is there
    os.replace(part, path)


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]], columns: Columns) -> None:
    parquet = _parquet()
    import pyarrow

    kinds = {str: pyarrow.string(), float: pyarrow.float64(), int: pyarrow.int64(), bool: pyarrow.bool_()}
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
    with parquet.ParquetWriter(path, schema) as writer:
        while group := list(islice(rows, BATCH_ROWS)):
            filled = [{name: row.get(name) for name in columns} for row in group]
            writer.write_table(pyarrow.Table.from_pylist(filled, schema=schema))
