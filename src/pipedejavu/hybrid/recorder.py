"""When the actions of a hybrid step ran, lane by lane; knows nothing of what they do."""

import time
from typing import Any

import torch


class Recorder:
    """When the actions of all lanes ran, in seconds since it began; a GPU's by its own clock."""

    def __init__(self, device: torch.device):
        self.spans: list[tuple[str, str, float, float]] = []
        """Lane, action, start and end."""
        self._timed: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._points: list[tuple[str, int, Any]] = []
        self._open: set[int] = set()
        self._origin: torch.cuda.Event | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._origin.record()
        self.began_s = time.perf_counter()

    def add(self, lane: str, action: str, start_s: float, end_s: float) -> None:
        """Takes a span in the seconds of time.perf_counter."""
        self.spans.append((lane, action, start_s - self.began_s, end_s - self.began_s))

    def add_events(self, lane: str, action: str, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Takes a span of a stream, between two events with timing."""
        self._timed.append((lane, action, start, end))

    def came(self, unit: int) -> None:
        """Takes note that the compute lane has come to a unit's forward; of a recompute it is told and takes none."""
        if unit not in self._open:
            self._points.append(("came", unit, self._point()))

    def began(self, unit: int) -> None:
        """Takes note that a unit's weights are there."""
        if unit not in self._open:
            self._open.add(unit)
            self._points.append(("began", unit, self._point()))

    def ended(self, unit: int) -> None:
        """Takes note that a unit's gradients are final."""
        self._open.discard(unit)
        self._points.append(("ended", unit, self._point()))

    def _point(self) -> Any:
        if self._origin is None:
            return time.perf_counter() - self.began_s
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _compute_spans(self) -> list[tuple[str, str, float, float]]:
        """Returns the forwards, from weights to the next unit, and the backwards, from one unit's end to the next."""
        times = [p if self._origin is None else self._origin.elapsed_time(p) / 1e3 for _, _, p in self._points]
        spans = []
        for (kind, unit, _), (following, other, _), start, end in zip(
            self._points, self._points[1:], times, times[1:], strict=False
        ):
            if kind == "began":
                spans.append(("compute", f"F{unit}", start, end))
            elif kind == "ended" and following == "ended":
                spans.append(("compute", f"B{other}", start, end))
        return spans

    def finish(self) -> list[tuple[str, str, float, float]]:
        """Returns all spans, the earliest first; waits for the GPU."""
        if self._origin is not None:
            torch.cuda.synchronize()
            for lane, action, start, end in self._timed:
                times = [self._origin.elapsed_time(event) / 1e3 for event in (start, end)]
                self.spans.append((lane, action, *times))
            self._timed.clear()
        self.spans += self._compute_spans()
        self._points.clear()
        return sorted(self.spans, key=lambda span: span[2])
