"""Forecasts of the jobs of a queue that is run, from earlier runs of the same jobs on this host.

Jobs with rates keep them. A job that has run here before is as fast as it is expected to be now; with a number of
devices that it has not had, in proportion. A job that has never run is as fast as the median of those that have;
without any it makes an update per second and device.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from pipedejavu.cluster import ClusterJob, RateRow
from pipedejavu.cluster.cluster_job import MILLI
from pipedejavu.simulate import JobChance, JobKey

if TYPE_CHECKING:
    from pipedejavu.run import JobRecord


class QueueForecast:
    """What earlier jobs on this host say about the jobs of a queue."""

    def __init__(self) -> None:
        from pipedejavu.planner.job_history import ended_jobs

        self.records = ended_jobs()

    def with_rates(self, jobs: Sequence[ClusterJob]) -> tuple[ClusterJob, ...]:
        """Returns the jobs with a rate for each number of devices that they can have."""
        known = {job.name: rates for job in jobs if not job.rates and (rates := self._rates(job))}
        usual = median(rate / count for rates in known.values() for count, rate in rates.items()) if known else 1.0
        return tuple(
            job if job.rates else job.replace(rates=_rows(job, known.get(job.name, {}), usual)) for job in jobs
        )

    def chances(self, jobs: Sequence[ClusterJob]) -> dict[str, JobChance]:
        """Returns how long jobs take that have run here, without interruption and with the devices they ask for."""
        records = {job.name: self._forecast(job, int(job.gpus)) for job in jobs}
        return {name: record.chance for name, record in records.items() if record}

    def _rates(self, job: ClusterJob) -> dict[int, float]:
        """Returns updates per second by number of devices, for those with which a job has run here."""
        records = {count: self._forecast(job, count) for count in _counts(job)}
        return {n: 1 / (r.step_s * r.ratio) for n, r in records.items() if r and r.step_s}

    def _forecast(self, job: ClusterJob, workers: int) -> "JobRecord | None":
        from pipedejavu.planner.job_history import forecast_like

        key = JobKey(job.model.removeprefix("zoo:"), f"ddp, {workers} workers", job.batch)
        return forecast_like(key, round(job.work), self.records)


def _counts(job: ClusterJob) -> list[int]:
    return [gpu_milli // MILLI for gpu_milli in job.counts()]


def _rows(job: ClusterJob, known: Mapping[int, float], usual: float) -> tuple[RateRow, ...]:
    each = median(rate / count for count, rate in known.items()) if known else usual
    return tuple(RateRow(gpus=n, cores=0, steps_per_s=known.get(n, n * each)) for n in _counts(job))
