"""A recorded run of HybridAdamW: where each unit's state lies, and when the actions of its lanes ran.

Owns the record, its JSON form, and the measured timeline: spans are numbered by step, so that each carries the name
that the same action has in a compiled program. Knows nothing of predictions.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from pipedejavu.facts import Bytes, InputError, Record, Timeline, WorkerSummary
from pipedejavu.hybrid import HybridAdamW
from pipedejavu.hybrid.home import size_of
from pipedejavu.hybrid.placement import Place

LANES = ("compute", "copy-out", "host", "copy-in")
"""Those that do the work; threads that only hand it on are left out."""
LEAST_STEPS = 2

_SPAN = re.compile(r"(F|B|UPDATE|OFFLOAD:[dwo]|FETCH:[wo])(\d+)(~host)?")
_NAMES = {
    "F": "F{unit}.{step}@{step}",
    "B": "B{unit}.{step}@{step}",
    "OFFLOAD:d": "OFFLOAD:d{unit}@{step}",
    "OFFLOAD:w": "OFFLOAD:w{unit}@{step}",
    "FETCH:o": "FETCH:o{unit}@{step}",
    "OFFLOAD:o": "OFFLOAD:o{unit}@{next}",
    "UPDATE": "UPDATE{unit}@{next}~host",
    "FETCH:w": "FETCH:w{unit}@{next}",
}
"""By the recorder's name without its unit: the action of a program."""


class RecordedUnit(Record):
    """A unit of the model, and where its optimizer state rests."""

    name: str
    place: Place
    num_parameters: int = Field(ge=0)
    weight_bytes: Bytes
    gradient_bytes: Bytes
    state_bytes: Bytes


class Work(NamedTuple):
    """One recorded piece of work of a unit in a step, counted from 1."""

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
    """What was recorded of some steps in a row."""

    units: tuple[RecordedUnit, ...] = Field(min_length=1)
    spans: tuple[tuple[str, str, float, float], ...]
    """Lane, action, start and end, as the recorder of the optimizer returns them."""
    is_clipped: bool
    window: int | None = None
    microbatches: int = 1
    gpu_bytes: Bytes = 0
    """The budget; 0 where it is not known."""
    host_bytes: Bytes = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns a fault where spans name units that are missing."""
        found = {int(m[2]) for _, action, _, _ in self.spans if (m := _SPAN.fullmatch(action))}
        more = sorted(unit for unit in found if unit >= len(self.units))
        return [f"spans name unit {more[0]}, and there are {len(self.units)}"] if more else []

    @cached_property
    def work(self) -> tuple[Work, ...]:
        """All work of the recorded steps, numbered; what was left of the step before them is not in it.

        Between a unit's forwards of two steps lies all its work of the first; only a visitor's state may still leave
        after the second has begun, and belongs to the visit before it. An update starts when its gradient is there:
        the time that it waited is not its own.
        """
        forwards: dict[int, list[float]] = defaultdict(list)
        for lane, action, start, _ in self.spans:
            if lane == "compute" and action.startswith("F"):
                forwards[int(action[1:])].append(start)
        found: list[Work] = []
        visits: dict[int, int] = {}
        arrived: dict[tuple[int, int], float] = {}
        for lane, action, start, end in sorted(self.spans, key=lambda span: span[2]):
            match = _SPAN.fullmatch(action)
            if lane not in LANES or match is None:
                continue
            kind, unit = match[1], int(match[2])
            # the host lane takes an update up before the GPU has come to its unit, and waits
            step = bisect_right(forwards[unit], end if kind == "UPDATE" else start)
            if kind == "FETCH:o":
                visits[unit] = step
            elif kind == "OFFLOAD:o":
                step = visits.get(unit, 0)
            elif kind == "OFFLOAD:d":
                arrived[unit, step] = end
            if step:
                found.append(Work(lane, kind, unit, step, start, end))
        return tuple(
            work._replace(start_s=min(max(work.start_s, arrived.get((work.unit, work.step), 0.0)), work.end_s))
            if work.kind == "UPDATE"
            else work
            for work in found
        )

    @cached_property
    def num_steps(self) -> int:
        """Steps that were recorded; raises InputError for fewer than two, or where the last one's updates miss."""
        count = sum(work.kind == "F" and work.unit == 0 for work in self.work)
        if count < LEAST_STEPS:
            raise InputError(f"{count} steps were recorded, and a step's length needs {LEAST_STEPS}; record more")
        held = {n for n, unit in enumerate(self.units) if unit.place in ("host", "lean")}
        updated = {work.unit for work in self.work if work.kind == "UPDATE" and work.step == count}
        if held - updated:
            raise InputError(
                f"{len(held - updated)} of {len(held)} updates of the last step are not in the recording; call the"
                " optimizer's synchronize() before the recorder's finish()"
            )
        return count

    @property
    def begin_s(self) -> float:
        """When the first forward of the first step began."""
        return min(work.start_s for work in self.work if work.kind == "F" and work.unit == 0)

    @property
    def step_s(self) -> float:
        """The median time from one step's first forward to the next one's."""
        begins = sorted(work.start_s for work in self.work if work.kind == "F" and work.unit == 0)
        lengths = [b - a for a, b in pairwise(begins)]
        return median(lengths)

    def timeline(self) -> Timeline:
        """Returns the recorded steps as a measured timeline, from their first forward on."""
        begin = self.begin_s
        rows = [
            (w.lane, w.action, max(0.0, w.start_s - begin), max(0.0, w.end_s - begin))
            for w in sorted(self.work, key=lambda w: w.start_s)
        ]
        return timeline_of("measured", rows)


def timeline_of(origin: str, rows: Sequence[tuple[str, str, float, float]]) -> Timeline:
    """Returns the timeline of one worker from lane, action, start and end of each action."""
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
    """Returns the record of an optimizer's run from what its recorder's `finish` returned."""
    flow = optimizer.flow
    if flow.plan is None:
        raise InputError("the optimizer has made no step yet; train a few, then record")
    limits = flow.meter.limits(flow.rules.clip_norm is not None, flow.rules.gpu_units)
    units = []
    for home, place in zip(flow.homes, flow.plan.places, strict=True):
        size = size_of(home)
        units.append(
            RecordedUnit(
                name=home.unit.name, place=place, num_parameters=size.num_parameters,
                weight_bytes=sum(m.numel * m.parameter.dtype.itemsize for m in home.members),
                gradient_bytes=size.gradient_bytes, state_bytes=size.gpu_bytes,
            )
        )  # fmt: skip
    return HybridRun(
        units=tuple(units), spans=tuple(spans), is_clipped=flow.rules.clip_norm is not None,
        window=flow.window.size if flow.window else None, microbatches=flow.rules.microbatches,
        gpu_bytes=limits.gpu_bytes, host_bytes=limits.host_bytes,
    )  # fmt: skip
