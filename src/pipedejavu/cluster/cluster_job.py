"""One training job of a shared cluster: what it asks for, and its table of throughput by resources.

A job's table says how many updates per second it makes with a number of GPUs of one kind, of CPU cores, and with an
amount of host memory. Where the figures are from (plans, a published table, a trace) is not known here.
"""

from functools import cached_property
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from pipedejavu.facts import Bytes, InputError, Record
from pipedejavu.facts.quantity import Seconds

ANY_KIND = "*"
MILLI = 1000
"""GPUs and cores are counted in thousandths, so that sums of shares are exact."""


class RateRow(Record):
    """Updates per second with at least these resources."""

    kind: str = ANY_KIND
    """Kind of the GPU, or of the CPU if there are no GPUs; '*' for any."""
    gpus: float = Field(default=1, ge=0)
    cores: float = Field(default=1, ge=0)
    memory_bytes: Bytes = 0
    steps_per_s: float = Field(gt=0)


class Share(NamedTuple):
    """Resources for one job on servers of one kind, and its updates per second with them."""

    kind: str
    gpu_milli: int
    cores_milli: int
    memory_bytes: int
    steps_per_s: float


class ClusterJob(Record):
    """A job in the queue of a cluster."""

    name: str = Field(min_length=1)
    model: str = ""
    """A model, profile or shape as in `plan`, or a name in a table of throughput."""
    batch: int = Field(default=32, ge=1)
    """Samples per update."""
    steps: float | None = Field(default=None, gt=0)
    """Updates; by default `epochs` passes over `samples`, or `duration_s`."""
    epochs: float | None = Field(default=None, gt=0)
    samples: int | None = Field(default=None, ge=1)
    """Samples per epoch."""
    duration_s: Seconds | None = None
    """Run time with the resources it asks for, instead of a table."""
    arrival_s: Seconds = 0.0
    deadline_s: Seconds | None = None
    """Time, from the start of the trace, by which it should end."""
    gpus: float = Field(default=1, ge=0)
    """GPUs it asks for: a whole number, or a part of one below 1; 0 for a job of CPUs."""
    most_gpus: int | None = Field(default=None, ge=1)
    """GPUs that an elastic job uses at most, if they are free; by default as many as it asks for."""
    kinds: tuple[str, ...] = ()
    """Kinds of device that it may use; by default all for which it has a rate."""
    cores: float | None = Field(default=None, ge=0)
    """CPU cores that it insists on; by default what the policy gives."""
    memory_bytes: Bytes | None = None
    """Host memory that it insists on."""
    prepare_s: Seconds = 0.0
    """Time of one core to load and prepare one sample."""
    checkpoint_bytes: Bytes = 0
    """What is written when the job is preempted, and read when it continues."""
    after: tuple[str, ...] = ()
    """Jobs that end before this one starts."""
    rates: tuple[RateRow, ...] = ()
    options: dict[str, bool | int | float | str] = Field(default={})
    """Options of `train` for a job that is run, by name."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns contradictions between work, times and devices."""
        work = [n for n in ("steps", "epochs", "duration_s") if getattr(self, n) is not None]
        faults = []
        if len(work) != 1:
            given = " and ".join(work) or "none of them"
            faults.append(f"job '{self.name}' gives {given}; give one of steps, epochs with samples, or duration_s")
        if self.epochs is not None and self.samples is None:
            faults.append(f"job '{self.name}' counts epochs without samples; give the samples of an epoch")
        if self.deadline_s is not None and self.deadline_s < self.arrival_s:
            faults.append(
                f"job '{self.name}' has its deadline at {self.deadline_s:g} s, before it arrives at"
                f" {self.arrival_s:g} s; deadlines count from the start of the trace"
            )
        if self.gpus > 1 and self.gpus != int(self.gpus):
            faults.append(f"job '{self.name}' asks for {self.gpus:g} GPUs; ask for a whole number, or a part below 1")
        if self.most_gpus is not None and (self.most_gpus < self.gpus or self.gpus < 1):
            faults.append(
                f"job '{self.name}' uses at most {self.most_gpus} GPUs but asks for {self.gpus:g};"
                " an elastic job asks for at least 1 and at most most_gpus"
            )
        return faults

    @property
    def work(self) -> float:
        """Updates until the job ends; seconds if it only states its duration."""
        if self.steps is not None:
            return self.steps
        if self.epochs is not None and self.samples is not None:
            return self.epochs * -(-self.samples // self.batch)
        return max(self.duration_s or 0.0, 1e-9)

    @property
    def gpu_milli(self) -> int:
        """Thousandths of GPUs that it asks for."""
        return round(MILLI * self.gpus)

    def counts(self) -> list[int]:
        """Thousandths of GPUs that it can use, fewest first."""
        if self.most_gpus is None:
            return [self.gpu_milli]
        return [MILLI * count for count in range(int(self.gpus), self.most_gpus + 1)]

    @property
    def title(self) -> str:
        """What it trains, or else the GPUs that it asks for."""
        return self.model or f"{self.gpus:g} GPUs"

    @cached_property
    def table(self) -> "RateTable":
        """The table of throughput; a job that only states its duration has one row."""
        rows = self.rates
        if self.duration_s is not None:
            rows = (RateRow(gpus=self.gpus, cores=self.cores or 0, memory_bytes=self.memory_bytes or 0, steps_per_s=1),)
        if self.kinds:
            named = [row for row in rows if row.kind in (ANY_KIND, *self.kinds)]
            rows = tuple(
                row.replace(kind=kind) for row in named for kind in (self.kinds if row.kind == ANY_KIND else [row.kind])
            )
        return RateTable(rows)


class RateTable:
    """Lookups in the rows of a job: the rate of a share is that of the best row that it covers."""

    def __init__(self, rows: tuple[RateRow, ...]):
        self._shares: dict[tuple[str, int], list[Share]] = {}
        for row in rows:
            gpu_milli = round(MILLI * row.gpus)
            share = Share(row.kind, gpu_milli, round(MILLI * row.cores), row.memory_bytes, row.steps_per_s)
            self._shares.setdefault((row.kind, gpu_milli), []).append(share)
        self.kinds = sorted({kind for kind, _ in self._shares})

    def rows(self, kind: str, gpu_milli: int) -> list[Share]:
        """Returns the rows for a kind and a number of GPUs."""
        return self._shares.get((kind, gpu_milli)) or self._shares.get((ANY_KIND, gpu_milli), [])

    def rate(self, kind: str, gpu_milli: int, cores_milli: int, memory_bytes: int) -> float:
        """Returns updates per second with some resources; 0 if no row is covered."""
        rows = self.rows(kind, gpu_milli)
        covered = [r.steps_per_s for r in rows if r.cores_milli <= cores_milli and r.memory_bytes <= memory_bytes]
        return max(covered, default=0.0)

    def best(self, kind: str, gpu_milli: int, cores_milli: int, memory_bytes: int) -> Share | None:
        """Returns the fastest row within some resources; of equally fast ones, that with the fewest."""
        rows = [
            row._replace(kind=kind)
            for row in self.rows(kind, gpu_milli)
            if row.cores_milli <= cores_milli and row.memory_bytes <= memory_bytes
        ]
        return min(rows, key=lambda r: (-r.steps_per_s, r.cores_milli, r.memory_bytes), default=None)


def check_jobs(jobs: tuple[ClusterJob, ...]) -> None:
    """Raises InputError for names given twice, jobs that are waited for but missing, and cycles of them."""
    names = [job.name for job in jobs]
    known = set(names)
    if len(known) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"two jobs are called '{twice}'; give each its own name")
    missing = [(job.name, other) for job in jobs for other in job.after if other not in known]
    if missing:
        raise InputError(f"job '{missing[0][0]}' waits for '{missing[0][1]}', which is not among the {len(jobs)} jobs")
    left = {job.name: set(job.after) for job in jobs if job.after}
    while left:
        ready = {name for name, others in left.items() if not others & left.keys()}
        if not ready:
            raise InputError(f"jobs wait for each other in a cycle: {' → '.join(_cycle(left))}")
        left = {name: others for name, others in left.items() if name not in ready}


def _cycle(left: dict[str, set[str]]) -> list[str]:
    """Returns the names along a cycle, the first repeated at the end."""
    path = [min(left)]
    while True:
        following = min(left[path[-1]] & left.keys())
        if following in path:
            return [*path[path.index(following) :], following]
        path.append(following)
