"""Tensor-parallel groups: devices of one kind and host that divide each operator; to a program a group is one device.

The group has the summed memory of its devices. A unit's forward and backward take the time of one device's part: the
one that the profile states, or else the time per sample divided by the size of the group, with launches as they are.
They also take the time of the unit's collectives (`unit_traffic`).
"""

import fnmatch
from collections.abc import Iterator, Sequence

from pipedejavu.facts import Cost, Device, InputError, Machine, Profile, Route, Unit, UnitTime
from pipedejavu.plan import Plan
from pipedejavu.program.unit_traffic import parameter_share, unit_collectives, work_share

TpGroup = tuple[str, ...]
"""The names of a group's devices."""


def tp_groups_of(plan: Plan, devices: Sequence[str]) -> Iterator[TpGroup]:
    """Yields the devices of each worker."""
    first = 0
    for size in plan.degrees:
        yield tuple(devices[first : first + size])
        first += size


def written_out(plan: Plan) -> Plan:
    """Returns the plan with a worker for each device of its tensor-parallel groups, as the engine runs it.

    Groups of different sizes stay, each as one worker: the engine does not run them.
    """
    place = plan.place
    if place.stage_shards is None or len({*place.stage_shards}) > 1 or place.stage_replicas:
        return plan
    if place.cpu_replicas or place.servers:
        return plan
    return plan.replace(place=place.replace(shards=place.stage_shards[0], stage_shards=None))


def join(
    profile: Profile, machine: Machine, tp_groups: Sequence[TpGroup], layouts: Sequence[str] = ()
) -> tuple[Profile, Machine]:
    """Returns the profile and the machine with one device per group, whose devices divide units by some layouts.

    The device has the name of the group's first, so that the machine's links apply to it. Raises InputError if devices
    cannot form a group.
    """
    larger = [[machine.device(name) for name in tp_group] for tp_group in tp_groups if len(tp_group) > 1]
    if not larger:
        return profile, machine
    for tp_group in larger:
        _check_tp_group(tp_group)
    joined = {tp_group[0].name: _joined(tp_group) for tp_group in larger}
    taken = {device.name for tp_group in larger for device in tp_group[1:]}
    devices = tuple(joined.get(d.name, d) for d in machine.devices if d.name not in taken)
    kept = [device.name for device in devices]
    links = tuple(k for k in machine.links if all(fnmatch.filter(kept, end) for end in (k.source, k.target)))
    return with_tp_times(profile, machine, larger, layouts), machine.replace(devices=devices, links=links)


def with_tp_times(
    profile: Profile, machine: Machine, tp_groups: Sequence[Sequence[Device]], layouts: Sequence[str] = ()
) -> Profile:
    """Returns the profile with times for each group, under a device kind of its own."""
    kinds = {tp_kind(tp_group[0].kind, len(tp_group)): tp_group for tp_group in tp_groups}
    routes = {kind: machine.route(tp_group[0].name, tp_group[1].name) for kind, tp_group in kinds.items()}
    units = []
    for unit in profile.units:
        tp_times = {}
        for kind, tp_group in kinds.items():
            size, time = len(tp_group), part_time(profile, unit, tp_group[0].kind, len(tp_group), layouts)
            forward, backward = (
                _collectives_cost(layouts, size, unit, routes[kind], is_backward=is_backward)
                for is_backward in (False, True)
            )
            tp_times[kind] = time.replace(
                forward=time.forward.plus(forward),
                backward=time.backward.plus(backward),
                input_backward=time.input_backward and time.input_backward.plus(backward),
                recompute=time.recompute.plus(forward),
            )
        units.append(unit.replace(times=unit.times | tp_times))
    error = {kind: profile.error[group[0].kind] for kind, group in kinds.items() if group[0].kind in profile.error}
    return profile.replace(units=tuple(units), error=profile.error | error)


def part_time(profile: Profile, unit: Unit, kind: str, size: int, layouts: Sequence[str] = ()) -> UnitTime:
    """Returns the times of one device's part of a unit if `size` of its kind divide it, without collectives."""
    if size == 1:
        return profile.time(unit, kind)
    if (stated := unit.tp_times.get(tp_kind(kind, size))) is not None:
        return stated
    time = profile.time(unit, kind)
    share = parameter_share(layouts, size, unit)
    update_s = time.update_s * (1 - share + share / size)
    return time.divided(size, work_share(layouts, size, unit)).replace(update_s=update_s)


def tp_kind(kind: str, size: int) -> str:
    """Returns the device kind of a group of `size` devices."""
    return f"{size}x{kind}" if size > 1 else kind


def are_tp_group(devices: Sequence[Device]) -> bool:
    """Whether devices can divide operators: they are of one kind and host."""
    return len({(d.kind, d.host) for d in devices}) == 1


def _check_tp_group(tp_group: Sequence[Device]) -> None:
    if not are_tp_group(tp_group):
        names = ", ".join(f"'{d.name}'" for d in tp_group)
        raise InputError(
            f"place.stage_shards makes a tensor-parallel group of {names}, which are not of one kind on one host; name"
            " others in place.devices"
        )


def _collectives_cost(layouts: Sequence[str], size: int, unit: Unit, route: Route, *, is_backward: bool) -> Cost:
    fixed_s = sample_s = 0.0
    for collective in unit_collectives(layouts, size, unit, is_backward=is_backward):
        latency_s, byte_s = route.collective_line(collective.kind, size)
        fixed_s += latency_s + collective.fixed_bytes * byte_s
        sample_s += collective.sample_bytes * byte_s
    return Cost(fixed_s=fixed_s, per_sample_s=sample_s)


def _joined(tp_group: Sequence[Device]) -> Device:
    first, size = tp_group[0], len(tp_group)
    return first.replace(
        kind=tp_kind(first.kind, size),
        memory_bytes=min(d.memory_bytes for d in tp_group) * size,
        reserved_bytes=max(d.reserved_bytes for d in tp_group) * size,
        flop_per_s=first.flop_per_s * size,
        memory_bytes_per_s=first.memory_bytes_per_s * size,
        parameters_per_s=first.parameters_per_s * size,
    )
