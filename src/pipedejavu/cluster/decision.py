"""What a scheduler does next: which jobs of a queue start or stop, and on which devices.

The policies, the placement and the rounds of the simulator decide. A decision depends on the queue and its servers
alone; it knows no clock and no processes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipedejavu.cluster.cluster_job import MILLI, ClusterJob
from pipedejavu.cluster.cluster_state import ClusterState
from pipedejavu.cluster.job_placement import place_waiting
from pipedejavu.cluster.schedule_options import ScheduleOptions
from pipedejavu.cluster.scheduling_round import may_change, run_round
from pipedejavu.cluster.server import Server
from pipedejavu.cluster.server_pool import ServerPart
from pipedejavu.facts import InputError


class QueuedJob(NamedTuple):
    """A job that has not ended, and what it has had."""

    job: ClusterJob
    left_steps: float
    is_ready: bool
    """Whether it has arrived, and the jobs before it have ended."""
    attained_s: float = 0.0
    """Seconds of devices that it has had."""
    received_s: Mapping[str, float] = {}
    """Seconds that it has run, by kind."""
    devices: tuple[int, ...] = ()
    """Devices of the one server that it holds; empty if it does not run."""


class QueueDecision(NamedTuple):
    """Changes of a queue, by the jobs' positions; a job in both moves to other devices."""

    stops: tuple[int, ...]
    starts: dict[int, tuple[int, ...]]
    """The devices on which jobs start."""
    may_change: bool
    """Whether a later round could change anything though no job arrives or ends."""


def decide(
    jobs: Sequence[QueuedJob], server: Server, options: ScheduleOptions, *, is_round: bool = False
) -> QueueDecision:
    """Returns what to change on one server now; running jobs are preempted and resized at rounds only."""
    state = ClusterState([queued.job for queued in jobs], [server], options)
    for run, queued in zip(state.runs, jobs, strict=True):
        run.left_steps = max(queued.left_steps, 1e-9)
        run.attained_s, run.received_s = queued.attained_s, dict(queued.received_s)
        if queued.devices:
            share = state.shares(run, server.kind, MILLI * len(queued.devices))[-1]
            part = ServerPart(0, queued.devices, MILLI, share.cores_milli, share.memory_bytes)
            state.start(run, share, [part])
            run.ready_s = 0.0
        elif queued.is_ready:
            state.waiting[run.index] = None
    if is_round:
        run_round(state)
    place_waiting(state)
    after = [tuple(slot for part in run.parts for slot in part.slots) for run in state.runs]
    moved = [n for n, queued in enumerate(jobs) if after[n] != queued.devices]
    return QueueDecision(
        tuple(n for n in moved if jobs[n].devices), {n: after[n] for n in moved if after[n]}, may_change(state)
    )


def check_queue(jobs: Sequence[ClusterJob], server: Server, options: ScheduleOptions) -> None:
    """Raises InputError for a job that could not run on a server that is free."""
    for job in jobs:
        waiting = QueuedJob(job, job.work, is_ready=True)
        if not decide([waiting], server, options).starts:
            raise InputError(
                f"job '{job.name}' asks for {job.gpus:g} devices, and this host does not have them for it: it has"
                f" {server.gpus} of kind '{server.kind}'; make the job smaller"
            )
