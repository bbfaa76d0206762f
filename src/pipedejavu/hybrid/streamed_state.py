"""State that rests in host memory and is streamed to the GPU for its update.

It is fetched during the backward pass into memory that the step has freed, updated there, and returned to the host
during the next forward pass. Memory of returned state is reused for state that did not fit before.

    compute    B2 B1 B0  V0 F0 V1 F1 V2 F2 ...        V: the update of streamed state, right before its forward
    copy-in       o0 o1       o2                      o2 is fetched when o0 has been returned
    copy-out                  o0   o1   o2            each returns during the forward of the next unit
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.param_state import ParamState, gradients_of
from pipedejavu.hybrid.unit_state import UnitState
from pipedejavu.optim.arithmetic import Scalars
from pipedejavu.optim.state_parts import state_from
from pipedejavu.runtime.host_memory import Progress, Slab
from pipedejavu.runtime.lane import Lane, StreamLane
from pipedejavu.runtime.lane_event import LaneEvent, now

CHUNK_BYTES = 2**26
"""Copies of one direction share the copy engine, and a stream with queued copies keeps it busy. Large copies are cut
into chunks, so that small copies which the model needs run in between."""

POLL_S = 0.1
"""How often a wait checks the lanes: a lane that has failed returns no memory."""


@dataclass
class CopyRate:
    """The time of copies, summed up."""

    size_bytes: int = 0
    time_s: float = 0.0

    def add(self, size_bytes: int, time_s: float) -> None:
        """Counts a copy."""
        self.size_bytes += size_bytes
        self.time_s += time_s

    def seconds(self, size_bytes: int) -> float | None:
        """Returns the time of a copy of this size; None if there was no copy yet."""
        return self.time_s * size_bytes / self.size_bytes if self.size_bytes else None


class StreamBuffer:
    """The GPU memory that all streamed state shares; used from the compute lane and from the threads of the lanes."""

    def __init__(self, lanes: HybridLanes) -> None:
        self._lanes = lanes
        self._free: list[Tensor] = []
        self._num_used = self._num_returning = self._num_expected = 0
        self._size_bytes = 0
        self._is_urgent = False
        self._changed = threading.Condition()
        self._returns: list[Callable[[], None]] = []
        self._num_forwards = 0
        self.copied = {kind: CopyRate() for kind in ("FETCH", "OFFLOAD")}
        """What copies of each direction have taken so far, with what they waited for each other."""

    def add(self, memory: Tensor) -> Tensor:
        """Adds memory that is used from now on, and returns it."""
        with self._changed:
            self._num_used += 1
            self._size_bytes += memory.numel()
        return memory

    def expect(self) -> None:
        """Announces one later call of `take`, so that returned memory is kept for it."""
        with self._changed:
            self._num_expected += 1

    def take(self, size_bytes: int) -> Tensor | None:
        """Waits for free memory of at least this size; returns None if none will be free in time."""
        with self._changed:
            while not (fitting := [memory for memory in self._free if memory.numel() >= size_bytes]):
                if self._num_returning == 0 and (self._num_used == 0 or self._is_urgent):
                    break
                self._wait()
            self._num_expected -= 1
            smallest = min(fitting, key=Tensor.numel, default=None)
            if smallest is not None:
                self._free = [memory for memory in self._free if memory is not smallest]
                self._num_used += 1
            return smallest

    def queue_return(self, start: Callable[[], None]) -> None:
        """Queues the return of updated state to the host, which `start` begins."""
        with self._changed:
            self._num_returning += 1
        self._returns.append(start)

    def begin(self) -> None:
        """Begins a step: until the second forward, gaps are left for the small copies of a model's first modules."""
        self._num_forwards = 0

    @property
    def num_ahead(self) -> int:
        """How many chunks may be queued after the current one; none while small copies need gaps."""
        return 0 if self._num_forwards < 2 else 1

    def start_returns(self) -> None:
        """Starts the queued returns: when the next forward begins, or when their memory is needed."""
        returns, self._returns = self._returns, []
        for start in returns:
            start()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """A context in which the compute lane waits for streamed state, so that `take` does not wait for memory."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
        yield
        self._is_urgent = False

    def release(self, memory: Tensor, *, was_returned: bool) -> None:
        """Takes back memory that is no longer used."""
        with self._changed:
            self._free.append(memory)
            self._num_used -= 1
            self._num_returning -= was_returned
            if not self._num_expected:
                self._drop()
            self._changed.notify_all()

    def shrink(self, size_bytes: int) -> None:
        """Frees memory for a forward: waits for returns until the rest is within this size, or none is left."""
        self._num_forwards += 1
        self.start_returns()
        with self._changed:
            while self._size_bytes > size_bytes:
                self._drop()
                if not self._num_returning or self._size_bytes <= size_bytes:
                    return
                self._wait()

    def finish(self) -> None:
        """Waits for all returns and frees all memory that is not used."""
        self.shrink(-1)

    def _drop(self) -> None:
        self._size_bytes -= sum(memory.numel() for memory in self._free)
        self._free = []

    def _wait(self) -> None:
        self._changed.wait(POLL_S)
        self._lanes.leave.check()
        self._lanes.arrive.check()


class StreamedState:
    """The state of one unit that is streamed."""

    def __init__(self, unit_state: UnitState, buffer: StreamBuffer, progress: Progress):
        self.unit_state, self.lanes, self.buffer = unit_state, unit_state.lanes, buffer
        unit_state.place = "visit"
        is_pinned = self.lanes.device.type == "cuda"
        self.slab = Slab(unit_state.resting_bytes, self.lanes.update.zero, is_pinned=is_pinned, progress=progress)
        for param in unit_state.params:
            param.state = state_from(param.parameter.data.view(-1), param.moments, self.slab.take)
        self._on_gpu: Tensor | None = None
        """The state on the GPU, byte for byte as in host memory."""
        self._fetched: LaneEvent | None = None
        self._returned: LaneEvent | None = None

    def fetch(self) -> None:
        """Starts the copy to the GPU now, into new memory of the compute lane; without any, `update` starts it."""
        self.buffer.start_returns()
        if self._fetched is None:
            try:
                memory = torch.empty(self.slab.size_bytes, dtype=torch.uint8, device=self.lanes.device)
            except torch.OutOfMemoryError:
                return
            copy = partial(self._copy_in, self.buffer.add(memory))
            self._fetched = self.lanes.arrive.submit(
                f"come{self.unit_state.index}", copy, self._returned, now(self.lanes.device)
            )

    def update(self, factors: Mapping[ParamState, Scalars], scale: float) -> None:
        """Schedules the update on the compute lane right before the next forward of the unit; fetches the state."""
        self.buffer.start_returns()
        if self._fetched is None:
            self.buffer.expect()
            self._fetched = self.lanes.arrive.submit(
                f"come{self.unit_state.index}", partial(self._copy_in, None), self._returned
            )
        self.unit_state.before = partial(self._apply, factors, gradients_of(factors), scale)

    def _copy_in(self, memory: Tensor | None) -> None:
        """Copies the state to the GPU, into `memory` or, without it, into memory of the buffer."""
        size = self.slab.size_bytes
        memory = self.buffer.take(size) if memory is None else memory
        if memory is None:
            memory = self.buffer.add(self._allocate(size))
        self._copy("FETCH", self.lanes.copy_in, self.slab.whole, memory[:size])
        self._on_gpu = memory

    def _allocate(self, size: int) -> Tensor:
        """Returns new memory of the copy-in stream, which waits for no other lane."""
        lane = self.lanes.copy_in
        with torch.cuda.stream(lane.stream) if isinstance(lane, StreamLane) else nullcontext():
            return torch.empty(size, dtype=torch.uint8, device=self.lanes.device)

    def _apply(
        self, factors: Mapping[ParamState, Scalars], gradients: Mapping[ParamState, Tensor], scale: float
    ) -> None:
        assert self._fetched is not None
        self.buffer.start_returns()
        with self.buffer.urgent():
            self._fetched.wait_on_host()
        on_gpu, self._on_gpu, self._fetched = self._on_gpu, None, None
        assert on_gpu is not None
        self.unit_state.prepare(factors, gradients, on_gpu)(scale)
        self.buffer.queue_return(partial(self._start_return, on_gpu, now(self.lanes.device)))

    def _start_return(self, on_gpu: Tensor, updated: LaneEvent) -> None:
        self._returned = self.lanes.leave.submit(
            f"leave{self.unit_state.index}", partial(self._copy_out, on_gpu), updated
        )

    def _copy_out(self, on_gpu: Tensor) -> None:
        self._copy("OFFLOAD", self.lanes.copy_out, on_gpu[: self.slab.size_bytes], self.slab.whole)
        self.buffer.release(on_gpu, was_returned=True)

    def _copy(self, kind: str, lane: Lane, source: Tensor, target: Tensor) -> None:
        """Copies chunk by chunk; returns when the last chunk has been copied."""
        began_s = time.perf_counter()
        events: list[LaneEvent] = []
        for there, here in zip(torch.split(target, CHUNK_BYTES), torch.split(source, CHUNK_BYTES), strict=True):
            events.append(
                lane.submit(f"{kind}:o{self.unit_state.index}", partial(there.copy_, here, non_blocking=True))
            )
            for event in events[-2 : len(events) - self.buffer.num_ahead]:
                event.wait_on_host()
        events[-1].wait_on_host()
        self.buffer.copied[kind].add(source.nbytes, time.perf_counter() - began_s)

    def cancel(self) -> None:
        """Releases state that was fetched and not updated."""
        if self._fetched is not None and self.unit_state.before is None:
            self._fetched.wait_on_host()
            assert self._on_gpu is not None
            self.buffer.release(self._on_gpu, was_returned=False)
            self._on_gpu = self._fetched = None
