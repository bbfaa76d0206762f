"""Lanes: where a worker's actions are carried out, and how an action of one lane waits for those of others.

A host lane goes on when an action's work is done. On a GPU, compute and copies are stream lanes: their actions are
issued to a CUDA stream, a little ahead of the device, and marked by events, which others wait for. A lane knows
nothing of what an action does.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from pipedejavu.program import Action

AHEAD = 2
"""Actions that a stream lane issues before the device has done the first of them.

What the host frees is reused only behind all streams that read it; who issued further ahead would need memory that the
program counts as free.
"""

Handler = Callable[[Action], None]


class HostMark(NamedTuple):
    """An action that was over when its lane went on."""

    start_s: float
    end_s: float

    def wait(self) -> None:
        """Returns at once."""

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Lets a stream go on."""

    def times_s(self, origin: "Origin") -> tuple[float, float]:
        """Returns when the action started and ended."""
        return self.start_s - origin.time_s, self.end_s - origin.time_s


class StreamMark(NamedTuple):
    """An action between two events of its stream."""

    start: torch.cuda.Event
    end: torch.cuda.Event

    def wait(self) -> None:
        """Waits on the host."""
        self.end.synchronize()

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Lets a stream wait, and the host go on."""
        stream.wait_event(self.end)

    def times_s(self, origin: "Origin") -> tuple[float, float]:
        """Returns when the action started and ended on the device."""
        assert origin.event is not None
        return origin.event.elapsed_time(self.start) / 1e3, origin.event.elapsed_time(self.end) / 1e3


Mark = HostMark | StreamMark


class Origin(NamedTuple):
    """The moment that a worker's times are counted from, on the host's clock and on the device's."""

    time_s: float
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, device: torch.device) -> "Origin":
        """Returns this moment; waits for the device."""
        if device.type == "cpu":
            return cls(time.perf_counter(), None)
        torch.cuda.synchronize(device)
        event = _event()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        return cls(time.perf_counter(), event)


class HostLane:
    """A lane whose actions are over when it goes on: all lanes of a CPU; on a GPU updates on the host and transfers.

    With a stream, it issues its copies there and waits for them.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None):
        self.stream = stream

    def wait(self, before: Mark) -> None:
        """Waits for an action of another lane."""
        before.wait()

    def run(self, handle: Handler, a: Action) -> HostMark:
        """Carries an action out."""
        start_s = time.perf_counter()
        if self.stream is None:
            handle(a)
        else:
            with torch.cuda.stream(self.stream):
                handle(a)
            self.stream.synchronize()
        return HostMark(start_s, time.perf_counter())


class StreamLane:
    """A lane that is a CUDA stream.

    One that brings values in waits on the host: only what has been dropped on the device makes room for them.
    """

    def __init__(self, stream: torch.cuda.Stream, waits_on_host: bool):
        self.stream, self.waits_on_host = stream, waits_on_host
        self.issued: deque[torch.cuda.Event] = deque()

    def wait(self, before: Mark) -> None:
        """Waits for an action of another lane, on the stream or on the host."""
        if self.waits_on_host:
            before.wait()
        else:
            before.hold_back(self.stream)

    def run(self, handle: Handler, a: Action) -> StreamMark:
        """Issues an action."""
        if len(self.issued) == AHEAD:
            self.issued.popleft().synchronize()
        start, end = _event(), _event()
        with torch.cuda.stream(self.stream):
            start.record(self.stream)
            handle(a)
            end.record(self.stream)
        self.issued.append(end)
        return StreamMark(start, end)


Lane = HostLane | StreamLane


def make_lane(name: str, device: torch.device) -> Lane:
    """Returns a worker's lane of this name."""
    if device.type == "cpu" or name == "host":
        return HostLane()
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    if name.startswith("net"):
        return HostLane(stream)
    return StreamLane(stream, waits_on_host=name == "copy-in")


def _event() -> torch.cuda.Event:
    """Returns an event with a time; the host sleeps, rather than spins, while it waits for it."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
