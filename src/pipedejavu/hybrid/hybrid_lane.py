"""Queues of work beside the compute lane: a CUDA stream for copies of a GPU, a thread for everything else.

Work of one lane runs in order; `LaneEvent` is a point in it that others can wait for. Without a GPU all lanes
are threads that work on CPU tensors: the same queues, the same waits.
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

from pipedejavu.hybrid.native import HostUpdate
from pipedejavu.hybrid.recorder import Recorder


class LaneEvent(Protocol):
    """A point in a lane's work."""

    def is_past(self) -> bool:
        """Whether the work before it has ended."""

    def wait_on_host(self) -> None:
        """Blocks the calling thread; raises what the work raised."""

    def wait_on_device(self) -> None:
        """Lets the current stream wait, and not the calling thread where there is a stream."""


class StreamEvent:
    """A point in a CUDA stream."""

    def __init__(self, event: torch.cuda.Event):
        self.event = event

    def is_past(self) -> bool:
        """Whether the work before it has ended."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait_on_host(self) -> None:
        """Blocks the calling thread."""
        self.event.synchronize()

    def wait_on_device(self) -> None:
        """Lets the current stream wait, or the thread where there is none."""
        self.event.wait()


class ThreadEvent:
    """A point in a thread's work."""

    def __init__(self, is_past: bool = False):
        self.event, self.error = threading.Event(), None  # type: tuple[threading.Event, BaseException | None]
        if is_past:
            self.event.set()

    def is_past(self) -> bool:
        """Whether the work before it has ended."""
        return self.event.is_set()

    def wait_on_host(self) -> None:
        """Blocks the calling thread."""
        self.event.wait()
        if self.error is not None:
            raise self.error

    def wait_on_device(self) -> None:
        """Lets the current stream wait, or the thread where there is none."""
        self.wait_on_host()


def now(device: torch.device) -> LaneEvent:
    """Returns the present point of the compute lane."""
    if device.type != "cuda":
        return ThreadEvent(is_past=True)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return StreamEvent(event)


class Lane(ABC):
    """What all lanes share: their name, a recorder if one listens, and a delay that stress tests inject."""

    def __init__(self, name: str):
        self.name = name
        self.recorder: Recorder | None = None
        self.delay: Callable[[], None] | None = None

    @abstractmethod
    def submit(self, action: str, work: Callable[[], Any], *after: LaneEvent | None) -> LaneEvent:
        """Queues work behind all that was submitted and behind the marks; returns the point of its end."""

    def close(self) -> None:  # noqa: B027  (a stream has nothing to end)
        """Ends the lane."""


class StreamLane(Lane):
    """A lane of a GPU: work is issued at once, and runs in the order of its stream."""

    def __init__(self, name: str, device: torch.device):
        super().__init__(name)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, action: str, work: Callable[[], Any], *after: LaneEvent | None) -> LaneEvent:
        """Queues work behind all that was submitted and behind the marks."""
        with torch.cuda.stream(self.stream):
            for event in after:
                if event is not None:
                    event.wait_on_device()
            if self.delay is not None:
                self.delay()
            recorder = self.recorder
            start = None if recorder is None else _event(is_timed=True)
            work()
            end = _event(is_timed=recorder is not None)
        if recorder is not None and start is not None:
            recorder.add_events(self.name, action, start, end)
        return StreamEvent(end)


def _event(is_timed: bool) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=is_timed, blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class ThreadLane(Lane):
    """A lane that is a thread of this process; after a failure it does no more work, and its marks raise."""

    def __init__(self, name: str):
        super().__init__(name)
        self._queue: deque[tuple[str, Callable[[], Any], tuple[LaneEvent | None, ...], ThreadEvent] | None] = deque()
        self._filled = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"pipedejavu {name}", daemon=True)
        self._thread.start()
        _open_lanes.add(self)

    def submit(self, action: str, work: Callable[[], Any], *after: LaneEvent | None) -> LaneEvent:
        """Queues work behind all that was submitted and behind the marks."""
        event = ThreadEvent()
        self._queue.append((action, work, after, event))
        self._filled.release()
        return event

    def check(self) -> None:
        """Raises what its work has raised."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the thread, behind all that was submitted."""
        self._queue.append(None)
        self._filled.release()
        self._thread.join()

    def abandon(self) -> None:
        """Lets the thread end with the work that it is at."""
        self._queue.appendleft(None)
        self._filled.release()

    def wait_for_end(self, timeout_s: float) -> None:
        """Waits until the thread has ended, for so long at most."""
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
            del item, work, after, event  # what the work held is free while the lane waits for more

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
    """Ends all threads before the interpreter does: one that it finds inside of torch would abort the process."""
    lanes = list(_open_lanes)
    for lane in lanes:
        lane.abandon()
    for lane in lanes:
        lane.wait_for_end(timeout_s=2.0)


def copy_lane(name: str, device: torch.device) -> Lane:
    """Returns a lane for copies between a device and the host."""
    return StreamLane(name, device) if device.type == "cuda" else ThreadLane(name)


class Lanes:
    """The lanes of one device, and the update that the host lane runs."""

    def __init__(self, device: torch.device, update: HostUpdate):
        self.device, self.update = device, update
        self.copy_in = copy_lane("copy-in", device)
        self.copy_out = copy_lane("copy-out", device)
        self.host = ThreadLane("host")
        self.fetch = ThreadLane("fetch")
        """Waits for updates on behalf of weights that are on their way."""
        self.arrive, self.leave = ThreadLane("arrive"), ThreadLane("leave")
        """Let visitors come and go, piece by piece."""
        self._recorder: Recorder | None = None

    @property
    def all(self) -> tuple[Lane, ...]:
        """Every lane."""
        return self.host, self.fetch, self.arrive, self.leave, self.copy_in, self.copy_out

    def listen(self, recorder: Recorder | None) -> None:
        """Lets a recorder take note of all work from now on."""
        self._recorder = recorder
        for lane in self.all:
            lane.recorder = recorder

    def note(self, what: str, unit: int) -> None:
        """Tells the recorder what the compute lane has come to, if one listens."""
        if self._recorder is not None:
            self._recorder.note(what, unit)

    def close(self) -> None:
        """Ends all lanes and the threads of the update."""
        for lane in self.all:
            lane.close()
        self.update.close()
