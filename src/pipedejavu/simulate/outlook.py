"""How long a run will still take: the simulator's forecast at first, then more and more what its own steps took.

The forecast is an observation of a step's time like any other, with a spread of its own. What is measured comes in
groups of steps, as they are reported; the first steps of a run warm up and do not count once others are known. The
spread of what is left has three parts: how well the mean is known, how steps differ, and whether they become slower or
faster.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

FORECAST_SPREAD = 0.3
"""Standard deviation of a forecast's error, as a part of it, before anything was measured."""
WARM_UP = 1.5
"""A first group of steps that took so many times the median of the others is the warm-up."""
RECENT = 64
"""Groups that count: a run's pace may change."""
NORMAL_90 = 1.645
"""Standard deviations on each side that hold 90 % of a normal distribution."""

STUDENT = 1.5
"""Student's t for 90 % over the normal's is about 1 + this ÷ degrees of freedom."""


class Left(NamedTuple):
    """What is left of a run: with nine chances in ten it takes `time_s` ± `spread_s`."""

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
    """The outlook of a run of `steps` whose step is forecast to take `forecast_s`."""

    def __init__(self, forecast_s: float, steps: int):
        self.forecast_s, self.steps = forecast_s, steps
        self._step, self._time_s, self._waiting = 0, 0.0, 0
        self._groups: list[_Group] = []

    def saw(self, step: int, elapsed_s: float) -> None:
        """Takes note that a step, counted from 1, has ended so long after the start; several may end at once."""
        self._waiting += step - self._step
        self._step = step
        if elapsed_s > self._time_s and self._waiting:
            self._groups.append(_Group(self._waiting, elapsed_s - self._time_s))
            self._time_s, self._waiting = elapsed_s, 0

    def left(self) -> Left:
        """Returns what is left now."""
        groups, count = _steady(self._groups)[-RECENT:], self.steps - self._step
        prior = (FORECAST_SPREAD * self.forecast_s) ** 2
        if not groups:
            return self._left(count, self.forecast_s, prior, 0.0)
        mean, each = _mean(groups), _variance(groups)
        known = each / sum(group.steps for group in groups) + _drift(groups) ** 2
        if len(groups) == 1:  # nothing says yet how steps differ
            known += (FORECAST_SPREAD * mean) ** 2 / 2
        if not prior:
            return self._left(count, mean, known, each)
        share = prior / (prior + known)
        return self._left(count, share * mean + (1 - share) * self.forecast_s, share * known, each)

    def _left(self, count: int, step_s: float, of_mean: float, of_step: float) -> Left:
        """Adds up variances: that of the mean counts for all steps alike, that of a step for each anew."""
        return Left(count * step_s, NORMAL_90 * sqrt(count**2 * of_mean + count * of_step), step_s)


def _steady(groups: Sequence[_Group]) -> list[_Group]:
    """Returns the groups without the warm-up at their beginning."""
    found = list(groups)
    while len(found) > 1 and found[0].step_s > WARM_UP * median(group.step_s for group in found[1:]):
        found.pop(0)
    return found


def _mean(groups: Sequence[_Group]) -> float:
    return sum(group.time_s for group in groups) / sum(group.steps for group in groups)


def _variance(groups: Sequence[_Group]) -> float:
    """Returns the variance of a single step, where a group of n differs by an n-th of it; more where few are known."""
    free = len(groups) - 1
    if not free:
        return 0.0
    mean = _mean(groups)
    found = sum(group.steps * (group.step_s - mean) ** 2 for group in groups) / free
    return found * (1 + STUDENT / free) ** 2


def _drift(groups: Sequence[_Group]) -> float:
    """Returns how much further the mean may move: half of what it moved between the halves, beyond their noise."""
    if len(groups) < 4:
        return 0.0
    middle = len(groups) // 2
    first, second = groups[:middle], groups[middle:]
    noise = sqrt(sum(_variance(half) / sum(group.steps for group in half) for half in (first, second)))
    return max(0.0, abs(_mean(second) - _mean(first)) - noise) / 2
