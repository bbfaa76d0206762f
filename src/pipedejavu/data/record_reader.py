"""Records of .jsonl, .csv, .parquet and .arrow files, each with the place where it stands."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from pipedejavu.data.data_files import DataFiles
from pipedejavu.facts import InputError, open_file
from pipedejavu.facts.error import brief

_MOST_LINE_BYTES = 1 << 26
"""Longest line of a .jsonl file."""
_MOST_FIELD = 1 << 26
"""Most characters in a field of a .csv file."""


class PlacedRecord(NamedTuple):
    """One record of a file."""

    place: str
    """The file and the line, for errors."""
    fields: Mapping[str, Any]


def read_records(files: DataFiles) -> Iterator[PlacedRecord]:
    """Yields the records of all files in their order; raises InputError at the first that cannot be read."""
    read = {"jsonl": _read_jsonl, "csv": _read_csv, "parquet": _read_parquet, "arrow": _read_arrow}[files.kind]
    for path in files.paths:
        try:
            yield from read(path)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 text: {error.reason}; convert it to UTF-8") from None


def _read_jsonl(path: Path) -> Iterator[PlacedRecord]:
    with _buffered(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES + 1), b""), 1):
            place = f"{path}, line {number}"
            if len(line) > _MOST_LINE_BYTES:
                raise InputError(
                    f"{place} has more than {_MOST_LINE_BYTES} bytes; put each record on a line of its own"
                )
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{place} is not JSON: {error}; write one object per line") from None
            if not isinstance(record, dict):
                raise InputError(f"{place} is no JSON object but {brief(record)}; write one object per line")
            yield PlacedRecord(place, record)


def _read_csv(path: Path) -> Iterator[PlacedRecord]:
    csv.field_size_limit(_MOST_FIELD)
    with _buffered(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        rows = csv.reader(text, strict=True)
        try:
            header = next(rows, None)
            for row in rows:
                if not row:
                    continue
                assert header is not None
                if len(row) != len(header):
                    raise InputError(
                        f"{path}, line {rows.line_num} has {len(row)} columns, and the header has {len(header)}; give"
                        " every row as many"
                    )
                yield PlacedRecord(f"{path}, line {rows.line_num}", dict(zip(header, row, strict=True)))
        except csv.Error as error:
            raise InputError(
                f"{path}, line {rows.line_num} is not CSV: {error}; quote fields that have commas"
            ) from None


def _read_parquet(path: Path) -> Iterator[PlacedRecord]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(f"{path} needs the package pyarrow; pip install 'pipedejavu[parquet]'") from None
    row = 0
    with open_file(path) as file:
        try:
            for batch in parquet.ParquetFile(file).iter_batches():
                for record in batch.to_pylist():
                    row += 1
                    yield PlacedRecord(f"{path}, row {row}", record)
        except import_module("pyarrow").ArrowException as error:
            text = str(error).partition("\n")[0]
            raise InputError(f"{path} cannot be read as parquet: {text}; write it again") from None


def _read_arrow(path: Path) -> Iterator[PlacedRecord]:
    """Yields the records of a file that `datasets` has saved: Arrow's stream format."""
    try:
        ipc = import_module("pyarrow.ipc")
    except ImportError:
        raise InputError(f"{path} needs the package pyarrow; pip install 'pipedejavu[parquet]'") from None
    row = 0
    with open_file(path) as file:
        try:
            for batch in ipc.open_stream(file):
                for record in batch.to_pylist():
                    row += 1
                    yield PlacedRecord(f"{path}, row {row}", record)
        except import_module("pyarrow").ArrowException as error:
            text = str(error).partition("\n")[0]
            raise InputError(f"{path} cannot be read as Arrow: {text}; save the data set again") from None


@contextmanager
def _buffered(path: Path) -> Iterator["io.BufferedReader[io.FileIO]"]:
    with open_file(path) as raw, io.BufferedReader(raw, 1 << 20) as file:
        yield file
