"""Gradients as the backward pass makes them: their norms, and their way to host memory.

Every norm and every copy costs the host some time, and a model has hundreds of small parameters: those of one unit are
gathered, and taken together.
"""

from collections import deque
from collections.abc import Collection

import torch
from torch import Tensor

from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.unit_state import ParamState, UnitState
from pipedejavu.runtime.lane_event import LaneEvent

MANY_BYTES = 2**22
"""Of gathered gradients that are to leave: they set out then, before the link waits for them."""


Leaving = tuple[UnitState, LaneEvent, list[Tensor]]
"""Gradients of a unit on their way; their memory must not be taken by others before the mark."""


class GradientBucket:
    """The gradients of one unit that have come last, and those that are on their way."""

    def __init__(self, params: Collection[ParamState], lanes: HybridLanes):
        device = lanes.device
        self.norms = torch.zeros(len(params), pin_memory=device.type == "cuda")
        """In host memory, by slot: of gradients that have arrived there, and of all behind `finish`."""
        self._norms = torch.zeros(len(params), device=device)
        self._norm_of = dict(zip(params, self._norms.unbind(), strict=True))
        self._home: UnitState | None = None
        self._waiting: dict[ParamState, Tensor] = {}
        self._leaving: deque[Leaving] = deque()

    def make_way(self, unit_state: UnitState, param: ParamState) -> None:
        """Frees what has left, and takes what was gathered if a new gradient cannot be taken together with it."""
        self.prune()
        if unit_state is not self._home or param in self._waiting:
            self.take()

    def add(self, unit_state: UnitState, param: ParamState, gradient: Tensor) -> None:
        """Gathers a gradient; many that are to leave do so at once."""
        self._home, self._waiting[param] = unit_state, gradient
        if unit_state.is_on_host and sum(waiting.nbytes for waiting in self._waiting.values()) >= MANY_BYTES:
            self.take()

    def take(self) -> None:
        """Takes the norms of what was gathered, and sends it away if its state is in host memory.

        A norm depends on its own gradient alone, whichever others it is taken with.
        """
        unit_state, flat = (
            self._home,
            {param: gradient.reshape(-1) for param, gradient in self._waiting.items()},
        )
        for dtype in {gradient.dtype for gradient in flat.values()}:
            alike = {param: gradient for param, gradient in flat.items() if gradient.dtype == dtype}
            found = torch._foreach_norm(list(alike.values()), 2, torch.float32)
            torch._foreach_copy_([self._norm_of[param] for param in alike], found)
        if unit_state is not None and unit_state.is_on_host and flat:
            self._leaving.append((unit_state, unit_state.send(flat, self._norms, self.norms), list(flat.values())))
        self.forget()

    def forget(self) -> None:
        """Drops what was gathered."""
        self._home, self._waiting = None, {}

    def prune(self) -> None:
        """Frees gradients that have left the GPU, which they do in the order in which they set out."""
        while self._leaving and self._leaving[0][1].is_past():
            self._leaving.popleft()

    def let_leave(self, last: UnitState, room_bytes: int) -> None:
        """Waits, the first one first, until the gradients of units before the last that are on their way fit a room."""
        over = sum(_size(leaving) for leaving in self._leaving if leaving[0] is not last) - room_bytes
        while over > 0 and self._leaving:
            leaving = self._leaving.popleft()
            leaving[1].wait_on_host()
            over -= _size(leaving) if leaving[0] is not last else 0

    def finish(self) -> None:
        """Takes all norms, and waits until they are in host memory."""
        self.take()
        self.norms.copy_(self._norms)

    def wait(self) -> None:
        """Waits until gradients that leave have left, and gives their memory back."""
        if not self._leaving:
            return
        for _, event, _ in self._leaving:
            event.wait_on_host()
        self._leaving.clear()
        if self._norms.device.type == "cuda":
            torch.cuda.empty_cache()

    def norm(self, params: Collection[ParamState]) -> float:
        """Returns the norm of these gradients together, as far as norms are in host memory."""
        return float(torch.linalg.vector_norm(self.norms[[param.slot for param in params]]))

    def is_finite(self, params: Collection[ParamState]) -> bool:
        """Whether these gradients are finite, as far as norms are in host memory."""
        return bool(self.norms[[param.slot for param in params]].isfinite().all())


def _size(leaving: Leaving) -> int:
    return sum(gradient.nbytes for gradient in leaving[2])
