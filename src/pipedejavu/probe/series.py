"""Series of measurements: trials that take turns in rounds, and what their scatter says of another survey.

Nothing here knows what is timed. Rounds are spread over the whole survey, so that a neighbour who is busy for some
seconds disturbs a few rounds of every trial and not one trial alone.

Note: what a value and its spread mean. Disturbances only ever slow, so the value of a time or a rate is the one that
the fastest quarter of the rounds surpasses: it stays where it is while others take the machine for less than three
quarters of the survey. A second survey, minutes later, has a value of its own. Where the rounds are independent it lies
far closer than they do, but where disturbances last for seconds it does not. So a survey is cut into quarters: the
scatter of the quarters' values shows slow disturbances, that of single rounds fast ones, and the spread is the wider of
the two. What changes over hours (other neighbours, heat, a new driver) does not show within a minute; a floor stands
for that.
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
"""Is told what is under way, and which share of the survey is done."""

VISIT_S, PARTS = 0.02, 3
"""A visit to a trial repeats it for about this long, in parts of which the fastest counts: what interrupts a part only
ever slows it. A trial that takes longer runs once a part."""
LONG_RUN_S = 0.05
"""A trial that takes longer than this has one part."""
LONGEST_RUN_S = 1.0
"""A trial whose single run takes longer is left out."""
FEWEST_ROUNDS, MOST_ROUNDS = 5, 60
FLOOR = 0.03
"""Least relative spread: what differs between processes that run the same on a quiet machine."""
QUARTERS = 4
QUARTER_FACTOR = 3.2
"""Standard deviations of the quarters' values: the 95 % point of Student's t for four of them."""
FAST = {"s": 0.25, "B/s": 0.75, "FLOP/s": 0.75, "1/s": 0.75}
"""The quantile that is a value; of a size or a ratio, which have no fast side, it is the median."""


@dataclass(frozen=True)
class TimedTrial:
    """Something that can be timed, again and again."""

    subject: str
    what: str
    setting: str
    amount: float
    """What one run computes, moves or updates; 1 to keep its seconds."""
    unit: Unit
    time_s: Callable[[int], float]
    """Runs it so many times and returns the seconds that they took together."""

    @property
    def name(self) -> str:
        """Returns subject, what and setting in one text."""
        return f"{self.subject} {self.what} {self.setting}".rstrip()


Series = dict[str, list[float]]
"""Of every trial, by name, the seconds that one run took in each round."""


@dataclass(frozen=True)
class Rounds:
    """What a survey's rounds yielded: for each trial one time a round, and the trials that were left out."""

    times_s: Series
    left_out: dict[str, str]
    """Why, by name."""


def run_rounds(
    trials: Sequence[TimedTrial],
    budget_s: float,
    report: Report = lambda *_: None,
    now: Callable[[], float] = time.perf_counter,
) -> Rounds:
    """Visits every trial once a round until the budget is spent; each round starts at another trial."""
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
                times[trial.name].append(_visit(trial, counts[trial.name]))
            except (RuntimeError, OSError) as error:
                times[trial.name].append(math.nan)
                left_out[trial.name] = _brief(error)
    return Rounds({name: t for name, t in times.items() if name not in left_out}, left_out)


def _warm_up(trial: TimedTrial, counts: dict[str, int]) -> str:
    """Finds how many runs are a part of a visit, zero for one run in all; returns why there is no visit, if so."""
    try:
        once_s = min(trial.time_s(1), trial.time_s(1))  # the first makes what it works on
    except (RuntimeError, OSError) as error:  # a type or a size that this device does not have
        return _brief(error)
    if once_s > LONGEST_RUN_S:
        return f"one run takes {once_s:.2g} s"
    part = min(1000, max(1, int(VISIT_S / PARTS / max(once_s, 1e-9))))
    counts[trial.name] = part if once_s < LONG_RUN_S else 0
    return ""


def _visit(trial: TimedTrial, count: int) -> float:
    """Returns the seconds of one run: the fastest part's mean, or that of a single run where `count` is zero."""
    return min(trial.time_s(count) / count for _ in range(PARTS)) if count else trial.time_s(1)


def _brief(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def summarise(subject: str, what: str, setting: str, unit: Unit, values: Sequence[float]) -> Measurement:
    """Returns the value of what each round found, with its spread."""
    known = [value for value in values if math.isfinite(value)]
    share = FAST.get(unit, 0.5)
    found = quantile(known, share)
    return Measurement(
        subject=subject,
        what=what,
        setting=setting,
        unit=unit,
        value=found,
        spread=max(estimate_spread(known, share), FLOOR * abs(found)),
        rounds=len(known),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value below which a share of the others lies, between neighbours in proportion."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (at - math.floor(at)) * (high - low)


def estimate_spread(values: Sequence[float], share: float) -> float:
    """Returns how far this quantile of another survey may lie from this one's; see the note above."""
    if len(values) < 2:
        return abs(values[0]) if values else 0.0
    found = quantile(values, share)
    fast = max(found - quantile(values, 0.1), quantile(values, 0.9) - found)
    if len(values) < 2 * QUARTERS:
        return max(values) - min(values)
    size = len(values) / QUARTERS
    parts = [values[round(n * size) : round((n + 1) * size)] for n in range(QUARTERS)]
    return max(fast, QUARTER_FACTOR * stdev(quantile(part, share) for part in parts))


def rates(trial: TimedTrial, times_s: Series) -> list[float]:
    """Returns a trial's amount for each second, round by round; its seconds where its unit is that."""
    if trial.unit == "s":
        return times_s[trial.name]
    return [trial.amount / max(t, 1e-12) for t in times_s[trial.name]]


@dataclass(frozen=True)
class FittedLine:
    """What a transfer takes: latency and then bytes over bandwidth."""

    latency_s: float
    bytes_per_s: float


def fit_line(times_s: Mapping[int, float]) -> FittedLine:
    """Fits a line to times by size; relative errors count, so that small messages weigh as much as large ones."""
    points = [(1 / t, size / t) for size, t in times_s.items() if t > 0]
    # Least squares of latency · x + slope · y − 1 over the points (x, y): two equations in two unknowns.
    xx, xy, yy = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    x1, y1 = (sum(p[i] for p in points) for i in (0, 1))
    determinant = xx * yy - xy * xy
    latency, slope = yy * x1 - xy * y1, xx * y1 - xy * x1
    if slope <= 0:  # noise: larger messages take no longer, so that only a least bandwidth is known
        return FittedLine(x1 / xx, max(y for _, y in points))
    if latency < 0 or determinant <= 0:  # noise: the latency does not show
        return FittedLine(0.0, yy / y1)
    return FittedLine(latency / determinant, determinant / slope)
