"""The state of a simulated cluster: jobs that wait and run, what is free, and the events to come."""

import heapq
from collections.abc import Sequence

from pipedejavu.cluster.allocation import base_rates, shares_of
from pipedejavu.cluster.cluster_job import MILLI, ClusterJob, Share
from pipedejavu.cluster.job_run import JobRun, JobSpan
from pipedejavu.cluster.policy import POLICIES, JobView, RankedJob
from pipedejavu.cluster.schedule_options import ScheduleOptions
from pipedejavu.cluster.server import Server, shapes_of
from pipedejavu.cluster.server_pool import JobShape, ServerPart, ServerPool
from pipedejavu.facts import InputError

_NUM_USUAL = 12
"""Sizes of jobs that packing against fragments looks at."""
MOST_EVENTS = 5_000_000


class ClusterState:
    """Jobs, servers and events at one time; every change of a job goes through here."""

    def __init__(self, jobs: Sequence[ClusterJob], servers: Sequence[Server], options: ScheduleOptions):
        self.options, self.policy = options, POLICIES[options.policy]
        self.pool = ServerPool(servers, options.packing, usual_shapes(jobs))
        self.shapes = shapes_of(list(servers))
        self.runs = [JobRun(index, job) for index, job in enumerate(jobs)]
        self.rates = [base_rates(job, self.shapes) for job in jobs]
        self.spans: list[JobSpan] = []
        self.waiting: dict[int, None] = {}
        self.running: dict[int, None] = {}
        self.on_server: list[set[int]] = [set() for _ in servers]
        self.events: list[tuple[float, int, str, int, int]] = []
        self.num_events = 0
        self.now_s = 0.0

    def push(self, time_s: float, kind: str, index: int, version: int = 0) -> None:
        """Adds an event."""
        self.num_events += 1
        if self.num_events > MOST_EVENTS:
            raise InputError(f"the simulation takes over {MOST_EVENTS:,} events; make its rounds longer (--round)")
        heapq.heappush(self.events, (time_s, self.num_events, kind, index, version))

    def overhead_s(self, run: JobRun) -> float:
        """Returns the time until a job makes progress: its processes start, and a checkpoint is written and read."""
        moves = 2 if run.left_steps < run.job.work else 0
        return self.options.start_s + moves * run.job.checkpoint_bytes / self.options.disk_bytes_per_s

    def start(self, run: JobRun, share: Share, parts: Sequence[ServerPart]) -> None:
        """Starts or continues a waiting job."""
        overhead_s = self.overhead_s(run)
        self.pool.take(parts)
        for part in parts:
            self.on_server[part.server].add(run.index)
        self.waiting.pop(run.index, None)
        self.running[run.index] = None
        run.start(self.now_s, share, parts, overhead_s)
        self.push(run.ends_s, "end", run.index, run.version)

    def stop(self, run: JobRun) -> None:
        """Ends a job's span and frees its devices."""
        self.pool.give(run.parts)
        for part in run.parts:
            self.on_server[part.server].discard(run.index)
        span = run.stop(self.now_s)
        if span.end_s > span.start_s:
            self.spans.append(span)
        del self.running[run.index]

    def preempt(self, run: JobRun) -> None:
        """Stops a job; it waits, with its work kept by a checkpoint."""
        self.stop(run)
        run.num_preemptions += 1
        self.waiting[run.index] = None

    def retune(self, run: JobRun, share: Share) -> None:
        """Gives a running job other cores and memory beside the GPUs that it holds."""
        self.pool.give(run.parts)
        parts = with_share(run.parts, share)
        self.pool.take(parts)
        run.retune(self.now_s, share, parts)
        self.push(run.ends_s, "end", run.index, run.version)

    def rank(self, indices: Sequence[int]) -> list[RankedJob]:
        """Returns some jobs in the policy's order."""
        for index in indices:
            self.runs[index].advance(self.now_s)
        views = [
            JobView(i, run.job, run.left_steps, run.attained_s, run.received_s, self.rates[i])
            for i in indices
            for run in (self.runs[i],)
        ]
        return self.policy.rank(views, self.capacity())

    def capacity(self) -> dict[str, int]:
        """Returns the thousandths of GPUs by kind; of servers, for kinds without GPUs."""
        return {
            kind: self.pool.capacity(kind).gpu_milli if shape.gpus else MILLI * self.pool.num_on(kind)
            for kind, shape in self.shapes.items()
        }

    def shares(self, run: JobRun, kind: str, gpu_milli: int) -> list[Share]:
        """Returns the shares to try for a job on servers of a kind."""
        return shares_of(run.job, kind, self.shapes[kind], gpu_milli, self.options.allocation)


def with_share(parts: Sequence[ServerPart], share: Share) -> tuple[ServerPart, ...]:
    """Returns the parts of servers with a share's cores and memory, divided evenly."""
    cores, memory = -(-share.cores_milli // len(parts)), -(-share.memory_bytes // len(parts))
    return tuple(part._replace(cores_milli=cores, memory_bytes=memory) for part in parts)


def usual_shapes(jobs: Sequence[ClusterJob]) -> list[JobShape]:
    """Returns the most frequent sizes of the jobs that use GPUs, with their shares."""
    counts: dict[tuple[int, int, int], int] = {}
    for job in jobs:
        if job.gpu_milli:
            key = (job.gpu_milli, round(MILLI * (job.cores or 0)), job.memory_bytes or 0)
            counts[key] = counts.get(key, 0) + 1
    frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_NUM_USUAL]
    total = sum(count for _, count in frequent)
    return [JobShape(*key, count / total) for key, count in frequent]
