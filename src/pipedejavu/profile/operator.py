"""Measured operators as table rows: work, device and time of each; and the class of each torch operation.

`bench/operators.py` measures the rows. Estimates for unmeasured devices are fitted to the rows in `operators.csv`.
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
"""Classes of measured operators that are not named after their class."""
_PATTERNS = {
    "attention": r"scaled_dot_product|(flash|efficient|cudnn)_attention",
    "conv": r"conv",
    "matmul": r"(b|add|addb|baddb)?mm|linear|matmul|mv|dot",
    "norm": r".*norm",
    "softmax": r".*softmax|nll_loss|cross_entropy|logsumexp",
    "embedding": r"embedding|index|gather|scatter|take",
}
"""Prefixes of torch's operation names, without underscores; all other operations are elementwise."""
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
    """The device's best matrix product in this dtype."""
    bytes_per_s: float
    """The device's best copy."""

    @property
    def class_(self) -> str:
        """The operator's class."""
        return _CLASS_OF.get(self.operator, self.operator)

    @property
    def bound_s(self) -> float:
        """Lower bound of the roofline: the longer of arithmetic and memory traffic at the device's best rates."""
        return max(self.flop / self.flop_per_s, self.size_bytes / self.bytes_per_s)


@cache
def classify(name: str) -> str:
    """Returns the class of a torch operation by its name, such as 'native_layer_norm_backward'."""
    plain = name.strip("_")
    return next((class_ for class_, pattern in _PATTERNS.items() if re.match(pattern, plain)), "elementwise")


def read_rows(path: str) -> tuple[OperatorRow, ...]:
    """Reads rows from a CSV file; raises InputError with the line of the first fault."""
    return _parse(read_file(path).decode("utf-8", errors="replace"), path)


@cache
def known_rows() -> tuple[OperatorRow, ...]:
    """Returns the rows of `operators.csv`."""
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
