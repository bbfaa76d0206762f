"""Records the operations that run inside a `with` block: their work, the memory they allocate, and tensors saved.

It works on real and fake tensors. Workspace that an operation allocates and frees before it returns, as convolutions
do, is recorded only on a GPU, where the allocator reports it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from pipedejavu.profile.operator import classify
from pipedejavu.runtime.product_rule import repeatable


class OperatorWork(NamedTuple):
    """The work of one operation."""

    flop: int
    size_bytes: int
    """Bytes read and written."""
    class_: str
    """Class of operators with similar efficiency."""
    reads: tuple[tuple[int, int], ...] = ()
    """Number and bytes of each storage that it reads."""
    makes: tuple[tuple[int, int], ...] = ()
    """Number and bytes of each storage that it makes."""


_ALONE = frozenset(("matmul", "conv", "attention", "embedding", "update"))
"""Classes of operators that a compiler does not fuse with others."""


def fused(works: Sequence[OperatorWork]) -> list[OperatorWork]:
    """Returns operations as a compiler runs them: each run of fusible ones is one kernel.

    A kernel reads each storage that comes from outside once, and writes what is read after it. What nothing reads again
    in this part counts as written, since the backward may need it.
    """
    kernels: list[list[OperatorWork]] = []
    for work in works:
        is_alone = work.class_ in _ALONE
        if is_alone or not kernels or kernels[-1][0].class_ in _ALONE:
            kernels.append([work])
        else:
            kernels[-1].append(work)
    last_read = {number: n for n, kernel in enumerate(kernels) for work in kernel for number, _ in work.reads}
    return [kernel[0] if len(kernel) == 1 else _one(kernel, n, last_read) for n, kernel in enumerate(kernels)]


def _one(kernel: Sequence[OperatorWork], number: int, last_read: Mapping[int, int]) -> OperatorWork:
    made = {key: size for work in kernel for key, size in work.makes}
    read = {key: size for work in kernel for key, size in work.reads if key not in made}
    written = {key: size for key, size in made.items() if last_read.get(key, number + 1) > number}
    size_bytes = sum(read.values()) + sum(written.values())
    return OperatorWork(sum(work.flop for work in kernel), size_bytes, "elementwise")


class OperatorMeter:
    """Counts operations, the memory that they allocate, and the tensors that the forward saves."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parts: dict[str, list[OperatorWork]] = {}
        self.saved: dict[int, int] = {}
        """Size of each storage that holds a saved tensor."""
        self.made: set[int] = set()
        """The saved storages that an operation of the forward allocated; others are parameters, buffers and inputs."""
        self.changes: dict[str, list[tuple[int, int]]] = {}
        """By part of the step: id and signed size of each allocation and release, except gradients of weights."""
        self.pending: dict[int, int] = {}
        """Size of each storage that is kept between the halves of a backward, other than parameters and buffers."""
        self.pending_outputs: set[int] = set()
        """Those of them that hold the gradient of an output."""
        self._alive: dict[int, tuple[int, ref[Any]]] = {}
        """Ids of the storages that operations allocated and that still exist."""
        self._changes: list[tuple[int, int]] = []
        self._count = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what runs inside the `with` block."""
        saved: list[Tensor] = []  # ids are unique while these live

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor.detach()  # else a node would hold its own output and never be freed

        done = self.parts.setdefault(name, [])
        self._changes = []
        with torch.autograd.graph.saved_tensors_hooks(keep, repeatable(lambda tensor: tensor)), _Operations(done, self):
            yield
        made = [self._alive.get(storage_id(p.grad)) for p in self.module.parameters() if p.grad is not None]
        gradients = {allocation[0] for allocation in made if allocation is not None}
        self.changes[name] = [(number, size) for number, size in self._changes if number not in gradients]
        if name == "forward":
            self.saved = {storage_id(t): t.untyped_storage().nbytes() for t in saved}
            self.made = self.saved.keys() & self._alive.keys()
        saved.clear()  # the graph holds `keep`; the backward must be able to free what it has read

    def between(self, pending: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Records what the first half of a backward leaves to the second."""
        held = {storage_id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        self.pending = {storage_id(t): t.untyped_storage().nbytes() for t in pending if storage_id(t) not in held}
        self.pending_outputs = self.pending.keys() & {storage_id(t) for t in outputs}

    def track(self, tensor: Tensor) -> None:
        """Records an allocation, and later its release."""
        memory = tensor.untyped_storage()
        where, size = storage_id(tensor), memory.nbytes()
        if where in self._alive:
            return
        self._count += 1
        number = self._count

        def gone(_: object) -> None:
            del self._alive[where]
            self._changes.append((number, -size))

        self._alive[where] = number, ref(memory, gone)
        self._changes.append((number, size))

    def number_of(self, tensor: Tensor) -> int:
        """Returns a number of a tensor's storage that no other has; that of an older storage is negative."""
        where = storage_id(tensor)
        known = self._alive.get(where)
        return known[0] if known else -where

    def add_workspace(self, size_bytes: int) -> None:
        """Records memory that an operation allocated and released."""
        self._count += 1
        self._changes += [(self._count, size_bytes), (self._count, -size_bytes)]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation that moves bytes, and every new storage."""

    def __init__(self, done: list[OperatorWork], memory: OperatorMeter):
        super().__init__()  # type: ignore[no-untyped-call]
        self.done, self.memory = done, memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, so that torch does not import Dynamo, which takes longer than most counts."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and records it."""
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        gpu = next((t.device for t in inputs if t.is_cuda), None)
        if gpu:
            torch.cuda.reset_peak_memory_stats(gpu)
        output = func(*args, **kwargs)
        made = _tensors(output)
        before = {storage_id(t) for t in inputs}
        for tensor in made:
            if storage_id(tensor) not in before:
                self.memory.track(tensor)
        if gpu:
            self.memory.add_workspace(torch.cuda.max_memory_allocated(gpu) - torch.cuda.memory_allocated(gpu))
        if made and not func.is_view and func._overloadpacket not in _FREE:
            count = _FLOP.get(func._overloadpacket)
            flop = count(*args, **kwargs, out_val=output) if count else 0
            read_bytes, made_bytes = ([t.nbytes for t in tensors] for tensors in (inputs, made))
            if func._overloadpacket is torch.ops.aten.embedding:
                read_bytes[0] = min(read_bytes[0], sum(made_bytes))  # an embedding reads only some rows of its table
            class_ = classify(func._overloadpacket.__name__)
            ends = (tuple((self.memory.number_of(t), t.nbytes) for t in tensors) for tensors in (inputs, made))
            self.done.append(OperatorWork(int(flop), sum(read_bytes) + sum(made_bytes), class_, *ends))
        return output


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_id(tensor: Tensor) -> int:
    """Returns an id of a tensor's storage, even of a fake tensor; valid while the tensor lives."""
    storage_id: int = tensor.untyped_storage()._cdata
    return storage_id


def _with_heads_of(query: Tensor, *tensors: Tensor) -> list[torch.Size]:
    """Returns shapes with as many heads as the query: several of its heads may share one key and value."""
    return [torch.Size((*tensor.shape[:-3], query.shape[-3], *tensor.shape[-2:])) for tensor in tensors]


def _product(left: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    return 2 * out_val.numel() * left.shape[-1]


def _added_product(_: Tensor, left: Tensor, *__: Any, out_val: Tensor, **___: Any) -> int:
    return 2 * out_val.numel() * left.shape[-1]


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, *_with_heads_of(query, key, value)))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = gradient.shape, query.shape, *_with_heads_of(query, key, value)
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


_FREE = frozenset(
    getattr(torch.ops.aten, name) for name in ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty")
)
"""Operations, other than views, that touch no bytes."""

_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_FLOP: dict[Any, Any] = {
    **flop_registry,
    **{getattr(torch.ops.aten, name): _product for name in ("mm", "bmm")},
    **{getattr(torch.ops.aten, name): _added_product for name in ("addmm", "baddbmm")},
    **{getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}"): _attention for kernel in _KERNELS},
    **{getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward"): _attention_backward for kernel in _KERNELS},
}
"""Torch's FLOP counts, the ones that it lacks, products into another dtype, and attention whose heads share keys and
values."""
