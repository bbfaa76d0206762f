"""Jobs that have ended on this machine, in the cache, from which forecasts of later ones learn."""

from collections.abc import Sequence

from pipedejavu.planner.cache import keep, newest
from pipedejavu.run.job_record import JobRecord, record_of
from pipedejavu.simulate import JobKey, PastJob

MOST_KEPT, MOST_LEARNED = 512, 64
"""Newest jobs that are kept, and those of the same devices that count: a machine and its other load change."""


def keep_job(record: JobRecord, run_dir: str, ended_at: float) -> None:
    """Keeps a job that has ended."""
    keep(record, {"run_dir": run_dir, "ended_at": ended_at})


def ended_jobs() -> list[JobRecord]:
    """Returns the newest jobs, oldest first."""
    return newest(JobRecord, MOST_KEPT)


def past_jobs(devices: str, records: Sequence[JobRecord] | None = None) -> list[PastJob]:
    """Returns what can be learned from the newest jobs on some kinds of devices."""
    records = ended_jobs() if records is None else records
    learned = [past for record in records if record.devices == devices and (past := record.past) is not None]
    return learned[-MOST_LEARNED:]


def forecast_like(key: JobKey, steps: int, records: Sequence[JobRecord]) -> JobRecord | None:
    """Returns the forecast of a job of so many updates that is among the ended ones; None if it is not."""
    last = next((record for record in reversed(records) if record.key == key), None)
    if last is None:
        return None
    return record_of(key, last.devices, last.step_s, last.scale, steps, past_jobs(last.devices, records))
