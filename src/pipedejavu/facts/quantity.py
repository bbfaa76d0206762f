"""Quantities as numbers in SI base units, or as text with a unit ("80 GiB", "55 GB/s", "3 us").

Records store numbers only; people may write machine files with the text forms.
"""

import re
import sys
from typing import Annotated

from pydantic import BeforeValidator

from pipedejavu.facts.error import brief

_SMALL = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "m": 1e-3}
"""Prefixes of seconds; µ exists as two characters that look the same."""
_LARGE = {"": 1.0, "K": 1e3} | {p: 10.0 ** (3 * n) for n, p in enumerate(["k", "M", "G", "T", "P", "E"], 1)}
_LARGE |= {f"{p}i": 1024.0**n for n, p in enumerate(["K", "M", "G", "T", "P", "E"], 1)}
"""Prefixes of all other units, so that '5 mB' is a fault and not five thousandths of a byte."""

_BASES = {
    "B": "bytes",
    "bit": "bits",
    "s": "seconds",
    "B/s": "bytes per second",
    "bit/s": "bits per second",
    "FLOP/s": "floating-point operations per second",
}
_ALIASES = {"b/s": "bit/s", "b": "bit", "bps": "bit/s", "bytes": "B", "bytes/s": "B/s", "FLOPS": "FLOP/s"}
_BITS = {"bit": "B", "bit/s": "B/s"}

_TEXT = re.compile(r"([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*([^0-9.\s].*)?")


def parse_quantity(text: str, base: str) -> float:
    """Returns `text` as a number of `base` units; raises ValueError that names the expected unit."""
    match = _TEXT.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{brief(text)} is not a quantity; write a number of {_BASES[base]}, such as '1 {base}'")
    number, unit = match[1], match[2]
    if unit is None:
        raise ValueError(f"{brief(text)} has no unit; this needs {_BASES[base]}, such as '{number} {base}'")
    for end in sorted([*_BASES, *_ALIASES], key=len, reverse=True):
        rest = _ALIASES.get(end, end)
        scale = (_SMALL if rest == "s" else _LARGE).get(unit.removesuffix(end))
        if unit.endswith(end) and scale is not None:
            divisor = 8.0 if rest in _BITS else 1.0
            if _BITS.get(rest, rest) == base:
                return float(number) * scale / divisor
            raise ValueError(f"{brief(text)} is in {_BASES[rest]}; this needs {_BASES[base]} ({base})")
    raise ValueError(f"unit {brief(unit)} is not known; this needs {_BASES[base]}, such as '1 {base}'")


def _reader(base: str, *, whole: bool = False) -> BeforeValidator:
    def read(value: object) -> object:
        number = parse_quantity(value, base) if isinstance(value, str) else value
        if isinstance(number, int | float) and not isinstance(number, bool):
            if not 0 <= number <= sys.float_info.max:
                text = brief(value) if isinstance(value, str) else f"{brief(value)} {base}"
                raise ValueError(f"{text} is not possible; it must be zero or more, and finite")
            if whole and (isinstance(value, str) or number == int(number)):
                return round(number)
        return number

    return BeforeValidator(read)


Bytes = Annotated[int, _reader("B", whole=True)]
PartBytes = Annotated[float, _reader("B")]
"""Bytes per something, which may be a fraction."""
Seconds = Annotated[float, _reader("s")]
BytesPerSecond = Annotated[float, _reader("B/s")]
FlopPerSecond = Annotated[float, _reader("FLOP/s")]


def format_bytes(size_bytes: float) -> str:
    """Formats bytes for people: '1.5 GiB'."""
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 1), ("TiB", 1)):
        if abs(round(size_bytes, digits)) < 1024 or unit == "TiB":
            return f"{size_bytes:.{digits}f} {unit}"
        size_bytes /= 1024
    raise AssertionError("unreachable")


def format_seconds(time_s: float) -> str:
    """Formats a duration for people: '2.5 ms'."""
    if abs(time_s) >= 999.5:
        return f"{time_s:.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(time_s) >= 0.9995 * scale or unit == "us":
            return f"{time_s / scale:.3g} {unit}"
    raise AssertionError("unreachable")
