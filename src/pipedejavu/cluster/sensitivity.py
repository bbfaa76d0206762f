"""A job's table of throughput from plans: for each kind and number of GPUs, with fewer cores and less memory.

Each row is the best plan of a search on that part of the machine, simulated; nothing is run. A plan that keeps nothing
on the host depends on its cores and memory only by what its processes take and by the preparation of samples, so one
search is enough for it.
"""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from math import ceil

from pipedejavu.cluster.cluster_job import ClusterJob, RateRow
from pipedejavu.facts import Device, InputError, Machine, Profile
from pipedejavu.search import RankedPlan, SearchOptions, search

PROCESS_BYTES = 2 << 30
"""Host memory that the process of one worker is assumed to take: its libraries, and the batches it has ready."""
_PARTS = ((0.125, 1.0), (0.25, 1.0), (0.5, 1.0), (1.0, 0.25), (1.0, 0.5))
"""Shares of a host's cores and memory for which a plan that uses the host is searched, beside the whole host."""

ProfileOf = Callable[[Machine], Profile]


def plan_rates(
    job: ClusterJob, machine: Machine, profile_of: ProfileOf, time_budget_s: float = 5.0
) -> tuple[RateRow, ...]:
    """Returns the rows of a job for the kinds of a machine that it may use; none if it fits nowhere."""
    rows: list[RateRow] = []
    for kind, hosts in _hosts_by_kind(machine).items():
        if job.kinds and kind not in job.kinds:
            continue
        for gpu_milli in job.counts():
            rows += _rows(job, machine, kind, hosts, gpu_milli, profile_of, time_budget_s)
    return thinned(rows)


def _hosts_by_kind(machine: Machine) -> dict[str, list[str]]:
    """Returns the hosts of each kind: that of their GPUs, or of their CPU without any."""
    hosts: dict[str, list[str]] = {}
    for host in machine.hosts:
        devices = [device for device in machine.devices if device.host == host.name]
        kinds = [d.kind for d in devices if d.type == "gpu"] or [d.kind for d in devices]
        if kinds:
            hosts.setdefault(kinds[0], []).append(host.name)
    return hosts


def _rows(
    job: ClusterJob, machine: Machine, kind: str, hosts: Sequence[str], gpu_milli: int, profile_of: ProfileOf,
    time_budget_s: float,
) -> list[RateRow]:  # fmt: skip
    gpus = gpu_milli // 1000
    if gpu_milli % 1000:
        raise InputError(
            f"job '{job.name}' asks for {job.gpus:g} of a GPU; plans are for whole GPUs, so give its rates"
        )
    most = sum(d.host == hosts[0] and d.type == "gpu" for d in machine.devices)
    count = ceil(gpus / most) if gpus else 1
    if gpus and (not most or count > len(hosts) or gpus % count):
        return []
    chosen, cores = hosts[:count], next(h.cores for h in machine.hosts if h.name == hosts[0])
    options = SearchOptions(batch=job.batch, candidates=1, time_budget_s=time_budget_s, is_runnable=True)

    def best(share: float, memory_share: float) -> RankedPlan | None:
        part = machine_part(machine, chosen, gpus // count, share, memory_share)
        names = tuple(d.name for d in part.devices if d.type == "gpu") or None
        return search(profile_of(part), part, options.replace(devices=names)).best

    whole = best(1.0, 1.0)
    if whole is None:
        return []
    workers = max(1, gpus)
    if gpus and not _host_bytes(whole):
        need = workers * PROCESS_BYTES
        return list(_with_preparation(job, kind, gpus, whole, (workers, count * cores), need))
    rows: list[RateRow] = []
    for share, memory_share in (*_PARTS, (1.0, 1.0)):
        plan = whole if share == memory_share == 1 else best(share, memory_share)
        if plan is not None:
            given = max(workers, ceil(count * cores * share))
            need = ceil(_host_bytes(plan)) + workers * PROCESS_BYTES
            rows += _with_preparation(job, kind, gpus, plan, (given, given), need)
    return rows


def _host_bytes(plan: RankedPlan) -> float:
    """Returns the bytes that a plan keeps in the memory of hosts."""
    return sum(need.need_bytes for need in plan.memory if plan.machine.device(need.device).type == "cpu")


def _with_preparation(
    job: ClusterJob, kind: str, gpus: int, plan: RankedPlan, cores: tuple[int, int], need: int
) -> Iterable[RateRow]:
    """Yields a plan's rows from the fewest to the most cores: the slower of its updates and of preparing samples."""
    rate, (least, most) = 1 / plan.time_s, cores
    for number in range(least, most + 1):
        prepared = number / (job.prepare_s * job.batch) if job.prepare_s else rate
        yield RateRow(kind=kind, gpus=gpus, cores=number, memory_bytes=need, steps_per_s=min(rate, prepared))
        if prepared >= rate:
            return


def thinned(rows: Sequence[RateRow]) -> tuple[RateRow, ...]:
    """Returns the rows without those that are no faster than one with fewer resources."""
    kept: list[RateRow] = []
    for row in sorted(rows, key=lambda r: (r.kind, r.gpus, r.cores, r.memory_bytes, -r.steps_per_s)):
        covered = (r for r in kept if (r.kind, r.gpus) == (row.kind, row.gpus) and r.memory_bytes <= row.memory_bytes)
        if all(other.steps_per_s < row.steps_per_s for other in covered):
            kept.append(row)
    return tuple(kept)


def machine_part(machine: Machine, hosts: Sequence[str], gpus: int, share: float, memory_share: float) -> Machine:
    """Returns some hosts of a machine with fewer GPUs each, and a share of their cores and memory."""
    devices = []
    for host in hosts:
        members = [device for device in machine.devices if device.host == host]
        devices += [device for device in members if device.type == "gpu"][:gpus]
        devices += [_cpu_part(device, share, memory_share) for device in members if device.type == "cpu"]
    kept = [host.replace(cores=max(1, round(share * host.cores))) for host in machine.hosts if host.name in hosts]
    names = [device.name for device in devices]
    links = tuple(
        link
        for link in machine.links
        if all(any(fnmatchcase(name, end) for name in names) for end in (link.source, link.target))
    )
    return machine.replace(hosts=tuple(kept), devices=tuple(devices), links=links)


def _cpu_part(cpu: Device, share: float, memory_share: float) -> Device:
    return cpu.replace(
        memory_bytes=round(cpu.memory_bytes * memory_share),
        reserved_bytes=round(cpu.reserved_bytes * memory_share),
        flop_per_s=cpu.flop_per_s * share,
        memory_bytes_per_s=cpu.memory_bytes_per_s * share,
        parameters_per_s=cpu.parameters_per_s * share,
        most_workers=max(1, round(cpu.most_workers * share)),
    )
