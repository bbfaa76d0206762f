"""Measures a model's units on devices of this machine: time, memory and boundary size, at one or more microbatch sizes.

Equal units are measured once. Everything runs on copies, so that the model's state, such as batch statistics, does not
change.
"""

import copy
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.facts import HeadForm, Profile, Tie, Unit, UnitTime
from pipedejavu.plan import Precision
from pipedejavu.profile.dedup import unit_key
from pipedejavu.profile.expert_rows import expert_share, num_experts
from pipedejavu.profile.head_measurement import measure_head, merge_forms
from pipedejavu.profile.line_fit import fit_line
from pipedejavu.profile.operator_count import UnitWork, count_step
from pipedejavu.profile.sequential import Units
from pipedejavu.profile.stopwatch import Stopwatch
from pipedejavu.profile.unit_sample import UnitSample, has_same_units
from pipedejavu.profile.unit_step import PARTS, LossHead, moved, run_several, run_step, tensors_of
from pipedejavu.runtime.compiled_unit import LossCall, UnitCompiler
from pipedejavu.runtime.compute_precision import FULL, ComputeFormat, allowed_tf32, lower_, parameters_of

PLAIN = Precision()
_FEWEST, _MOST, _ENOUGH_S = 3, 20, 0.25
"""Number of timed passes: at least the first, at most the second, and enough to take this long together."""
_MOST_EQUAL = 4
"""A unit that stands for several is timed that many times as long, up to this factor: its error counts as often."""
_ISSUED = {"cuda"}
"""Device types that run asynchronously from the host."""
_WARM_UPS = {"cpu": 0, "cuda": 2}
"""Untimed passes after the one that counts; a GPU's first passes load kernels and choose algorithms."""
_TURNS = {"cpu": 3, "cuda": 1}
"""How often the timing goes through all units and sizes: the speed of a shared CPU drifts over seconds."""

_BUDGET_S = 20.0
"""Time for the timed passes on one kind of device; models of many or slow units get fewer passes, but each unit one."""
_SUSTAINED_S = 2.0
"""How long a GPU runs without a pause; after about a second its power limit slows it down."""
_TOGETHER = 4
"""Units whose passes the host issues together, if the memory suffices for what all of them save."""
_CYCLES_PER_S = 3e9
"""Above the clock rate of any GPU."""
_CACHE_BYTES = 64 << 20
"""More than the caches of most cores hold."""

Report = Callable[[str], None]
"""Called with the name of what is measured next."""
MakeUpdate = Callable[[Sequence[Tensor]], Callable[[], None]]
"""Takes parameters; returns a function that updates them once."""


def measure_profile(
    name: str,
    unit_samples: Sequence[UnitSample],
    ties: Sequence[frozenset[str]],
    kinds: Mapping[str, torch.device],
    make_update: MakeUpdate,
    report: Report = lambda text: None,  # noqa: ARG005
    compiler: UnitCompiler | None = None,
    precision: Precision = PLAIN,
) -> Profile:
    """Runs each unit forward and backward on a microbatch of each size, and its update, on a device of each kind.

    `ties` are the full names of parameters that units share. The profile has the time at each size and the line through
    them; bytes are those of the last size. The units must be the same at all sizes. They compute in `precision`. With a
    `compiler` they are timed compiled, while FLOP and bytes are those of eager units.
    """
    last = unit_samples[-1]
    form = ComputeFormat.of(precision, [module for _, module in last.units])
    assert all(has_same_units(unit_sample, last) for unit_sample in unit_samples)
    times: list[dict[str, UnitTime]] = [{} for _ in last.units]
    units: list[Unit] = []
    drift: dict[str, float] = {}
    forms: list[tuple[HeadForm, ...]] = []
    for kind, device in kinds.items():
        with form.context(device, caches=False), allowed_tf32(precision):
            measured = [_count_sample(unit_sample, device, make_update, form, compiler) for unit_sample in unit_samples]
            enough_s, num_turns = _within_budget(measured, _TURNS[device.type])
            turns = [_time_turn(measured, unit_samples, kind, device, enough_s, report) for _ in range(num_turns)]
            factor = _time_issue(measured, device) if device.type in _ISSUED else 1.0
        if len(turns) > 1:
            drift[kind] = stdev(turns) / fmean(turns)
        for unit_times, *same in zip(times, *measured, strict=True):
            by_size = {unit_sample.samples: unit.times for unit_sample, unit in zip(unit_samples, same, strict=True)}
            lines = {part: fit_line({n: taken[part] for n, taken in by_size.items()}) for part in PARTS}
            if device.type in _ISSUED:
                issue_s = same[0].issue_s
                lines = {part: line.times(factor).replace(issue_s=issue_s[part]) for part, line in lines.items()}
            unit_times[kind] = UnitTime(update_s=same[-1].update_s).replace(**lines)
        counted = [unit.counted for unit in measured[-1]]
        units = [
            describe(name, module, work, following, last.samples, form)
            for (name, module), work, following in zip(last.units, counted, (*counted[1:], None), strict=True)
        ]
        with form.context(device, caches=False), allowed_tf32(precision):
            forms.append(_head_forms(measured[-1][-1], last.samples, kind, device))
        if device.type == "cuda":
            del measured, counted
            torch.cuda.empty_cache()  # worker processes need the memory
    described = tuple(unit.replace(times=unit_times) for unit, unit_times in zip(units, times, strict=True))
    return Profile(
        name=name,
        units=described,
        ties=describe_ties(ties, last.units, form),
        drift=drift,
        head_forms=merge_forms(forms, -1),
        precision=str(precision),
    )


def _head_forms(unit: "_MeasuredUnit", samples: int, kind: str, device: torch.device) -> tuple[HeadForm, ...]:
    """Returns the last unit with its head in chunks."""
    assert unit.head is not None
    return measure_head(
        unit.module,
        unit.value,
        unit.head,
        is_first=unit.is_first,
        kind=kind,
        device=device,
        work=unit.counted,
        samples=samples,
        watch=partial(Stopwatch, device),
    )


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Joins a model's profiles from several kinds of devices; bytes are those of the one that needs most memory."""
    fullest = max(profiles, key=lambda profile: sum(u.activation_bytes + u.backward_work_bytes for u in profile.units))
    forms = merge_forms([profile.head_forms for profile in profiles], profiles.index(fullest))
    units = []
    for unit, *same in zip(fullest.units, *(profile.units for profile in profiles), strict=True):
        units.append(unit.replace(times={kind: times for other in same for kind, times in other.times.items()}))
    batch = {kind: cost for profile in profiles for kind, cost in profile.batch.items()}
    drift = {kind: share for profile in profiles for kind, share in profile.drift.items()}
    return fullest.replace(units=tuple(units), batch=batch, drift=drift, head_forms=forms)


def describe_ties(ties: Sequence[frozenset[str]], units: Units, form: ComputeFormat = FULL) -> tuple[Tie, ...]:
    """Returns the parameters that units share as records of the profile, in the order given."""
    sizes_by_id = {id(p): form.gradient_bytes(part, p) for _, m in units for part, p in parameters_of(m)}
    owned = [
        (u, n, sizes_by_id[id(p)]) for u, m in units for n, p in m.named_parameters(prefix=u, remove_duplicate=False)
    ]
    records = []
    for names in ties:
        sizes = {unit: size for unit, full, size in owned if full in names}
        records.append(Tie(units=tuple(sizes), size_bytes=max(sizes.values())))
    return tuple(records)


@dataclass
class _MeasuredUnit:
    """Measurements of one unit at one size on one device, which hold for all units equal to it."""

    name: str
    module: nn.Module
    value: Any
    head: LossHead | None
    is_first: bool
    counted: UnitWork
    count_s: float
    """Time of the pass in which its work was counted: more than an ordinary pass."""
    times: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    issue: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    """On a GPU: host time to issue each part of a unit alone."""
    issue_s: dict[str, float] = field(default_factory=dict)
    """On a GPU: host time to issue each part within a step of several units."""
    update_s: float = 0.0
    num_equal: int = 0
    compiler: UnitCompiler | None = None

    def ready(self, device: torch.device) -> tuple[nn.Module, LossHead | None]:
        """Returns a copy of the unit on a device, and its loss; if compiled, the copy computes the loss itself."""
        module = copy.deepcopy(self.module).to(device)
        if self.compiler is None:
            return module, self.head
        return _CompiledUnit(self.name, module, self.head, self.compiler), None

    def run(self, device: torch.device, enough_s: float, fewest: int) -> float:
        """Times passes on a copy of the unit; returns the time of forward and backward, summed over all equal units."""
        (module, head), before = self.ready(device), len(self.times["forward"])
        issue_s = 0.0
        for _ in range(max(_WARM_UPS[device.type], 2 if self.compiler else 0)):  # the first call compiles
            start = time.perf_counter()
            run_step(module, self.value, head, self.is_first, Stopwatch(device))
            issue_s = time.perf_counter() - start
        for _ in _repeats(enough_s, fewest):
            _occupy(device, issue_s)
            watch = Stopwatch(device)
            run_step(module, self.value, head, self.is_first, watch)
            for part in PARTS:
                self.times[part].append(watch.time_s(part))
                self.issue[part].append(watch.host_s.get(part, 0.0))
        return self.num_equal * sum(median(self.times[part][before:]) for part in ("forward", "backward"))


class _CompiledUnit(nn.Module):
    """A unit that runs compiled, together with its loss if it is the last."""

    def __init__(self, name: str, module: nn.Module, head: LossHead | None, compiler: UnitCompiler):
        super().__init__()
        self.name, self.module, self.compiler = name, module, compiler
        self.head = LossCall(head.loss, head.targets) if head else None

    def forward(self, value: Any) -> Any:
        """Returns the output of the unit, or its loss."""
        return self.compiler.run(self.name, self.module, value, self.head)


def _count_sample(
    unit_sample: UnitSample,
    device: torch.device,
    make_update: MakeUpdate,
    form: ComputeFormat,
    compiler: UnitCompiler | None,
) -> list[_MeasuredUnit]:
    """Runs each distinct unit once and counts its work; equal units share one record."""
    value, targets = moved(unit_sample.inputs, device), moved(unit_sample.targets, device)
    known: dict[Hashable, _MeasuredUnit] = {}
    measured = []
    for index, (name, module) in enumerate(unit_sample.units):
        head = unit_sample.head(index, targets)
        key = (unit_key(module, value), head is None, index == 0)
        if key not in known:
            computed = lower_(copy.deepcopy(module), form) if form.lowers else module
            unit = copy.deepcopy(computed).to(device)
            start = time.perf_counter()
            counted = count_step(unit, value, head, index == 0)
            count_s = time.perf_counter() - start
            known[key] = _MeasuredUnit(name, computed, value, head, index == 0, counted, count_s, compiler=compiler)
            known[key].update_s = _update_s([p.detach() for p in unit.parameters() if p.requires_grad], make_update)
            del unit
        known[key].num_equal += 1
        measured.append(known[key])
        value = known[key].counted.output
    return measured


def _within_budget(measured: Sequence[Sequence[_MeasuredUnit]], turns: int) -> tuple[float, int]:
    """Returns how long a unit is timed in all turns, if it stands for itself alone, and how many turns are made."""
    units = {id(unit): unit for units in measured for unit in units}.values()
    planned_s = _ENOUGH_S * sum(min(unit.num_equal, _MOST_EQUAL) for unit in units)
    fewest_s = sum(unit.count_s for unit in units)
    return _ENOUGH_S * min(1.0, _BUDGET_S / planned_s), max(1, min(turns, int(_BUDGET_S / fewest_s)))


def _time_turn(
    measured: Sequence[Sequence[_MeasuredUnit]],
    unit_samples: Sequence[UnitSample],
    kind: str,
    device: torch.device,
    enough_s: float,
    report: Report,
) -> float:
    """Times every distinct unit at each size; returns the time of one pass of the model, summed over the sizes."""
    turns, taken_s = _TURNS[device.type], 0.0
    for units, unit_sample in zip(measured, unit_samples, strict=True):
        for unit in {id(unit): unit for unit in units}.values():
            report(f"{unit.name} ({kind}, {unit_sample.samples} samples)")
            taken_s += unit.run(device, enough_s * min(unit.num_equal, _MOST_EQUAL) / turns, -(-_FEWEST // turns))
    return taken_s


def _time_issue(measured: Sequence[Sequence[_MeasuredUnit]], device: torch.device) -> float:
    """Measures how long the host takes to issue each unit; returns the slowdown of the GPU under sustained load."""
    factor = _slow_down(measured[-1], device)
    for unit in {id(unit): unit for unit in measured[0]}.values():
        unit.issue_s = _issue_s(unit, device)
    return factor


def _slow_down(units: Sequence[_MeasuredUnit], device: torch.device) -> float:
    """Returns how much slower a GPU is under sustained load, as a factor, measured on the most expensive unit."""
    unit = max(units, key=lambda unit: unit.num_equal * sum(map(median, unit.times.values())))
    expected_s, issue_s = (sum(map(median, taken.values())) for taken in (unit.times, unit.issue))
    (module, head), sustained = unit.ready(device), list[float]()
    for _ in range(_FEWEST):
        start = time.perf_counter()
        while time.perf_counter() - start < _SUSTAINED_S / _FEWEST:
            run_step(module, unit.value, head, unit.is_first, Stopwatch(device))
        _occupy(device, issue_s)
        watch = Stopwatch(device)
        run_step(module, unit.value, head, unit.is_first, watch)
        sustained.append(sum(map(watch.time_s, PARTS)))
    return max(1.0, median(sustained) / expected_s)


def _issue_s(unit: _MeasuredUnit, device: torch.device) -> dict[str, float]:
    """Returns the host's time to issue each part of a unit among others; alone, its caches are cold each time."""
    count = _TOGETHER if 2 * _TOGETHER * sum(unit.counted.saved) < _free_bytes(device) else 1
    (module, head), watches = unit.ready(device), list[Stopwatch]()
    for _ in _repeats(_ENOUGH_S, _WARM_UPS[device.type] + _FEWEST):
        watch = Stopwatch(device)
        run_several(module, unit.value, head, unit.is_first, watch, count)
        for part in watch.events:
            watch.time_s(part)  # the next pass starts when the device is idle
        watches.append(watch)
    warm = watches[_WARM_UPS[device.type] :]
    alone = {part: median(times) for part, times in unit.issue.items()}
    forward, backward = (median(w.host_s.get(part, 0.0) for w in warm) / count for part in ("forward", "backward"))
    half = backward / alone["backward"] if alone["backward"] else 1.0
    halves = {part: half * alone[part] for part in ("input_backward", "weight_backward")}
    return {"forward": forward, "recompute": forward, "backward": backward, **halves}


def _free_bytes(device: torch.device) -> float:
    """Returns a GPU's free memory, including what its allocator has cached."""
    if device.type != "cuda":
        return math.inf
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _repeats(enough_s: float, fewest: int) -> Iterator[int]:
    """Yields pass numbers until there are at least `fewest` and they have taken `enough_s`."""
    start = time.perf_counter()
    for n in range(_MOST):
        if n >= fewest and time.perf_counter() - start > enough_s:
            return
        yield n


def _occupy(device: torch.device, time_s: float) -> None:
    """Keeps a GPU busy for at least `time_s`, so that what is issued meanwhile runs without gaps."""
    if device.type == "cuda" and time_s:
        torch.cuda._sleep(round(time_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]


def describe(
    name: str,
    module: nn.Module,
    counted: UnitWork,
    following: UnitWork | None,
    samples: int,
    form: ComputeFormat = FULL,
) -> Unit:
    """Returns a unit's sizes; `following` is the work of the next unit, or None for the last."""
    owned = [*parameters_of(module)]
    trained = [(part, p) for part, p in owned if p.requires_grad]
    return Unit(
        name=name,
        flop=counted.flop / samples,
        num_parameters=sum(p.numel() for p in module.parameters()),
        parameter_bytes=form.weight_bytes(module),
        gradient_bytes=sum(form.gradient_bytes(part, p) for part, p in trained),
        optimizer_bytes=sum(form.state_bytes(part, p) for part, p in trained),
        expert_share=expert_share(module),
        num_experts=num_experts(module),
        expert_rows=min((rows.count for rows in counted.expert_rows), default=0) / samples,
        expert_row_bytes=sum(rows.size_bytes for rows in counted.expert_rows) / samples,
        activation_bytes=counted.saved_bytes / samples,
        shared_bytes=min(counted.saved_output_bytes, following.saved_input_bytes) / samples if following else 0.0,
        forward_work_bytes=counted.forward_work_bytes / samples,
        backward_work_bytes=counted.backward_work_bytes / samples,
        parameter_parts=tuple(form.bytes_of(part, p) for part, p in owned),
        activation_parts=tuple(size / samples for size in counted.saved),
        boundary_bytes=sum(t.nbytes for t in tensors_of(counted.output)) / samples,
        has_batch_statistics=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()),
    )


def _update_s(parameters: Sequence[Tensor], make_update: MakeUpdate) -> float:
    """Times updates of a unit's parameters; flushes a CPU's caches in between, as the rest of a step does."""
    if not parameters:
        return 0.0
    update, device = make_update(parameters), parameters[0].device
    times: list[float] = []
    others = torch.zeros(_CACHE_BYTES, dtype=torch.uint8) if device.type == "cpu" else None
    for _ in range(1 + _FEWEST):
        if others is not None:
            others.add_(1)
        _occupy(device, times[-1] if times else 0.0)
        watch = Stopwatch(device)
        with watch.part("update"):
            update()
        times.append(max(watch.time_s("update"), watch.host_s["update"]))
    return median(times[1:])  # the first pass warms up
