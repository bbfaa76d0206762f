"""State that rests in host memory and visits the GPU for its update.

It comes during the backward pass into memory that the step has freed, is updated there, and goes back while the next
forward pass is under way; the memory of those that have left takes in those that found no room before.

    compute    B2 B1 B0  V0 F0 V1 F1 V2 F2 ...        V: the update of a visitor, right before its forward
    copy-in       o0 o1       o2                      o2 comes when o0 has left
    copy-out                  o0   o1   o2            each leaves at the forward of the next unit
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from pipedejavu.hybrid.arithmetic import Scalars
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.unit_state import ParamState, Progress, UnitState, gradients_of, take_state
from pipedejavu.runtime.host_memory import Slab
from pipedejavu.runtime.lane import Lane, StreamLane
from pipedejavu.runtime.lane_event import LaneEvent, now

PIECE_BYTES = 2**26
"""The copies of one direction run one after the other, whoever asks for them, and a stream that always has a next one
keeps its turn: a large one is cut into pieces, so that a small one which the model needs comes in between."""

WAIT_S = 0.1
"""How often a wait looks again; a lane that has failed gives nothing back."""


class StreamBuffer:
    """The memory of the GPU that visitors share; what one has left takes in the next."""

    def __init__(self, lanes: HybridLanes) -> None:
        self._lanes = lanes
        self._free: list[Tensor] = []
        self._num_taken = self._num_leaving = self._num_expected = 0
        self._size_bytes = 0
        self._is_urgent = False
        self._changed = threading.Condition()
        self._departures: list[Callable[[], None]] = []
        self._num_forwards = 0

    def add(self, memory: Tensor) -> Tensor:
        """Takes note of memory that a visitor brings with it."""
        with self._changed:
            self._num_taken += 1
            self._size_bytes += memory.numel()
        return memory

    def expect(self) -> None:
        """Takes note of a visitor that will come into what another has left."""
        with self._changed:
            self._num_expected += 1

    def take(self, size_bytes: int) -> Tensor | None:
        """Waits for memory of at least this size; None if none will be left before the compute lane needs it."""
        with self._changed:
            while not (fitting := [memory for memory in self._free if memory.numel() >= size_bytes]):
                if self._num_leaving == 0 and (self._num_taken == 0 or self._is_urgent):
                    break
                self._wait()
            self._num_expected -= 1
            found = min(fitting, key=Tensor.numel, default=None)
            if found is not None:
                self._free = [memory for memory in self._free if memory is not found]
                self._num_taken += 1
            return found

    def leave(self, depart: Callable[[], None]) -> None:
        """Takes note of a visitor that is about to leave."""
        with self._changed:
            self._num_leaving += 1
        self._departures.append(depart)

    def begin(self) -> None:
        """Takes note that a step begins: models move small values, to and fro, before their first block."""
        self._num_forwards = 0

    @property
    def num_ahead(self) -> int:
        """How many pieces may be queued beside the one under way; none while small copies should find a gap."""
        return 0 if self._num_forwards < 2 else 1

    def let_go(self) -> None:
        """Lets those leave that are about to: when the next forward comes, or someone waits for their memory."""
        departures, self._departures = self._departures, []
        for depart in departures:
            depart()

    @contextmanager
    def urgency(self) -> Iterator[None]:
        """Lets visitors come at once while the compute lane waits for one."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
        yield
        self._is_urgent = False

    def give(self, memory: Tensor, *, has_left: bool) -> None:
        """Takes memory back that nobody uses any more."""
        with self._changed:
            self._free.append(memory)
            self._num_taken -= 1
            self._num_leaving -= has_left
            if not self._num_expected:
                self._drop()
            self._changed.notify_all()

    def shrink(self, size_bytes: int) -> None:
        """Makes way for a forward: waits for visitors that are leaving until the rest is within this size."""
        self._num_forwards += 1
        self.let_go()
        with self._changed:
            while self._size_bytes > size_bytes:
                self._drop()
                if not self._num_leaving or self._size_bytes <= size_bytes:
                    return
                self._wait()

    def finish(self) -> None:
        """Waits until all visitors that are leaving have left, and frees what nobody uses."""
        self.shrink(-1)

    def _drop(self) -> None:
        self._size_bytes -= sum(memory.numel() for memory in self._free)
        self._free = []

    def _wait(self) -> None:
        self._changed.wait(WAIT_S)
        self._lanes.leave.check()
        self._lanes.arrive.check()


class StreamedState:
    """The state of one unit."""

    def __init__(self, unit_state: UnitState, room: StreamBuffer, progress: Progress):
        self.unit_state, self.lanes, self.room = unit_state, unit_state.lanes, room
        unit_state.place = "visit"
        is_pinned = self.lanes.device.type == "cuda"
        self.slab = Slab(unit_state.resting_bytes, self.lanes.update.zero, is_pinned=is_pinned, progress=progress)
        for param in unit_state.params:
            param.state = take_state(param, param.parameter.data.view(-1), self.slab)
        self._here: Tensor | None = None
        """The state on the GPU, byte for byte as in host memory."""
        self._came: LaneEvent | None = None
        self._left: LaneEvent | None = None

    def come(self) -> None:
        """Lets the state come now, into new memory of the compute lane."""
        self.room.let_go()
        if self._came is None:
            memory = torch.empty(self.slab.size_bytes, dtype=torch.uint8, device=self.lanes.device)
            arrive = partial(self._arrive, self.room.add(memory))
            self._came = self.lanes.arrive.submit(
                f"come{self.unit_state.index}", arrive, self._left, now(self.lanes.device)
            )

    def update(self, factors: Mapping[ParamState, Scalars], scale: float) -> None:
        """Lets the unit be updated on the compute lane right before its next forward, when its state has come."""
        self.room.let_go()
        if self._came is None:
            self.room.expect()
            self._came = self.lanes.arrive.submit(
                f"come{self.unit_state.index}", partial(self._arrive, None), self._left
            )
        self.unit_state.before = partial(self._apply, factors, gradients_of(factors), scale)

    def _arrive(self, memory: Tensor | None) -> None:
        """Copies the state to the GPU; without memory of its own, into what another visitor has left."""
        size = self.slab.size_bytes
        memory = self.room.take(size) if memory is None else memory
        if memory is None:
            memory = self.room.add(self._own_memory(size))
        self._copy("FETCH", self.lanes.copy_in, self.slab.whole, memory[:size])
        self._here = memory

    def _own_memory(self, size: int) -> Tensor:
        """Returns memory that only this lane's copies wait for."""
        lane = self.lanes.copy_in
        with torch.cuda.stream(lane.stream) if isinstance(lane, StreamLane) else nullcontext():
            return torch.empty(size, dtype=torch.uint8, device=self.lanes.device)

    def _apply(
        self, factors: Mapping[ParamState, Scalars], gradients: Mapping[ParamState, Tensor], scale: float
    ) -> None:
        assert self._came is not None
        self.room.let_go()
        with self.room.urgency():
            self._came.wait_on_host()
        here, self._here, self._came = self._here, None, None
        assert here is not None
        self.unit_state.prepare(factors, gradients, here)(scale)
        self.room.leave(partial(self._depart, here, now(self.lanes.device)))

    def _depart(self, here: Tensor, updated: LaneEvent) -> None:
        self._left = self.lanes.leave.submit(f"leave{self.unit_state.index}", partial(self._leave, here), updated)

    def _leave(self, here: Tensor) -> None:
        self._copy("OFFLOAD", self.lanes.copy_out, here[: self.slab.size_bytes], self.slab.whole)
        self.room.give(here, has_left=True)

    def _copy(self, kind: str, lane: Lane, source: Tensor, target: Tensor) -> None:
        """Copies piece by piece; returns when all of it is there."""
        events: list[LaneEvent] = []
        for there, here in zip(torch.split(target, PIECE_BYTES), torch.split(source, PIECE_BYTES), strict=True):
            events.append(
                lane.submit(f"{kind}:o{self.unit_state.index}", partial(there.copy_, here, non_blocking=True))
            )
            for event in events[-2 : len(events) - self.room.num_ahead]:
                event.wait_on_host()
        events[-1].wait_on_host()

    def cancel(self) -> None:
        """Ends a visit that led to no update."""
        if self._came is not None and self.unit_state.before is None:
            self._came.wait_on_host()
            assert self._here is not None
            self.room.give(self._here, has_left=False)
            self._here = self._came = None
