"""Blocks whose weights rest in host memory and are copied to the GPU when they are needed.

At most `size` blocks are on the GPU at once. When the compute lane enters a block, the next block in its direction is
fetched and the least recently used ones are evicted; a forward pass goes up the blocks, a backward pass down. Memory
is allocated and freed in the order of the compute lane, and each copy waits for the point of its allocation.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from pipedejavu.facts import InputError
from pipedejavu.hybrid.assignment import Assignment
from pipedejavu.hybrid.budget import MemoryMeter, pinning_progress
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.param_state import ParamState
from pipedejavu.hybrid.unit_state import UnitState, size_of
from pipedejavu.runtime.lane_event import LaneEvent, now

WEIGHT_SHARE = 0.5
"""Share of the GPU's budget that weights may take before a window is used; the rest is for activations and state."""


def open_window(
    model: nn.Module,
    unit_states: list[UnitState],
    lanes: HybridLanes,
    meter: MemoryMeter,
    size: int | Literal["auto"] | None,
) -> "Window | None":
    """Returns a window of this size, or None if all weights stay on the GPU."""
    blocks = [unit_state for unit_state in unit_states if unit_state.unit.is_block and not unit_state.unit.is_shared]
    if size == "auto":
        size = _auto_size(unit_states, blocks, meter)
    if size is None or size >= len(blocks):
        is_elsewhere = any(p.device != lanes.device for p in model.parameters())
        if size is None or not is_elsewhere:
            return None
        size = max(1, len(blocks))
    if not blocks:
        raise InputError(
            "a window needs blocks of their own weights in a list, and the model has none; give window=None"
        )
    window = Window(blocks, lanes, size)
    for unit_state in blocks:
        unit_state.is_windowed = True
    return window


def _auto_size(unit_states: list[UnitState], blocks: list[UnitState], meter: MemoryMeter) -> int | None:
    """Returns None if all weights fit in their share of the budget, else the number of blocks that fit, at least 2."""
    limit = int(meter.limits(True, None).gpu_bytes * WEIGHT_SHARE)
    weights = {unit_state: size_of(unit_state).weight_bytes for unit_state in unit_states}
    if sum(weights.values()) <= limit or not blocks:
        return None
    left = limit - sum(weights[unit_state] for unit_state in unit_states if unit_state not in blocks)
    return max(2, left // max(weights[unit_state] for unit_state in blocks))


def assigned_window(unit_states: list[UnitState], lanes: HybridLanes, assignment: Assignment) -> "Window | None":
    """Returns the window of the units that an assignment places in one, or None if there are none."""
    windowed = {id(m) for (_, m), place in zip(assignment.units, assignment.places, strict=True) if place == "window"}
    blocks = [unit_state for unit_state in unit_states if id(unit_state.unit.module) in windowed]
    for unit_state in blocks:
        if unit_state.unit.is_shared:
            raise InputError(
                f"unit '{unit_state.unit.name}' shares weights with others, so that they cannot come through a window;"
                " give it another place"
            )
        unit_state.is_windowed = True
    return Window(blocks, lanes, assignment.window) if blocks else None


class Window:
    """The blocks of a model whose weights are on the GPU only when needed."""

    def __init__(self, blocks: list[UnitState], lanes: HybridLanes, size: int):
        self.blocks, self.lanes, self.size = blocks, lanes, size
        self._position = {unit_state: n for n, unit_state in enumerate(blocks)}
        self._here: dict[UnitState, tuple[LaneEvent, list[LaneEvent]]] = {}
        """Blocks on the GPU or being fetched, the least recently used first. The first event says that the copy was
        issued; the list then holds the event of the copy."""
        self._weights: dict[ParamState, Tensor] = {}
        """Tensors on the GPU, without memory while their block is evicted; what autograd saved of them stays valid."""
        self._last, self._step = 0, 1

    def fill(self, model: nn.Module, enter: Callable[[UnitState], None]) -> list[RemovableHandle]:
        """Moves the weights of the blocks to host memory and the rest of the model to the device.

        Returns hooks that call `enter` when the backward of a block begins. From now on `model.to(device)`, which
        trainers call, leaves these weights where they are.
        """
        device = self.lanes.device
        with pinning_progress(sum(size_of(unit_state).host_bytes for unit_state in self.blocks)) as progress:
            for unit_state in self.blocks:
                unit_state.settle("host", has_shadow=False, progress=progress)
                for param in unit_state.params:
                    shape = param.parameter.shape
                    self._weights[param] = torch.empty(shape, dtype=param.parameter.dtype, device=device)
                    self._free(param)
        weights = {param.parameter for param in self._weights}
        for unit_state in self.blocks:
            unit_state.unit.module._apply = partial(_apply_to_rest, unit_state.unit.module, weights)  # type: ignore[method-assign]
        model.to(device)
        return [unit_state.unit.module.register_forward_hook(_watch(unit_state, enter)) for unit_state in self.blocks]

    def release(self) -> None:
        """Makes `model.to` move the blocks again."""
        for unit_state in self.blocks:
            unit_state.unit.module.__dict__.pop("_apply", None)

    def enter(self, unit_state: UnitState) -> None:
        """Makes the compute lane wait for the weights of a block, and fetches the next block."""
        position = self._position[unit_state]
        if position != self._last:
            self._step = 1 if position > self._last else -1
        self._last = position
        self._fetch(unit_state, {unit_state})
        issued, copies = self._here[unit_state]
        issued.wait_on_host()
        for copy in copies:
            copy.wait_on_device()
        ahead = position + self._step
        if self.size > 1 and 0 <= ahead < len(self.blocks):
            self._fetch(self.blocks[ahead], {unit_state, self.blocks[ahead]})

    def restart(self) -> None:
        """Evicts all blocks, whose weights an update makes stale, and fetches the first ones when they are updated."""
        self.clear()
        for unit_state in self.blocks[: min(self.size, 2)]:
            self._fetch(unit_state, {unit_state})

    def clear(self) -> None:
        """Evicts all blocks."""
        for unit_state in list(self._here):
            self._evict(unit_state)
        self._last, self._step = 0, 1

    def _fetch(self, unit_state: UnitState, needed: set[UnitState]) -> None:
        """Starts the copy of a block to the GPU; evicts blocks that are not needed."""
        if unit_state in self._here:
            self._here[unit_state] = self._here.pop(unit_state)
            return
        for other in [other for other in self._here if other not in needed]:
            if len(self._here) >= self.size:
                self._evict(other)
        for param in unit_state.params:
            weight = self._weights[param]
            weight.untyped_storage().resize_(weight.numel() * weight.dtype.itemsize)
            param.parameter.data = weight
        allocated, updated, copies = now(self.lanes.device), unit_state.updated, []

        def copy() -> None:
            for param in unit_state.params:
                assert param.state is not None
                self._weights[param].view(-1).copy_(param.state.weight, non_blocking=True)

        def fetch() -> None:
            if updated is not None:
                updated.wait_on_host()
            copies.append(self.lanes.copy_in.submit(f"FETCH:w{unit_state.index}", copy, allocated))

        self._here[unit_state] = self.lanes.fetch.submit(f"wait{unit_state.index}", fetch), copies

    def _evict(self, unit_state: UnitState) -> None:
        issued, copies = self._here.pop(unit_state)
        issued.wait_on_host()
        for copy in copies:
            copy.wait_on_device()  # its memory must not be reused while the copy still writes
        for param in unit_state.params:
            self._free(param)

    def _free(self, param: ParamState) -> None:
        """Frees the memory of a weight on the GPU; the parameter then refers to the weight in host memory."""
        assert param.state is not None
        self._weights[param].untyped_storage().resize_(0)
        param.parameter.data = param.state.weight.view(param.parameter.shape)


def _watch(unit_state: UnitState, enter: Callable[[UnitState], None]) -> Callable[..., None]:
    """Returns a forward hook that makes autograd call `enter` when the gradient of an output of the block is ready."""

    def watch(_module: nn.Module, _inputs: object, output: object) -> None:
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _: enter(unit_state))  # type: ignore[no-untyped-call]

    return cast(Callable[..., None], torch._dynamo.disable(watch))  # type: ignore[no-untyped-call]


def _apply_to_rest(
    block: nn.Module, weights: Collection[nn.Parameter], convert: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Replaces `_apply` of a block, with which torch moves and casts modules; leaves windowed weights as they are."""
    modules = block.modules() if recurse else (block,)
    for module in modules:
        for parameter in module.parameters(recurse=False):
            if parameter not in weights:
                parameter.data = convert(parameter.data)
            elif convert(parameter.data.new_empty(0)).dtype != parameter.dtype:
                raise InputError(
                    f"the model's dtype is {parameter.dtype}, and its weights come through a window; change the dtype"
                    " before HybridAdamW is made"
                )
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = convert(buffer)
    return block
