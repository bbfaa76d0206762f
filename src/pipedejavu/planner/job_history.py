"""Jobs that have ended on this machine, in the cache, from which forecasts of later ones learn."""

from pipedejavu.planner.cache import keep, newest
from pipedejavu.run.job_record import JobRecord
from pipedejavu.simulate import PastJob

MOST_KEPT, MOST_LEARNED = 512, 64
"""Newest jobs that are kept, and those of the same devices that count: a machine and its other load change."""


def keep_job(record: JobRecord, run_dir: str, ended_at: float) -> None:
    """Keeps a job that has ended."""
    keep(record, {"run_dir": run_dir, "ended_at": ended_at})


def ended_jobs(devices: str | None = None) -> list[JobRecord]:
    """Returns the newest jobs, oldest first; only those on some kinds of devices if these are given."""
    records = newest(JobRecord, MOST_KEPT)
    return [record for record in records if devices in (None, record.devices)]


def past_jobs(devices: str) -> list[PastJob]:
    """Returns what can be learned from the newest jobs on some kinds of devices."""
    learned = [past for record in ended_jobs(devices) if (past := record.past) is not None]
    return learned[-MOST_LEARNED:]
