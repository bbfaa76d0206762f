"""Reads and extends metrics.jsonl: one JSON object per line; rows that this program cannot have written are ignored."""

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipedejavu.facts import InputError, format_bytes, open_file

MOST_BYTES, _MOST_LINE_BYTES = 1 << 32, 1 << 20
_MOST = 2**53
"""Integers below this are exact as floats."""
_COUNTS = {
    "step", "evaluated", "saved", "not_saved", "resumed", "stopped", "count", "samples", "peak_bytes", "peak_gpu_bytes",
    "peak_reserved_bytes", "left",
}  # fmt: skip
_STEP_NAMES = ("step", "saved", "switched", "skipped", "evaluated", "left")
"""Keys that may hold the step of a row."""
_FIGURES = {"eval_loss", "perplexity", "accuracy", "epoch"}
_AMOUNTS = {"elapsed_s", "took_s", "size_bytes"}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the valid rows of a file; lines that are truncated or malformed are ignored.

    Raises InputError if the file exists but cannot be read, or is larger than `MOST_BYTES`.
    """
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise InputError(
                f"cannot read {path}: it has {format_bytes(size)}, and at most {format_bytes(MOST_BYTES)} are read"
            )
        return [row for line in _lines(path) if (row := _row(line)) is not None]
    except OSError as error:
        if path.is_file():
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        return []


def step_of(row: dict[str, Any]) -> int:
    """Returns the step of a row; 0 if it has none."""
    return next((row[name] for name in _STEP_NAMES if type(row.get(name)) is int), 0)


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, except those too long to be a row."""
    with open_file(path) as file:
        rest, is_skipped = b"", False
        while part := file.read(_MOST_LINE_BYTES):
            *lines, rest = (rest + part).split(b"\n")
            yield from lines[1:] if is_skipped and lines else lines
            is_skipped = is_skipped and not lines
            if len(rest) > _MOST_LINE_BYTES:
                rest, is_skipped = b"", True
        if rest and not is_skipped:
            yield rest


def _row(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and _is_sound(row):
            return row
    return None


def _is_sound(row: dict[str, Any]) -> bool:
    """Whether every known key has a value of its type."""
    return (
        all(_is_count(row[name]) for name in _COUNTS & row.keys())
        and all(_is_amount(row[name]) for name in _AMOUNTS & row.keys())
        and (row.get("skipped", True) is True or _is_count(row["skipped"]))
        and all(_is_number(share) for share in _shares(row))
        and all(_is_number(row[name]) or row[name] is None for name in _FIGURES & row.keys())
        and ("loss" not in row or ("step" in row and (row["loss"] is None or _is_number(row["loss"]))))
    )


def _shares(row: dict[str, Any]) -> list[Any]:
    shares = row.get("shares", [])
    return shares if isinstance(shares, list) else [None]


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float represents exactly; infinities and NaN count, as losses may be such."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_amount(value)


def _is_amount(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and 0 <= value < _MOST


def append_metrics(path: Path, data: bytes) -> None:
    """Appends bytes to a file, all or none of them; does not follow links or block on a FIFO."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        before = os.fstat(file).st_size
        if os.write(file, data) < len(data):
            os.ftruncate(file, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(file)
