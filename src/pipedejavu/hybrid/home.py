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
from pipedejavu.hybrid.arithmetic import Scalars, State, update_
from pipedejavu.hybrid.gpu import Launch, UnitUpdate, addresses_of, has_kernel, places_of, state_in
from pipedejavu.hybrid.lane import Lanes, Mark, now
from pipedejavu.hybrid.native import Task
from pipedejavu.hybrid.placement import Place, UnitSize
from pipedejavu.hybrid.slab import Slab, aligned
from pipedejavu.hybrid.unit import ModelUnit

Progress = Callable[[int], None]


@dataclass(eq=False)
class Member:
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
    state: State | None = None
    spare: State | None = None
    out: Mark | None = None
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


@dataclass(eq=False)
class Home:
    """A unit with its state in one place."""

    unit: ModelUnit
    index: int
    members: list[Member]
    lanes: Lanes
    place: Place | None = None
    is_windowed: bool = False
    """Whether its weights rest in host memory and come for each use."""
    updated: Mark | None = None
    """The end of the host's work on its newest weights."""
    returned: Mark | None = None
    """The end of the copy of its newest weights to the GPU."""
    began_with: list[Any] | None = None
    """The settings of an update that began in the backward pass of a step that has not ended."""
    assumed: dict[Member, Scalars] = field(default_factory=dict)
    """The factors of a guess that was asked for."""
    guessed: dict[Member, Scalars] = field(default_factory=dict)
    """The factors of what lies in the spare state; the host lane's own."""
    before: Callable[[], None] | None = None
    """What is left to do on the compute lane before the weights are the newest."""
    _slabs: list[Slab] = field(default_factory=list)
    _unit_update: UnitUpdate | None = None

    def __post_init__(self) -> None:
        for before, member in pairwise(self.members):
            member.start = before.start + places_of(before.parameter)[1]

    @property
    def is_on_host(self) -> bool:
        """Whether the host updates it, so that its gradients leave the GPU."""
        return self.place in ("host", "lean")

    @property
    def resting_bytes(self) -> int:
        """The bytes of moments and of the low halves of masters."""
        return sum(places_of(member.parameter)[1] for member in self.members)

    def settle(self, place: Place, *, has_spare: bool, progress: Progress) -> None:
        """Allocates the state in its place, with moments of zero and masters equal to the weights."""
        self.place = place
        device = self.lanes.device
        if place == "gpu":
            for member in self.members:
                moments = (torch.zeros(member.numel, dtype=torch.float32, device=device) for _ in range(2))
                low = torch.zeros(member.numel, dtype=torch.int16, device=device) if member.is_split else None
                member.state = State(member.parameter.data.view(-1), low, *moments)
            return
        is_lean = place == "lean"
        is_pinned = device.type == "cuda"
        sizes = size_of(self)
        moved = Slab(
            (sizes.lean_bytes if is_lean else sizes.host_bytes) - self.resting_bytes,
            self.lanes.update, is_pinned=is_pinned, progress=progress,
        )  # fmt: skip
        rest = Slab(self.resting_bytes, self.lanes.update, is_pinned=False, progress=progress)
        self._slabs += [moved, rest]
        for member in self.members:
            dtype = member.parameter.dtype
            member.gradient = moved.take(member.numel, dtype)
            weight = member.gradient if is_lean else moved.take(member.numel, dtype)
            member.state = take_state(member, weight, rest)
        self.refresh()
        if has_spare:
            self.add_spare(progress)

    def add_spare(self, progress: Progress) -> None:
        """Allocates a second copy of what an update writes."""
        is_pinned = self.lanes.device.type == "cuda"
        weights = sum(aligned(m.numel * m.parameter.dtype.itemsize) for m in self.members)
        moved = Slab(weights, self.lanes.update, is_pinned=is_pinned, progress=progress)
        rest = Slab(self.resting_bytes, self.lanes.update, is_pinned=False, progress=progress)
        self._slabs += [moved, rest]
        for member in self.members:
            member.spare = take_state(member, moved.take(member.numel, member.parameter.dtype), rest)

    def refresh(self) -> None:
        """Copies the model's weights to host memory, where the state of a unit has a copy of them."""
        for member in self.members:
            if self.place == "host" and member.state is not None:
                member.state.weight.copy_(member.parameter.data.view(-1))

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

    def send(self, gradients: Mapping[Member, Tensor], norms: Tensor, partial: Tensor) -> Mark:
        """Lets gradients leave for host memory, with the norms of the unit."""
        self.assumed = {}  # a guess that was made of an earlier sum of gradients
        slots = slice(self.members[0].slot, self.members[-1].slot + 1)

        def copy() -> None:
            here = [_gradient_of(member) for member in gradients]
            torch._foreach_copy_([*here, partial[slots]], [*gradients.values(), norms[slots]], non_blocking=True)

        out = self.lanes.copy_out.submit(f"OFFLOAD:d{self.index}", copy, now(self.lanes.device))
        for member in gradients:
            member.out = out
        return out

    def guess(self, factors: dict[Member, Scalars], is_wrong: Callable[[], bool]) -> None:
        """Queues an update into the spare state, which becomes true only if its factors turn out to be right."""
        self.assumed = factors

        def work() -> None:
            _wait_for(factors)
            if self.assumed is not factors or is_wrong():
                return
            self.lanes.update([_task(member, s, None, member.spare) for member, s in factors.items()])
            self.guessed = factors

        self.lanes.host.submit(f"UPDATE{self.index}~guess", work)

    def update(
        self, factors: dict[Member, Scalars], staging: "Staging", is_left_out: Callable[[], bool] = lambda: False
    ) -> None:
        """Queues the update on the host and the way of the new weights to the GPU; a right guess is taken over."""
        ready = now(self.lanes.device)
        assumed = self.assumed = self.assumed if self.assumed == factors else {}

        def work() -> None:
            lean = staging.take(self) if self.place == "lean" else {}
            _wait_for(factors)
            if is_left_out():
                return
            for member in factors:
                member.step += 1
            if assumed and self.guessed is assumed:
                for member in factors:
                    member.state, member.spare = member.spare, member.state
            else:
                tasks = [_task(member, s, lean.get(member), member.state) for member, s in factors.items()]
                self.lanes.update(tasks)
            self.guessed = {}
            if not self.is_windowed:
                self.returned = self.lanes.copy_in.submit(f"FETCH:w{self.index}", lambda: _return(factors), ready)

        self.updated = self.lanes.host.submit(f"UPDATE{self.index}~host", work)

    def prepare(
        self, factors: Mapping[Member, Scalars], gradients: Mapping[Member, Tensor], visiting: Tensor | None = None
    ) -> Launch:
        """Returns the unit's update on the compute lane; its state rests on the GPU, or is there for a visit."""
        launch = self._launch_of(factors, gradients, visiting)

        def update(scale: float) -> None:
            for member in factors:
                member.step += 1
            self.lanes.note("updating", self.index)
            launch(scale)
            self.lanes.note("updated", self.index)

        return update

    def _launch_of(
        self, factors: Mapping[Member, Scalars], gradients: Mapping[Member, Tensor], visiting: Tensor | None
    ) -> Launch:
        if has_kernel(self.lanes.device):
            if self._unit_update is None:
                self._unit_update = self._make_update()
            every = [(factors.get(member), gradients.get(member)) for member in self.members]
            base = 0 if visiting is None else visiting.data_ptr()
            return self._unit_update.prepare([s for s, _ in every], [g for _, g in every], base)

        def one_by_one(scale: float) -> None:
            for member, s in factors.items():
                own = member.state if visiting is None else state_in(visiting, member.parameter.data, member.start)
                assert own is not None
                update_(s._replace(scale=scale), gradients[member].reshape(-1), own, own)

        return one_by_one

    def _make_update(self) -> UnitUpdate:
        """Returns the GPU's update of the unit, whose state rests there or will lie together when it visits."""
        places = []
        for member in self.members:
            assert member.state is not None
            if self.place == "gpu":
                places.append(addresses_of(member.state))
            else:
                low, m, v = places_of(member.parameter)[0]
                places.append((member.start + low, member.start + m, member.start + v))
        return UnitUpdate([member.parameter for member in self.members], places)


class Staging:
    """Room for the weights of two lean units: one is updated while the next one's weights come."""

    def __init__(self, homes: list[Home], lanes: Lanes, progress: Progress):
        self.lanes = lanes
        lean = [home for home in homes if home.place == "lean"]
        size = max((size_of(home).gradient_bytes for home in lean), default=0)
        is_pinned = lanes.device.type == "cuda"
        self._slabs = [
            Slab(size, lanes.update, is_pinned=is_pinned, progress=progress) for _ in range(2 if lean else 0)
        ]
        self._queue: list[Home] = []
        self._asked: dict[Home, tuple[dict[Member, Tensor], Mark]] = {}
        self._turn = 0

    def expect(self, homes: list[Home]) -> None:
        """Takes the lean units of one step, in the order in which they will be updated; asks for the first."""
        self._queue = list(homes)
        self._ask()

    def take(self, home: Home) -> dict[Member, Tensor]:
        """Returns a unit's weights as they were before the update, and asks for the next unit's."""
        if home not in self._asked:
            self._queue.insert(0, home)
            self._ask()
        weights, mark = self._asked.pop(home)
        mark.wait_on_host()
        self._ask()
        return weights

    def _ask(self) -> None:
        if not self._queue:
            return
        home, slab = self._queue.pop(0), self._slabs[self._turn]
        self._turn = 1 - self._turn
        slab.rewind()
        weights = {member: slab.take(member.numel, member.parameter.dtype) for member in home.members}

        def copy() -> None:
            torch._foreach_copy_(list(weights.values()), [member.weight for member in weights], non_blocking=True)

        self._asked[home] = weights, self.lanes.copy_out.submit(f"OFFLOAD:w{home.index}", copy)


def size_of(home: Home) -> UnitSize:
    """Returns the bytes of a unit in each place."""
    weights = sum(aligned(m.numel * m.parameter.dtype.itemsize) for m in home.members)
    resting = home.resting_bytes
    on_gpu = sum(m.numel * (10 if m.is_split else 8) for m in home.members)
    device = sum(m.numel * m.parameter.dtype.itemsize for m in home.members)
    return UnitSize(
        name=home.unit.name,
        num_parameters=sum(m.numel for m in home.members),
        weight_bytes=0 if home.is_windowed else device,
        gradient_bytes=weights,
        gpu_bytes=on_gpu,
        host_bytes=2 * weights + resting,
        lean_bytes=weights + resting,
        visit_bytes=resting,
        spare_bytes=weights + resting,
        is_bound_to_host=home.is_windowed,
    )


def check_gradient(home: Home, member: Member) -> Tensor:
    """Returns a gradient that has just come; raises InputError for one that cannot be right or cannot be used."""
    gradient, device = member.parameter.grad, home.lanes.device
    assert gradient is not None
    if (home.updated is not None or home.before is not None) and not home.is_windowed:
        raise InputError(
            f"'{member.name}' was used without a call of '{home.unit.name}', whose forward waits for its update;"
            " call synchronize() of the optimizer before each forward pass"
        )
    if gradient.device != device:
        raise InputError(f"HybridAdamW was made for {device}, and the model is on {gradient.device}; move it first")
    if gradient.is_sparse or gradient.dtype != member.parameter.dtype:
        kind = "sparse" if gradient.is_sparse else str(gradient.dtype)
        raise InputError(f"the gradient of '{member.name}' is {kind}; HybridAdamW takes dense {member.parameter.dtype}")
    return gradient


def gradients_of(members: Iterable[Member]) -> dict[Member, Tensor]:
    """Returns the gradients that parameters have in the model."""
    found = {member: member.parameter.grad for member in members}
    return {member: gradient for member, gradient in found.items() if gradient is not None}


def take_state(member: Member, weight: Tensor, rest: Slab) -> State:
    """Returns a member's state, whose resting part is taken from a slab."""
    low = rest.take(member.numel, torch.int16) if member.is_split else None
    return State(weight, low, rest.take(member.numel, torch.float32), rest.take(member.numel, torch.float32))


def _task(member: Member, s: Scalars, weight: Tensor | None, new: State | None) -> Task:
    """Returns a member's update from its state, or from a weight that it keeps elsewhere, to `new`."""
    assert new is not None
    old = _state_of(member) if weight is None else _state_of(member)._replace(weight=weight)
    return Task(s, _gradient_of(member), old, new)


def _state_of(member: Member) -> State:
    assert member.state is not None
    return member.state


def _gradient_of(member: Member) -> Tensor:
    assert member.gradient is not None
    return member.gradient


def _wait_for(members: Iterable[Member]) -> None:
    """Waits until their gradients lie in host memory."""
    for out in {member.out for member in members}:
        assert out is not None
        out.wait_on_host()


def _return(members: Iterable[Member]) -> None:
    """Copies new weights from host memory into the model."""
    new = {member: _state_of(member).weight for member in members}
    torch._foreach_copy_([member.weight for member in new], list(new.values()), non_blocking=True)
