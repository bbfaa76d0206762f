"""Times one unit at one microbatch size on one device: its passes, its issuing by the host, and its update."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.profile.operator_count import UnitWork, with_compiled_saves
from pipedejavu.profile.stopwatch import Stopwatch
from pipedejavu.profile.unit_step import PARTS, LossHead, detached, run_several, run_step
from pipedejavu.runtime.compiled_unit import LossCall, UnitCompiler
from pipedejavu.runtime.device_memory import DeviceMemory

FEWEST, ENOUGH_S = 3, 0.25
"""A unit is timed this often at least, and until its passes have taken this long together."""
_MOST = 20
"""Most timed passes of a unit in a turn."""
MOST_EQUAL = 4
"""A unit that stands for several is timed that many times as long, up to this factor: its error counts as often."""
_WARM_UPS = {"cpu": 0, "cuda": 2}
"""Untimed passes after the first; a GPU's first passes load kernels and choose algorithms."""
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


@dataclass
class MeasuredUnit:
    """Measurements of one unit at one size on one device, which hold for all units equal to it."""

    name: str
    module: nn.Module
    value: Any
    head: LossHead | None
    is_first: bool
    counted: UnitWork
    expected_s: float
    """About the time of a pass, until one is timed."""
    times: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    issue: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    """On a GPU: host time to issue each part of a unit alone."""
    issue_s: dict[str, float] = field(default_factory=dict)
    """On a GPU: host time to issue each part within a step of several units."""
    update_s: float | None = None
    num_equal: int = 0
    is_too_large: bool = False
    """Whether the device has too little memory for a pass at this size."""
    compiler: UnitCompiler | None = None

    @property
    def is_timed(self) -> bool:
        """Whether it has run at least once."""
        return bool(self.times["forward"])

    @property
    def step_s(self) -> float:
        """Time of forward and backward, as measured."""
        return sum(median(self.times[part]) for part in ("forward", "backward"))

    def leave_out(self) -> None:
        """Forgets what was timed, as the device has too little memory for this size: other sizes must do."""
        self.is_too_large = True
        self.times = {part: [] for part in PARTS}
        self.issue = {part: [] for part in PARTS}

    def again(self) -> "MeasuredUnit":
        """Returns a record of the same unit without times, for another kind of device."""
        other = MeasuredUnit(
            self.name, self.module, self.value, self.head, self.is_first, self.counted, self.expected_s
        )
        other.num_equal, other.compiler = self.num_equal, self.compiler
        return other

    def ready(self, device: torch.device) -> tuple[nn.Module, LossHead | None]:
        """Returns a copy of the unit on a device, and its loss; if compiled, the copy computes the loss itself."""
        module = copy.deepcopy(self.module).to(device)
        if self.compiler is None:
            return module, self.head
        module = module if self.compiler.has_parameters else _with_leaves(module)
        return _CompiledUnit(self.name, module, self.head, self.compiler), None

    def run(self, device: torch.device, enough_s: float, fewest: int) -> float:
        """Times passes on a copy of the unit; returns the time of forward and backward, summed over all equal units."""
        (module, head), before = self.ready(device), len(self.times["forward"])
        issue_s = 0.0
        for _ in range(max(_WARM_UPS[device.type], 2 if self.compiler else 0)):  # the first call compiles
            start = time.perf_counter()
            run_step(module, self.value, head, self.is_first, Stopwatch(device))
            issue_s = time.perf_counter() - start
        if self.compiler is not None and not before:
            self.counted = with_compiled_saves(self.counted, module, self.value, self.is_first)
        for _ in _repeats(enough_s, fewest):
            _occupy(device, issue_s)
            watch = Stopwatch(device)
            run_step(module, self.value, head, self.is_first, watch)
            for part in PARTS:
                self.times[part].append(watch.time_s(part))
                self.issue[part].append(watch.host_s.get(part, 0.0))
        self.expected_s = sum(median(self.times[part]) for part in PARTS)
        return self.num_equal * sum(median(self.times[part][before:]) for part in ("forward", "backward"))


def _with_leaves(module: nn.Module) -> nn.Module:
    """Replaces a module's parameters by plain tensors, as the engine's workers do."""
    leaves: dict[int, Tensor] = {}
    parameters = [*module.parameters()]  # keeps ids unique
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                leaf = leaves.setdefault(id(parameter), parameter.detach().requires_grad_(parameter.requires_grad))
                part._parameters[key] = leaf  # type: ignore[assignment]
    del parameters
    return module


class _CompiledUnit(nn.Module):
    """A unit that runs compiled, together with its loss if it is the last."""

    def __init__(self, name: str, module: nn.Module, head: LossHead | None, compiler: UnitCompiler):
        super().__init__()
        self.name, self.module, self.compiler = name, module, compiler
        self.head = LossCall(head.loss, head.targets) if head else None

    def forward(self, value: Any) -> Any:
        """Returns the output of the unit, or its loss."""
        return self.compiler.run(self.name, self.module, value, self.head)


def run_forward(module: nn.Module, value: Any, device: torch.device) -> tuple[Any, float]:
    """Runs a copy of a unit without a graph; returns its output and the time.

    On a GPU it runs twice: the first run of all loads kernels and takes seconds.
    """
    for _ in range(1 if device.type == "cpu" else 2):
        unit = copy.deepcopy(module).to(device)
        given = tuple(t.clone() for t in value) if isinstance(value, tuple) else value.clone()
        start = time.perf_counter()
        with torch.no_grad():
            output = detached(unit(given))
        if device.type != "cpu":
            torch.cuda.synchronize(device)
    return output, time.perf_counter() - start


def measure_slowdown(units: Sequence[MeasuredUnit], device: torch.device) -> float:
    """Returns how much slower a GPU is under sustained load, as a factor, measured on the most expensive unit."""
    unit = max(units, key=lambda unit: unit.num_equal * sum(map(median, unit.times.values())))
    expected_s, issue_s = (sum(map(median, taken.values())) for taken in (unit.times, unit.issue))
    (module, head), sustained = unit.ready(device), list[float]()
    for _ in range(FEWEST):
        start = time.perf_counter()
        while time.perf_counter() - start < _SUSTAINED_S / FEWEST:
            run_step(module, unit.value, head, unit.is_first, Stopwatch(device))
        _occupy(device, issue_s)
        watch = Stopwatch(device)
        run_step(module, unit.value, head, unit.is_first, watch)
        sustained.append(sum(map(watch.time_s, PARTS)))
    return max(1.0, median(sustained) / expected_s)


def measure_issue(unit: MeasuredUnit, device: torch.device) -> dict[str, float]:
    """Returns the host's time to issue each part of a unit among others; alone, its caches are cold each time."""
    count = _TOGETHER if 2 * _TOGETHER * sum(unit.counted.saved) < _free_bytes(device) else 1
    (module, head), watches = unit.ready(device), list[Stopwatch]()
    for _ in _repeats(ENOUGH_S, _WARM_UPS[device.type] + FEWEST):
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
    return DeviceMemory(device).free_bytes() if device.type == "cuda" else math.inf


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


def time_update(parameters: Sequence[Tensor], make_update: MakeUpdate) -> float:
    """Times updates of a unit's parameters; flushes a CPU's caches in between, as the rest of a step does."""
    if not parameters:
        return 0.0
    update, device = make_update(parameters), parameters[0].device
    times: list[float] = []
    others = torch.zeros(_CACHE_BYTES, dtype=torch.uint8) if device.type == "cpu" else None
    for _ in range(1 + FEWEST):
        if others is not None:
            others.add_(1)
        _occupy(device, times[-1] if times else 0.0)
        watch = Stopwatch(device)
        with watch.part("update"):
            update()
        times.append(max(watch.time_s("update"), watch.host_s["update"]))
    return median(times[1:])  # the first pass warms up
