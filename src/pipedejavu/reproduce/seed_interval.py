"""A figure over several seeds: its mean and the half of its 95 % interval, by Student's t."""

from collections.abc import Sequence
from math import isfinite, sqrt
from statistics import fmean, stdev

_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def half_interval(values: Sequence[float]) -> float | None:
    """Returns the half of the 95 % interval of a mean; None for a single value, or values that are no numbers."""
    if len(values) < 2 or not all(map(isfinite, values)):
        return None
    return _T.get(len(values), 2.0) * stdev(values) / sqrt(len(values))


def describe_mean(values: Sequence[float], form: str = ".3f", sign: bool = False) -> str:
    """Returns 'mean ± half interval', with a true minus sign."""
    if not all(map(isfinite, values)):
        return "no number"
    half = half_interval(values)
    mean = f"{fmean(values):{'+' if sign else ''}{form}}"
    return (mean if half is None else f"{mean} ± {half:{form}}").replace("-", "−")
