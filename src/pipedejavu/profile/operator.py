"""Operators as rows: what each did, on which device, and how long it took; and which operation is of which class.

`bench/operators.py` measures such rows; those that come with the project are what estimates of unmeasured devices are
fitted to.
"""

import csv
import math
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from pipedejavu.facts import InputError, read_file

CLASSES = ("matmul", "conv", "attention", "norm", "softmax", "embedding", "elementwise", "update")
_CLASS_OF = {"loss": "softmax", "add": "elementwise", "copy": "elementwise"}
"""Of measured operators that are not classes by themselves."""
_PATTERNS = {
    "attention": r"scaled_dot_product|(flash|efficient|cudnn)_attention",
    "conv": r"conv",
    "matmul": r"(b|add|addb|baddb)?mm|linear|matmul|mv|dot",
    "norm": r".*norm",
    "softmax": r".*softmax|nll_loss|cross_entropy|logsumexp",
    "embedding": r"embedding|index|gather|scatter|take",
}
"""What the names of torch's operations begin with, without underscores; all others go over elements one by one."""
_NUMBERS = ("flop", "bytes", "time_s", "flop_per_s", "bytes_per_s")
_COLUMNS = ("device", "type", "dtype", "operator", "pass", "shape", *_NUMBERS)


class OperatorRow(NamedTuple):
    """One operator at one shape on one device."""

    device: str
    type: str
    dtype: str
    operator: str
    pass_: str
    shape: str
    flop: float
    size_bytes: float
    time_s: float
    flop_per_s: float
    """Of the device: its best product in this type of numbers."""
    bytes_per_s: float
    """Of the device: its best copy."""

    @property
    def class_(self) -> str:
        """The operator's class."""
        return _CLASS_OF.get(self.operator, self.operator)

    @property
    def bound_s(self) -> float:
        """What the arithmetic or the memory of the device needs at least, whichever is longer."""
        return max(self.flop / self.flop_per_s, self.size_bytes / self.bytes_per_s)


@cache
def classify(name: str) -> str:
    """Returns the class of one of torch's operations by its name, such as 'native_layer_norm_backward'."""
    plain = name.strip("_")
    return next((found for found, pattern in _PATTERNS.items() if re.match(pattern, plain)), "elementwise")


def read_rows(path: str) -> tuple[OperatorRow, ...]:
    """Reads the rows of a file; raises InputError with the line of the first fault."""
    return _parse(read_file(path).decode("utf-8", errors="replace"), path)


@cache
def known_rows() -> tuple[OperatorRow, ...]:
    """Returns the rows that come with the project."""
    return _parse(files("pipedejavu.profile").joinpath("operators.csv").read_text("utf-8"), "operators.csv")


def _parse(text: str, source: str) -> tuple[OperatorRow, ...]:
    lines = csv.DictReader(text.splitlines())
    for name in (name for name in _COLUMNS if name not in (lines.fieldnames or ())):
        raise InputError(f"{source}: column '{name}' is missing; measure rows with bench/operators.py")
    return tuple(_row(line, f"{source}, line {number}") for number, line in enumerate(lines, 2))


def _row(line: dict[str, str], where: str) -> OperatorRow:
    device, type_, dtype, operator, pass_, shape = (line[name] or "" for name in _COLUMNS[:6])
    numbers = []
    for name in _NUMBERS:
        try:
            value = float(line[name] or "")
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf or (value == 0 and name != "flop"):
            raise InputError(f"{where}: {name} is {line[name]!r}, but it must be a number above zero")
        numbers.append(value)
    return OperatorRow(device, type_, dtype, operator, pass_, shape, *numbers)
