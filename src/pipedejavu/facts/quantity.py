"""Quantities as numbers in SI base units, or as text with a unit ("80 GiB", "55 GB/s", "3 us").

Records store numbers only; the text forms exist so that people can write machine files by hand.
"""

import math
import re
from typing import Annotated

from pydantic import BeforeValidator

_SCALE = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3} | {
    prefix: 10.0 ** (3 * power) for power, prefix in enumerate(["k", "M", "G", "T", "P"], 1)
}
_BINARY = {f"{p}i": 1024.0**n for n, p in enumerate(["K", "M", "G", "T", "P"], 1)}
_SCALE |= {"K": 1e3} | _BINARY

_BASES = {
    "B": "bytes",
    "bit": "bits",
    "s": "seconds",
    "B/s": "bytes per second",
    "bit/s": "bits per second",
    "FLOP/s": "floating-point operations per second",
}
_ALIASES = {"b/s": "bit/s", "b": "bit", "bytes": "B", "bytes/s": "B/s", "FLOPS": "FLOP/s"}
_BITS = {"bit": "B", "bit/s": "B/s"}

_TEXT = re.compile(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(.*?)\s*")


def parse_quantity(text: str, base: str) -> float:
    """Returns `text` as a number of `base` units; raises ValueError naming the unit expected."""
    match = _TEXT.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a quantity; write a number of {_BASES[base]}")
    unit = match[2]
    for prefix in sorted(_SCALE, key=len, reverse=True):
        rest = _ALIASES.get(unit.removeprefix(prefix), unit.removeprefix(prefix))
        if unit.startswith(prefix) and rest in _BASES:
            divisor = 8.0 if rest in _BITS else 1.0
            if _BITS.get(rest, rest) == base:
                return float(match[1]) * _SCALE[prefix] / divisor
            raise ValueError(f"{text!r} is in {_BASES[rest]}; this needs {_BASES[base]} ({base})")
    raise ValueError(f"unit {unit!r} is not known; this needs {_BASES[base]}, such as '1 {base}'")


def _reader(base: str, *, whole: bool = False) -> BeforeValidator:
    def read(value: object) -> object:
        if isinstance(value, str):
            value = parse_quantity(value, base)
            if whole:
                value = round(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{value} {base} is not possible; it must be zero or more")
            if whole and value == int(value):
                return int(value)
        return value

    return BeforeValidator(read)


Bytes = Annotated[int, _reader("B", whole=True)]
PartBytes = Annotated[float, _reader("B")]
"""Bytes for each of something, which need not be whole."""
Seconds = Annotated[float, _reader("s")]
BytesPerSecond = Annotated[float, _reader("B/s")]
FlopPerSecond = Annotated[float, _reader("FLOP/s")]


def format_bytes(size_bytes: float) -> str:
    """Formats bytes for people: '1.5 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size_bytes) < 1024 or unit == "TiB":
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError("unreachable")


def format_seconds(time_s: float) -> str:
    """Formats a duration for people: '2.50 ms'."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(time_s) >= scale or unit == "us":
            return f"{time_s / scale:.3g} {unit}"
    raise AssertionError("unreachable")
