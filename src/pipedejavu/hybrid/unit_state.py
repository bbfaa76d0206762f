"""One unit at run time: its parameters, where their state lies, and how an update reaches the model.

Three lanes work beside the compute lane. Gradients leave on `copy-out`, the `host` lane updates, and new weights
return on `copy-in`:

    compute   F0 F1 F2 ...      B2 B1 B0   F0   F1 ...
    copy-out                       g2 g1 g0
    host                                 U0 U1 U2          each forward waits for its own unit alone
    copy-in                                 w0 w1 w2
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.hybrid.arithmetic import AdamState, Scalars, update_
from pipedejavu.hybrid.gpu_update import Launch, UnitUpdate, addresses_of, has_kernel, places_of, state_in
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.model_unit import ModelUnit
from pipedejavu.hybrid.native import NativeTask
from pipedejavu.hybrid.placement import Place, UnitSize
from pipedejavu.runtime.host_memory import Slab, aligned
from pipedejavu.runtime.lane_event import LaneEvent, now

Progress = Callable[[int], None]


@dataclass(eq=False)
class ParamState:
    """One parameter of a unit."""

    name: str
    parameter: nn.Parameter
    group: Mapping[str, Any]
    """Its group in the optimizer, whose learning rate a scheduler may change."""
    slot: int
    """Its place among the norms."""
    start: int = 0
    """Where its state begins in memory that holds that of the whole unit."""
    step: int = 0
    """Updates that were applied."""
    arrived: int = 0
    """Backward passes since the last step that gave it a gradient."""
    gradient: Tensor | None = None
    """Where its gradient waits in host memory."""
    state: AdamState | None = None
    spare: AdamState | None = None
    out: LaneEvent | None = None
    """The point when its gradient lies in host memory."""
    _weight: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """Its values in the model, one-dimensional; made once, as the compute lane waits while a lane makes views."""
        data = self.parameter.data
        if self._weight is None or self._weight.data_ptr() != data.data_ptr():
            self._weight = data.view(-1)
        return self._weight

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return self.parameter.numel()

    @property
    def is_split(self) -> bool:
        """Whether its master is kept in two halves."""
        return self.parameter.dtype == torch.bfloat16

    def setting(self) -> tuple[float, tuple[float, float], float, float]:
        """Returns learning rate, betas, eps and weight decay, as they are now."""
        return float(self.group["lr"]), tuple(self.group["betas"]), self.group["eps"], self.group["weight_decay"]


@dataclass(eq=False)
class UnitState:
    """A unit with its state in one place."""

    unit: ModelUnit
    index: int
    params: list[ParamState]
    lanes: HybridLanes
    place: Place | None = None
    is_windowed: bool = False
    """Whether its weights rest in host memory and come for each use."""
    updated: LaneEvent | None = None
    """The end of the host's work on its newest weights."""
    returned: LaneEvent | None = None
    """The end of the copy of its newest weights to the GPU."""
    began_with: list[Any] | None = None
    """The settings of an update that began in the backward pass of a step that has not ended."""
    assumed: dict[ParamState, Scalars] = field(default_factory=dict)
    """The factors of a guess that was asked for."""
    guessed: dict[ParamState, Scalars] = field(default_factory=dict)
    """The factors of what lies in the spare state; the host lane's own."""
    before: Callable[[], None] | None = None
    """What is left to do on the compute lane before the weights are the newest."""
    _slabs: list[Slab] = field(default_factory=list)
    _unit_update: UnitUpdate | None = None

    def __post_init__(self) -> None:
        for before, param in pairwise(self.params):
            param.start = before.start + places_of(before.parameter)[1]

    @property
    def is_on_host(self) -> bool:
        """Whether the host updates it, so that its gradients leave the GPU."""
        return self.place in ("host", "lean")

    @property
    def resting_bytes(self) -> int:
        """The bytes of moments and of the low halves of masters."""
        return sum(places_of(param.parameter)[1] for param in self.params)

    def settle(self, place: Place, *, has_spare: bool, progress: Progress) -> None:
        """Allocates the state in its place, with moments of zero and masters equal to the weights."""
        self.place = place
        device = self.lanes.device
        if place == "gpu":
            for param in self.params:
                moments = (torch.zeros(param.numel, dtype=torch.float32, device=device) for _ in range(2))
                low = torch.zeros(param.numel, dtype=torch.int16, device=device) if param.is_split else None
                param.state = AdamState(param.parameter.data.view(-1), low, *moments)
            return
        is_lean = place == "lean"
        is_pinned = device.type == "cuda"
        sizes = size_of(self)
        moved = Slab(
            (sizes.lean_bytes if is_lean else sizes.host_bytes) - self.resting_bytes,
            self.lanes.update.zero, is_pinned=is_pinned, progress=progress,
        )  # fmt: skip
        rest = Slab(self.resting_bytes, self.lanes.update.zero, is_pinned=False, progress=progress)
        self._slabs += [moved, rest]
        for param in self.params:
            dtype = param.parameter.dtype
            param.gradient = moved.take(param.numel, dtype)
            weight = param.gradient if is_lean else moved.take(param.numel, dtype)
            param.state = take_state(param, weight, rest)
        self.refresh()
        if has_spare:
            self.add_spare(progress)

    def add_spare(self, progress: Progress) -> None:
        """Allocates a second copy of what an update writes."""
        is_pinned = self.lanes.device.type == "cuda"
        weights = sum(aligned(m.numel * m.parameter.dtype.itemsize) for m in self.params)
        moved = Slab(weights, self.lanes.update.zero, is_pinned=is_pinned, progress=progress)
        rest = Slab(self.resting_bytes, self.lanes.update.zero, is_pinned=False, progress=progress)
        self._slabs += [moved, rest]
        for param in self.params:
            param.spare = take_state(param, moved.take(param.numel, param.parameter.dtype), rest)

    def refresh(self) -> None:
        """Copies the model's weights to host memory, where the state of a unit has a copy of them."""
        for param in self.params:
            if self.place == "host" and param.state is not None:
                param.state.weight.copy_(param.parameter.data.view(-1))

    def wait(self) -> None:
        """Lets the compute lane wait for the newest weights of this unit."""
        if self.before is not None:
            before, self.before = self.before, None
            before()
        if self.updated is not None:
            self.updated.wait_on_host()
            if self.returned is not None:
                self.returned.wait_on_device()
            self.updated = self.returned = None

    def send(self, gradients: Mapping[ParamState, Tensor], norms: Tensor, partial: Tensor) -> LaneEvent:
        """Lets gradients leave for host memory, with the norms of the unit."""
        self.assumed = {}  # a guess that was made of an earlier sum of gradients
        slots = slice(self.params[0].slot, self.params[-1].slot + 1)

        def copy() -> None:
            here = [_gradient_of(param) for param in gradients]
            torch._foreach_copy_([*here, partial[slots]], [*gradients.values(), norms[slots]], non_blocking=True)

        out = self.lanes.copy_out.submit(f"OFFLOAD:d{self.index}", copy, now(self.lanes.device))
        for param in gradients:
            param.out = out
        return out

    def guess(self, factors: dict[ParamState, Scalars], is_wrong: Callable[[], bool]) -> None:
        """Queues an update into the spare state, which becomes true only if its factors turn out to be right."""
        self.assumed = factors

        def work() -> None:
            _wait_for(factors)
            if self.assumed is not factors or is_wrong():
                return
            self.lanes.update([_task(param, s, None, param.spare) for param, s in factors.items()])
            self.guessed = factors

        self.lanes.host.submit(f"UPDATE{self.index}~guess", work)

    def update(
        self, factors: dict[ParamState, Scalars], staging: "Staging", is_left_out: Callable[[], bool] = lambda: False
    ) -> None:
        """Queues the update on the host and the way of the new weights to the GPU; a right guess is taken over."""
        ready = now(self.lanes.device)
        assumed = self.assumed = self.assumed if self.assumed == factors else {}

        def work() -> None:
            lean = staging.take(self) if self.place == "lean" else {}
            _wait_for(factors)
            if is_left_out():
                return
            for param in factors:
                param.step += 1
            if assumed and self.guessed is assumed:
                for param in factors:
                    param.state, param.spare = param.spare, param.state
            else:
                tasks = [_task(param, s, lean.get(param), param.state) for param, s in factors.items()]
                self.lanes.update(tasks)
            self.guessed = {}
            if not self.is_windowed:
                self.returned = self.lanes.copy_in.submit(f"FETCH:w{self.index}", lambda: _return(factors), ready)

        self.updated = self.lanes.host.submit(f"UPDATE{self.index}~host", work)

    def prepare(
        self,
        factors: Mapping[ParamState, Scalars],
        gradients: Mapping[ParamState, Tensor],
        visiting: Tensor | None = None,
    ) -> Launch:
        """Returns the unit's update on the compute lane; its state rests on the GPU, or is there for a visit."""
        launch = self._launch_of(factors, gradients, visiting)

        def update(scale: float) -> None:
            for param in factors:
                param.step += 1
            self.lanes.note("updating", self.index)
            launch(scale)
            self.lanes.note("updated", self.index)

        return update

    def _launch_of(
        self, factors: Mapping[ParamState, Scalars], gradients: Mapping[ParamState, Tensor], visiting: Tensor | None
    ) -> Launch:
        if has_kernel(self.lanes.device):
            if self._unit_update is None:
                self._unit_update = self._make_update()
            every = [(factors.get(param), gradients.get(param)) for param in self.params]
            base = 0 if visiting is None else visiting.data_ptr()
            return self._unit_update.prepare([s for s, _ in every], [g for _, g in every], base)

        def one_by_one(scale: float) -> None:
            for param, s in factors.items():
                own = param.state if visiting is None else state_in(visiting, param.parameter.data, param.start)
                assert own is not None
                update_(s._replace(scale=scale), gradients[param].reshape(-1), own, own)

        return one_by_one

    def _make_update(self) -> UnitUpdate:
        """Returns the GPU's update of the unit, whose state rests there or will lie together when it visits."""
        places = []
        for param in self.params:
            assert param.state is not None
            if self.place == "gpu":
                places.append(addresses_of(param.state))
            else:
                low, m, v = places_of(param.parameter)[0]
                places.append((param.start + low, param.start + m, param.start + v))
        return UnitUpdate([param.parameter for param in self.params], places)


class Staging:
    """Room for the weights of two lean units: one is updated while the next one's weights come."""

    def __init__(self, unit_states: list[UnitState], lanes: HybridLanes, progress: Progress):
        self.lanes = lanes
        lean = [unit_state for unit_state in unit_states if unit_state.place == "lean"]
        size = max((size_of(unit_state).gradient_bytes for unit_state in lean), default=0)
        is_pinned = lanes.device.type == "cuda"
        self._slabs = [
            Slab(size, lanes.update.zero, is_pinned=is_pinned, progress=progress) for _ in range(2 if lean else 0)
        ]
        self._queue: list[UnitState] = []
        self._asked: dict[UnitState, tuple[dict[ParamState, Tensor], LaneEvent]] = {}
        self._turn = 0

    def expect(self, unit_states: list[UnitState]) -> None:
        """Takes the lean units of one step, in the order in which they will be updated; asks for the first."""
        self._queue = list(unit_states)
        self._ask()

    def take(self, unit_state: UnitState) -> dict[ParamState, Tensor]:
        """Returns a unit's weights as they were before the update, and asks for the next unit's."""
        if unit_state not in self._asked:
            self._queue.insert(0, unit_state)
            self._ask()
        weights, event = self._asked.pop(unit_state)
        event.wait_on_host()
        self._ask()
        return weights

    def _ask(self) -> None:
        if not self._queue:
            return
        unit_state, slab = self._queue.pop(0), self._slabs[self._turn]
        self._turn = 1 - self._turn
        slab.rewind()
        weights = {param: slab.take(param.numel, param.parameter.dtype) for param in unit_state.params}

        def copy() -> None:
            torch._foreach_copy_(list(weights.values()), [param.weight for param in weights], non_blocking=True)

        self._asked[unit_state] = weights, self.lanes.copy_out.submit(f"OFFLOAD:w{unit_state.index}", copy)


def size_of(unit_state: UnitState) -> UnitSize:
    """Returns the bytes of a unit in each place."""
    weights = sum(aligned(m.numel * m.parameter.dtype.itemsize) for m in unit_state.params)
    resting = unit_state.resting_bytes
    on_gpu = sum(m.numel * (10 if m.is_split else 8) for m in unit_state.params)
    device = sum(m.numel * m.parameter.dtype.itemsize for m in unit_state.params)
    return UnitSize(
        name=unit_state.unit.name,
        num_parameters=sum(m.numel for m in unit_state.params),
        weight_bytes=0 if unit_state.is_windowed else device,
        gradient_bytes=weights,
        gpu_bytes=on_gpu,
        host_bytes=2 * weights + resting,
        lean_bytes=weights + resting,
        visit_bytes=resting,
        spare_bytes=weights + resting,
        is_bound_to_host=unit_state.is_windowed,
    )


def check_gradient(unit_state: UnitState, param: ParamState) -> Tensor:
    """Returns a gradient that has just come; raises InputError for one that cannot be right or cannot be used."""
    gradient, device = param.parameter.grad, unit_state.lanes.device
    assert gradient is not None
    if (unit_state.updated is not None or unit_state.before is not None) and not unit_state.is_windowed:
        raise InputError(
            f"'{param.name}' was used without a call of '{unit_state.unit.name}', whose forward waits for its"
            " update; call synchronize() of the optimizer before each forward pass"
        )
    if gradient.device != device:
        raise InputError(f"HybridAdamW was made for {device}, and the model is on {gradient.device}; move it first")
    if gradient.is_sparse or gradient.dtype != param.parameter.dtype:
        kind = "sparse" if gradient.is_sparse else str(gradient.dtype)
        raise InputError(f"the gradient of '{param.name}' is {kind}; HybridAdamW takes dense {param.parameter.dtype}")
    return gradient


def gradients_of(params: Iterable[ParamState]) -> dict[ParamState, Tensor]:
    """Returns the gradients that parameters have in the model."""
    found = {param: param.parameter.grad for param in params}
    return {param: gradient for param, gradient in found.items() if gradient is not None}


def take_state(param: ParamState, weight: Tensor, rest: Slab) -> AdamState:
    """Returns a member's state, whose resting part is taken from a slab."""
    low = rest.take(param.numel, torch.int16) if param.is_split else None
    return AdamState(weight, low, rest.take(param.numel, torch.float32), rest.take(param.numel, torch.float32))


def _task(param: ParamState, s: Scalars, weight: Tensor | None, new: AdamState | None) -> NativeTask:
    """Returns a member's update from its state, or from a weight that it keeps elsewhere, to `new`."""
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
    """Waits until their gradients lie in host memory."""
    for out in {param.out for param in params}:
        assert out is not None
        out.wait_on_host()


def _return(params: Iterable[ParamState]) -> None:
    """Copies new weights from host memory into the model."""
    new = {param: _state_of(param).weight for param in params}
    torch._foreach_copy_([param.weight for param in new], list(new.values()), non_blocking=True)
