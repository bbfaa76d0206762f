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


_LONG = ((2 * 86400.0, 86400.0, "days"), (2 * 3600.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))
"""From how long on a duration is said in which unit, and the unit's seconds."""


def format_range(low_s: float, high_s: float) -> str:
    """Formats two durations in the unit of the longer one: '54 to 71 min'."""
    return f"{_in_unit(low_s, high_s)[0]} to {' '.join(_in_unit(high_s, high_s))}"


def format_long(time_s: float) -> str:
    """Formats the duration of a job: '62 min'."""
    return " ".join(_in_unit(time_s, time_s))


def format_deviation(time_s: float, deviation_s: float) -> str:
    """Formats a duration and its deviation in one unit: '62 min, deviation 8.1 min'."""
    return ", deviation ".join(" ".join(_in_unit(value_s, time_s)) for value_s in (time_s, deviation_s))


def _in_unit(value_s: float, largest_s: float) -> tuple[str, str]:
    """Returns a duration in the unit for the largest of several, and that unit."""
    size_s, name = next((size_s, name) for least_s, size_s, name in _LONG if largest_s >= least_s)
    value = value_s / size_s
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}", name
