"""What a scheduler does next: which jobs of a queue start or stop, and on which devices.

The policies, the placement and the rounds of the simulator decide. A decision depends on the queue and its servers
alone; it knows no clock and no processes.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
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
    """Devices that it holds, all of one server; empty if it does not run."""


class QueueDecision(NamedTuple):
    """Changes of a queue, by the jobs' positions; a job in both moves to other devices."""

    stops: tuple[int, ...]
    starts: dict[int, tuple[int, ...]]
    """The devices on which jobs start."""
    may_change: bool
    """Whether a later round could change anything though no job arrives or ends."""


def decide(
    jobs: Sequence[QueuedJob],
    servers: Sequence[Server],
    options: ScheduleOptions,
    *,
    is_round: bool = False,
    lost: Collection[int] = (),
) -> QueueDecision:
    """Returns what to change now; running jobs are preempted and resized at rounds only.

    Devices are numbered through all servers. Those that are `lost` get no jobs, and no job has devices of two.
    """
    state = ClusterState([queued.job for queued in jobs], servers, options)
    for number in lost:
        state.pool.is_on[number] = False
    starts = [0, *accumulate(server.gpus for server in servers)]
    for run, queued in zip(state.runs, jobs, strict=True):
        run.left_steps = max(queued.left_steps, 1e-9)
        run.attained_s, run.received_s = queued.attained_s, dict(queued.received_s)
        if queued.devices:
            server = bisect_right(starts, queued.devices[0]) - 1
            share = state.shares(run, servers[server].kind, MILLI * len(queued.devices))[-1]
            slots = tuple(device - starts[server] for device in queued.devices)
            state.start(run, share, [ServerPart(server, slots, MILLI, share.cores_milli, share.memory_bytes)])
            run.ready_s = 0.0
        elif queued.is_ready:
            state.waiting[run.index] = None
    if is_round:
        run_round(state)
    place_waiting(state)
    after = [tuple(starts[part.server] + slot for part in run.parts for slot in part.slots) for run in state.runs]
    moved = [n for n, queued in enumerate(jobs) if after[n] != queued.devices]
    return QueueDecision(
        tuple(n for n in moved if jobs[n].devices), {n: after[n] for n in moved if after[n]}, may_change(state)
    )


def check_queue(jobs: Sequence[ClusterJob], servers: Sequence[Server], options: ScheduleOptions) -> None:
    """Raises InputError for a job that could not run on servers that are free."""
    most = max(server.gpus for server in servers)
    for job in jobs:
        fits = job.gpus <= most and decide([QueuedJob(job, job.work, is_ready=True)], servers, options).starts
        if not fits:
            has = "this host does not have them for it: it has" if len(servers) == 1 else "the most on one node are"
            raise InputError(
                f"job '{job.name}' asks for {job.gpus:g} devices, and {has} {most} of kind '{servers[0].kind}'; make"
                " the job smaller"
            )
        if len(servers) > 1 and (job.most_gpus or 0) > most:
            raise InputError(
                f"job '{job.name}' uses up to {job.most_gpus} devices, and the most of one node are {most}, which a job"
                " does not leave; make most_gpus smaller"
            )
