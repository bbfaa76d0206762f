"""How many cores and how much memory a job gets with its GPUs: in proportion to them, or tuned to its sensitivity.

`proportional` gives each GPU the same part of its server. `tuned` gives a job what its table says it can use, as
Synergy does: a job that needs more than its part gets it from jobs that need less, and falls back to its part if there
is not enough.
"""

from collections.abc import Mapping

from pipedejavu.cluster.cluster_job import ClusterJob, Share
from pipedejavu.cluster.server import ServerShape

ALLOCATIONS = ("proportional", "tuned")


def proportional_share(job: ClusterJob, kind: str, shape: ServerShape, gpu_milli: int) -> Share | None:
    """Returns the share that some GPUs bring with them; None if the job makes no progress on the kind.

    What the job itself insists on replaces its part; a job of CPUs gets its fastest row, and a job that makes no
    progress with its part the least with which it does.
    """
    if not gpu_milli or job.duration_s is not None:
        best = job.table.best(kind, gpu_milli, shape.cores_milli, shape.memory_bytes)
        return best and _insisting(job, best)
    cores, memory = shape.proportional(gpu_milli)
    share = _insisting(job, Share(kind, gpu_milli, cores, memory, 0.0))
    rate = job.table.rate(kind, gpu_milli, share.cores_milli, share.memory_bytes)
    if rate:
        return share._replace(steps_per_s=rate)
    least = min(job.table.rows(kind, gpu_milli), key=lambda row: row[2:4], default=None)
    return least and _insisting(job, least._replace(kind=kind))


def _insisting(job: ClusterJob, share: Share) -> Share:
    if job.cores is not None:
        share = share._replace(cores_milli=round(1000 * job.cores))
    if job.memory_bytes is not None:
        share = share._replace(memory_bytes=job.memory_bytes)
    return share


def tuned_share(job: ClusterJob, kind: str, shape: ServerShape, gpu_milli: int) -> Share | None:
    """Returns the least share with which a job is as fast as a whole server makes it."""
    if job.cores is not None or job.memory_bytes is not None:
        return proportional_share(job, kind, shape, gpu_milli)
    servers = -(-gpu_milli // (1000 * shape.gpus)) if shape.gpus and gpu_milli else 1
    return job.table.best(kind, gpu_milli, servers * shape.cores_milli, servers * shape.memory_bytes)


def shares_of(job: ClusterJob, kind: str, shape: ServerShape, gpu_milli: int, allocation: str) -> list[Share]:
    """Returns the shares to try, the most wanted first."""
    proportional = proportional_share(job, kind, shape, gpu_milli)
    tuned = tuned_share(job, kind, shape, gpu_milli) if allocation == "tuned" else None
    shares = [share for share in (tuned, proportional) if share is not None]
    return shares[:1] if len(set(shares)) == 1 else shares


def base_rates(job: ClusterJob, shapes: Mapping[str, ServerShape]) -> dict[str, float]:
    """Returns a job's updates per second by usable kind, with the GPUs it asks for and the share they bring."""
    rates = {}
    for kind, shape in shapes.items():
        share = proportional_share(job, kind, shape, job.gpu_milli) or tuned_share(job, kind, shape, job.gpu_milli)
        if share is not None:
            rates[kind] = share.steps_per_s
    return rates
