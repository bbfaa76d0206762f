"""Fits a line over the number of samples to times measured at several microbatch sizes."""

from collections.abc import Mapping, Sequence
from math import isclose
from statistics import median, quantiles

from pipedejavu.facts import Cost


def fit_line(times: Mapping[int, Sequence[float]]) -> Cost:
    """Returns the line of least relative error through the median time at each number of samples.

    Slope and intercept are at least zero, and a single size gives a line through zero. One sample often takes less than
    the line says, so it is left out of the fit if two larger sizes are known. If the line misses a median, the result
    also keeps all medians.
    """
    middles = {samples: median(measured) for samples, measured in times.items()}
    if min(middles.values()) <= 0:
        return Cost()
    larger = {samples: middle for samples, middle in middles.items() if samples > 1}
    fixed_s, per_sample_s = _nearest(larger if len(larger) > 1 else middles)
    line = Cost(fixed_s=fixed_s, per_sample_s=per_sample_s)
    if not all(isclose(line.at(samples), middle) for samples, middle in middles.items()):
        line = line.replace(measured_s=middles)
    return line.replace(spread=max(_distance(line.at(samples), measured) for samples, measured in times.items()))


def _nearest(times: Mapping[int, float]) -> tuple[float, float]:
    """Minimises the sum of ((fixed + slope·samples) / time − 1)² over slope ≥ 0 and fixed ≥ 0."""
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


def _distance(expected: float, measured: Sequence[float]) -> float:
    """Returns the distance of the farther quartile of measured times from the expected time, as a share of it."""
    edges = quantiles(measured, n=4, method="inclusive")[::2] if len(measured) > 1 else measured
    return max(abs(edge - expected) for edge in edges) / expected
