"""How busy the lanes of a recorded run were, and which lanes determine the length of a step.

    print(occupancy_of(run))  # compute bounds 0.89 of a step of 509 ms, copy-in 0.08, …

Pure arithmetic over a recording, from the first forward of its first step to the first forward of its last.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from pipedejavu.facts import format_seconds
from pipedejavu.hybrid_report.recording import LANES, HybridRun, LaneWork
from pipedejavu.program import ActionKind

_IDLE = ("wait", "loop")
"""Kinds of spans in which the compute lane does not work."""


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """How the time of a step was used."""

    step_s: float
    busy: dict[str, float]
    """By lane: the share of the time in which it worked."""
    bounds: dict[str, float]
    """By lane: the share of a step that it determines. For the compute lane this is its own work, for other lanes the
    waits of the compute lane for them; `loop` is the rest, such as the user's loop between two steps."""
    hidden: float
    """The share of the host's work for which the compute lane did not wait."""

    @property
    def bound(self) -> str:
        """The lane that determines most of a step."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def reason(self) -> str:
        """Why a step takes as long as it does, as a sentence."""
        (first, share), *rest = sorted(self.bounds.items(), key=lambda item: -item[1])
        others = "".join(f", {lane} {part:.2f}" for lane, part in rest if part >= 0.005)
        text = f"{first} bounds {share:.2f} of a step of {format_seconds(self.step_s)}{others}"
        works = ", ".join(f"{lane} {part:.2f}" for lane, part in self.busy.items() if part)
        hides = f"; {self.hidden:.2f} of the host's work is hidden" if self.busy["host"] else ""
        return f"{text}; busy: {works}{hides}"

    def __str__(self) -> str:
        return self.reason


def occupancy_of(run: HybridRun) -> Occupancy:
    """Returns the occupancy of the lanes over the complete steps of a recording."""
    begins = sorted(work.start_s for work in run.work if work.kind == ActionKind.FORWARD and work.unit == 0)
    start, end = begins[0], begins[run.num_steps - 1]
    works = [_within(work, start, end) for work in run.everything if work.end_s > start and work.start_s <= end]
    busy = {
        lane: _covered((w.start_s, w.end_s) for w in works if w.lane == lane and w.kind not in _IDLE) / (end - start)
        for lane in LANES
    }
    bounds = dict.fromkeys((*LANES, "loop"), 0.0)
    for wait in _waits(works):
        for lane, time_s in _waited_for(run, wait, works).items():
            bounds[lane] += time_s / (end - start)
    waits = sum(share for lane, share in bounds.items() if lane != "loop")
    bounds["compute"] = busy["compute"]
    bounds["loop"] = max(0.0, 1.0 - busy["compute"] - waits)
    hidden = max(0.0, 1.0 - waits / busy["host"]) if busy["host"] else 1.0
    return Occupancy(step_s=(end - start) / (run.num_steps - 1), busy=busy, bounds=bounds, hidden=hidden)


def _within(work: LaneWork, start_s: float, end_s: float) -> LaneWork:
    return work._replace(start_s=max(start_s, work.start_s), end_s=min(end_s, work.end_s))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the total time in which at least one of the spans runs."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _waits(works: list[LaneWork]) -> list[LaneWork]:
    """Returns the waits of the compute lane; if none were recorded, its gaps before forwards."""
    recorded = [work for work in works if work.kind == "wait"]
    if recorded:
        return recorded
    compute = sorted((work for work in works if work.lane == "compute"), key=lambda work: work.start_s)
    return [
        after._replace(kind="wait", start_s=before.end_s, end_s=after.start_s)
        for before, after in pairwise(compute)
        if after.kind == ActionKind.FORWARD and after.start_s > before.end_s
    ]


def _waited_for(run: HybridRun, wait: LaneWork, works: list[LaneWork]) -> dict[str, float]:
    """Divides a wait among the lanes that it was for: the copies of the unit, and before them its update."""
    place = run.places[wait.unit]
    if place == "device":
        return {"loop": wait.end_s - wait.start_s}
    if place == "visit":
        return {"copy-in": wait.end_s - wait.start_s}
    copies = (w for w in works if w.lane == "copy-in" and w.unit == wait.unit)
    overlaps = [_within(w, wait.start_s, wait.end_s) for w in copies]
    copied = _covered((w.start_s, w.end_s) for w in overlaps if w.end_s > w.start_s)
    return {"copy-in": copied, "host": wait.end_s - wait.start_s - copied}
