"""The optimizer state of one unit: where it rests, how gradients reach it, and how an update reaches the model.

Three lanes work beside the compute lane. Gradients leave on `copy-out`, the `host` lane updates, and new weights
return on `copy-in`:

    compute   F0 F1 F2 ...      B2 B1 B0   F0   F1 ...
    copy-out                       g2 g1 g0
    host                                 U0 U1 U2          each forward waits only for its own unit
    copy-in                                 w0 w1 w2
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.model_unit import ModelUnit
from pipedejavu.hybrid.param_state import ParamState
from pipedejavu.hybrid.placement import Place, UnitSize
from pipedejavu.optim.arithmetic import AdamState, Part, Scalars, update_
from pipedejavu.optim.gpu_update import Launch, UnitUpdate, addresses_of, has_kernel, state_in, state_layout
from pipedejavu.optim.native import NativeTask
from pipedejavu.optim.state_parts import state_from
from pipedejavu.runtime.host_memory import Progress, Slab, aligned
from pipedejavu.runtime.lane_event import LaneEvent, now


class WeightSource(Protocol):
    """Copies the weights of units without a copy on the host there for an update."""

    def take(self, unit_state: "UnitState") -> dict[ParamState, Tensor]:
        """Returns the weights of a unit in host memory; waits for their copy."""


@dataclass(eq=False)
class UnitState:
    """The optimizer state of one unit, all of it in one place."""

    unit: ModelUnit
    index: int
    params: list[ParamState]
    lanes: HybridLanes
    place: Place | None = None
    is_windowed: bool = False
    """Whether its weights rest in host memory and are copied to the GPU for each use."""
    sums_wide: bool = False
    """Whether its bf16 gradients are added up in float32."""
    is_moved: bool = False
    """Whether its state was put on the host because the GPU's memory ran out, and stays there."""
    updated: LaneEvent | None = None
    """The end of the host's work on its latest update."""
    returned: LaneEvent | None = None
    """The end of the copy of its new weights to the GPU."""
    began_with: list[Any] | None = None
    """The settings of an update that began in the backward pass, until the step ends."""
    requested: dict[ParamState, Scalars] = field(default_factory=dict)
    """The factors of the speculative update that was queued last."""
    speculated: dict[ParamState, Scalars] = field(default_factory=dict)
    """The factors with which the shadow state was written; only the host lane reads and writes it."""
    before: Callable[[], None] | None = None
    """Work on the compute lane that remains before the weights are up to date."""
    defers_moments: bool = False
    """Whether an update on the host writes the weights first, and the moments after those of all units."""
    _moments: LaneEvent | None = None
    """The end of the work that writes its moments, if they are deferred."""
    _deferred: list[NativeTask] = field(default_factory=list)
    """What that work has to do; only the host lane reads and writes it."""
    _slabs: list[Slab] = field(default_factory=list)
    _unit_update: UnitUpdate | None = None

    def __post_init__(self) -> None:
        for before, param in pairwise(self.params):
            param.start = before.start + state_layout(before.parameter, before.moments)[1]

    @property
    def is_on_host(self) -> bool:
        """Whether the host updates it, so that its gradients leave the GPU."""
        return self.place in ("host", "lean")

    def gradient_dtype(self, param: ParamState) -> torch.dtype:
        """Returns the dtype of the sum of a parameter's gradients."""
        dtype = param.parameter.dtype
        return torch.float32 if self.sums_wide and dtype == torch.bfloat16 else dtype

    @property
    def resting_bytes(self) -> int:
        """The bytes of its moments and of the low halves of its masters."""
        return sum(state_layout(param.parameter, param.moments)[1] for param in self.params)

    def settle(self, place: Place, *, has_shadow: bool, progress: Progress) -> None:
        """Allocates the state in its place, with zero moments and masters equal to the weights."""
        self.place = place
        device = self.lanes.device
        if place == "gpu":
            for param in self.params:
                param.state = state_from(
                    param.parameter.data.view(-1),
                    param.moments,
                    lambda n, dtype: torch.zeros(n, dtype=dtype, device=device),
                )
            return
        has_copy = place != "lean"
        is_pinned = device.type == "cuda"
        sizes = size_of(self)
        moved = Slab(
            (sizes.host_bytes if has_copy else sizes.no_copy_bytes) - self.resting_bytes,
            self.lanes.update.zero, is_pinned=is_pinned, progress=progress,
        )  # fmt: skip
        resting = Slab(self.resting_bytes, self.lanes.update.zero, is_pinned=False, progress=progress)
        self._slabs += [moved, resting]
        for param in self.params:
            dtype = param.parameter.dtype
            param.gradient = moved.take(param.numel, self.gradient_dtype(param))
            # Threads of an update may write a weight to the memory of its gradient only if both have as many bytes.
            has_own = has_copy or param.gradient.dtype != dtype
            weight = moved.take(param.numel, dtype) if has_own else param.gradient
            param.state = state_from(weight, param.moments, resting.take)
        self.refresh()
        if has_shadow:
            self.add_shadow(progress)

    def move_to_host(self, progress: Progress) -> None:
        """Moves state that rests on the GPU, or is streamed to it, to the place `host`; no update may be running."""
        before = {param: param.state for param in self.params}
        self.settle("host", has_shadow=False, progress=progress)
        self._unit_update, self.is_moved = None, True
        for param, state in before.items():
            for target, value in zip(_state_of(param)[1:], state[1:] if state is not None else (), strict=False):
                if target is not None and value is not None:
                    target.copy_(value)

    def empty(self) -> list[Slab]:
        """Forgets where its state rests, to be settled again; returns the host memory that still holds the state."""
        slabs, self._slabs = self._slabs, []
        self.place, self._unit_update = None, None
        for param in self.params:
            param.gradient = None
        return slabs

    def add_shadow(self, progress: Progress) -> None:
        """Allocates the shadow state: a second copy of what an update writes."""
        is_pinned = self.lanes.device.type == "cuda"
        weights = sum(aligned(param.numel * param.parameter.dtype.itemsize) for param in self.params)
        moved = Slab(weights, self.lanes.update.zero, is_pinned=is_pinned, progress=progress)
        resting = Slab(self.resting_bytes, self.lanes.update.zero, is_pinned=False, progress=progress)
        self._slabs += [moved, resting]
        for param in self.params:
            weight = moved.take(param.numel, param.parameter.dtype)
            param.shadow = state_from(weight, param.moments, resting.take)

    def refresh(self) -> None:
        """Copies the weights of the model to the host's copy of them, if there is one."""
        for param in self.params:
            if self.place == "host" and param.state is not None:
                param.state.weight.copy_(param.parameter.data.view(-1))

    def wait(self) -> None:
        """Makes the compute lane wait until the weights of this unit are up to date."""
        if self.before is not None:
            before, self.before = self.before, None
            before()
        if self.updated is not None:
            self.updated.wait_on_host()
            if self.returned is not None:
                self.returned.wait_on_device()
            self.updated = self.returned = None

    def wait_for_moments(self) -> None:
        """Waits until deferred moments are written, so that they and the gradients in host memory may be replaced."""
        if self._moments is not None:
            self._moments.wait_on_host()
            self._moments = None

    def send(self, gradients: Mapping[ParamState, Tensor], norms: Tensor, host_norms: Tensor) -> LaneEvent:
        """Copies gradients, and the norms of the unit, to host memory on the copy-out lane."""
        self.requested = {}  # it was for an earlier sum of gradients
        self.wait_for_moments()
        slots = slice(self.params[0].slot, self.params[-1].slot + 1)

        def copy() -> None:
            on_host = [_gradient_of(param) for param in gradients]
            torch._foreach_copy_([*on_host, host_norms[slots]], [*gradients.values(), norms[slots]], non_blocking=True)

        out = self.lanes.copy_out.submit(f"OFFLOAD:d{self.index}", copy, now(self.lanes.device))
        for param in gradients:
            param.out = out
        return out

    def speculate(self, factors: dict[ParamState, Scalars], is_wrong: Callable[[], bool]) -> None:
        """Queues an update of the shadow state, which `update` adopts if its factors turn out to be right."""
        self.requested = factors

        def work() -> None:
            _wait_for(factors)
            if self.requested is not factors or is_wrong():
                return
            self.lanes.update([_task(param, s, None, param.shadow) for param, s in factors.items()])
            self.speculated = factors

        self.lanes.host.submit(f"UPDATE{self.index}~guess", work)

    def update(
        self,
        factors: dict[ParamState, Scalars],
        staging: WeightSource,
        is_left_out: Callable[[], bool] = lambda: False,
    ) -> None:
        """Queues the update on the host and the copy of the new weights to the GPU.

        A speculative update with the same factors is adopted instead: state and shadow state change places. If the
        unit defers its moments, `update_moments` has to follow.
        """
        ready = now(self.lanes.device)
        requested = self.requested = self.requested if self.requested == factors else {}
        defers = self.defers_moments

        def work() -> None:
            weights = staging.take(self) if self.place == "lean" else {}
            _wait_for(factors)
            if is_left_out():
                return
            for param in factors:
                param.step += 1
            if requested and self.speculated is requested:
                for param in factors:
                    param.state, param.shadow = param.shadow, param.state
            else:
                tasks = [_task(param, s, weights.get(param), param.state) for param, s in factors.items()]
                if defers:
                    self._deferred = [task._replace(part=Part.MOMENTS) for task in tasks]
                    tasks = [task._replace(part=Part.WEIGHTS) for task in tasks]
                self.lanes.update(tasks)
            self.speculated = {}
            if not self.is_windowed:
                self.returned = self.lanes.copy_in.submit(f"FETCH:w{self.index}", lambda: _return(factors), ready)

        self.updated = self.lanes.host.submit(f"UPDATE{self.index}~host", work)

    def update_moments(self) -> None:
        """Queues what the latest update left to do, if the unit defers its moments."""
        if not self.defers_moments:
            return

        def work() -> None:
            tasks, self._deferred = self._deferred, []
            if tasks:
                self.lanes.update(tasks)

        self._moments = self.lanes.host.submit(f"UPDATE{self.index}~moments", work)

    def prepare(
        self,
        factors: Mapping[ParamState, Scalars],
        gradients: Mapping[ParamState, Tensor],
        streamed: Tensor | None = None,
    ) -> Launch:
        """Returns the update of the unit on the compute lane, with its state on the GPU.

        `streamed` is the memory on the GPU that holds state which rests on the host.
        """
        launch = self._launch_of(factors, gradients, streamed)

        def update(scale: float) -> None:
            for param in factors:
                param.step += 1
            self.lanes.note("updating", self.index)
            launch(scale)
            self.lanes.note("updated", self.index)

        return update

    def _launch_of(
        self, factors: Mapping[ParamState, Scalars], gradients: Mapping[ParamState, Tensor], streamed: Tensor | None
    ) -> Launch:
        if has_kernel(self.lanes.device):
            if self._unit_update is None:
                self._unit_update = self._make_update()
            every = [(factors.get(param), gradients.get(param)) for param in self.params]
            base = 0 if streamed is None else streamed.data_ptr()
            return self._unit_update.prepare([s for s, _ in every], [g for _, g in every], base)

        def one_by_one(scale: float) -> None:
            for param, s in factors.items():
                state = param.state
                if streamed is not None:
                    state = state_in(streamed, param.parameter.data, param.start, param.moments)
                assert state is not None
                update_(s._replace(scale=scale), gradients[param].reshape(-1), state, state)

        return one_by_one

    def _make_update(self) -> UnitUpdate:
        """Returns the update kernel of the unit; it takes addresses of resting state, offsets of streamed state."""
        layouts = []
        for param in self.params:
            assert param.state is not None
            if self.place == "gpu":
                layouts.append(addresses_of(param.state))
            else:
                low, m, v, *scales = (param.start + at for at in state_layout(param.parameter, param.moments)[0])
                layouts.append((low, m, v, scales[0], scales[1]))
        return UnitUpdate([param.parameter for param in self.params], layouts, self.params[0].moments)


def size_of(unit_state: UnitState) -> UnitSize:
    """Returns the bytes of a unit in each place."""
    params = unit_state.params
    weights = sum(aligned(param.numel * param.parameter.dtype.itemsize) for param in params)
    resting = unit_state.resting_bytes
    on_gpu = sum(param.state_bytes for param in params)
    device = sum(param.numel * param.parameter.dtype.itemsize for param in params)
    gradients = sum(aligned(param.numel * unit_state.gradient_dtype(param).itemsize) for param in params)
    own = (param for param in params if unit_state.gradient_dtype(param) != param.parameter.dtype)
    lean = gradients + sum(aligned(param.numel * param.parameter.dtype.itemsize) for param in own)
    return UnitSize(
        name=unit_state.unit.name,
        num_parameters=sum(param.numel for param in params),
        weight_bytes=0 if unit_state.is_windowed else device,
        gradient_bytes=gradients,
        gpu_bytes=on_gpu,
        host_bytes=weights + gradients + resting,
        no_copy_bytes=lean + resting,
        streamed_bytes=resting,
        shadow_bytes=weights + resting,
        is_bound_to_host=unit_state.is_windowed or unit_state.is_moved,
        host_place="lean" if unit_state.place == "lean" else "host",
    )


def _task(param: ParamState, s: Scalars, weight: Tensor | None, new: AdamState | None) -> NativeTask:
    """Returns the update of a parameter to `new`, from its state or, if given, from `weight` and its moments."""
    assert new is not None
    old = _state_of(param) if weight is None else _state_of(param)._replace(weight=weight)
    return NativeTask(s, _gradient_of(param), old, new)


def _state_of(param: ParamState) -> AdamState:
    assert param.state is not None
    return param.state


def _gradient_of(param: ParamState) -> Tensor:
    assert param.gradient is not None
    return param.gradient


def _wait_for(params: Iterable[ParamState]) -> None:
    """Waits until the gradients of parameters are in host memory."""
    for out in {param.out for param in params}:
        assert out is not None
        out.wait_on_host()


def _return(params: Iterable[ParamState]) -> None:
    """Copies new weights from host memory into the model."""
    new = {param: _state_of(param).weight for param in params}
    torch._foreach_copy_([param.weight for param in new], list(new.values()), non_blocking=True)
