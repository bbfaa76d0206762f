"""What autograd saves, in boxes that are carried to host memory and back while a graph waits for its backward.

A box is the memory of saved tensors, whatever shares it, so that all come back as they were. It goes with the last
graph that needs it. Where a graph begins and ends are stubs, which have a form and no memory.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from pipedejavu.engine.device import CPU, moved


class SavedStorage:
    """Memory, as bytes."""

    def __init__(self, memory: torch.UntypedStorage):
        self.home = memory.device
        """Where it comes back to; what a kernel has saved on the CPU is at home there."""
        self.content = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


class _Part(NamedTuple):
    """A tensor in a box."""

    storage: SavedStorage
    dtype: torch.dtype
    form: tuple[Any, ...]
    """Its first element, its shape and its strides."""


class SavedTensorOffload(saved_tensors_hooks):
    """A context in which autograd saves into boxes, but what others own: weights and buffers."""

    def __init__(self, owned: Iterable[Tensor]):
        super().__init__(self._pack, _unpack)
        self._owned = {tensor.untyped_storage().data_ptr() for tensor in owned}
        self._boxes: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()

    def _pack(self, tensor: Tensor) -> Tensor | _Part:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            return tensor
        memory = tensor.untyped_storage()
        place = memory.data_ptr()
        if place in self._owned or not memory.nbytes():
            return tensor
        storage = self._boxes.get(place)
        if storage is None:
            self._boxes[place] = storage = SavedStorage(memory)
        return _Part(storage, tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride()))

    @property
    def contents(self) -> tuple[Tensor, ...]:
        """What is in the boxes that are needed still."""
        return tuple(storage.content for storage in list(self._boxes.values()))

    def carry(self, device: torch.device) -> None:
        """Carries all boxes to the host, or home from there; on the current stream of a GPU."""
        for storage in list(self._boxes.values()):
            storage.content = moved(storage.content, CPU if device == CPU else storage.home)


def _unpack(packed: Tensor | _Part) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    content = packed.storage.content
    return torch.empty(0, dtype=packed.dtype, device=content.device).set_(content.untyped_storage(), *packed.form)


def stub(tensor: Tensor) -> Tensor:
    """Returns a leaf of a tensor's form that takes no memory."""
    found = torch.empty_strided(tensor.shape, (0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
    return found.requires_grad_(tensor.requires_grad)


class _Begin(Function):
    @staticmethod
    def forward(_ctx: Any, _begin: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _End(Function):
    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return stub(tensor.detach())

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient


def begin_at(begin: Tensor, tensor: Tensor) -> Tensor:
    """Returns a tensor whose gradient goes to a stub of it."""
    if not begin.requires_grad:
        return tensor
    found: Tensor = _Begin.apply(begin, tensor.detach())  # type: ignore[no-untyped-call]
    return found


def end_of(tensor: Tensor) -> Tensor:
    """Returns a stub of a tensor, at which its backward can begin."""
    found: Tensor = _End.apply(tensor)  # type: ignore[no-untyped-call]
    return found
