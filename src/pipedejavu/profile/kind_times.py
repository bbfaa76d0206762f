"""Measures all units on one kind of device within a time budget; what is left out is estimated, and marked.

Sizes are timed in order of use: the last one, one sample, those between. Of the units the costly ones come first. A
device that an estimate finds many times slower than the fastest one is not measured.
"""

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import torch
from torch import nn

from pipedejavu.facts import Cost, UnitTime, format_seconds
from pipedejavu.profile.dedup import unit_key
from pipedejavu.profile.line_fit import fit_line
from pipedejavu.profile.measured_unit import (
    ENOUGH_S,
    FEWEST,
    MOST_EQUAL,
    MakeUpdate,
    MeasuredUnit,
    Report,
    measure_issue,
    measure_slowdown,
    run_forward,
    time_update,
)
from pipedejavu.profile.operator_count import UnitWork, count_on_fakes, count_step
from pipedejavu.profile.quick_rates import measure_rates
from pipedejavu.profile.time_budget import BudgetPart
from pipedejavu.profile.unit_sample import UnitSample
from pipedejavu.profile.unit_step import PARTS, LossHead, moved
from pipedejavu.runtime.compiled_unit import UnitCompiler
from pipedejavu.runtime.compute_precision import ComputeFormat, lower_

RULED_OUT = 20.0
"""A device is not measured if it is estimated to take this many times as long as the fastest. Even if the estimate is
twice too long, it could do no more than a tenth of the fastest one's work."""
_PASSES_OF_FORWARD = 6
"""A pass of all parts takes about as long as this many forwards."""
_ISSUED = {"cuda"}
"""Device types that run asynchronously from the host."""
_TURNS = {"cpu": 3, "cuda": 1}
"""How often the timing goes through all units and sizes: the speed of a shared CPU drifts over seconds."""

_Sizes = dict[int, list[MeasuredUnit]]
"""By number of samples: the units, of which equal ones share a record."""


class MeasureSetting(NamedTuple):
    """What is the same on all kinds of devices."""

    unit_samples: Sequence[UnitSample]
    """For each microbatch size; the last one is the size asked for."""
    make_update: MakeUpdate
    form: ComputeFormat
    compiler: UnitCompiler | None
    report: Report


@dataclass(frozen=True)
class MeasuredKind:
    """The times of all units on one kind of device."""

    kind: str
    device: torch.device
    units: Sequence[MeasuredUnit]
    """At the last size; without times if the device was ruled out."""
    times: Sequence[UnitTime]
    drift: float | None = None
    """Variation between turns; None if there was one turn."""
    estimated: str = ""
    """Which times are estimated, and why; empty if none is."""
    costs: Mapping[int, Mapping[str, Cost]] = field(default_factory=dict)
    """By id of a unit's record: its times as measured."""

    @property
    def is_measured(self) -> bool:
        """Whether anything ran on the device."""
        return bool(self.costs)

    def step_s(self, samples: int) -> float:
        """Returns the time of a forward and a backward of the model."""
        return sum(time.forward.at(samples) + time.backward.at(samples) for time in self.times)


def measure_kind(
    kind: str, device: torch.device, setting: MeasureSetting, budget: BudgetPart, known: Sequence[MeasuredKind]
) -> MeasuredKind:
    """Measures the units on a kind of device; `known` are the kinds that were measured before."""
    last = setting.unit_samples[-1]
    same = next((other for other in known if _is_like(other.device, device)), None)
    if same and not same.is_measured:
        return _estimate_kind(kind, device, setting, same.units, same.estimated)
    if known and not same and (reason := _rule_out(device, setting.form, known, last.samples)):
        return _estimate_kind(kind, device, setting, known[0].units, reason)
    if same:
        copies = {id(unit): unit.again() for unit in same.units}
        units = [copies[id(unit)] for unit in same.units]
    else:
        units = _count_units(last, device, setting, budget)
    sizes: _Sizes = {last.samples: units}
    drift = _time_sizes(sizes, kind, device, setting, budget)
    factor = _time_issue(sizes, device, budget) if device.type in _ISSUED else 1.0
    _time_updates(units, device, setting.make_update, budget)
    costs = {id(unit): _costs(sizes, index, device, factor) for index, unit in enumerate(units)}
    costs = {key: cost for key, cost in costs.items() if cost}
    filled = _fill(units, costs, last.samples, device, setting.form, same)
    times = [
        UnitTime(update_s=unit.update_s or 0.0, is_estimated=id(unit) not in costs).replace(**filled[id(unit)])
        for unit in units
    ]
    estimated = _describe_left_out(units, costs)
    return MeasuredKind(kind, device, units, times, drift, estimated, costs)


def _is_like(device: torch.device, other: torch.device) -> bool:
    """Whether units have the same work on two devices, and about the same proportions of times."""
    return device.type == other.type


def _distinct(units: Sequence[MeasuredUnit]) -> list[MeasuredUnit]:
    """Returns each record once, the costliest first."""
    once = {id(unit): unit for unit in units}.values()
    return sorted(once, key=lambda unit: -unit.expected_s * unit.num_equal)


def _count_units(
    unit_sample: UnitSample, device: torch.device, setting: MeasureSetting, budget: BudgetPart
) -> list[MeasuredUnit]:
    """Runs the forward of each distinct unit, and counts its work; equal units share one record.

    Work is counted in a pass or, if the budget has no time for one, by shapes alone.
    """
    value, targets = moved(unit_sample.inputs, device), moved(unit_sample.targets, device)
    known: dict[Hashable, tuple[MeasuredUnit, Any]] = {}
    units = []
    for index, (name, module) in enumerate(unit_sample.units):
        head = unit_sample.head(index, targets)
        key = (unit_key(module, value), head is None, index == 0)
        if key not in known:
            computed = _in_format(module, setting.form)
            output, forward_s = run_forward(computed, value, device)
            expected_s = _PASSES_OF_FORWARD * forward_s
            is_cheap = device.type != "cpu" or budget.allows(2 * expected_s)  # counting slows a pass
            work = _count_work(computed, value, head, index == 0, device, by_shapes=not is_cheap)
            unit = MeasuredUnit(name, computed, value, head, index == 0, work, expected_s)
            unit.compiler = setting.compiler
            known[key] = unit, output
        unit, value = known[key]
        unit.num_equal += 1
        units.append(unit)
    return units


def _count_work(
    module: nn.Module, value: Any, head: LossHead | None, is_first: bool, device: torch.device, *, by_shapes: bool
) -> UnitWork:
    """Counts the work of a unit in a pass, or by shapes alone if asked or if the device has no memory for the pass."""
    work = count_on_fakes(module, value, head, is_first) if by_shapes else None
    if work is not None:
        return work
    try:
        return count_step(copy.deepcopy(module).to(device), value, head, is_first)
    except torch.OutOfMemoryError:
        work = None if by_shapes else count_on_fakes(module, value, head, is_first)
        if work is None:
            raise
        return work


def _in_format(module: nn.Module, form: ComputeFormat) -> nn.Module:
    """Returns a unit with its weights in the formats that they are computed with."""
    return lower_(copy.deepcopy(module), form) if form.lowers else module


def _at_size(
    unit_sample: UnitSample, units: Sequence[MeasuredUnit], device: torch.device, form: ComputeFormat
) -> list[MeasuredUnit]:
    """Returns records of the same units at another size, with the inputs that their forwards give.

    A model that is not a chain has modules of its own for each size.
    """
    value, targets = moved(unit_sample.inputs, device), moved(unit_sample.targets, device)
    known: dict[int, tuple[MeasuredUnit, Any]] = {}
    smaller = []
    for index, unit in enumerate(units):
        if id(unit) not in known:
            module = _in_format(unit_sample.units[index][1], form)
            output, forward_s = run_forward(module, value, device)
            other = replace(unit.again(), module=module, value=value, head=unit_sample.head(index, targets))
            other.expected_s = _PASSES_OF_FORWARD * forward_s
            known[id(unit)] = other, output
        other, value = known[id(unit)]
        smaller.append(other)
    return smaller


def _time_sizes(
    sizes: _Sizes, kind: str, device: torch.device, setting: MeasureSetting, budget: BudgetPart
) -> float | None:
    """Times every distinct unit at each size, in turns; returns the variation between whole turns."""
    *smaller, last = setting.unit_samples
    order = [last, *smaller]
    units = sizes[last.samples]
    distinct = _distinct(units)
    planned_s = ENOUGH_S * len(order) * sum(min(unit.num_equal, MOST_EQUAL) for unit in distinct)
    once_s = len(order) * sum(unit.expected_s for unit in distinct)
    enough_s = ENOUGH_S * min(1.0, max(0.0, budget.left_s) / planned_s)
    num_turns = max(1, min(_TURNS[device.type], int(budget.left_s / once_s) if once_s else 1))
    turns = []
    for _ in range(num_turns):
        taken_s, is_whole = 0.0, True
        for unit_sample in order:
            if unit_sample.samples not in sizes:
                if not budget.allows(0.0):
                    is_whole = False
                    continue
                sizes[unit_sample.samples] = _at_size(unit_sample, units, device, setting.form)
            for unit in _distinct(sizes[unit_sample.samples]):
                is_needed = not any(unit.is_timed for same in sizes.values() for unit in same)
                if unit.is_too_large:
                    continue
                if not is_needed and not budget.allows(unit.expected_s):
                    is_whole = False
                    continue
                setting.report(f"{unit.name} ({kind}, {unit_sample.samples} samples)")
                repeats = min(unit.num_equal, MOST_EQUAL) / num_turns
                try:
                    taken_s += unit.run(device, enough_s * repeats, -(-FEWEST // num_turns))
                except torch.OutOfMemoryError:
                    unit.leave_out()
        turns += [taken_s] if is_whole else []
    return stdev(turns) / fmean(turns) if len(turns) > 1 else None


def _time_issue(sizes: _Sizes, device: torch.device, budget: BudgetPart) -> float:
    """Measures how long the host takes to issue each unit; returns the slowdown of the GPU under sustained load."""
    _, last = max(sizes.items())
    timed = [unit for unit in _distinct(last) if unit.is_timed]
    factor = measure_slowdown(timed, device) if timed and budget.allows(0.0) else 1.0
    for index, unit in enumerate(last):
        smaller = next((units[index] for _, units in sorted(sizes.items()) if units[index].is_timed), None)
        if smaller is None or unit.issue_s:
            continue
        alone_s = {part: median(times) for part, times in smaller.issue.items()}
        unit.issue_s = measure_issue(smaller, device) if budget.allows(ENOUGH_S) else alone_s
    return factor


def _time_updates(
    units: Sequence[MeasuredUnit], device: torch.device, make_update: MakeUpdate, budget: BudgetPart | None
) -> None:
    """Times the update of each distinct unit; after the budget only that of the largest, which the others follow."""
    sizes = {id(unit): sum(p.numel() for p in unit.module.parameters() if p.requires_grad) for unit in units}
    rate = 0.0
    for unit in sorted({id(unit): unit for unit in units}.values(), key=lambda unit: -sizes[id(unit)]):
        if rate and sizes[id(unit)] and not (budget and budget.allows(0.0)):
            unit.update_s = sizes[id(unit)] / rate
            continue
        module = copy.deepcopy(unit.module).to(device)
        unit.update_s = time_update([p.detach() for p in module.parameters() if p.requires_grad], make_update)
        rate = rate or (sizes[id(unit)] / unit.update_s if unit.update_s else 0.0)


def _costs(sizes: _Sizes, index: int, device: torch.device, factor: float) -> dict[str, Cost]:
    """Returns the measured times of a unit by part; empty if it was not timed."""
    timed = {samples: units[index] for samples, units in sorted(sizes.items()) if units[index].is_timed}
    if not timed:
        return {}
    lines = {part: fit_line({n: unit.times[part] for n, unit in timed.items()}) for part in PARTS}
    if device.type not in _ISSUED:
        return lines
    issue_s = max(sizes.items())[1][index].issue_s
    return {part: line.times(factor).replace(issue_s=issue_s.get(part, 0.0)) for part, line in lines.items()}


def _rule_out(device: torch.device, form: ComputeFormat, known: Sequence[MeasuredKind], samples: int) -> str:
    """Returns why a device need not be measured; empty if it may be fast enough."""
    rates = measure_rates(device, form.autocast or torch.float32)
    works = [
        work for unit in known[0].units for part in ("forward", "backward") for work in unit.counted.parts.get(part, ())
    ]
    estimate_s, fastest = rates.time_s(works), min(known, key=lambda other: other.step_s(samples))
    ratio = estimate_s / fastest.step_s(samples)
    if ratio < RULED_OUT:
        return ""
    return (
        f"not measured: forward and backward of {samples} samples are estimated at {format_seconds(estimate_s)},"
        f" {ratio:.0f} times as long as on {fastest.kind}"
    )


def _estimate_kind(
    kind: str, device: torch.device, setting: MeasureSetting, units: Sequence[MeasuredUnit], reason: str
) -> MeasuredKind:
    """Returns a kind whose passes are estimated; of the updates, which may run on it, the largest is timed."""
    copies = {id(unit): unit.again() for unit in units}
    units = [copies[id(unit)] for unit in units]
    _time_updates(units, device, setting.make_update, None)
    filled = _fill(units, {}, setting.unit_samples[-1].samples, device, setting.form, None)
    times = [UnitTime(update_s=unit.update_s or 0.0, is_estimated=True).replace(**filled[id(unit)]) for unit in units]
    return MeasuredKind(kind, device, units, times, estimated=reason)


def _fill(
    units: Sequence[MeasuredUnit],
    costs: Mapping[int, Mapping[str, Cost]],
    samples: int,
    device: torch.device,
    form: ComputeFormat,
    same: MeasuredKind | None,
) -> dict[int, Mapping[str, Cost]]:
    """Returns the times of all units: as measured, or estimated in proportion to those that were measured.

    An estimate is the time on a kind of device of the same type or, without one, that of its counted operations.
    """
    filled: dict[int, Mapping[str, Cost]] = dict(costs)
    if all(id(unit) in costs for unit in units):
        return filled
    rates = measure_rates(device, form.autocast or torch.float32)

    def estimate(index: int, part: str) -> Cost:
        if same is not None:
            line: Cost = getattr(same.times[index], part) or Cost()
            return line
        return Cost(per_sample_s=rates.time_s(units[index].counted.parts.get(part, ())) / samples)

    for part in PARTS:
        pairs = [
            (costs[id(unit)][part].at(samples), estimate(n, part).at(samples))
            for n, unit in enumerate(units)
            if id(unit) in costs
        ]
        measured_s, estimated_s = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        factor = measured_s / estimated_s if measured_s and estimated_s else 1.0
        for n, unit in enumerate(units):
            if id(unit) not in costs:
                filled[id(unit)] = {**filled.get(id(unit), {}), part: estimate(n, part).times(factor)}
    return filled


def _describe_left_out(units: Sequence[MeasuredUnit], costs: Mapping[int, Mapping[str, Cost]]) -> str:
    names = list(dict.fromkeys(unit.name for unit in units if id(unit) not in costs))
    if not names:
        return ""
    distinct = len({id(unit) for unit in units})
    which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return f"{len(names)} of {distinct} distinct units ({which}) estimated, as the time for measuring was over"
