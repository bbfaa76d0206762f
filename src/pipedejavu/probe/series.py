"""Series of measurements: trials that take turns in rounds, and how far a repeated survey may differ.

Nothing here knows what is timed. Rounds are spread over the whole survey, so that a disturbance of some seconds affects
a few rounds of every trial and not all rounds of one.

Note: value and spread. Disturbances only slow a trial down, so the value of a time or rate is the quartile of the
fastest rounds: it is stable while other processes use the machine for less than three quarters of the survey. A second
survey, minutes later, has another value. If rounds are independent it lies far closer than single rounds do; if
disturbances last for seconds it does not. So a survey is divided into quarters: the scatter of the quarters' values
shows slow disturbances, that of single rounds fast ones, and the spread is the larger of the two. Changes over hours
(other users, heat, a new driver) do not show within a minute; a minimum spread allows for them.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Literal

from pipedejavu.facts import Measurement

Unit = Literal["B", "s", "B/s", "FLOP/s", "1/s", "×"]
Report = Callable[[str, float], None]
"""Called with the current trial, and the share of the survey that is done."""

VISIT_S, PARTS = 0.02, 3
"""Per round a trial is repeated for about this long, in parts of which the fastest counts, since an interruption only
slows a part. A trial that takes longer runs once per part."""
LONG_RUN_S = 0.05
"""A trial that takes longer than this runs one part."""
LONGEST_RUN_S = 1.0
"""A trial whose single run takes longer than this is left out."""
FEWEST_ROUNDS, MOST_ROUNDS = 5, 60
FLOOR = 0.03
"""Minimum relative spread: the difference between processes that do the same on a quiet machine."""
QUARTERS = 4
QUARTER_FACTOR = 3.2
"""Factor of the standard deviation of the quarters' values: the 95 % point of Student's t for four of them."""
FAST = {"s": 0.25, "B/s": 0.75, "FLOP/s": 0.75, "1/s": 0.75}
"""The quantile that is the value; the median for sizes and ratios, which have no fast side."""


@dataclass(frozen=True)
class TimedTrial:
    """Work that can be timed repeatedly."""

    subject: str
    what: str
    setting: str
    amount: float
    """What one run computes, moves or updates; 1 if the result is its time."""
    unit: Unit
    time_s: Callable[[int], float]
    """Runs the work this many times and returns the total seconds."""

    @property
    def name(self) -> str:
        """Subject, quantity and setting in one text."""
        return f"{self.subject} {self.what} {self.setting}".rstrip()


Series = dict[str, list[float]]
"""Seconds per run in each round, by the name of the trial."""


@dataclass(frozen=True)
class Rounds:
    """Results of a survey's rounds: per trial one time per round, and the trials that were left out."""

    times_s: Series
    left_out: dict[str, str]
    """Reasons, by the name of the trial."""


def run_rounds(
    trials: Sequence[TimedTrial],
    budget_s: float,
    report: Report = lambda *_: None,
    now: Callable[[], float] = time.perf_counter,
) -> Rounds:
    """Runs every trial once per round until the budget is spent; each round starts with another trial."""
    start = now()
    counts: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for trial in trials:
        report(f"warming up: {trial.name}", 0.0)
        fault = _warm_up(trial, counts)
        if fault:
            left_out[trial.name] = fault
    kept = [trial for trial in trials if trial.name in counts]
    times: Series = {trial.name: [] for trial in kept}
    warm = now()
    for number in range(MOST_ROUNDS):
        began = now()
        if number >= FEWEST_ROUNDS and began - start + (began - warm) / number > budget_s:
            break
        shift = number * 7 % max(1, len(kept))
        for trial in kept[shift:] + kept[:shift]:
            report(trial.name, max(number / MOST_ROUNDS, (now() - start) / max(budget_s, 1.0)))
            try:
                times[trial.name].append(_run_once(trial, counts[trial.name]))
            except (RuntimeError, OSError) as error:
                times[trial.name].append(math.nan)
                left_out[trial.name] = _brief(error)
    return Rounds({name: t for name, t in times.items() if name not in left_out}, left_out)


def _warm_up(trial: TimedTrial, counts: dict[str, int]) -> str:
    """Finds how many runs make a part, zero for a single run in all; returns why the trial is left out, or ''."""
    try:
        once_s = min(trial.time_s(1), trial.time_s(1))  # the first run allocates
    except (RuntimeError, OSError) as error:  # a dtype or size that the device does not support
        return _brief(error)
    if once_s > LONGEST_RUN_S:
        return f"one run takes {once_s:.2g} s"
    part = min(1000, max(1, int(VISIT_S / PARTS / max(once_s, 1e-9))))
    counts[trial.name] = part if once_s < LONG_RUN_S else 0
    return ""


def _run_once(trial: TimedTrial, count: int) -> float:
    """Returns the seconds of one run: the mean of the fastest part, or a single run if `count` is zero."""
    return min(trial.time_s(count) / count for _ in range(PARTS)) if count else trial.time_s(1)


def _brief(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def summarise(subject: str, what: str, setting: str, unit: Unit, values: Sequence[float]) -> Measurement:
    """Returns the value and spread of a quantity from its values in each round."""
    known = [each for each in values if math.isfinite(each)]
    share = FAST.get(unit, 0.5)
    value = quantile(known, share)
    return Measurement(
        subject=subject,
        what=what,
        setting=setting,
        unit=unit,
        value=value,
        spread=max(estimate_spread(known, share), FLOOR * abs(value)),
        rounds=len(known),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Returns a quantile, with linear interpolation between neighbours."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (at - math.floor(at)) * (high - low)


def estimate_spread(values: Sequence[float], share: float) -> float:
    """Returns how far the same quantile of another survey may differ; see the note above."""
    if len(values) < 2:
        return abs(values[0]) if values else 0.0
    value = quantile(values, share)
    fast = max(value - quantile(values, 0.1), quantile(values, 0.9) - value)
    if len(values) < 2 * QUARTERS:
        return max(values) - min(values)
    size = len(values) / QUARTERS
    parts = [values[round(n * size) : round((n + 1) * size)] for n in range(QUARTERS)]
    return max(fast, QUARTER_FACTOR * stdev(quantile(part, share) for part in parts))


def rates(trial: TimedTrial, times_s: Series) -> list[float]:
    """Returns a trial's amount per second in each round, or its seconds if that is its unit."""
    if trial.unit == "s":
        return times_s[trial.name]
    return [trial.amount / max(t, 1e-12) for t in times_s[trial.name]]


@dataclass(frozen=True)
class FittedLine:
    """Time of a transfer as latency plus bytes over bandwidth."""

    latency_s: float
    bytes_per_s: float


def fit_line(times_s: Mapping[int, float]) -> FittedLine:
    """Fits a line to times by size, minimising relative errors, so that small messages weigh as much as large ones."""
    points = [(1 / t, size / t) for size, t in times_s.items() if t > 0]
    # Least squares of latency · x + slope · y − 1 over the points (x, y): two equations in two unknowns.
    xx, xy, yy = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    x1, y1 = (sum(p[i] for p in points) for i in (0, 1))
    determinant = xx * yy - xy * xy
    latency, slope = yy * x1 - xy * y1, xx * y1 - xy * x1
    if slope <= 0:  # noise: larger messages take no longer, so only a lower bound of the bandwidth is known
        return FittedLine(x1 / xx, max(y for _, y in points))
    if latency < 0 or determinant <= 0:  # noise hides the latency
        return FittedLine(0.0, yy / y1)
    return FittedLine(latency / determinant, determinant / slope)
