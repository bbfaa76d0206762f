"""A discrete-event simulator of a cluster: jobs arrive, are placed, preempted and resized, and end.

    arrival ──▶ waiting ──▶ running ──▶ ended
                   ▲           │  tick: preempted for jobs that the policy ranks before it
                   └───────────┘

At every event waiting jobs are placed in the policy's order. At ticks, a round apart while jobs wait or could use more,
running jobs are preempted, tuned and resized, and rented servers come and go.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from pipedejavu.cluster.cluster_job import ClusterJob, check_jobs
from pipedejavu.cluster.cluster_state import ClusterState
from pipedejavu.cluster.job_placement import place_waiting
from pipedejavu.cluster.job_run import JobRun, JobSpan
from pipedejavu.cluster.renting import RentedTime, Renting
from pipedejavu.cluster.schedule_options import ScheduleOptions
from pipedejavu.cluster.scheduling_round import may_change, run_round
from pipedejavu.cluster.server import Server
from pipedejavu.facts import InputError, format_bytes


class ClusterCourse(NamedTuple):
    """What happened: each job's course, the times that jobs held devices, and those for which servers were rented."""

    options: ScheduleOptions
    servers: tuple[Server, ...]
    runs: tuple[JobRun, ...]
    spans: tuple[JobSpan, ...]
    rented: tuple[RentedTime, ...]
    base_rates: tuple[dict[str, float], ...]
    """Updates per second of each job by kind, with the GPUs it asks for."""
    num_events: int


def simulate_cluster(
    jobs: Sequence[ClusterJob], servers: Sequence[Server], options: ScheduleOptions | None = None
) -> ClusterCourse:
    """Runs all jobs to their end; raises InputError for a job that the whole cluster could not run."""
    options = options or ScheduleOptions()
    check_jobs(tuple(jobs))
    state = ClusterState(jobs, servers, options)
    _check_sizes(state)
    clock = _Clock(state)
    clock.run()
    rates = tuple(state.rates)
    return ClusterCourse(
        options, tuple(servers), tuple(state.runs), tuple(state.spans), tuple(clock.renting.times), rates,
        state.num_events,
    )  # fmt: skip


def _check_sizes(state: ClusterState) -> None:
    """Raises InputError for the first job that does not fit into the empty cluster."""
    empty = state.pool.copy()
    empty.is_on[:] = True
    known: set[object] = set()
    for run in state.runs:
        job = run.job
        shape = (job.gpu_milli, job.cores, job.memory_bytes, job.kinds, *state.rates[run.index].items())
        if shape in known:
            continue
        shares = [share for kind in state.rates[run.index] for share in state.shares(run, kind, job.gpu_milli)]
        if not any(empty.find(share) is not None for share in shares):
            raise InputError(_too_large(state, job))
        known.add(shape)


def _too_large(state: ClusterState, job: ClusterJob) -> str:
    asked = [f"{job.gpus:g} GPUs" if job.gpus != 1 else "1 GPU"]
    asked += [f"{job.cores:g} cores"] if job.cores is not None else []
    asked += [format_bytes(job.memory_bytes)] if job.memory_bytes is not None else []
    kinds = f" of kind {' or '.join(job.kinds)}" if job.kinds else ""
    largest = "; ".join(
        f"{kind}: {state.pool.num_of(kind)} with up to {shape.gpus} GPUs, {shape.cores_milli / 1000:g} cores and"
        f" {format_bytes(shape.memory_bytes)}"
        for kind, shape in state.shapes.items()
    )
    return (
        f"job '{job.name}' asks for {', '.join(asked)}{kinds}, which fits on no server of the cluster ({largest});"
        " make the job smaller, or add servers"
    )


class _Clock:
    """The loop over events."""

    def __init__(self, state: ClusterState):
        self.state, self.renting = state, Renting(state)
        self.tick_s: float | None = None
        self.followers: dict[str, list[int]] = {}
        self.open_names = [set(run.job.after) for run in state.runs]

    def run(self) -> None:
        """Handles events until every job has ended."""
        state = self.state
        for run in state.runs:
            for name in run.job.after:
                self.followers.setdefault(name, []).append(run.index)
            if not run.job.after:
                state.push(run.job.arrival_s, "arrival", run.index)
        while state.events:
            state.now_s = state.events[0][0]
            while state.events and state.events[0][0] <= state.now_s:
                _, _, kind, index, version = heapq.heappop(state.events)
                self._handle(kind, index, version)
            if self.tick_s == state.now_s:
                self.tick_s = None
                run_round(state)
            place_waiting(state)
            self.renting.review()
            self._plan_tick()
        for server in list(self.renting.since_s):
            self.renting.give_back(server)
        assert not state.waiting
        assert not state.running

    def _handle(self, kind: str, index: int, version: int) -> None:
        state = self.state
        if kind == "arrival":
            state.waiting[index] = None
        elif kind == "on":
            state.pool.is_on[index] = index in self.renting.since_s
        elif kind == "end" and state.runs[index].version == version:
            run = state.runs[index]
            state.stop(run)
            run.left_steps, run.end_s = 0.0, state.now_s
            for follower in self.followers.get(run.job.name, ()):
                self.open_names[follower].discard(run.job.name)
                if not self.open_names[follower]:
                    state.push(max(state.runs[follower].job.arrival_s, state.now_s), "arrival", follower)

    def _plan_tick(self) -> None:
        state = self.state
        if self.tick_s is None and may_change(state) and (state.running or state.waiting):
            round_s = state.options.round_s
            self.tick_s = (state.now_s // round_s + 1) * round_s
            state.push(self.tick_s, "tick", 0)
