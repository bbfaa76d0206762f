"""A job's forecast in its run folder, with what the job took once it has ended: what later forecasts learn from."""

from collections.abc import Sequence
from math import exp

from pipedejavu.facts import Record
from pipedejavu.facts.quantity import Seconds, format_long
from pipedejavu.simulate import JobChance, JobKey, PastJob, Prediction, devices_of, job_chance, key_of, scale_of
from pipedejavu.simulate.job_chance import ratio_of


class JobRecord(Record):
    """The part of a run that one process makes, from the start of its workers until its weights are written.

    Evaluations are left out of all times.
    """

    model: str
    plan: str
    batch: int
    """Samples per update."""
    devices: str
    """Kinds of its devices, and the cores of their hosts."""
    steps: int
    """Updates that were to be made."""
    step_s: Seconds
    """Forecast of an update."""
    scale: float
    """The spread of its logarithm, before anything was learned."""
    ratio: float = 1.0
    """The factor by which an update is expected to take longer than forecast."""
    chance: JobChance
    measured_step_s: Seconds | None = None
    """None if it has not ended, or has made too few updates."""
    measured_s: Seconds | None = None
    """None if it has not ended."""

    @property
    def key(self) -> JobKey:
        """What it may have in common with other jobs."""
        return JobKey(self.model, self.plan, self.batch)

    @property
    def past(self) -> PastJob | None:
        """What later forecasts learn from it; None if that is nothing."""
        if self.measured_s is None or not self.measured_step_s or not self.step_s:
            return None
        start_s = self.measured_s - self.steps * self.measured_step_s
        return PastJob(self.key, self.measured_step_s / self.step_s, max(0.0, start_s))

    def __str__(self) -> str:
        """Returns what it took, and its forecast, in words: '62 min (forecast 54 to 71 min)'."""
        took = "not ended" if self.measured_s is None else format_long(self.measured_s)
        return f"{took} (forecast {self.chance.interval})"


def forecast_job(model: str, prediction: Prediction, steps: int, past: Sequence[PastJob]) -> JobRecord:
    """Returns the forecast of a job of so many updates from that of one, and from earlier jobs on its devices."""
    program, chance = prediction.program, prediction.chance
    step_s, devices = chance.mean_s / program.plan.steps, devices_of(program)
    return record_of(key_of(model, program), devices, step_s, scale_of(chance), steps, past)


def record_of(key: JobKey, devices: str, step_s: float, scale: float, steps: int, past: Sequence[PastJob]) -> JobRecord:
    """Returns the record of a job that has not ended."""
    return JobRecord(
        model=key.model, plan=key.plan, batch=key.batch, devices=devices, steps=steps, step_s=step_s, scale=scale,
        chance=job_chance(key, step_s, scale, steps, past), ratio=exp(ratio_of(key, scale, past).centre),
    )  # fmt: skip
