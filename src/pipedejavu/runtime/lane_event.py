"""Events: points in the work of a lane that the host, or another lane, can wait for.

StreamEvent   in a CUDA stream, recorded on the device
ThreadEvent   in the queue of a thread; it carries the exception if the work failed
HostEvent     work that has already ended, with the times at which it ran
"""

import threading
import time
from typing import NamedTuple, Protocol

import torch


class LaneEvent(Protocol):
    """A point in the work of a lane."""

    def is_past(self) -> bool:
        """Returns whether the work before it has ended."""

    def wait_on_host(self) -> None:
        """Blocks the calling thread until the work before it has ended; raises what the work raised."""

    def wait_on_device(self, stream: torch.cuda.Stream | None = None) -> None:
        """Makes a stream, by default the current one, wait; blocks the calling thread only if there is no stream."""


class ClockOrigin(NamedTuple):
    """The moment that times are counted from, on the host's clock and on the device's."""

    time_s: float
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, device: torch.device) -> "ClockOrigin":
        """Returns the present moment; synchronizes the device, so that both clocks start together."""
        if device.type == "cpu":
            return cls(time.perf_counter(), None)
        torch.cuda.synchronize(device)
        event = make_event(is_timed=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        return cls(time.perf_counter(), event)


class HostEvent(NamedTuple):
    """The end of work that ran on the host before the lane went on."""

    start_s: float
    end_s: float

    def is_past(self) -> bool:
        """Returns True."""
        return True

    def wait_on_host(self) -> None:
        """Returns at once."""

    def wait_on_device(self, stream: torch.cuda.Stream | None = None) -> None:
        """Returns at once."""

    def times_s(self, origin: ClockOrigin) -> tuple[float, float]:
        """Returns when the work started and ended, in seconds after the origin."""
        return self.start_s - origin.time_s, self.end_s - origin.time_s


class StreamEvent:
    """The end of work in a CUDA stream, and its start if the work is timed."""

    def __init__(self, end: torch.cuda.Event, start: torch.cuda.Event | None = None):
        self.end, self.start = end, start

    def is_past(self) -> bool:
        """Returns whether the work has ended."""
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    def wait_on_host(self) -> None:
        """Blocks the calling thread until the work has ended."""
        self.end.synchronize()

    def wait_on_device(self, stream: torch.cuda.Stream | None = None) -> None:
        """Makes a stream, by default the current one, wait for the work."""
        if stream is None:
            self.end.wait()
        else:
            stream.wait_event(self.end)

    def times_s(self, origin: ClockOrigin) -> tuple[float, float]:
        """Returns when the work started and ended on the device, in seconds after the origin."""
        assert origin.event is not None
        assert self.start is not None
        return origin.event.elapsed_time(self.start) / 1e3, origin.event.elapsed_time(self.end) / 1e3


class ThreadEvent:
    """The end of work that a thread does."""

    def __init__(self, is_past: bool = False):
        self.event, self.error = threading.Event(), None  # type: tuple[threading.Event, BaseException | None]
        if is_past:
            self.event.set()

    def is_past(self) -> bool:
        """Returns whether the work has ended."""
        return self.event.is_set()

    def wait_on_host(self) -> None:
        """Blocks the calling thread until the work has ended; raises what it raised."""
        self.event.wait()
        if self.error is not None:
            raise self.error

    def wait_on_device(self, stream: torch.cuda.Stream | None = None) -> None:  # noqa: ARG002
        """Blocks the calling thread: a stream cannot wait for a thread."""
        self.wait_on_host()


def now(device: torch.device) -> LaneEvent:
    """Returns the present point of the device's current stream."""
    if device.type != "cuda":
        return ThreadEvent(is_past=True)
    event = make_event(is_timed=False)
    event.record()
    return StreamEvent(event)


def make_event(is_timed: bool) -> torch.cuda.Event:
    """Returns a new event; a host that waits for it sleeps instead of spinning."""
    return torch.cuda.Event(enable_timing=is_timed, blocking=True)  # type: ignore[no-untyped-call]
