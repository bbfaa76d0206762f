"""Scenes: the machine as it is, with its CPUs divided between workers, or with devices joined for divided operators."""

import fnmatch
from collections import Counter
from collections.abc import Iterator
from math import inf

from pipedejavu.facts import Cost, Device, InputError, Machine, Profile
from pipedejavu.search.draft import Scene
from pipedejavu.search.option import Options
from pipedejavu.search.space import divisors

MOST_PARTS = 16
"""That a CPU is divided into."""
LEAST_PART = 0.01
TYPICAL = 8
"""Samples of the microbatch by which kinds of devices are compared."""
COLLECTIVES = 4
"""Of a unit's boundary, when its operators are divided: two all-reduces forward and two backward."""


def scenes_of(profile: Profile, machine: Machine, options: Options, *, everyone: bool = False) -> Iterator[Scene]:
    """Yields what there is to plan for; raises InputError where no device can be used.

    Without `everyone`, kinds of devices that could not add a hundredth to the speed of all others train nothing.
    """
    names = usable(profile, machine, options)
    names = names if everyone else worthwhile(profile, machine, names)
    yield Scene(profile, machine, names)
    devices = [machine.device(name) for name in names]
    if all(d.type == "cpu" for d in devices):
        most = max(d.most_workers for d in devices)
        for parts in (n for n in divisors(most) if 1 < n <= MOST_PARTS):
            yield _parted(profile, machine, names, parts)
    if not options.is_runnable:
        for size in (2, 4, 8):
            joined = _joined(profile, machine, devices, size)
            if joined is not None:
                yield joined


def usable(profile: Profile, machine: Machine, options: Options) -> tuple[str, ...]:
    """Returns the devices whose kind all units have times on, GPUs first, by host."""
    asked = [machine.device(name) for name in options.devices] if options.devices else [*machine.devices]
    known = [d for d in asked if all(d.kind in unit.times for unit in profile.units)]
    if not known:
        kinds = ", ".join(sorted({f"'{d.kind}'" for d in asked}))
        raise InputError(
            f"profile '{profile.name}' has no times on {kinds}, the devices of machine '{machine.name}'; profile the"
            " model on them, or estimate it for this machine"
        )
    return tuple(d.name for d in sorted(known, key=lambda d: d.type == "cpu"))


def worthwhile(profile: Profile, machine: Machine, names: tuple[str, ...]) -> tuple[str, ...]:
    """Leaves out kinds of devices, from the slowest on, that add less than `LEAST_PART` to the speed of the others."""
    counts = Counter(machine.device(name).kind for name in names)
    rates = {}
    for kind, count in counts.items():
        times = [profile.time(unit, kind) for unit in profile.units]
        work = sum(time.forward.at(TYPICAL) + time.backward.at(TYPICAL) for time in times)
        rates[kind] = count / work if work else inf
    order = sorted(rates, key=rates.__getitem__)
    left = {kind for n, kind in enumerate(order) if rates[kind] < LEAST_PART * sum(rates[k] for k in order[n + 1 :])}
    return tuple(name for name in names if machine.device(name).kind not in left)


def _parted(profile: Profile, machine: Machine, names: tuple[str, ...], parts: int) -> Scene:
    """Returns the scene with CPUs divided into parts, which take as many times longer unless they were measured."""
    counts = {d.name: min(parts, d.most_workers) for d in map(machine.device, names)}
    divided = machine.divided(sum(counts.values()))
    devices, factors = [], dict[str, int]()
    for device in divided.devices:
        count = counts.get(device.name.rpartition(".")[0], 1)
        kind = f"{device.kind}/{count}" if count > 1 else device.kind
        factors |= {kind: count} if count > 1 else {}
        devices.append(device.but(kind=kind))
    units = []
    for unit in profile.units:
        own = {kind: unit.times[kind.rpartition("/")[0]].times(count) for kind, count in factors.items()}
        units.append(unit.but(times=own | unit.times))
    found = tuple(d.name for d in devices if d.name.rpartition(".")[0] in names or d.name in names)
    note = f"CPU in {parts} parts"
    return Scene(profile.but(units=tuple(units)), divided.but(devices=tuple(devices)), found, note)


def _joined(profile: Profile, machine: Machine, devices: list[Device], size: int) -> Scene | None:
    """Returns the scene in which `size` like GPUs of a host are one device that divides each operator over them."""
    alike: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        if device.type == "gpu":
            alike.setdefault((device.host, device.kind), []).append(device)
    teams = [found[i : i + size] for found in alike.values() for i in range(0, len(found) - size + 1, size)]
    if not teams:
        return None
    routes = {team[0].kind: machine.route(team[0].name, team[1].name) for team in teams}
    kinds = {kind: f"{size}x{kind}" for kind in routes}
    replaced = {d.name for team in teams for d in team}
    joined = [_team(team, kinds[team[0].kind]) for team in teams]
    units = []
    for unit in profile.units:
        own = {}
        for kind, route in routes.items():
            divided = unit.times[kind].times(1 / size)
            sent = COLLECTIVES / 2 * 2 * (size - 1) / size * unit.boundary_bytes / route.bytes_per_s
            waits = COLLECTIVES / 2 * 2 * (size - 1) * route.latency_s
            own[kinds[kind]] = divided.but(
                forward=_later(divided.forward, waits, sent),
                backward=_later(divided.backward, waits, sent),
                recompute=_later(divided.recompute, waits, sent),
            )
        units.append(unit.but(times=unit.times | own))
    rest = tuple(d for d in machine.devices if d.name not in replaced)
    # A team keeps the name of its first device, so that the machine's links hold for it.
    kept = [d.name for d in (*joined, *rest)]
    links = tuple(k for k in machine.links if all(fnmatch.filter(kept, end) for end in (k.source, k.target)))
    whole = machine.but(devices=(*joined, *rest), links=links)
    note = f"operators over {size} devices"
    reason = f"the engine does not divide operators yet (each device stands for {size})"
    return Scene(profile.but(units=tuple(units)), whole, tuple(d.name for d in joined), note, reason)


def _later(cost: Cost, fixed_s: float, per_sample_s: float) -> Cost:
    return cost.but(fixed_s=cost.fixed_s + fixed_s, per_sample_s=cost.per_sample_s + per_sample_s)


def _team(team: list[Device], kind: str) -> Device:
    first = team[0]
    return first.but(
        kind=kind,
        memory_bytes=first.memory_bytes * len(team),
        reserved_bytes=first.reserved_bytes * len(team),
        flop_per_s=first.flop_per_s * len(team),
        memory_bytes_per_s=first.memory_bytes_per_s * len(team),
        parameters_per_s=first.parameters_per_s * len(team),
    )
