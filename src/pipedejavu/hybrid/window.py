"""Blocks whose weights rest in host memory and come to the GPU when they are needed.

At most `size` blocks are there at once. As the compute lane comes to one, the next in its direction sets out, and the
ones behind make room; a forward pass goes up the blocks and a backward pass down. Memory is taken and freed in the
order of the compute lane, and each copy waits for the point at which its memory was taken.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from pipedejavu.facts import InputError
from pipedejavu.hybrid.budget import MemoryMeter, pinning_progress
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.unit_state import ParamState, UnitState, size_of
from pipedejavu.runtime.lane_event import LaneEvent, now

ROOMY_SHARE = 0.5
"""Of the GPU's budget that weights may take before they come through a window; the rest is for a step."""


def open_window(
    model: nn.Module,
    unit_states: list[UnitState],
    lanes: HybridLanes,
    meter: MemoryMeter,
    size: int | Literal["auto"] | None,
) -> "Window | None":
    """Returns the window of the asked size, or None where all weights stay on the GPU."""
    blocks = [unit_state for unit_state in unit_states if unit_state.unit.is_block and not unit_state.unit.is_shared]
    if size == "auto":
        size = _auto_size(unit_states, blocks, meter)
    if size is None or size >= len(blocks):
        is_away = any(p.device != lanes.device for p in model.parameters())
        if size is None or not is_away:
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
    """Returns None if all weights fit in their share of the budget, else how many blocks do, at least two."""
    room = int(meter.limits(True, None).gpu_bytes * ROOMY_SHARE)
    weights = {unit_state: size_of(unit_state).weight_bytes for unit_state in unit_states}
    if sum(weights.values()) <= room or not blocks:
        return None
    left = room - sum(weights[unit_state] for unit_state in unit_states if unit_state not in blocks)
    return max(2, left // max(weights[unit_state] for unit_state in blocks))


class Window:
    """The blocks of a model that come and go."""

    def __init__(self, blocks: list[UnitState], lanes: HybridLanes, size: int):
        self.blocks, self.lanes, self.size = blocks, lanes, size
        self._position = {unit_state: n for n, unit_state in enumerate(blocks)}
        self._here: dict[UnitState, tuple[LaneEvent, list[LaneEvent]]] = {}
        """Blocks on the GPU or on their way, the longest unused first: the host's part of the way, and the copy."""
        self._weights: dict[ParamState, Tensor] = {}
        """Memory of the GPU, empty while its block is away; what autograd has saved stays valid when it is back."""
        self._last, self._step = 0, 1

    def fill(self, model: nn.Module, enter: Callable[[UnitState], None]) -> list[RemovableHandle]:
        """Moves the blocks' weights to host memory and all else of the model to the device; returns its hooks.

        As the backward pass comes to a block they call `enter`. From now on `model.to(device)`, which trainers call,
        moves all but these weights.
        """
        device = self.lanes.device
        with pinning_progress(sum(size_of(unit_state).host_bytes for unit_state in self.blocks)) as progress:
            for unit_state in self.blocks:
                unit_state.settle("host", has_spare=False, progress=progress)
                for param in unit_state.params:
                    shape = param.parameter.shape
                    self._weights[param] = torch.empty(shape, dtype=param.parameter.dtype, device=device)
                    self._leave(param)
        weights = {param.parameter for param in self._weights}
        for unit_state in self.blocks:
            unit_state.unit.module._apply = partial(_apply_to_rest, unit_state.unit.module, weights)  # type: ignore[method-assign]
        model.to(device)
        return [unit_state.unit.module.register_forward_hook(_watch(unit_state, enter)) for unit_state in self.blocks]

    def release(self) -> None:
        """Lets the blocks be moved as any module again."""
        for unit_state in self.blocks:
            unit_state.unit.module.__dict__.pop("_apply", None)

    def enter(self, unit_state: UnitState) -> None:
        """Lets the compute lane wait for a block's weights, and lets its neighbour set out."""
        position = self._position[unit_state]
        if position != self._last:
            self._step = 1 if position > self._last else -1
        self._last = position
        self._bring(unit_state, {unit_state})
        coming, copies = self._here[unit_state]
        coming.wait_on_host()
        for copy in copies:
            copy.wait_on_device()
        ahead = position + self._step
        if self.size > 1 and 0 <= ahead < len(self.blocks):
            self._bring(self.blocks[ahead], {unit_state, self.blocks[ahead]})

    def restart(self) -> None:
        """Drops all weights, which an update makes old, and lets the first blocks set out as they become new."""
        self.clear()
        for unit_state in self.blocks[: min(self.size, 2)]:
            self._bring(unit_state, {unit_state})

    def clear(self) -> None:
        """Lets all blocks leave."""
        for unit_state in list(self._here):
            self._evict(unit_state)
        self._last, self._step = 0, 1

    def _bring(self, unit_state: UnitState, needed: set[UnitState]) -> None:
        """Lets a block set out for the GPU; others than the needed ones make room."""
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
        taken, updated, copies = now(self.lanes.device), unit_state.updated, []

        def copy() -> None:
            for param in unit_state.params:
                assert param.state is not None
                self._weights[param].view(-1).copy_(param.state.weight, non_blocking=True)

        def fetch() -> None:
            if updated is not None:
                updated.wait_on_host()
            copies.append(self.lanes.copy_in.submit(f"FETCH:w{unit_state.index}", copy, taken))

        self._here[unit_state] = self.lanes.fetch.submit(f"wait{unit_state.index}", fetch), copies

    def _evict(self, unit_state: UnitState) -> None:
        coming, copies = self._here.pop(unit_state)
        coming.wait_on_host()
        for copy in copies:
            copy.wait_on_device()  # its memory must not be taken by others while the copy still writes
        for param in unit_state.params:
            self._leave(param)

    def _leave(self, param: ParamState) -> None:
        """Frees a weight's memory on the GPU; the model then holds the one in host memory."""
        assert param.state is not None
        self._weights[param].untyped_storage().resize_(0)
        param.parameter.data = param.state.weight.view(param.parameter.shape)


def _watch(unit_state: UnitState, enter: Callable[[UnitState], None]) -> Callable[..., None]:
    """Lets autograd tell when it comes to a block: when the gradient of one of its outputs is there."""

    def watch(_module: nn.Module, _inputs: object, output: object) -> None:
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _: enter(unit_state))  # type: ignore[no-untyped-call]

    return cast(Callable[..., None], torch._dynamo.disable(watch))  # type: ignore[no-untyped-call]


def _apply_to_rest(
    block: nn.Module, weights: Collection[nn.Parameter], convert: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Stands in for a block's `_apply`, by which modules are moved: weights that come and go stay where they are."""
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
