"""When the actions of a hybrid step ran, lane by lane; knows nothing of what they do."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipedejavu.runtime.lane_event import ClockOrigin

_DONE = {
    "came": "wait{}", "began": "F{}", "turned": "B{}", "came again": "wait{}", "began again": "B{}",
    "updating": "UPDATE{}",
}  # fmt: skip
"""By what was noted: what the compute lane does from there on."""


class Recorder:
    """When the actions of all lanes ran, in seconds since it began; a GPU's by its own clock."""

    def __init__(self, device: torch.device):
        self.spans: list[tuple[str, str, float, float]] = []
        """Lane, action, start and end."""
        self._timed: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._points: list[tuple[str, int, Any]] = []
        self._begun: set[int] = set()
        """Units between their forward and the end of their backward."""
        self._is_backward = False
        self.undo: list[Callable[[], None]] = []
        """What to do when the recording is over."""
        self.began_s, self._origin = ClockOrigin.now(device)

    def add(self, lane: str, action: str, start_s: float, end_s: float) -> None:
        """Takes a span in the seconds of time.perf_counter."""
        self.spans.append((lane, action, start_s - self.began_s, end_s - self.began_s))

    def add_events(self, lane: str, action: str, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Takes a span of a stream, between two events with timing."""
        self._timed.append((lane, action, start, end))

    def note(self, what: str, unit: int) -> None:
        """Takes note of what the compute lane has come to.

        `came`: a unit's forward, or again for its backward; `began`: its weights are there; `turned`: the gradient of
        its output is; `ended`: its own gradients are final; `updating` and `updated`: the GPU's own update of it.
        """
        is_again = what in ("came", "began") and unit in self._begun
        if is_again and not self._is_backward:
            return  # a second use in one forward pass, for which it need not wait
        if what == "began":
            self._begun.add(unit)
            self._is_backward = is_again
        elif what in ("turned", "ended"):
            self._is_backward = True
            self._begun -= {unit} if what == "ended" else set()
        self._points.append((what + " again" * is_again, unit, self._point()))

    def watch(self, module: nn.Module, unit: int) -> None:
        """Takes note of the moment when the backward of a unit begins: of the last one no other's end tells it."""

        def watch(_module: nn.Module, _inputs: object, output: object) -> None:
            for value in tree_leaves(output):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(lambda _: self.note("turned", unit))  # type: ignore[no-untyped-call]

        hook = module.register_forward_hook(torch._dynamo.disable(watch), prepend=True)  # type: ignore[no-untyped-call]
        self.undo.append(hook.remove)

    def _point(self) -> Any:
        if self._origin is None:
            return time.perf_counter() - self.began_s
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _compute_spans(self) -> Iterator[tuple[str, str, float, float]]:
        """Yields what the compute lane did from each point to the next.

        A forward goes on to the next unit, a backward from one unit's end to the next; what the user's loop does
        between a backward pass and a forward, beside updates, is `loop`.
        """
        times = [p if self._origin is None else self._origin.elapsed_time(p) / 1e3 for _, _, p in self._points]
        for ((what, unit, _), start), ((following, other, _), end) in pairwise(zip(self._points, times, strict=True)):
            action = _DONE.get(what, "loop").format(unit)
            if what == "ended" and following in ("ended", "came again"):
                action = f"B{other}"
            elif what == "updated" and following == "began":
                action = f"wait{unit}"
            yield "compute", action, start, end

    def finish(self) -> list[tuple[str, str, float, float]]:
        """Ends the recording and returns all spans, the earliest first; waits for the GPU."""
        if self._origin is not None:
            torch.cuda.synchronize()
            for lane, action, start, end in self._timed:
                times = [self._origin.elapsed_time(event) / 1e3 for event in (start, end)]
                self.spans.append((lane, action, *times))
            self._timed.clear()
        self.spans += self._compute_spans()
        self._points.clear()
        for undo in self.undo:
            undo()
        self.undo.clear()
        return sorted(self.spans, key=lambda span: span[2])
