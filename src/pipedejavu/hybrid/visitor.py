"""State that rests in host memory and visits the GPU for its update.

It comes during the backward pass into memory that the step has freed, is updated there, and goes back while the next
forward pass is under way; the memory of those that have left takes in those that found no room before.

    compute    B2 B1 B0  V0 F0 V1 F1 V2 F2 ...        V: the update of a visitor, right before its forward
    copy-in       o0 o1       o2                      o2 comes when o0 has left
    copy-out               o0   o1   o2
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from pipedejavu.hybrid.arithmetic import Scalars, State
from pipedejavu.hybrid.gpu import update_on_gpu
from pipedejavu.hybrid.home import Home, Member, Progress, resting_bytes, take_state
from pipedejavu.hybrid.lane import Mark, now
from pipedejavu.hybrid.slab import Slab, aligned

PIECE_BYTES = 2**26
"""Copies to the host run in turn, so a large one would keep every small one waiting that a model may ask for."""


class Room:
    """The memory of the GPU that visitors share."""

    def __init__(self, size_bytes: int):
        self.size_bytes, self.used_bytes = size_bytes, 0
        self.leaving: list[tuple[Mark, Tensor]] = []

    def take(self, size_bytes: int, device: torch.device) -> Tensor:
        """Returns memory for one visitor, as soon as others have left enough of it."""
        self.prune()
        while self.leaving and self.used_bytes + size_bytes > self.size_bytes:
            self.leaving[0][0].wait_on_host()
            self.prune()
        self.used_bytes += size_bytes
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def prune(self) -> None:
        """Frees what visitors have left."""
        while self.leaving and self.leaving[0][0].is_past():
            self.used_bytes -= self.leaving.pop(0)[1].numel()

    def finish(self) -> None:
        """Waits until all that is leaving has left."""
        for mark, _ in self.leaving:
            mark.wait_on_host()
        self.prune()


class Visitor:
    """The state of one unit."""

    def __init__(self, home: Home, room: Room, progress: Progress):
        self.home, self.lanes, self.room = home, home.lanes, room
        home.place = "visit"
        size = sum(resting_bytes(member) for member in home.members)
        is_pinned = self.lanes.device.type == "cuda"
        self.slab = Slab(size, self.lanes.update, is_pinned=is_pinned, progress=progress)
        for member in home.members:
            member.state = take_state(member, member.parameter.data.view(-1), self.slab)
        self._here: tuple[Tensor, Mark] | None = None
        """The state on the GPU, byte for byte as in host memory, and the end of its way there."""
        self._left: Mark | None = None

    def come(self) -> None:
        """Lets the state come to the GPU, behind its last way back."""
        if self._here is not None:
            return
        if self._left is not None:
            self._left.wait_on_host()
        here = self.room.take(self.slab.size_bytes, self.lanes.device)
        copy = partial(here.copy_, self.slab.whole, non_blocking=True)
        came = self.lanes.copy_in.submit(f"FETCH:o{self.home.index}", copy, now(self.lanes.device))
        self._here = here, came

    def update(self, factors: Mapping[Member, Scalars]) -> None:
        """Updates the unit on the compute lane: now if its state is there, else before its next forward."""
        gradients = {member: member.parameter.grad for member in factors}
        apply = partial(self._apply, factors, gradients)
        if self._here is not None and self._here[1].is_past():
            apply()
        else:
            self.home.before = apply

    def _apply(self, factors: Mapping[Member, Scalars], gradients: Mapping[Member, Tensor | None]) -> None:
        self.come()
        assert self._here is not None
        (here, came), self._here = self._here, None
        came.wait_on_device()
        used = 0
        for member in self.home.members:
            size = resting_bytes(member)
            gradient = gradients.get(member)
            if gradient is not None:
                member.step += 1
                update_on_gpu(factors[member], gradient.reshape(-1), _state_in(member, here[used : used + size]))
            used += size
        leave = partial(self._leave, here)
        self._left = self.lanes.leave.submit(f"leave{self.home.index}", leave, now(self.lanes.device))
        self.room.leaving.append((self._left, here))

    def _leave(self, here: Tensor) -> None:
        """Copies the state to host memory, with no more than two pieces under way."""
        marks: list[Mark] = []
        for start in range(0, here.numel(), PIECE_BYTES):
            piece = slice(start, start + PIECE_BYTES)
            copy = partial(self.slab.whole[piece].copy_, here[piece], non_blocking=True)
            marks.append(self.lanes.copy_out.submit(f"OFFLOAD:o{self.home.index}", copy))
            if len(marks) > 1:
                marks[-2].wait_on_host()
        marks[-1].wait_on_host()

    def cancel(self) -> None:
        """Ends a visit that led to no update; its memory is free once the copy into it has ended."""
        if self._here is not None and self.home.before is None:
            (here, came), self._here = self._here, None
            came.wait_on_device()
            self.room.used_bytes -= here.numel()


def _state_in(member: Member, visiting: Tensor) -> State:
    """Returns a member's state in the bytes of a visit, laid out as in its slab."""
    n, at, low = member.numel, 0, None
    if member.is_split:
        low, at = visiting[: 2 * n].view(torch.int16), aligned(2 * n)
    m = visiting[at : at + 4 * n].view(torch.float32)
    at += aligned(4 * n)
    return State(member.parameter.data.view(-1), low, m, visiting[at : at + 4 * n].view(torch.float32))
