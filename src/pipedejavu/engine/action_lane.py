"""Lanes of a worker: each runs the actions of its queue in order and waits for the actions of other lanes.

An action on a host lane has ended when the lane goes on. On a GPU, compute and copies are stream lanes: their actions
are issued to a CUDA stream a little ahead of the device, and other lanes wait for their events. Unlike the lanes in
`runtime`, these own no thread: the worker's loop runs each lane in a thread of its own and decides when to wait.
"""

import time
from collections import deque
from collections.abc import Callable

import torch

from pipedejavu.program import Action
from pipedejavu.runtime.lane import issue
from pipedejavu.runtime.lane_event import HostEvent, StreamEvent

AHEAD = 2
"""Actions that a stream lane issues before the device has finished the first of them.

Memory that the host frees is reused only after all streams that read it, so issuing further ahead would need memory
that the program counts as free.
"""

Handler = Callable[[Action], None]
ActionEvent = HostEvent | StreamEvent


class HostActionLane:
    """A lane whose actions end before it goes on: all lanes of a CPU; on a GPU, host updates and transfers.

    With a stream, it issues its copies there and waits for them.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None):
        self.stream = stream

    def wait(self, before: ActionEvent) -> None:
        """Waits for an action of another lane."""
        before.wait_on_host()

    def run(self, handle: Handler, a: Action) -> HostEvent:
        """Runs an action to its end."""
        start_s = time.perf_counter()
        if self.stream is None:
            handle(a)
        else:
            with torch.cuda.stream(self.stream):
                handle(a)
            self.stream.synchronize()
        return HostEvent(start_s, time.perf_counter())


class StreamActionLane:
    """A lane that is a CUDA stream.

    A lane that brings values in waits on the host instead: it may allocate only after other values are freed.
    """

    def __init__(self, stream: torch.cuda.Stream, waits_on_host: bool):
        self.stream, self.waits_on_host = stream, waits_on_host
        self.issued: deque[StreamEvent] = deque()

    def wait(self, before: ActionEvent) -> None:
        """Waits for an action of another lane, on the stream or on the host."""
        if self.waits_on_host:
            before.wait_on_host()
        else:
            before.wait_on_device(self.stream)

    def run(self, handle: Handler, a: Action) -> StreamEvent:
        """Issues an action; first waits until fewer than `AHEAD` issued ones are unfinished."""
        if len(self.issued) == AHEAD:
            self.issued.popleft().wait_on_host()
        with torch.cuda.stream(self.stream):
            event = issue(self.stream, lambda: handle(a), is_timed=True)
        self.issued.append(event)
        return event


ActionLane = HostActionLane | StreamActionLane


def make_lane(name: str, device: torch.device, is_issued: bool = False) -> ActionLane:
    """Returns the lane of a worker with this name; `is_issued` if its wire issues transfers to the lane's stream."""
    if device.type == "cpu" or name == "host":
        return HostActionLane()
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    if name.startswith("net") and not is_issued:
        return HostActionLane(stream)
    return StreamActionLane(stream, waits_on_host=name == "copy-in" or name.startswith("net<"))
