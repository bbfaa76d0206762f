"""Measures a model's units on devices of this machine: time, memory and boundary of each, at one microbatch or several.

Units that are alike are measured once. Everything runs on copies, so that what is measured (batch statistics, say)
stays as it was.
"""

import copy
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.facts import Profile, Tie, Unit, UnitTime
from pipedejavu.profile.dedup import likeness
from pipedejavu.profile.line_fit import fit_line
from pipedejavu.profile.operator_count import Counted, count_step
from pipedejavu.profile.sequential import Units
from pipedejavu.profile.unit_sample import UnitSample, has_same_units
from pipedejavu.profile.unit_step import PARTS, Head, moved, run_several, run_step, tensors_of

_FEWEST, _MOST, _ENOUGH_S = 3, 20, 0.25
"""Passes that are timed: at least so many, and more of short ones, until they took so long together."""
_MOST_ALIKE = 4
"""Units that stand for others are timed for as many times as long, up to this: their errors count as often."""
_ISSUED = {"cuda"}
"""Types of devices that the host issues work to, and that run behind it."""
_WARM_UPS = {"cpu": 0, "cuda": 2}
"""Beside the pass that counts. A GPU's first passes load kernels and choose algorithms."""
_TURNS = {"cpu": 3, "cuda": 1}
"""How often the timing goes through all units and sizes: a CPU that others share is slower for seconds, then faster."""

_SUSTAINED_S = 2.0
"""For how long a GPU runs without a pause: after a second or so it is as slow as its power lets it be."""
_TOGETHER = 4
"""Units whose passes the host issues one behind the other, where there is room for what all of them save."""
_CYCLES_PER_S = 3e9
"""More than any GPU has."""
_CACHE_BYTES = 64 << 20
"""More than the caches of most cores hold."""

Report = Callable[[str], None]
"""Is told what is measured next."""
MakeUpdate = Callable[[Sequence[Tensor]], Callable[[], None]]
"""Takes parameters; returns what updates them once."""


def measure_profile(
    name: str,
    unit_samples: Sequence[UnitSample],
    ties: Sequence[frozenset[str]],
    kinds: Mapping[str, torch.device],
    make_update: MakeUpdate,
    report: Report = lambda text: None,  # noqa: ARG005
) -> Profile:
    """Runs each unit forward and backward on a microbatch of each size, and its update, on a device of each kind.

    `ties` are the full names of parameters that units share. Times are those of every size and the line through them;
    bytes are those of the last. The units must be the same at all sizes.
    """
    assert all(has_same_units(unit_sample, unit_samples[-1]) for unit_sample in unit_samples)
    times: list[dict[str, UnitTime]] = [{} for _ in unit_samples[-1].units]
    found: list[Unit] = []
    drift: dict[str, float] = {}
    for kind, device in kinds.items():
        rows = [_count_shot(unit_sample, device, make_update) for unit_sample in unit_samples]
        turns = [_time_turn(rows, unit_samples, kind, device, report) for _ in range(_TURNS[device.type])]
        if device.type in _ISSUED:
            factor = _slow_down(rows[-1], device)
            for row in {id(row): row for row in rows[0]}.values():
                row.issue_s = _issue_s(row, device)
        if len(turns) > 1:
            drift[kind] = stdev(turns) / fmean(turns)
        for own, *same in zip(times, *rows, strict=True):
            by_size = {unit_sample.samples: row.times for unit_sample, row in zip(unit_samples, same, strict=True)}
            lines = {part: fit_line({n: taken[part] for n, taken in by_size.items()}) for part in PARTS}
            if device.type in _ISSUED:
                issue_s = same[0].issue_s
                lines = {part: line.times(factor).replace(issue_s=issue_s[part]) for part, line in lines.items()}
            own[kind] = UnitTime(update_s=same[-1].update_s).replace(**lines)
        counted = [row.counted for row in rows[-1]]
        found = [
            describe(unit, module, own, behind, unit_samples[-1].samples)
            for (unit, module), own, behind in zip(unit_samples[-1].units, counted, (*counted[1:], None), strict=True)
        ]
        if device.type == "cuda":
            del rows, counted
            torch.cuda.empty_cache()  # the workers are other processes, and need it
    described = tuple(unit.replace(times=own) for unit, own in zip(found, times, strict=True))
    return Profile(name=name, units=described, ties=describe_ties(ties, unit_samples[-1].units), drift=drift)


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Joins profiles of one model that were measured on different kinds of devices; bytes are those of the fullest."""
    fullest = max(profiles, key=lambda profile: sum(u.activation_bytes + u.backward_work_bytes for u in profile.units))
    units = []
    for unit, *same in zip(fullest.units, *(profile.units for profile in profiles), strict=True):
        units.append(unit.replace(times={kind: times for own in same for kind, times in own.times.items()}))
    batch = {kind: cost for profile in profiles for kind, cost in profile.batch.items()}
    drift = {kind: part for profile in profiles for kind, part in profile.drift.items()}
    return fullest.replace(units=tuple(units), batch=batch, drift=drift)


def describe_ties(ties: Sequence[frozenset[str]], units: Units) -> tuple[Tie, ...]:
    """Returns the profile's form of parameters that units share, in the order given."""
    owned = [(u, n, p.nbytes) for u, m in units for n, p in m.named_parameters(prefix=u, remove_duplicate=False)]
    found = []
    for names in ties:
        homes = {unit: size for unit, full, size in owned if full in names}
        found.append(Tie(units=tuple(homes), size_bytes=max(homes.values())))
    return tuple(found)


@dataclass
class _Row:
    """What one unit takes on one device at one size, and all units that are like it."""

    name: str
    module: nn.Module
    value: Any
    head: Head | None
    is_first: bool
    counted: Counted
    times: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    issue: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    """On a GPU: what the host took to issue them, each alone."""
    issue_s: dict[str, float] = field(default_factory=dict)
    """The same in a step of several units."""
    update_s: float = 0.0
    num_alike: int = 0

    def run(self, device: torch.device, enough_s: float, fewest: int) -> float:
        """Times passes on a copy of the unit; returns what a forward and its backward take, for all that are alike."""
        module, before = copy.deepcopy(self.module).to(device), len(self.times["forward"])
        issue_s = 0.0
        for _ in range(_WARM_UPS[device.type]):
            start = time.perf_counter()
            run_step(module, self.value, self.head, self.is_first, _Stopwatch(device))
            issue_s = time.perf_counter() - start
        for _ in _repeats(enough_s, fewest):
            _occupy(device, issue_s)
            watch = _Stopwatch(device)
            run_step(module, self.value, self.head, self.is_first, watch)
            for part in PARTS:
                self.times[part].append(watch.time_s(part))
                self.issue[part].append(watch.host_s.get(part, 0.0))
        return self.num_alike * sum(median(self.times[part][before:]) for part in ("forward", "backward"))


def _count_shot(unit_sample: UnitSample, device: torch.device, make_update: MakeUpdate) -> list[_Row]:
    """Runs each unit once and counts; units that are alike have the same row."""
    value, targets = moved(unit_sample.inputs, device), moved(unit_sample.targets, device)
    known: dict[Hashable, _Row] = {}
    rows = []
    for index, (name, module) in enumerate(unit_sample.units):
        head = unit_sample.head(index, targets)
        key = (likeness(module, value), head is None, index == 0)
        if key not in known:
            own = copy.deepcopy(module).to(device)
            known[key] = _Row(name, module, value, head, index == 0, count_step(own, value, head, index == 0))
            known[key].update_s = _update_s([p.detach() for p in own.parameters() if p.requires_grad], make_update)
            del own
        known[key].num_alike += 1
        rows.append(known[key])
        value = known[key].counted.output
    return rows


def _time_turn(
    rows: Sequence[Sequence[_Row]], unit_samples: Sequence[UnitSample], kind: str, device: torch.device, report: Report
) -> float:
    """Times every row of each size, and returns what all took that counts: a pass of the model at each size."""
    turns, taken_s = _TURNS[device.type], 0.0
    for own, unit_sample in zip(rows, unit_samples, strict=True):
        for row in {id(row): row for row in own}.values():
            report(f"{row.name} ({kind}, {unit_sample.samples} samples)")
            taken_s += row.run(device, _ENOUGH_S * min(row.num_alike, _MOST_ALIKE) / turns, -(-_FEWEST // turns))
    return taken_s


def _slow_down(rows: Sequence[_Row], device: torch.device) -> float:
    """Returns how many times as long passes take a GPU that has run for a while; those of the units that take most."""
    row = max(rows, key=lambda row: row.num_alike * sum(map(median, row.times.values())))
    expected_s, issue_s = (sum(map(median, taken.values())) for taken in (row.times, row.issue))
    module, found = copy.deepcopy(row.module).to(device), []
    for _ in range(_FEWEST):
        start = time.perf_counter()
        while time.perf_counter() - start < _SUSTAINED_S / _FEWEST:
            run_step(module, row.value, row.head, row.is_first, _Stopwatch(device))
        _occupy(device, issue_s)
        watch = _Stopwatch(device)
        run_step(module, row.value, row.head, row.is_first, watch)
        found.append(sum(map(watch.time_s, PARTS)))
    return max(1.0, median(found) / expected_s)


def _issue_s(row: _Row, device: torch.device) -> dict[str, float]:
    """Returns what the host takes to issue each part of a unit among others: alone, all of it is cold each time."""
    count = _TOGETHER if 2 * _TOGETHER * sum(row.counted.saved) < _free_bytes(device) else 1
    module, watches = copy.deepcopy(row.module).to(device), []
    for _ in _repeats(_ENOUGH_S, _WARM_UPS[device.type] + _FEWEST):
        watch = _Stopwatch(device)
        run_several(module, row.value, row.head, row.is_first, watch, count)
        for part in watch.events:
            watch.time_s(part)  # the next begins when the device is through
        watches.append(watch)
    warm = watches[_WARM_UPS[device.type] :]
    alone = {part: median(found) for part, found in row.issue.items()}
    forward, backward = (median(w.host_s.get(part, 0.0) for w in warm) / count for part in ("forward", "backward"))
    half = backward / alone["backward"] if alone["backward"] else 1.0
    halves = {part: half * alone[part] for part in ("input_backward", "weight_backward")}
    return {"forward": forward, "recompute": forward, "backward": backward, **halves}


def _free_bytes(device: torch.device) -> float:
    """Returns the memory of a GPU that is free, or that its allocator has and does not use."""
    if device.type != "cuda":
        return math.inf
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _repeats(enough_s: float, fewest: int) -> Iterator[int]:
    """Counts passes until there are enough."""
    start = time.perf_counter()
    for n in range(_MOST):
        if n >= fewest and time.perf_counter() - start > enough_s:
            return
        yield n


def _occupy(device: torch.device, time_s: float) -> None:
    """Keeps a GPU busy for so long at least: what is issued meanwhile runs without gaps."""
    if device.type == "cuda" and time_s:
        torch.cuda._sleep(round(time_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]


class _Stopwatch:
    """A meter of time: the device's, by events of the stream on a GPU, and the host's, which is the same on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.host_s: dict[str, float] = {}
        self.events: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times what runs inside."""
        begin = self._event()
        start = time.perf_counter()
        yield
        self.host_s[name] = time.perf_counter() - start
        self.events[name] = begin, self._event()

    def _event(self) -> Any:
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def time_s(self, name: str) -> float:
        """Returns what a part took the device, once it is through with it; nothing for a part that did not run."""
        if name not in self.events:
            return 0.0
        begin, end = self.events[name]
        if end is None:
            return self.host_s[name]
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def describe(name: str, module: nn.Module, counted: Counted, behind: Counted | None, samples: int) -> Unit:
    """Returns a unit's sizes; `behind` is what was counted of the next one, if there is one."""
    parameter_bytes = sum(p.nbytes for p in module.parameters())
    trained_bytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    return Unit(
        name=name,
        flop=counted.flop / samples,
        num_parameters=sum(p.numel() for p in module.parameters()),
        parameter_bytes=parameter_bytes,
        gradient_bytes=trained_bytes,
        optimizer_bytes=2 * trained_bytes,
        activation_bytes=counted.saved_bytes / samples,
        shared_bytes=min(counted.saved_output_bytes, behind.saved_input_bytes) / samples if behind else 0.0,
        forward_work_bytes=counted.forward_work_bytes / samples,
        backward_work_bytes=counted.backward_work_bytes / samples,
        parameter_parts=tuple(p.nbytes for p in module.parameters()),
        activation_parts=tuple(size / samples for size in counted.saved),
        boundary_bytes=sum(t.nbytes for t in tensors_of(counted.output)) / samples,
        has_batch_statistics=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()),
    )


def _update_s(parameters: Sequence[Tensor], make_update: MakeUpdate) -> float:
    """Times updates of a unit's parameters; on a CPU none is in a cache, as a whole step lies between two updates."""
    if not parameters:
        return 0.0
    update, device = make_update(parameters), parameters[0].device
    times: list[float] = []
    others = torch.zeros(_CACHE_BYTES, dtype=torch.uint8) if device.type == "cpu" else None
    for _ in range(1 + _FEWEST):
        if others is not None:
            others.add_(1)
        _occupy(device, times[-1] if times else 0.0)
        watch = _Stopwatch(device)
        with watch.part("update"):
            update()
        times.append(max(watch.time_s("update"), watch.host_s["update"]))
    return median(times[1:])  # the first pass warms up
