"""Records when the actions of hybrid steps run, lane by lane; knows nothing of what they do."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipedejavu.runtime.deferred_logits import DeferredLogits
from pipedejavu.runtime.lane_event import ClockOrigin

_ACTIONS = {
    "came": "wait{}", "began": "F{}", "turned": "B{}", "came again": "wait{}", "began again": "B{}",
    "updating": "UPDATE{}",
}  # fmt: skip
"""By noted point: the action of the compute lane from there on."""


class Recorder:
    """Collects spans of all lanes, in seconds since its start; spans of a GPU are timed by CUDA events."""

    def __init__(self, device: torch.device):
        self.spans: list[tuple[str, str, float, float]] = []
        """Lane, action, start and end of each action."""
        self._timed: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._points: list[tuple[str, int, Any]] = []
        self._active: set[int] = set()
        """Units whose forward has begun and whose backward has not ended."""
        self._is_backward = False
        self.undo: list[Callable[[], None]] = []
        """Calls that end the recording."""
        self.began_s, self._origin = ClockOrigin.now(device)

    def add(self, lane: str, action: str, start_s: float, end_s: float) -> None:
        """Adds a span with times of `time.perf_counter`."""
        self.spans.append((lane, action, start_s - self.began_s, end_s - self.began_s))

    def add_events(self, lane: str, action: str, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Adds a span of a stream, between two timed events."""
        self._timed.append((lane, action, start, end))

    def note(self, what: str, unit: int) -> None:
        """Notes which point of a unit's work the compute lane has reached.

        came       the start of its forward, or of its backward if that needs weights
        began      its weights are there
        turned     the gradient of its output is there
        ended      its own gradients are final
        updating, updated   the start and end of its update on the GPU
        """
        is_again = what in ("came", "began") and unit in self._active
        if is_again and not self._is_backward:
            return  # a second use in one forward pass, which waits for nothing
        if what == "began":
            self._active.add(unit)
            self._is_backward = is_again
        elif what in ("turned", "ended"):
            self._is_backward = True
            self._active -= {unit} if what == "ended" else set()
        self._points.append((what + " again" * is_again, unit, self._point()))

    def watch(self, module: nn.Module, unit: int) -> None:
        """Notes when the backward of the last unit begins; other units begin when the backward of the next one ends."""

        def turn(_: Tensor) -> None:
            self.note("turned", unit)

        def watch(_module: nn.Module, _inputs: object, output: object) -> None:
            for value in tree_leaves(output):
                if isinstance(value, DeferredLogits):  # a hook of theirs would compute them
                    value.origin.on_backward.append(turn)
                elif isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(turn)  # type: ignore[no-untyped-call]

        hook = module.register_forward_hook(torch._dynamo.disable(watch), prepend=True)  # type: ignore[no-untyped-call]
        self.undo.append(hook.remove)

    def _point(self) -> Any:
        if self._origin is None:
            return time.perf_counter() - self.began_s
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _compute_spans(self) -> Iterator[tuple[str, str, float, float]]:
        """Yields the action of the compute lane from each point to the next.

        A forward lasts until the next unit comes, a backward from the end of one unit to the end of the next. Time
        between a backward pass and a forward that is not an update is `loop`, the user's loop.
        """
        times = [p if self._origin is None else self._origin.elapsed_time(p) / 1e3 for _, _, p in self._points]
        for ((what, unit, _), start), ((following, other, _), end) in pairwise(zip(self._points, times, strict=True)):
            action = _ACTIONS.get(what, "loop").format(unit)
            if what == "ended" and following in ("ended", "came again"):
                action = f"B{other}"
            elif what == "updated" and following == "began":
                action = f"wait{unit}"
            yield "compute", action, start, end

    def finish(self) -> list[tuple[str, str, float, float]]:
        """Ends the recording and returns all spans, sorted by start; synchronizes the GPU."""
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
