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
from pipedejavu.hybrid.budget import Meter, pinning_progress
from pipedejavu.hybrid.home import Home, Member, size_of
from pipedejavu.hybrid.lane import Lanes, Mark, now

ROOMY_SHARE = 0.5
"""Of the GPU's budget that weights may take before they come through a window; the rest is for a step."""


def open_window(
    model: nn.Module, homes: list[Home], lanes: Lanes, meter: Meter, size: int | Literal["auto"] | None
) -> "Window | None":
    """Returns the window of the asked size, or None where all weights stay on the GPU."""
    blocks = [home for home in homes if home.unit.is_block and not home.unit.is_shared]
    if size == "auto":
        size = _auto_size(homes, blocks, meter)
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
    for home in blocks:
        home.is_windowed = True
    return window


def _auto_size(homes: list[Home], blocks: list[Home], meter: Meter) -> int | None:
    """Returns None if all weights fit in their share of the budget, else how many blocks do, at least two."""
    room = int(meter.limits(True, None).gpu_bytes * ROOMY_SHARE)
    weights = {home: size_of(home).weight_bytes for home in homes}
    if sum(weights.values()) <= room or not blocks:
        return None
    left = room - sum(weights[home] for home in homes if home not in blocks)
    return max(2, left // max(weights[home] for home in blocks))


class Window:
    """The blocks of a model that come and go."""

    def __init__(self, blocks: list[Home], lanes: Lanes, size: int):
        self.blocks, self.lanes, self.size = blocks, lanes, size
        self._position = {home: n for n, home in enumerate(blocks)}
        self._here: dict[Home, tuple[Mark, list[Mark]]] = {}
        """Blocks on the GPU or on their way, the longest unused first: the host's part of the way, and the copy."""
        self._weights: dict[Member, Tensor] = {}
        """Memory of the GPU, empty while its block is away; what autograd has saved stays valid when it is back."""
        self._last, self._step = 0, 1

    def fill(self, model: nn.Module, enter: Callable[[Home], None]) -> list[RemovableHandle]:
        """Moves the blocks' weights to host memory and all else of the model to the device; returns its hooks.

        As the backward pass comes to a block they call `enter`. From now on `model.to(device)`, which trainers call,
        moves all but these weights.
        """
        device = self.lanes.device
        with pinning_progress(sum(size_of(home).host_bytes for home in self.blocks)) as progress:
            for home in self.blocks:
                home.settle("host", has_spare=False, progress=progress)
                for member in home.members:
                    shape = member.parameter.shape
                    self._weights[member] = torch.empty(shape, dtype=member.parameter.dtype, device=device)
                    self._leave(member)
        weights = {member.parameter for member in self._weights}
        for home in self.blocks:
            home.unit.module._apply = partial(_apply_to_rest, home.unit.module, weights)  # type: ignore[method-assign]
        model.to(device)
        return [home.unit.module.register_forward_hook(_watch(home, enter)) for home in self.blocks]

    def release(self) -> None:
        """Lets the blocks be moved as any module again."""
        for home in self.blocks:
            home.unit.module.__dict__.pop("_apply", None)

    def enter(self, home: Home) -> None:
        """Lets the compute lane wait for a block's weights, and lets its neighbour set out."""
        position = self._position[home]
        if position != self._last:
            self._step = 1 if position > self._last else -1
        self._last = position
        self._bring(home, {home})
        coming, copies = self._here[home]
        coming.wait_on_host()
        for copy in copies:
            copy.wait_on_device()
        ahead = position + self._step
        if self.size > 1 and 0 <= ahead < len(self.blocks):
            self._bring(self.blocks[ahead], {home, self.blocks[ahead]})

    def restart(self) -> None:
        """Drops all weights, which an update makes old, and lets the first blocks set out as they become new."""
        self.clear()
        for home in self.blocks[: min(self.size, 2)]:
            self._bring(home, {home})

    def clear(self) -> None:
        """Lets all blocks leave."""
        for home in list(self._here):
            self._evict(home)
        self._last, self._step = 0, 1

    def _bring(self, home: Home, needed: set[Home]) -> None:
        """Lets a block set out for the GPU; others than the needed ones make room."""
        if home in self._here:
            self._here[home] = self._here.pop(home)
            return
        for other in [other for other in self._here if other not in needed]:
            if len(self._here) >= self.size:
                self._evict(other)
        for member in home.members:
            weight = self._weights[member]
            weight.untyped_storage().resize_(weight.numel() * weight.dtype.itemsize)
            member.parameter.data = weight
        taken, updated, copies = now(self.lanes.device), home.updated, []

        def copy() -> None:
            for member in home.members:
                assert member.state is not None
                self._weights[member].view(-1).copy_(member.state.weight, non_blocking=True)

        def fetch() -> None:
            if updated is not None:
                updated.wait_on_host()
            copies.append(self.lanes.copy_in.submit(f"FETCH:w{home.index}", copy, taken))

        self._here[home] = self.lanes.fetch.submit(f"wait{home.index}", fetch), copies

    def _evict(self, home: Home) -> None:
        coming, copies = self._here.pop(home)
        coming.wait_on_host()
        for copy in copies:
            copy.wait_on_device()  # its memory must not be taken by others while the copy still writes
        for member in home.members:
            self._leave(member)

    def _leave(self, member: Member) -> None:
        """Frees a weight's memory on the GPU; the model then holds the one in host memory."""
        assert member.state is not None
        self._weights[member].untyped_storage().resize_(0)
        member.parameter.data = member.state.weight.view(member.parameter.shape)


def _watch(home: Home, enter: Callable[[Home], None]) -> Callable[..., None]:
    """Lets autograd tell when it comes to a block: when the gradient of one of its outputs is there."""

    def watch(_module: nn.Module, _inputs: object, output: object) -> None:
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _: enter(home))  # type: ignore[no-untyped-call]

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
