"""Planning problems: the machine as given, with its CPUs divided, or with tensor-parallel groups of devices."""

from collections import Counter
from collections.abc import Iterator
from math import inf

from pipedejavu.facts import InputError, Machine, Profile, with_part_times
from pipedejavu.plan.axis import Layout
from pipedejavu.program.tp_group import TpGroup, join, with_tp_times
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
            divided = _with_divided_cpus(profile, machine, names, parts)
            yield divided
            yield from _with_tp_groups(divided, options)
    yield from _with_tp_groups(problem, options)


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


def _with_tp_groups(problem: PlanningProblem, options: SearchOptions) -> Iterator[PlanningProblem]:
    """Yields problems with tensor-parallel groups of equal devices of one host: of one size, or of a size per stage.

    Groups are of GPUs, or of CPUs if there are no GPUs. Those of a size per stage do not run.
    """
    profile, machine, known = problem.profile, problem.machine, problem.profile.tp_sizes
    has_gpus = any(machine.device(name).type == "gpu" for name in problem.devices)
    if known is None and (options.is_runnable or not has_gpus):
        return
    equal = _equal_devices(problem, "gpu" if has_gpus else "cpu")
    every: list[TpGroup] = []
    for size in TP_SIZES:
        groups = tuple(names[i : i + size] for names in equal for i in range(0, len(names) - size + 1, size))
        every += groups if known is None or size in known else ()
        for layouts in _layouts_over(profile, size, len(problem.devices)) if groups else ():
            joined, whole = join(profile, machine, groups, layouts)
            leads, note = tuple(group[0] for group in groups), f"operators over {size} devices"
            yield PlanningProblem(joined, whole, leads, note, problem, groups, layouts=layouts)
    names = tuple(name for some in equal for name in some)
    if every and not options.is_runnable and 2 < len(names) <= MOST_FREE:
        yield _with_degrees(problem, names, every)


def _equal_devices(problem: PlanningProblem, type_: str) -> list[tuple[str, ...]]:
    """Returns the devices of a type, those of one host and kind together."""
    equal: dict[tuple[str, str], list[str]] = {}
    for device in map(problem.machine.device, problem.devices):
        if device.type == type_:
            equal.setdefault((device.host, device.kind), []).append(device.name)
    return [tuple(names) for names in equal.values()]


def _with_degrees(problem: PlanningProblem, names: tuple[str, ...], tp_groups: list[TpGroup]) -> PlanningProblem:
    """Returns the problem in which each stage chooses the size of its tensor-parallel groups."""
    machine, degrees = problem.machine, (1, *sorted({len(tp_group) for tp_group in tp_groups}))
    profile = with_tp_times(problem.profile, machine, [[*map(machine.device, tp_group)] for tp_group in tp_groups])
    note = "operators over each stage's own devices"
    return PlanningProblem(profile, machine, names, note, problem, degrees=degrees)


def _layouts_over(profile: Profile, size: int, num_devices: int) -> Iterator[tuple[Layout, ...]]:
    """Yields what groups of a size may divide beside operators: nothing, and layouts that the model's graph has.

    On more than `MOST_FREE` devices that is only the layout that divides most. A head in chunks needs all logits, so it
    excludes a divided vocabulary.
    """
    if profile.tp_sizes is None or size in profile.tp_sizes:
        yield ()
    kinds = {kind for kind, sizes in profile.layout_sizes.items() if size in sizes}
    if profile.head_chunks > 1:
        kinds = {kind for kind in kinds if "vocabulary" not in kind}
    along: list[tuple[Layout, ...]] = [("sequence", "vocabulary"), ("sequence",), ("vocabulary",), ("context",)]
    known = [layouts for layouts in along if "+".join(layouts) in kinds]
    if ("sequence", "vocabulary") in known:
        known.remove(("sequence",))  # it saves no more
    yield from known if num_devices <= MOST_FREE else known[:1]
