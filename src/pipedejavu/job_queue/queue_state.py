"""The state of a queue on disk: for each job whether it waits, runs, has ended or failed, and what it has had."""

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from pipedejavu.cluster import ClusterJob
from pipedejavu.facts import InputError, Record
from pipedejavu.facts.quantity import Seconds
from pipedejavu.simulate import JobChance

STATE = "queue.json"
_LOCK = "queue.lock"


class HeldSpan(Record):
    """A time in which a job held devices."""

    start_s: Seconds
    end_s: Seconds
    devices: tuple[int, ...]
    steps: int = 0
    """Updates that it had made at the end."""


class JobEntry(Record):
    """A job and its course; times count from the start of the queue."""

    job: ClusterJob
    state: Literal["waiting", "running", "stopping", "ended", "failed"] = "waiting"
    pid: int | None = None
    """Its `train` process, while it runs or stops."""
    devices: tuple[int, ...] = ()
    """Devices that it holds."""
    planned: tuple[int, ...] = ()
    """Devices on which it starts as soon as they are free."""
    since_s: Seconds = 0.0
    """Start of its present span."""
    asked_s: Seconds | None = None
    """When it was asked to stop."""
    steps: int = 0
    """Updates that it has made."""
    forecast: JobChance | None = None
    """How long it takes without interruption, with the devices it asks for; None if it has not run here before."""
    spans: tuple[HeldSpan, ...] = ()
    num_preemptions: int = 0
    num_retries: int = 0
    end_s: Seconds | None = None
    reason: str = ""
    """Why it failed."""

    @property
    def holds_devices(self) -> bool:
        """Whether its process runs."""
        return self.state in ("running", "stopping")

    @property
    def is_over(self) -> bool:
        """Whether it has ended or failed."""
        return self.state in ("ended", "failed")

    def ran_s(self, now_s: float) -> float:
        """Returns the time for which it held devices."""
        present = now_s - self.since_s if self.holds_devices else 0.0
        return sum(span.end_s - span.start_s for span in self.spans) + present

    def waited_s(self, now_s: float) -> float:
        """Returns the time since its arrival for which it held none."""
        return max(0.0, (now_s if self.end_s is None else self.end_s) - self.job.arrival_s - self.ran_s(now_s))


class QueueState(Record):
    """A queue in its folder."""

    began_at: float = Field(ge=0)
    """Time of the system's clock at which the queue started."""
    now_s: Seconds = 0.0
    """Time of the last change."""
    entries: tuple[JobEntry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns the devices that two jobs hold."""
        held = [device for entry in self.entries for device in entry.devices]
        twice = sorted({device for device in held if held.count(device) > 1})
        return [f"device {device} is held by two jobs" for device in twice]

    def write(self, folder: Path) -> None:
        """Replaces the state in a folder."""
        self.save(folder / STATE)

    @classmethod
    def of(cls, jobs: Iterable[ClusterJob], now_at: float, forecasts: Mapping[str, JobChance]) -> "QueueState":
        """Returns a new queue."""
        entries = tuple(JobEntry(job=job, forecast=forecasts.get(job.name)) for job in jobs)
        return cls(began_at=now_at, entries=entries)

    @classmethod
    def read(cls, folder: Path, jobs: Sequence[ClusterJob]) -> "QueueState | None":
        """Returns the queue in a folder, None without one; raises InputError if it has other jobs.

        Rates that a job did not give itself follow from earlier runs, and do not make it another one.
        """
        if not (folder / STATE).exists():
            return None
        state = cls.load(folder / STATE)
        named = {job.name: job for job in jobs}
        known = {entry.job.name: entry.job for entry in state.entries}
        known |= {n: known[n].replace(rates=()) for n, job in named.items() if n in known and not job.rates}
        others = [name for name in {**known, **named} if known.get(name) != named.get(name)]
        if others:
            raise InputError(
                f"the queue in {folder} has {len(state.entries)} jobs, and job '{others[0]}' is not the same there; put"
                " the file back as it was, or choose another --out"
            )
        return state


@contextmanager
def lock_queue(folder: Path) -> Iterator[None]:
    """Locks the folder of a queue, creating it if needed; raises InputError if another scheduler runs it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise InputError(
            f"another scheduler runs the queue in {folder}; wait for it, or choose another --out"
        ) from None
    finally:
        os.close(file)
