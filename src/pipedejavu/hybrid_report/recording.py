"""A recorded run of HybridAdamW: where the state of each unit rests, and when the actions of the lanes ran.

Owns the record, its JSON form, and the measured timeline. Spans are numbered by step, so that each gets the name of
the same action in a compiled program. Knows nothing of predictions.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from math import inf
from statistics import median
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from pipedejavu.facts import Bytes, InputError, Record, Timeline, WorkerSummary
from pipedejavu.hybrid import HybridAdamW
from pipedejavu.hybrid.placement import Place
from pipedejavu.hybrid.unit_state import size_of
from pipedejavu.plan.axis import Rest
from pipedejavu.program import ActionKind

LANES = ("compute", "copy-out", "host", "copy-in")
"""The lanes that do the work; threads that only pass it on are left out."""
MIN_STEPS = 2

_SPAN = re.compile(r"(F|B|UPDATE|OFFLOAD:[dwo]|FETCH:[wo]|wait)(\d+)(~host|~guess|~moments)?|loop")
_NAMES = {
    "F": "F{unit}.{step}@{step}",
    "B": "B{unit}.{step}@{step}",
    "loop": "F{unit}.{step}@{step}",
    "OFFLOAD:d": "OFFLOAD:d{unit}@{step}",
    "OFFLOAD:w": "OFFLOAD:w{unit}@{step}",
    "FETCH:o": "FETCH:o{unit}@{step}",
    "OFFLOAD:o": "OFFLOAD:o{unit}@{next}",
    "UPDATE": "UPDATE{unit}@{next}",
    "UPDATE~host": "UPDATE{unit}@{next}~host",
    "FETCH:w": "FETCH:w{unit}@{next}",
}
"""By the recorder's name without the unit: the name of the action in a program. The user's loop before a forward pass
counts as part of that forward."""


_Parsed = tuple[str, str, int, float, float]
"""Lane, kind, unit, start and end."""


class RecordedUnit(Record):
    """A unit of the model, and where its optimizer state rests."""

    name: str
    place: Place
    num_parameters: int = Field(ge=0)
    weight_bytes: Bytes
    gradient_bytes: Bytes
    state_bytes: Bytes
    is_windowed: bool | None = None
    """Whether its weights are windowed; None if it was not recorded."""


class LaneWork(NamedTuple):
    """One recorded span of a unit's work; steps count from 1."""

    lane: str
    kind: str
    unit: int
    step: int
    start_s: float
    end_s: float

    @property
    def action(self) -> str:
        """The name of the action in a program."""
        return _NAMES[self.kind].format(unit=self.unit, step=self.step, next=self.step + 1)


class HybridRun(Record):
    """A recording of consecutive steps."""

    units: tuple[RecordedUnit, ...] = Field(min_length=1)
    spans: tuple[tuple[str, str, float, float], ...]
    """Lane, action, start and end, as returned by the recorder of the optimizer."""
    is_clipped: bool
    window: int | None = None
    microbatches: int = 1
    gpu_bytes: Bytes = 0
    """The budget of the GPU; 0 if it is not known."""
    host_bytes: Bytes = 0
    """The budget of the host; 0 if it is not known."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns a fault if spans name units that are missing."""
        named = {unit for _, _, unit, _, _ in self._parsed()}
        missing = sorted(unit for unit in named if unit >= len(self.units))
        return [f"spans name unit {missing[0]}, and there are {len(self.units)}"] if missing else []

    @cached_property
    def places(self) -> tuple[Rest, ...]:
        """Where the state of each unit rests, as the values of a plan."""
        words: dict[Place, Rest] = {"gpu": "device", "visit": "visit", "host": "host", "lean": "lean"}
        has_window = self.window is not None
        return tuple(
            "window" if has_window and unit.is_windowed is not False and unit.place == "host" else words[unit.place]
            for unit in self.units
        )

    @cached_property
    def work(self) -> tuple[LaneWork, ...]:
        """The work of the recorded steps that a program also has, without what remained of the step before them."""
        return tuple(work for work in self.everything if work.step and work.kind in _NAMES)

    @cached_property
    def everything(self) -> tuple[LaneWork, ...]:
        """All recorded work, numbered by step from 1; step 0 is what remained of the step before.

        The work of a unit in a step lies between its forwards of this step and the next, with two exceptions.
        Streamed state may return after the next forward has begun; it belongs to the step of its fetch. Weights that
        are fetched into a window belong to the step of the last update before them.
        """
        once = [unit for unit, rest in enumerate(self.places) if rest != "window"]
        spans = _one_at_a_time(_on_one_clock(sorted(self._parsed(), key=lambda span: span[3]), once))
        forwards: dict[int, list[float]] = defaultdict(list)
        for _, kind, unit, start, _ in spans:
            if kind == ActionKind.FORWARD:
                forwards[unit].append(start)
        numbered: list[LaneWork] = []
        last: dict[tuple[str, int], int] = {}
        arrived: dict[tuple[int, int], float] = defaultdict(float)
        for lane, kind, unit, start, end in spans:
            # the host lane starts an update before the GPU reaches its unit, and waits
            step = bisect_right(forwards[unit], end if kind == "UPDATE~host" else start)
            if kind == "OFFLOAD:o":
                step = last.get(("FETCH:o", unit), 0)
            elif kind == "FETCH:w" and self.places[unit] == "window":
                step = last.get(("UPDATE~host", unit), 0)
            elif kind in ("OFFLOAD:d", "OFFLOAD:w"):
                arrived[unit, step] = max(end, arrived[unit, step])
            elif kind == "loop":
                step = step + 1 if 0 < step < len(forwards[unit]) else 0
            last[kind, unit] = step
            numbered.append(LaneWork(lane, kind, unit, step, start, end))
        return tuple(
            work._replace(start_s=min(max(work.start_s, arrived[work.unit, work.step]), work.end_s))
            if work.kind == "UPDATE~host"  # without the wait for what it reads
            else work
            for work in numbered
        )

    def _parsed(self) -> Iterator[_Parsed]:
        for lane, action, start, end in self.spans:
            match = _SPAN.fullmatch(action)
            if lane in LANES and match is not None:
                kind, unit, place = match.groups()
                yield lane, (kind or action) + (place or ""), int(unit or 0), start, end

    @cached_property
    def num_steps(self) -> int:
        """Number of recorded steps; raises InputError if there are fewer than 2, or updates of the last are missing."""
        count = sum(work.kind == ActionKind.FORWARD and work.unit == 0 for work in self.work)
        if count < MIN_STEPS:
            raise InputError(f"{count} steps were recorded, and a step's length needs {MIN_STEPS}; record more")
        on_host = {n for n, unit in enumerate(self.units) if unit.place in ("host", "lean")}
        updated = {work.unit for work in self.work if work.kind == "UPDATE~host" and work.step == count}
        if on_host - updated:
            raise InputError(
                f"{len(on_host - updated)} of {len(on_host)} updates of the last step are not in the recording; call"
                " the optimizer's synchronize() before the recorder's finish()"
            )
        return count

    @property
    def begin_s(self) -> float:
        """When the first forward of the first step began."""
        return min(work.start_s for work in self.work if work.kind == ActionKind.FORWARD and work.unit == 0)

    @property
    def step_s(self) -> float:
        """The median time from the first forward of a step to that of the next."""
        begins = sorted(work.start_s for work in self.work if work.kind == ActionKind.FORWARD and work.unit == 0)
        lengths = [b - a for a, b in pairwise(begins)]
        return median(lengths)

    def timeline(self) -> Timeline:
        """Returns the recorded steps as a measured timeline that starts with the first forward."""
        begin = self.begin_s
        rows = [
            (w.lane, w.action, max(0.0, w.start_s - begin), max(0.0, w.end_s - begin))
            for w in sorted(self.work, key=lambda w: w.start_s)
        ]
        return timeline_of("measured", rows)


def _on_one_clock(spans: list[_Parsed], units: list[int]) -> list[_Parsed]:
    """Shifts the host's clock to the GPU's: the update of a unit ends when the copy of its new weights starts.

    The median difference over all pairs is how far the host's clock is ahead. An update that still ends after the
    start of its copy is cut there: the remaining time was spent on recording.
    """
    updates, starts = defaultdict(list), defaultdict(list)
    for n, (_, kind, unit, start, _) in enumerate(spans):
        if kind == "UPDATE~host":
            updates[unit].append(n)
        elif kind == "FETCH:w":
            starts[unit].append(start)
    copy_starts = {n: start for u in units for n, start in zip(reversed(updates[u]), reversed(starts[u]), strict=False)}
    ahead = max(0.0, median(spans[n][4] - start for n, start in copy_starts.items())) if copy_starts else 0.0
    shifted = []
    for n, (lane, kind, unit, start, end) in enumerate(spans):
        if lane == "host":
            start, end = start - ahead, end - ahead
            end = max(start, min(end, copy_starts.get(n, inf)))
        shifted.append((lane, kind, unit, start, end))
    return shifted


def _one_at_a_time(spans: list[_Parsed]) -> list[_Parsed]:
    """Moves the start of each copy to the end of the copy before it on its lane, since a stream runs them in order."""
    free: dict[str, float] = defaultdict(lambda: -inf)
    serial = []
    for lane, kind, unit, start, end in sorted(spans, key=lambda span: span[4]):
        serial.append((lane, kind, unit, max(start, free[lane]) if lane.startswith("copy") else start, end))
        free[lane] = end
    return sorted(serial, key=lambda span: span[3])


def timeline_of(origin: str, rows: Sequence[tuple[str, str, float, float]]) -> Timeline:
    """Returns the timeline of one worker; each row is lane, action, start and end."""
    lane, action, start, end = zip(*rows, strict=True)
    makespan = max(end)
    busy = sum(e - s for name, _, s, e in rows if name == "compute")
    worker = WorkerSummary(
        worker=0, device="gpu", busy_s=busy, peak_bytes=0.0, peak_live_microbatches=1, weight_versions=1
    )
    return Timeline.model_validate(
        {
            "origin": origin, "makespan_s": makespan, "bubble_fraction": 1 - busy / makespan, "workers": (worker,),
            "worker": (0,) * len(rows), "lane": lane, "action": action, "start_s": start, "end_s": end,
        }
    )  # fmt: skip


def read_run(optimizer: HybridAdamW, spans: Sequence[tuple[str, str, float, float]]) -> HybridRun:
    """Returns the record of a run from its optimizer and the spans that `finish` of its recorder returned."""
    scheduler = optimizer.scheduler
    if scheduler.plan is None:
        raise InputError("the optimizer has made no step yet; train a few, then record")
    limits = scheduler.meter.limits(scheduler.options.clip_norm is not None, scheduler.options.gpu_units)
    units = []
    for unit_state, place in zip(scheduler.unit_states, scheduler.plan.places, strict=True):
        size = size_of(unit_state)
        units.append(
            RecordedUnit(
                name=unit_state.unit.name, place=place, num_parameters=size.num_parameters,
                weight_bytes=sum(param.numel * param.parameter.dtype.itemsize for param in unit_state.params),
                gradient_bytes=size.gradient_bytes, state_bytes=size.gpu_bytes, is_windowed=unit_state.is_windowed,
            )
        )  # fmt: skip
    return HybridRun(
        units=tuple(units), spans=tuple(spans), is_clipped=scheduler.options.clip_norm is not None,
        window=scheduler.window.size if scheduler.window else None, microbatches=scheduler.options.microbatches,
        gpu_bytes=limits.gpu_bytes, host_bytes=limits.host_bytes,
    )  # fmt: skip
