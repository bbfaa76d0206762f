"""The remaining time of a run: at first the simulator's forecast, then more and more the measured steps.

The forecast counts as an observation of the step time with its own variance (a Bayesian prior). Measurements come in
groups of steps, as they are reported; warm-up steps are dropped once others are known. The spread of the remaining time
has three parts: the uncertainty of the mean, the variance of steps, and their drift.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

FORECAST_SPREAD = 0.3
"""Relative standard deviation of a forecast, before any step is measured."""
WARM_UP = 1.5
"""A first group of steps slower than this multiple of the median of the others is warm-up."""
RECENT = 64
"""Latest groups that count, as the speed of a run may change."""
NORMAL_90 = 1.645
"""90 % of a normal distribution lies within this many standard deviations of its mean."""

STUDENT = 1.5
"""The ratio of Student's t to the normal quantile for 90 % is about 1 + this ÷ degrees of freedom."""


class Left(NamedTuple):
    """The remaining time of a run: with a probability of 90 % it is `time_s` ± `spread_s`."""

    time_s: float
    spread_s: float
    step_s: float


class _Group(NamedTuple):
    steps: int
    time_s: float

    @property
    def step_s(self) -> float:
        return self.time_s / self.steps


class Outlook:
    """Estimates the remaining time of a run of `steps`, each forecast to take `forecast_s`."""

    def __init__(self, forecast_s: float, steps: int):
        self.forecast_s, self.steps = forecast_s, steps
        self._step, self._time_s, self._waiting = 0, 0.0, 0
        self._groups: list[_Group] = []

    def saw(self, step: int, elapsed_s: float) -> None:
        """Records that steps up to `step`, counted from 1, have ended `elapsed_s` after the start."""
        self._waiting += step - self._step
        self._step = step
        if elapsed_s > self._time_s and self._waiting:
            self._groups.append(_Group(self._waiting, elapsed_s - self._time_s))
            self._time_s, self._waiting = elapsed_s, 0

    def left(self) -> Left:
        """Returns the remaining time as of now."""
        groups, count = _steady(self._groups)[-RECENT:], self.steps - self._step
        prior = (FORECAST_SPREAD * self.forecast_s) ** 2
        if not groups:
            return self._left(count, self.forecast_s, prior, 0.0)
        mean, each = _mean(groups), _variance(groups)
        known = each / sum(group.steps for group in groups) + _drift(groups) ** 2
        if len(groups) == 1:  # the variance of steps is not known yet
            known += (FORECAST_SPREAD * mean) ** 2 / 2
        if not prior:
            return self._left(count, mean, known, each)
        share = prior / (prior + known)
        return self._left(count, share * mean + (1 - share) * self.forecast_s, share * known, each)

    def _left(self, count: int, step_s: float, of_mean: float, of_step: float) -> Left:
        """Adds up variances: the error of the mean is common to all steps, that of each step is independent."""
        return Left(count * step_s, NORMAL_90 * sqrt(count**2 * of_mean + count * of_step), step_s)


def _steady(groups: Sequence[_Group]) -> list[_Group]:
    """Returns the groups without the warm-up at the start."""
    steady = list(groups)
    while len(steady) > 1 and steady[0].step_s > WARM_UP * median(group.step_s for group in steady[1:]):
        steady.pop(0)
    return steady


def _mean(groups: Sequence[_Group]) -> float:
    return sum(group.time_s for group in groups) / sum(group.steps for group in groups)


def _variance(groups: Sequence[_Group]) -> float:
    """Returns the variance of a single step, scaled up by Student's t if there are few groups."""
    free = len(groups) - 1
    if not free:
        return 0.0
    mean = _mean(groups)
    variance = sum(group.steps * (group.step_s - mean) ** 2 for group in groups) / free
    return variance * (1 + STUDENT / free) ** 2


def _drift(groups: Sequence[_Group]) -> float:
    """Returns the expected further drift of the mean: half its change between the two halves, less their noise."""
    if len(groups) < 4:
        return 0.0
    middle = len(groups) // 2
    first, second = groups[:middle], groups[middle:]
    noise = sqrt(sum(_variance(half) / sum(group.steps for group in half) for half in (first, second)))
    return max(0.0, abs(_mean(second) - _mean(first)) - noise) / 2
