"""How long a whole job takes: the forecast of its updates, corrected by what earlier jobs on these devices took.

    job = start and end + updates × forecast of an update × ratio

The ratio is measured ÷ forecast time of an update. The logarithms of the time of start and end and of the ratio are
predicted from those of earlier jobs. Two jobs are the more related the more they have in common: devices, model, plan,
and all of these.
"""

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import numpy as np

from pipedejavu.facts import Record
from pipedejavu.facts.quantity import Seconds, format_deviation, format_range
from pipedejavu.program import Program
from pipedejavu.simulate.chance import NORMAL_90, Chance
from pipedejavu.simulate.outlook import FORECAST_SPREAD
from pipedejavu.simulate.student_t import StudentT, predict_next

SAME_DEVICES, SAME_MODEL, SAME_PLAN, SAME_JOB = 0.3, 0.2, 0.2, 0.2
"""Shares of the variance that two jobs have in common; the rest is each job's own."""
START_S, START_SCALE = 4.0, 0.8
"""Prior of the time that a job takes beside its updates, and the scale of its logarithm: processes start and import
torch, the first update is slow, weights are written."""
_LEAST = 1e-3
"""Ratios, and times relative to the prior, below this count as this."""
_DRAWS = 20_000


class JobKey(NamedTuple):
    """What makes two runs deviate alike; that they are on the same devices is known."""

    model: str
    plan: str
    batch: int

    def kinship(self, other: "JobKey") -> float:
        """Returns the correlation with another run."""
        model, plan, same = self.model == other.model, self.plan == other.plan, self == other
        return SAME_DEVICES + SAME_MODEL * model + SAME_PLAN * plan + SAME_JOB * same


class PastJob(NamedTuple):
    """A run that has ended."""

    key: JobKey
    ratio: float
    """Measured ÷ forecast time of an update."""
    start_s: float
    """Time that it took beside its updates."""


class JobChance(Record):
    """The time of a whole job: it takes less than `time_s` as likely as more."""

    time_s: Seconds
    low_s: Seconds
    """Lower end of the 80 % interval."""
    high_s: Seconds
    deviation_s: Seconds
    """Half the width of the middle 68 %: the standard deviation, if the distribution is normal."""
    num_runs: int = 0
    """Earlier runs that it learned from."""

    def __str__(self) -> str:
        """Returns the median, the deviation and the interval in words."""
        return f"{format_deviation(self.time_s, self.deviation_s)}; {self.interval} in 8 of 10 such jobs"

    @property
    def interval(self) -> str:
        """The 80 % interval in words: '54 to 71 min'."""
        return format_range(self.low_s, self.high_s)

    @property
    def origin(self) -> str:
        """What it is learned from, in words."""
        if not self.num_runs:
            return "no earlier run on these devices to learn from"
        return f"learned from {self.num_runs} earlier run{'s' if self.num_runs > 1 else ''} on these devices"


def job_chance(key: JobKey, step_s: float, scale: float, num_steps: int, past: Sequence[PastJob]) -> JobChance:
    """Returns the time of a job of `num_steps` updates, each forecast to take `step_s`.

    `scale` is the spread of the logarithm of the ratio before anything is learned; `past` are earlier jobs on the
    same devices.
    """
    source = np.random.default_rng(0)
    updates_s = num_steps * step_s * np.exp(ratio_of(key, scale, past).draw(source, _DRAWS))
    starts = _predict(key, [run.start_s / START_S for run in past], START_SCALE, past)
    times_s = START_S * np.exp(starts.draw(source, _DRAWS)) + updates_s
    low, less, median, more, high = np.quantile(times_s, (0.1, 0.16, 0.5, 0.84, 0.9)).tolist()
    return JobChance(time_s=median, low_s=low, high_s=high, deviation_s=(more - less) / 2, num_runs=len(past))


def scale_of(chance: Chance) -> float:
    """Returns the spread of the logarithm of a program's ratio before anything is learned."""
    if not chance.varies or not chance.low_s:
        return FORECAST_SPREAD
    return log(chance.high_s / chance.low_s) / (2 * NORMAL_90)


def ratio_of(key: JobKey, scale: float, past: Sequence[PastJob]) -> StudentT:
    """Returns the distribution of the logarithm of a job's ratio."""
    return _predict(key, [run.ratio for run in past], scale, past)


def key_of(model: str, program: Program) -> JobKey:
    """Returns what a program that trains a model has in common with other jobs."""
    plan = program.plan
    return JobKey(model, f"{plan.name}, {plan.num_workers} workers", sum(program.sizes))


def devices_of(program: Program) -> str:
    """Returns the kinds of devices that a program uses, and the number and the cores of their hosts."""
    used = [program.machine.device(name) for name in program.devices]
    names = {device.host for device in used}
    cores = sum(host.cores for host in program.machine.hosts if host.name in names)
    return f"{', '.join(sorted({device.kind for device in used}))}; {len(names)} hosts, {cores} cores"


def _predict(key: JobKey, factors: Sequence[float], scale: float, past: Sequence[PastJob]) -> StudentT:
    keys = [run.key for run in past]
    kinship = [[1.0 if n == m else one.kinship(other) for m, other in enumerate(keys)] for n, one in enumerate(keys)]
    values = [log(max(factor, _LEAST)) for factor in factors]
    return predict_next(values, kinship, [key.kinship(other) for other in keys], scale)
