"""The course of one job in a simulated cluster: its work, where it runs, and what it has had."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipedejavu.cluster.cluster_job import ClusterJob, Share
from pipedejavu.cluster.server_pool import ServerPart


class JobSpan(NamedTuple):
    """A time in which a job held the same devices."""

    job: int
    parts: tuple[ServerPart, ...]
    start_s: float
    end_s: float
    steps: float
    """Updates that it made."""
    overhead_s: float
    """Time of it for saving, loading and starting."""
    core_s: float
    """Seconds of CPU cores that it held."""


@dataclass
class JobRun:
    """A job and its progress; times are those of the simulated clock."""

    index: int
    job: ClusterJob
    left_steps: float = 0.0
    share: Share | None = None
    parts: tuple[ServerPart, ...] = ()
    since_s: float = 0.0
    """Time up to which its progress is counted."""
    ready_s: float = 0.0
    """Time at which it begins to make progress again, after loading."""
    started_s: float = 0.0
    """Start of the present span."""
    span_steps: float = 0.0
    span_core_s: float = 0.0
    first_s: float | None = None
    end_s: float | None = None
    attained_s: float = 0.0
    received_s: dict[str, float] = field(default_factory=dict)
    num_preemptions: int = 0
    version: int = 0
    """Grows with every change of rate; events for an older one do not count."""

    def __post_init__(self) -> None:
        self.left_steps = self.job.work

    @property
    def is_running(self) -> bool:
        """Whether it holds devices."""
        return self.share is not None

    def advance(self, now_s: float) -> None:
        """Counts progress up to now."""
        if self.share is not None:
            done = self.share.steps_per_s * max(0.0, now_s - max(self.since_s, self.ready_s))
            done = min(done, self.left_steps)
            self.left_steps -= done
            self.span_steps += done
            held = now_s - self.since_s
            self.attained_s += held * (self.share.gpu_milli / 1000 or 1.0)
            self.span_core_s += held * self.share.cores_milli / 1000
            kind = self.share.kind
            self.received_s[kind] = self.received_s.get(kind, 0.0) + held
        self.since_s = now_s

    def start(self, now_s: float, share: Share, parts: Sequence[ServerPart], overhead_s: float) -> None:
        """Begins a span on some devices; progress begins after an overhead."""
        self.advance(now_s)
        self.first_s = now_s if self.first_s is None else self.first_s
        self.share, self.parts = share, tuple(parts)
        self.started_s, self.ready_s = now_s, now_s + overhead_s
        self.span_steps = self.span_core_s = 0.0
        self.version += 1

    def retune(self, now_s: float, share: Share, parts: Sequence[ServerPart]) -> None:
        """Changes the cores and memory of the devices that it holds, at no cost."""
        self.advance(now_s)
        self.share, self.parts = share, tuple(parts)
        self.version += 1

    def stop(self, now_s: float) -> JobSpan:
        """Ends the span; returns it."""
        self.advance(now_s)
        overhead = min(self.ready_s, now_s) - self.started_s
        span = JobSpan(
            self.index, self.parts, self.started_s, now_s, self.span_steps, max(0.0, overhead), self.span_core_s
        )
        self.share, self.parts = None, ()
        self.version += 1
        return span

    @property
    def ends_s(self) -> float:
        """The time at which it ends if nothing changes."""
        assert self.share is not None
        return max(self.since_s, self.ready_s) + self.left_steps / self.share.steps_per_s
