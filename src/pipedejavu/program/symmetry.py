"""Symmetry: whether the pipelines of a plan behave identically, so that a program can hold one of them for all."""

from collections import Counter
from collections.abc import Sequence

from pipedejavu.facts import Device, Machine, Profile
from pipedejavu.plan import Plan

Ends = list[tuple[str, str]]
"""The (source, target) devices of one link, for each pipeline."""


def is_symmetric(plan: Plan, profile: Profile, machine: Machine, devices: tuple[str, ...]) -> bool:
    """Whether every pipeline has the same work, the same kinds of devices and the same links as the first."""
    place, size = plan.place, plan.pipeline_size
    copies = place.replicas * place.shards
    if copies == 1 or not _has_equal_work(plan) or (place.shards > 1 and size > 1):
        return False
    if place.shards > 1 and place.replicas > 1 and not _wires_are_private(machine):
        return False
    pipelines = [[machine.device(name) for name in devices[c * size : (c + 1) * size]] for c in range(copies)]
    kinds = {tuple((d.kind, d.memory_bytes, d.reserved_bytes) for d in pipeline) for pipeline in pipelines}
    if len(kinds) > 1:
        return False
    if _updates_on_host(plan) and not _share_cpus_equally(machine, pipelines):
        return False
    return all(_are_equal(machine, ends) for ends in _links(plan, profile, machine, pipelines))


def _has_equal_work(plan: Plan) -> bool:
    has_helpers = plan.reduce.wire == "summation-service" and plan.place.servers > 0
    has_special_worker = plan.place.cpu_replicas > 0 or plan.reduce.wire == "server" or has_helpers
    return not has_special_worker and plan.feed.kind not in ("share", "mask")


def _updates_on_host(plan: Plan) -> bool:
    return plan.keep.kind in ("host", "split")


def _links(plan: Plan, profile: Profile, machine: Machine, pipelines: Sequence[Sequence[Device]]) -> list[Ends]:
    """Returns the ends of each link that a pipeline may use, for all pipelines."""
    size = plan.pipeline_size
    # In a chain only neighbours and the two ends of a loop communicate.
    distances = {1, size - 1} - {0} if profile.edges is None else set(range(1, size))
    pairs = [(a, b) for a in range(size) for b in range(size) if abs(a - b) in distances]
    links = [[(devices[a].name, devices[b].name) for devices in pipelines] for a, b in pairs]
    if _updates_on_host(plan) or plan.keep.activations == "host" or plan.prefetches_data:
        fetches = [[(machine.cpu_of(devices[a]).name, devices[a].name) for devices in pipelines] for a in range(size)]
        fetches = [ends for ends in fetches if ends[0][0] != ends[0][1]]
        links += fetches + [[(device, host) for host, device in ends] for ends in fetches]
    return links


def _are_equal(machine: Machine, ends: Ends) -> bool:
    """Whether one link has the same route in all pipelines, over wires that equally many of them share."""
    routes = [machine.route(*pair) for pair in ends]
    if len({route._replace(wires=()) for route in routes}) > 1:
        return False
    users = Counter(wire for route in routes for wire in route.wires)
    return len({tuple(users[wire] for wire in route.wires) for route in routes}) == 1


def _share_cpus_equally(machine: Machine, pipelines: Sequence[Sequence[Device]]) -> bool:
    """Whether every CPU updates for equally many pipelines, and for the same rank of each."""
    columns = {tuple(machine.cpu_of(device).name for device in column) for column in zip(*pipelines, strict=True)}
    is_even = all(len({*Counter(column).values()}) == 1 for column in columns)
    return is_even and sum(len({*column}) for column in columns) == len({name for c in columns for name in c})


def _wires_are_private(machine: Machine) -> bool:
    return all("{source}" in wire and "{target}" in wire for link in machine.links for wire in link.wires)
