"""Lanes: queues whose work runs in order, on a CUDA stream or in a thread.

Submitting work returns an event, which other lanes and the host can wait for. Without a GPU every lane is a thread
that works on CPU tensors: the same queues and the same waits.
"""

import atexit
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from pipedejavu.runtime.lane_event import LaneEvent, StreamEvent, ThreadEvent, make_event


class LaneRecorder(Protocol):
    """Receives the times at which a lane's work ran."""

    def add(self, lane: str, action: str, start_s: float, end_s: float) -> None:
        """Takes the times of work on the host, as `time.perf_counter` gives them."""

    def add_events(self, lane: str, action: str, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Takes the timed events around work in a stream."""


def issue(stream: torch.cuda.Stream, work: Callable[[], Any], *, is_timed: bool) -> StreamEvent:
    """Issues work to the current stream, which is `stream`, and returns its event without waiting for the device."""
    start, end = make_event(is_timed=True) if is_timed else None, make_event(is_timed=is_timed)
    if start is not None:
        start.record(stream)
    work()
    end.record(stream)
    return StreamEvent(end, start)


class Lane(ABC):
    """A named queue of work, with an optional recorder and a delay before each piece of work for stress tests."""

    def __init__(self, name: str):
        self.name = name
        self.recorder: LaneRecorder | None = None
        self.delay: Callable[[], None] | None = None

    @abstractmethod
    def submit(self, action: str, work: Callable[[], Any], *after: LaneEvent | None) -> LaneEvent:
        """Queues work after all earlier work of the lane and after the events; returns the event of its end."""

    def close(self) -> None:  # noqa: B027  (a stream has nothing to end)
        """Ends the lane."""


class StreamLane(Lane):
    """A lane that is a CUDA stream: work is issued at once and runs on the device in the order of submission."""

    def __init__(self, name: str, device: torch.device):
        super().__init__(name)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, action: str, work: Callable[[], Any], *after: LaneEvent | None) -> LaneEvent:
        """Issues work after all earlier work of the stream and after the events."""
        with torch.cuda.stream(self.stream):
            for event in after:
                if event is not None:
                    event.wait_on_device()
            if self.delay is not None:
                self.delay()
            recorder = self.recorder
            issued = issue(self.stream, work, is_timed=recorder is not None)
        if recorder is not None and issued.start is not None:
            recorder.add_events(self.name, action, issued.start, issued.end)
        return issued


class ThreadLane(Lane):
    """A lane that is a thread of this process; after a failure it does no more work, and its later events raise."""

    def __init__(self, name: str):
        super().__init__(name)
        self._queue: deque[tuple[str, Callable[[], Any], tuple[LaneEvent | None, ...], ThreadEvent] | None] = deque()
        self._filled = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"pipedejavu {name}", daemon=True)
        self._thread.start()
        _open_lanes.add(self)

    def submit(self, action: str, work: Callable[[], Any], *after: LaneEvent | None) -> LaneEvent:
        """Queues work after all earlier work of the thread and after the events."""
        event = ThreadEvent()
        self._queue.append((action, work, after, event))
        self._filled.release()
        return event

    def check(self) -> None:
        """Raises the exception of the work that failed, if any did."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the thread after all submitted work."""
        self._queue.append(None)
        self._filled.release()
        self._thread.join()

    def abandon(self) -> None:
        """Ends the thread after its current work and drops the rest of the queue."""
        self._queue.appendleft(None)
        self._filled.release()

    def wait_for_end(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` for the thread to end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._filled.acquire()
            item = self._queue.popleft()
            if item is None:
                return
            action, work, after, event = item
            try:
                self.check()
                self._do(action, work, after)
            except BaseException as error:
                self._error = event.error = error
            event.event.set()
            del item, work, after, event  # frees what the work referenced while the lane is idle

    def _do(self, action: str, work: Callable[[], Any], after: tuple[LaneEvent | None, ...]) -> None:
        for before in after:
            if before is not None:
                before.wait_on_host()
        if self.delay is not None:
            self.delay()
        start = time.perf_counter()
        work()
        if self.recorder is not None:
            self.recorder.add(self.name, action, start, time.perf_counter())


_open_lanes: weakref.WeakSet[ThreadLane] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends all threads at exit: the interpreter aborts the process if a thread is still inside torch."""
    lanes = list(_open_lanes)
    for lane in lanes:
        lane.abandon()
    for lane in lanes:
        lane.wait_for_end(timeout_s=2.0)


class CopyLanes:
    """The two lanes for copies between a device and the host, one per direction."""

    def __init__(self, device: torch.device):
        self.device = device
        self.copy_in, self.copy_out = _copy_lane("copy-in", device), _copy_lane("copy-out", device)


def _copy_lane(name: str, device: torch.device) -> Lane:
    return StreamLane(name, device) if device.type == "cuda" else ThreadLane(name)
