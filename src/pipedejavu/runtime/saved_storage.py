"""Offload of what autograd saves, storage by storage, at a time that the caller chooses.

Tensors that share a storage are moved together and share it again afterwards. A storage is freed with the last graph
that needs it. The inputs and outputs of such a graph are stubs, which have a shape and no memory.

    with (offload := SavedTensorOffload(weights)):
        output = module(value)
    offload.move(cpu)   # and back to the device before the backward pass

`block_offload.py` offloads during the forward pass instead. It copies single tensors: a whole storage may still change
in place while the forward pass runs.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from pipedejavu.runtime.host_memory import CPU, move_tensor
from pipedejavu.runtime.product_rule import repeatable


class SavedStorage:
    """The storage of saved tensors, as bytes."""

    def __init__(self, memory: torch.UntypedStorage):
        self.device = memory.device
        """Where it returns to: a GPU, or the CPU if a kernel saved it there."""
        self.content = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


class _SavedView(NamedTuple):
    """A saved tensor as a view of a storage."""

    storage: SavedStorage
    dtype: torch.dtype
    layout: tuple[Any, ...]
    """Offset, shape and strides."""


def storage_addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Returns the addresses of the tensors' storages."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class SavedTensorOffload(saved_tensors_hooks):
    """A context that records what autograd saves, except the storages of `owned`: weights and buffers."""

    def __init__(self, owned: Iterable[Tensor]):
        super().__init__(self._pack, _unpack)
        self._owned = storage_addresses(owned)
        self._storages: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()

    def _pack(self, tensor: Tensor) -> Tensor | _SavedView:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            return tensor
        memory = tensor.untyped_storage()
        address = memory.data_ptr()
        if address in self._owned or not memory.nbytes():
            return tensor
        storage = self._storages.get(address)
        if storage is None:
            self._storages[address] = storage = SavedStorage(memory)
        return _SavedView(storage, tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride()))

    @property
    def contents(self) -> tuple[Tensor, ...]:
        """The bytes of each storage that a graph still needs."""
        return tuple(storage.content for storage in list(self._storages.values()))

    def move(self, device: torch.device) -> None:
        """Moves all storages to the host, or from there to their own device, on the current stream of a GPU."""
        for storage in list(self._storages.values()):
            storage.content = move_tensor(storage.content, CPU if device == CPU else storage.device)


@repeatable
def _unpack(packed: Tensor | _SavedView) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    content = packed.storage.content
    return torch.empty(0, dtype=packed.dtype, device=content.device).set_(content.untyped_storage(), *packed.layout)


def stub(tensor: Tensor) -> Tensor:
    """Returns a leaf with the shape of a tensor that takes no memory."""
    leaf = torch.empty_strided(tensor.shape, (0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
    return leaf.requires_grad_(tensor.requires_grad)


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
    """Returns the tensor with a graph that begins at a stub of it, to which its gradient goes."""
    if not begin.requires_grad:
        return tensor
    begun: Tensor = _Begin.apply(begin, tensor.detach())  # type: ignore[no-untyped-call]
    return begun


def end_of(tensor: Tensor) -> Tensor:
    """Returns a stub of a tensor, from which a backward pass can start."""
    end: Tensor = _End.apply(tensor)  # type: ignore[no-untyped-call]
    return end
