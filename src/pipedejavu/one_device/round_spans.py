"""The spans of one update, recorded in HybridAdamW's lanes and named as the actions of the program.

Recording synchronises with the device before and after the update, so that all of its actions are within it.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pipedejavu.facts import Span
from pipedejavu.hybrid.hybrid_adamw import HybridAdamW
from pipedejavu.program import Action, ActionKind, Program, ValueKind
from pipedejavu.program.effect import rest_of
from pipedejavu.runtime.lane_event import ClockOrigin

_PASSES = (ActionKind.FORWARD, ActionKind.BACKWARD)
_Timed = tuple[str, str, float, float]
"""Lane, action of HybridAdamW, start and end."""


class RoundSpans:
    """Records one update; takes the place of a recorder in the lanes of the optimizer."""

    def __init__(self, program: Program, optimizer: HybridAdamW, update: int):
        self.program, self.optimizer, self.update = program, optimizer, update
        optimizer.synchronize()
        self._device = optimizer.device
        self._origin = ClockOrigin.now(self._device)
        self._marks: list[tuple[str, int, int, Any]] = []
        self._spans: list[_Timed] = []
        self._timed: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._lanes = optimizer.scheduler.lanes
        self._piece_of = {unit: number for number, piece in enumerate(program.pieces) for unit in piece.units}
        assert optimizer.scheduler.options.assignment is not None
        unit_of = {id(module): n for n, (_, module) in enumerate(optimizer.scheduler.options.assignment.units)}
        self._piece_of_state = {
            unit_state.index: self._piece_of[unit_of[id(unit_state.unit.module)]]
            for unit_state in optimizer.scheduler.unit_states
        }
        """By number of a unit in the optimizer: its piece."""
        self._lanes.listen(_LaneSpans(self))

    def add(self, lane: str, action: str, start_s: float, end_s: float) -> None:
        """Adds a span with times of `time.perf_counter`."""
        self._spans.append((lane, action, start_s - self._origin.time_s, end_s - self._origin.time_s))

    def add_events(self, lane: str, action: str, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Adds a span of a stream, between two timed events."""
        self._timed.append((lane, action, start, end))

    def note(self, kind: str, unit: int, microbatch: int) -> None:
        """Notes what the compute lane begins: F or B of a unit, `updating` or `updated`, or that a backward `ended`."""
        self._marks.append((kind, unit, microbatch, self._point()))

    def _point(self) -> Any:
        if self._origin.event is None:
            return time.perf_counter() - self._origin.time_s
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def finish(self, after_s: float) -> list[Span]:
        """Ends the recording; returns the spans, which begin `after_s` seconds after the round began."""
        self.optimizer.synchronize()
        self._lanes.listen(None)
        if self._origin.event is not None:
            torch.cuda.synchronize(self._device)
        times = [p if self._origin.event is None else self._seconds(p) for *_, p in self._marks]
        spans = [*self._spans, *((lane, a, self._seconds(s), self._seconds(e)) for lane, a, s, e in self._timed)]
        found = [*self._of_compute(times), *self._of_lanes(spans)]
        return [Span(0, lane, action, after_s + max(0.0, s), after_s + max(0.0, e)) for lane, action, s, e in found]

    def _seconds(self, event: torch.cuda.Event) -> float:
        assert self._origin.event is not None
        return float(self._origin.event.elapsed_time(event)) / 1e3

    def _of_compute(self, times: list[float]) -> Iterator[_Timed]:
        """Yields the passes of each piece, and the updates on the device."""
        named = {(a.kind, a.piece, a.microbatch): str(a) for a in self._actions("compute")}
        parts: dict[tuple[str, int, int], tuple[float, float]] = {}
        for n, (kind, unit, microbatch, _) in enumerate(self._marks):
            end_s = times[min(n + 1, len(times) - 1)]
            if kind in _PASSES:
                key = (kind, self._piece_of[unit], microbatch)
            elif kind == "updating":
                key = ("UPDATE", self._piece_of_state[unit], -1)
            else:
                continue
            parts[key] = (parts.get(key, (times[n], 0.0))[0], end_s)
        updates = {a.piece: str(a) for a in self._actions("compute") if a.kind == ActionKind.UPDATE}
        for (kind, piece, microbatch), (start_s, end_s) in parts.items():
            name = updates.get(piece) if kind == "UPDATE" else named.get((ActionKind(kind), piece, microbatch))
            if name is not None:
                yield "compute", name, start_s, end_s

    def _of_lanes(self, spans: Iterable[_Timed]) -> Iterator[_Timed]:
        """Yields the work of the host and the copies; parts of one action are one span."""
        names: dict[tuple[str, str], list[str]] = defaultdict(list)
        for lane in ("host", "copy-in", "copy-out"):
            for a in self._actions(lane):
                names[lane, f"{a.kind}:{a.what}{a.piece}" if a.what else f"{a.kind}{a.piece}~host"].append(str(a))
        joined: dict[tuple[str, str], list[float]] = defaultdict(list)
        for lane, action, start_s, end_s in sorted(spans, key=lambda span: span[2]):
            known = names.get((lane, self._with_piece(action)), [])
            if len(known) > 1:  # a fetch of weights through a window, for forward and for backward
                yield lane, known.pop(0), start_s, end_s
            elif known:
                joined[lane, known[0]] += [start_s, end_s]
        for (lane, name), bounds in joined.items():
            yield lane, name, min(bounds), max(bounds)

    def _with_piece(self, action: str) -> str:
        """Returns an action of the optimizer with the number of the piece in place of its unit's."""
        kind = action.removesuffix("~host").rstrip("0123456789")
        number = action.removesuffix("~host").removeprefix(kind)
        return action.replace(number, str(self._piece_of_state[int(number)])) if number else action

    def _actions(self, lane: str) -> list[Action]:
        """Returns the actions of a lane that belong to this update."""
        first, size = self.update * self.program.update_size, self.program.update_size
        actions = [a for a in self.program.workers[0].actions if a.lane == lane]
        return [
            a
            for a in actions
            if (a.microbatch - first in range(size) if a.microbatch >= 0 else self._update_of(a) == self.update)
        ]

    def _update_of(self, a: Action) -> int:
        """Returns the update that an action belongs to, from the version that it reads or makes."""
        is_new = a.kind == ActionKind.UPDATE or (a.kind == ActionKind.OFFLOAD and a.what == ValueKind.OPTIMIZER_STATE)
        if a.kind == ActionKind.FETCH and a.what == ValueKind.WEIGHTS:
            is_new = rest_of(self.program, a.piece) != "window"
        return a.version - is_new


class _LaneSpans:
    """Passes on what the lanes of the optimizer record; passes of units are noted by the chain that runs them."""

    def __init__(self, spans: RoundSpans):
        self.spans = spans
        self.add, self.add_events = spans.add, spans.add_events

    def note(self, what: str, unit: int) -> None:
        """Notes the start or the end of an update on the device, of the optimizer's unit with this number."""
        if what in ("updating", "updated"):
            self.spans.note(what, unit, -1)
