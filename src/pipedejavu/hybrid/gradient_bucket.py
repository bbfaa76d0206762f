"""Gradients as the backward pass makes them: their norms, and their copies to host memory.

Each kernel and each copy costs the host time, and a model has hundreds of small parameters. So gradients of one unit
are collected in a bucket; their norms are computed, and their copies issued, together.
"""

from collections import deque
from collections.abc import Collection

import torch
from torch import Tensor

from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.param_state import ParamState
from pipedejavu.hybrid.unit_state import UnitState
from pipedejavu.runtime.lane_event import LaneEvent

BUCKET_BYTES = 2**22
"""The size at which gradients that go to the host are sent, before the unit is complete, to keep the link busy."""


Leaving = tuple[UnitState, LaneEvent, list[Tensor]]
"""A unit, the end of a copy of its gradients to the host, and these gradients, which must not be freed before it."""


class GradientBucket:
    """The latest gradients of one unit, and those that are being copied to the host."""

    def __init__(self, params: Collection[ParamState], lanes: HybridLanes):
        device = lanes.device
        self.norms = torch.zeros(len(params), pin_memory=device.type == "cuda")
        """Norms in host memory, by slot: those of copied gradients, and after `finish` all of them."""
        self._norms = torch.zeros(len(params), device=device)
        self._norm_of = dict(zip(params, self._norms.unbind(), strict=True))
        self._unit_state: UnitState | None = None
        self._gradients: dict[ParamState, Tensor] = {}
        self._leaving: deque[Leaving] = deque()

    def make_way(self, unit_state: UnitState, param: ParamState) -> None:
        """Empties the bucket if the gradient of a parameter cannot join it, and frees copied gradients."""
        self.prune()
        if unit_state is not self._unit_state or param in self._gradients:
            self.take()

    def add(self, unit_state: UnitState, param: ParamState, gradient: Tensor) -> None:
        """Adds a gradient; sends the bucket if it is full and goes to the host."""
        self._unit_state, self._gradients[param] = unit_state, gradient
        if unit_state.is_on_host and sum(waiting.nbytes for waiting in self._gradients.values()) >= BUCKET_BYTES:
            self.take()

    def take(self) -> None:
        """Empties the bucket: computes the norms, and sends the gradients to the host if the state is there.

        The norm of a gradient does not depend on the others in the bucket.
        """
        unit_state = self._unit_state
        flat = {param: gradient.reshape(-1) for param, gradient in self._gradients.items()}
        for dtype in {gradient.dtype for gradient in flat.values()}:
            of_dtype = {param: gradient for param, gradient in flat.items() if gradient.dtype == dtype}
            norms = torch._foreach_norm(list(of_dtype.values()), 2, torch.float32)
            torch._foreach_copy_([self._norm_of[param] for param in of_dtype], norms)
        if unit_state is not None and unit_state.is_on_host and flat:
            self._leaving.append((unit_state, unit_state.send(flat, self._norms, self.norms), list(flat.values())))
        self.forget()

    def forget(self) -> None:
        """Drops the gradients in the bucket."""
        self._unit_state, self._gradients = None, {}

    def prune(self) -> None:
        """Frees gradients whose copies have ended; copies end in the order in which they were issued."""
        while self._leaving and self._leaving[0][1].is_past():
            self._leaving.popleft()

    def let_leave(self, last: UnitState, limit_bytes: int) -> None:
        """Waits for the oldest copies until the gradients of units other than the last are within a limit."""
        over = sum(_size(leaving) for leaving in self._leaving if leaving[0] is not last) - limit_bytes
        while over > 0 and self._leaving:
            leaving = self._leaving.popleft()
            leaving[1].wait_on_host()
            over -= _size(leaving) if leaving[0] is not last else 0

    def finish(self) -> None:
        """Computes all remaining norms and waits until all norms are in host memory."""
        self.take()
        self.norms.copy_(self._norms)

    def wait(self) -> None:
        """Waits for all copies to the host and returns the memory of the gradients to the device."""
        if not self._leaving:
            return
        for _, event, _ in self._leaving:
            event.wait_on_host()
        self._leaving.clear()
        if self._norms.device.type == "cuda":
            torch.cuda.empty_cache()

    def norm(self, params: Collection[ParamState]) -> float:
        """Returns the norm of all these gradients together, from the norms in host memory."""
        return float(torch.linalg.vector_norm(self.norms[[param.slot for param in params]]))

    def is_finite(self, params: Collection[ParamState]) -> bool:
        """Returns whether these gradients are finite, from the norms in host memory."""
        return bool(self.norms[[param.slot for param in params]].isfinite().all())


def _size(leaving: Leaving) -> int:
    return sum(gradient.nbytes for gradient in leaving[2])
