"""What a block keeps of its forward for its backward: all of it, nothing but its input, or all of it in host memory.

What is sent to the host leaves on the copy-out lane while the forward goes on, and comes back one block ahead of the
backward pass. Weights are not touched: they are the business of their own units.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from pipedejavu.facts import InputError
from pipedejavu.hybrid.hybrid_lane import LaneEvent, Lanes, now
from pipedejavu.hybrid.model_unit import ModelUnit
from pipedejavu.hybrid.recompute import Recompute

Activations = Literal["keep", "recompute", "offload"]
MIN_BYTES = 2**20
"""Smaller tensors stay: their copies would cost more than their memory."""


class Away:
    """A tensor of one forward that waits in host memory."""

    def __init__(self, tensor: Tensor, lanes: Lanes):
        self.lanes, self._key = lanes, _identity(tensor)
        self._memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        is_pinned = lanes.device.type == "cuda"
        self.host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=is_pinned)
        copy = partial(self.host.copy_, tensor, non_blocking=True)
        self.out = lanes.copy_out.submit("OFFLOAD:s", copy, now(lanes.device))
        self._back: tuple[Tensor, LaneEvent] | None = None

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it is this tensor, and not an earlier one whose memory this one was given."""
        return self._key == _identity(tensor) and not self._memory.expired()  # type: ignore[no-untyped-call]

    def fetch(self) -> None:
        """Lets it come back, if it is not on its way."""
        if self._back is None:
            device = self.lanes.device
            back = torch.empty_strided(self.host.shape, self.host.stride(), dtype=self.host.dtype, device=device)
            copy = partial(back.copy_, self.host, non_blocking=True)
            self._back = back, self.lanes.copy_in.submit("FETCH:s", copy, now(device), self.out)

    def take(self) -> Tensor:
        """Returns it on the device; the compute lane waits for it."""
        self.fetch()
        assert self._back is not None
        (back, came), self._back = self._back, None
        came.wait_on_device()
        return back


class Offload:
    """The saved tensors of all blocks that send theirs away."""

    def __init__(self, lanes: Lanes):
        self.lanes = lanes
        self._leaving: list[tuple[LaneEvent, Tensor]] = []
        """Tensors whose copies are under way: their memory must not be taken by others before."""
        self._away: dict[int, list[Away]] = {}
        """By block: what its newest forward has sent away."""

    def run(self, block: int, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a block's forward, whose saved tensors leave."""
        away = self._away[block] = []
        owned = {p.untyped_storage().data_ptr() for p in module.parameters()}
        with saved_tensors_hooks(partial(self._pack, away, owned), partial(self._unpack, block)):
            return forward(*args, **kwargs)

    def _pack(self, away: list[Away], owned: set[int], tensor: Tensor) -> Tensor | Away:
        self._leaving = [(event, kept) for event, kept in self._leaving if not event.is_past()]
        is_dense = tensor.is_contiguous() or (tensor.dim() > 1 and tensor.mT.is_contiguous())
        is_small = tensor.numel() * tensor.dtype.itemsize < MIN_BYTES
        is_here = tensor.device == self.lanes.device and tensor.untyped_storage().data_ptr() not in owned
        if is_small or not is_dense or not is_here:
            return tensor
        tensor = tensor.detach()
        for found in away:  # several operations may save one tensor
            if found.is_of(tensor):
                return found
        found = Away(tensor, self.lanes)
        away.append(found)
        self._leaving.append((found.out, tensor))
        return found

    def _unpack(self, block: int, packed: Tensor | Away) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        for ahead in self._away.pop(block - 1, ()):
            ahead.fetch()
        return packed.take()


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version


def set_activations(
    units: Sequence[ModelUnit], choice: Activations | Mapping[str, Activations], lanes: Lanes
) -> list[Callable[[], None]]:
    """Lets each block keep what is chosen for it, for all alike or by name; returns what undoes it."""
    blocks = [unit for unit in units if unit.is_block]
    chosen = {unit.name: choice for unit in blocks} if isinstance(choice, str) else dict(choice)
    names = [unit.name for unit in blocks]
    for name, value in chosen.items():
        if name not in names:
            raise InputError(f"activations names '{name}', which is no block; the blocks are {', '.join(names)}")
        if value not in ("keep", "recompute", "offload"):
            raise InputError(f"activations of '{name}' is '{value}'; give keep, recompute or offload")
    offload = Offload(lanes)
    undo: list[Callable[[], None]] = []
    for n, unit in enumerate(blocks):
        value, module = chosen.get(unit.name, "keep"), unit.module
        if value == "keep":
            continue
        original, own = module.forward, module.__dict__.get("forward")
        away = partial(offload.run, n, module, original)
        again = Recompute(module, original, lanes.device)
        module.forward = partial(_forward, original, again if value == "recompute" else away)
        undo.append(partial(_restore, module, own))
    return undo


def _restore(module: nn.Module, own: Callable[..., Any] | None) -> None:
    """Gives a module back the forward that it had of its own, or that of its class."""
    module.__dict__.pop("forward", None)
    if own is not None:
        module.forward = own


def _forward(plain: Callable[..., Any], saving: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return saving(*args, **kwargs) if torch.is_grad_enabled() else plain(*args, **kwargs)
