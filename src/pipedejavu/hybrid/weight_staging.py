"""Host memory for the weights of units that keep no copy of them there: an update reads them from the GPU."""

import torch
from torch import Tensor

from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.param_state import ParamState
from pipedejavu.hybrid.unit_state import UnitState, size_of
from pipedejavu.runtime.host_memory import Progress, Slab
from pipedejavu.runtime.lane_event import LaneEvent


class WeightStaging:
    """Two buffers: one unit is updated while the weights of the next are copied."""

    def __init__(self, unit_states: list[UnitState], lanes: HybridLanes, progress: Progress = lambda _: None):
        self.lanes = lanes
        staged = [unit_state for unit_state in unit_states if unit_state.place == "lean"]
        size = max((size_of(unit_state).gradient_bytes for unit_state in staged), default=0)
        is_pinned = lanes.device.type == "cuda"
        self._slabs = [
            Slab(size, lanes.update.zero, is_pinned=is_pinned, progress=progress) for _ in range(2 if staged else 0)
        ]
        self._queue: list[UnitState] = []
        self._copies: dict[UnitState, tuple[dict[ParamState, Tensor], LaneEvent]] = {}
        self._turn = 0

    def expect(self, unit_states: list[UnitState]) -> None:
        """Sets the units of one step in the order of their updates, and starts the copy of the first."""
        self._queue = list(unit_states)
        self._copy_next()

    def take(self, unit_state: UnitState) -> dict[ParamState, Tensor]:
        """Returns the weights of a unit before its update, and starts the copy of the next unit's."""
        if unit_state not in self._copies:
            self._queue.insert(0, unit_state)
            self._copy_next()
        weights, event = self._copies.pop(unit_state)
        event.wait_on_host()
        self._copy_next()
        return weights

    def _copy_next(self) -> None:
        if not self._queue:
            return
        unit_state, slab = self._queue.pop(0), self._slabs[self._turn]
        self._turn = 1 - self._turn
        slab.rewind()
        weights = {param: slab.take(param.numel, param.parameter.dtype) for param in unit_state.params}

        def copy() -> None:
            torch._foreach_copy_(list(weights.values()), [param.weight for param in weights], non_blocking=True)

        self._copies[unit_state] = weights, self.lanes.copy_out.submit(f"OFFLOAD:w{unit_state.index}", copy)
