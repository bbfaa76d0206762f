"""Places waiting jobs on free devices, and takes back cores and memory that jobs hold beyond their part."""

from collections.abc import Sequence

from pipedejavu.cluster.allocation import proportional_share
from pipedejavu.cluster.cluster_job import MILLI, Share
from pipedejavu.cluster.cluster_state import ClusterState, with_share
from pipedejavu.cluster.job_run import JobRun


def place_waiting(state: ClusterState) -> None:
    """Places waiting jobs in the policy's order; a queue without backfill ends at the first that does not fit."""
    may_pass = state.options.backfill or state.policy.is_preemptive
    failed: set[Share] = set()
    for choice in state.rank(list(state.waiting)) if state.waiting else ():
        if not place(state, state.runs[choice.number], choice.kinds, failed) and not may_pass:
            break


def place(state: ClusterState, run: JobRun, kinds: Sequence[str], failed: set[Share] | None = None) -> bool:
    """Starts a job on the first kind on which it fits; returns whether it did.

    `failed` are shares known not to fit, so that many equal jobs cost one search.
    """
    for kind in kinds:
        is_new = False
        for share in state.shares(run, kind, run.job.gpu_milli):
            if failed is not None and share in failed:
                continue
            is_new = True
            parts = state.pool.find(share)
            if parts is not None:
                state.start(run, share, parts)
                return True
            if failed is not None:
                failed.add(share)
        if is_new and state.options.allocation == "tuned" and _reclaim(state, run, kind):
            return True
    return False


def _reclaim(state: ClusterState, run: JobRun, kind: str) -> bool:
    """Starts a job on a server whose jobs give back what they hold beyond their part of cores and memory."""
    share = proportional_share(run.job, kind, state.shapes[kind], run.job.gpu_milli)
    if share is None or share.gpu_milli > MILLI * state.shapes[kind].gpus:
        return False
    if state.pool.find(share._replace(cores_milli=0, memory_bytes=0)) is None:  # its GPUs are not free anywhere
        return False
    for server, about in enumerate(state.pool.servers):
        if about.kind != kind or not state.pool.is_on[server]:
            continue
        richer = [(index, less) for index in sorted(state.on_server[server]) if (less := _lesser(state, index))]
        trial = state.pool.only(server)
        for index, less in richer:
            trial.give(state.runs[index].parts)
            trial.take(with_share(state.runs[index].parts, less))
        if trial.find(share) is None:
            continue
        for index, less in richer:
            state.retune(state.runs[index], less)
        state.start(run, share, state.pool.only(server).find(share) or ())
        return True
    return False


def _lesser(state: ClusterState, index: int) -> Share | None:
    """Returns the share of a job on one server without what it holds beyond its part; None if it holds no more."""
    run = state.runs[index]
    assert run.share is not None
    least = proportional_share(run.job, run.share.kind, state.shapes[run.share.kind], run.share.gpu_milli)
    if least is None or len(run.parts) > 1:
        return None
    cores, memory = min(least.cores_milli, run.share.cores_milli), min(least.memory_bytes, run.share.memory_bytes)
    rate = run.job.table.rate(least.kind, least.gpu_milli, cores, memory)
    is_less = (cores, memory) != (run.share.cores_milli, run.share.memory_bytes)
    return Share(least.kind, least.gpu_milli, cores, memory, rate) if rate and is_less else None
