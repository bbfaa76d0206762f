"""Offload of what the blocks of a model save for their backward, while the forward pass runs.

Each tensor is copied to the host on the copy-out lane as soon as autograd saves it, and back one block before the
backward pass needs it. `saved_storage.py` moves whole storages after the forward pass instead.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from pipedejavu.runtime.lane import CopyLanes
from pipedejavu.runtime.lane_event import LaneEvent, now
from pipedejavu.runtime.saved_storage import storage_addresses

MIN_BYTES = 2**20
"""Smaller tensors stay on the device: their copies would cost more than their memory."""


class OffloadedTensor:
    """A tensor that one forward saved and that waits in host memory."""

    def __init__(self, tensor: Tensor, lanes: CopyLanes):
        self.lanes, self._key = lanes, _identity(tensor)
        self._memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        is_pinned = lanes.device.type == "cuda"
        self.host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=is_pinned)
        copy = partial(self.host.copy_, tensor, non_blocking=True)
        self.out = lanes.copy_out.submit("OFFLOAD:s", copy, now(lanes.device))
        """The end of the copy to the host."""
        self._back: tuple[Tensor, LaneEvent] | None = None

    def is_copy_of(self, tensor: Tensor) -> bool:
        """Returns whether it is a copy of this tensor, and not of an earlier one at the same address."""
        return self._key == _identity(tensor) and not self._memory.expired()  # type: ignore[no-untyped-call]

    def fetch(self) -> None:
        """Starts the copy back to the device, unless it has started."""
        if self._back is None:
            device = self.lanes.device
            back = torch.empty_strided(self.host.shape, self.host.stride(), dtype=self.host.dtype, device=device)
            copy = partial(back.copy_, self.host, non_blocking=True)
            self._back = back, self.lanes.copy_in.submit("FETCH:s", copy, now(device), self.out)

    def take(self) -> Tensor:
        """Returns the tensor on the device; the current stream waits for its copy."""
        self.fetch()
        assert self._back is not None
        (back, copied), self._back = self._back, None
        copied.wait_on_device()
        return back


class BlockOffload:
    """The offloaded tensors of all blocks."""

    def __init__(self, lanes: CopyLanes):
        self.lanes = lanes
        self._leaving: list[tuple[LaneEvent, Tensor]] = []
        """Tensors that are being copied: their memory must not be reused before the copy ends."""
        self._offloaded: dict[int, list[OffloadedTensor]] = {}
        """By block: the tensors of its latest forward."""

    def run(self, block: int, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of a block and offloads what autograd saves, except the block's parameters."""
        offloaded = self._offloaded[block] = []
        owned = storage_addresses(module.parameters())
        with saved_tensors_hooks(partial(self._pack, offloaded, owned), partial(self._unpack, block)):
            return forward(*args, **kwargs)

    def _pack(self, offloaded: list[OffloadedTensor], owned: set[int], tensor: Tensor) -> Tensor | OffloadedTensor:
        self._leaving = [(event, leaving) for event, leaving in self._leaving if not event.is_past()]
        is_dense = tensor.is_contiguous() or (tensor.dim() > 1 and tensor.mT.is_contiguous())
        is_small = tensor.numel() * tensor.dtype.itemsize < MIN_BYTES
        is_here = tensor.device == self.lanes.device and tensor.untyped_storage().data_ptr() not in owned
        if is_small or not is_dense or not is_here:
            return tensor
        tensor = tensor.detach()
        for copy in offloaded:  # several operations may save one tensor
            if copy.is_copy_of(tensor):
                return copy
        copy = OffloadedTensor(tensor, self.lanes)
        offloaded.append(copy)
        self._leaving.append((copy.out, tensor))
        return copy

    def _unpack(self, block: int, packed: Tensor | OffloadedTensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        for next_needed in self._offloaded.pop(block - 1, ()):
            next_needed.fetch()
        return packed.take()


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
