"""Times that were measured at several sizes of microbatch as one line, with what it leaves unsaid."""

from collections.abc import Mapping, Sequence
from math import isclose
from statistics import median, quantiles

from pipedejavu.facts import Cost


def fit_line(times: Mapping[int, Sequence[float]]) -> Cost:
    """Returns the line nearest to the medians of times by number of samples, where errors count as parts of a time.

    It never falls and never begins below zero. One size alone makes a line through zero. One sample often takes less
    than the line says, and does not bend it where two other sizes are known. Where the line misses a median, all of
    them are kept beside it.
    """
    middles = {samples: median(found) for samples, found in times.items()}
    if min(middles.values()) <= 0:
        return Cost()
    larger = {samples: middle for samples, middle in middles.items() if samples > 1}
    fixed_s, per_sample_s = _nearest(larger if len(larger) > 1 else middles)
    line = Cost(fixed_s=fixed_s, per_sample_s=per_sample_s)
    if not all(isclose(line.at(samples), middle) for samples, middle in middles.items()):
        line = line.replace(measured_s=middles)
    return line.replace(spread=max(_distance(line.at(samples), found) for samples, found in times.items()))


def _nearest(times: Mapping[int, float]) -> tuple[float, float]:
    """Minimises the sum of ((fixed + slope·samples) / time − 1)² over lines that neither fall nor begin below zero."""
    ones = [1 / time for time in times.values()]
    sizes = [samples / time for samples, time in times.items()]
    uu, uv, vv = (sum(map(_product, a, b)) for a, b in ((ones, ones), (ones, sizes), (sizes, sizes)))
    rising = 0.0, sum(sizes) / vv
    if len(times) == 1:
        return rising
    size = uu * vv - uv * uv
    fixed_s = (sum(ones) * vv - sum(sizes) * uv) / size
    slope_s = (sum(sizes) * uu - sum(ones) * uv) / size
    if slope_s < 0:
        return sum(ones) / uu, 0.0
    return (fixed_s, slope_s) if fixed_s >= 0 else rising


def _product(one: float, other: float) -> float:
    return one * other


def _distance(expected: float, found: Sequence[float]) -> float:
    """Returns how far the quartiles of times lie from what is expected, as a part of it."""
    edges = quantiles(found, n=4, method="inclusive")[::2] if len(found) > 1 else found
    return max(abs(edge - expected) for edge in edges) / expected
