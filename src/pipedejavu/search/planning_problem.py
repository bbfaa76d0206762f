"""Planning problems: the machine as given, with its CPUs divided, or with GPUs joined into tensor-parallel groups."""

from collections import Counter
from collections.abc import Iterator
from math import inf

from pipedejavu.facts import Device, InputError, Machine, Profile, with_part_times
from pipedejavu.program.tp_group import join, with_tp_times
from pipedejavu.search.candidate_plan import PlanningProblem
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.subspace import MOST_FREE, divisors

MOST_PARTS = 16
"""Parts that a CPU is divided into at most."""
LEAST_PART = 0.01
"""Share of the other devices' speed below which a kind of device is left out."""
TYPICAL = 8
"""Samples per microbatch at which the speeds of devices are compared."""
TP_SIZES = (2, 4, 8)


def problems_of(
    profile: Profile, machine: Machine, options: SearchOptions, *, all_devices: bool = False
) -> Iterator[PlanningProblem]:
    """Yields the problems to plan for; raises InputError if no device can be used.

    Unless `all_devices`, kinds that add less than `LEAST_PART` to the speed of the others train nothing.
    """
    names = usable(profile, machine, options)
    names = names if all_devices else worthwhile(profile, machine, names)
    problem = PlanningProblem(profile, machine, names)
    yield problem
    devices = [machine.device(name) for name in names]
    if all(d.type == "cpu" for d in devices):
        most = max(d.most_workers for d in devices)
        for parts in (n for n in divisors(most) if 1 < n <= MOST_PARTS):
            yield _with_divided_cpus(profile, machine, names, parts)
    if not options.is_runnable:
        yield from _with_tp_groups(problem, devices)


def usable(profile: Profile, machine: Machine, options: SearchOptions) -> tuple[str, ...]:
    """Returns the devices for whose kind all units have times, GPUs first."""
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
    """Returns the devices without the slowest kinds that add less than `LEAST_PART` to the speed of the others."""
    counts = Counter(machine.device(name).kind for name in names)
    rates = {}
    for kind, count in counts.items():
        times = [profile.time(unit, kind) for unit in profile.units]
        work = sum(time.forward.at(TYPICAL) + time.backward.at(TYPICAL) for time in times)
        rates[kind] = count / work if work else inf
    order = sorted(rates, key=rates.__getitem__)
    left = {kind for n, kind in enumerate(order) if rates[kind] < LEAST_PART * sum(rates[k] for k in order[n + 1 :])}
    return tuple(name for name in names if machine.device(name).kind not in left)


def _with_divided_cpus(profile: Profile, machine: Machine, names: tuple[str, ...], parts: int) -> PlanningProblem:
    """Returns the problem with CPUs divided into parts, whose times are measured or else scaled."""
    num_workers = sum(min(parts, machine.device(name).most_workers) for name in names)
    divided = machine.divided(num_workers, by_kind=True)
    devices = tuple(d.name for d in divided.devices if d.name.rpartition(".")[0] in names or d.name in names)
    profile, _ = with_part_times(profile, divided)
    return PlanningProblem(profile, divided, devices, f"CPU in {parts} parts")


def _with_tp_groups(problem: PlanningProblem, devices: list[Device]) -> Iterator[PlanningProblem]:
    """Yields problems with tensor-parallel groups of equal GPUs on one host: of one size, or of a size per stage."""
    equal: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        if device.type == "gpu":
            equal.setdefault((device.host, device.kind), []).append(device)
    profile, machine = problem.profile, problem.machine
    every = []
    known = problem.profile.tp_sizes
    for size in (n for n in TP_SIZES if known is None or n in known):
        tp_groups = [gpus[i : i + size] for gpus in equal.values() for i in range(0, len(gpus) - size + 1, size)]
        if not tp_groups:
            break
        every += tp_groups
        names = tuple(tuple(d.name for d in tp_group) for tp_group in tp_groups)
        joined, whole = join(profile, machine, names)
        note = f"operators over {size} devices"
        yield PlanningProblem(joined, whole, tuple(tp_group[0] for tp_group in names), note, problem, names)
    all_gpus = tuple(device.name for gpus in equal.values() for device in gpus)
    if every and 2 < len(all_gpus) <= MOST_FREE:
        degrees = (1, *sorted({len(tp_group) for tp_group in every}))
        note = "operators over each stage's own devices"
        yield PlanningProblem(with_tp_times(profile, machine, every), machine, all_gpus, note, problem, degrees=degrees)
