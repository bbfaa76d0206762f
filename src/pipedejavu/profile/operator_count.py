"""Counts what a unit's operations do: floating-point operations, bytes read and written, bytes saved for the backward,
and bytes that are there for a while only.

It counts real tensors and those without memory alike. What an operation takes for itself and gives back before it
returns, as convolutions do, is seen on a GPU only, whose allocator tells.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from pipedejavu.facts import InputError
from pipedejavu.profile.operator import classify
from pipedejavu.profile.segment import refusal_of_branches
from pipedejavu.profile.unit_step import Head, detached, run_step, tensors_of


class OperatorWork(NamedTuple):
    """What one operation does."""

    flop: int
    size_bytes: int
    """Read and written."""
    class_: str
    """Of operators that are about as efficient as each other."""


@dataclass(frozen=True)
class Counted:
    """What a unit's parts do on one microbatch."""

    parts: Mapping[str, tuple[OperatorWork, ...]]
    saved: tuple[int, ...]
    """The bytes of each memory that autograd keeps from the forward; parameters and buffers are there anyway."""
    saved_input_bytes: int
    """Of these: what the unit was given."""
    saved_output_bytes: int
    """Of these: what it returns."""
    forward_work_bytes: int
    """Most that was there at once inside of the forward, beyond what it left."""
    backward_work_bytes: int
    """Most that was added inside of the backward, as what was saved goes; the gradients of weights do not count."""
    output: Any

    @property
    def saved_bytes(self) -> int:
        """What autograd keeps from the forward for the backward."""
        return sum(self.saved)

    @property
    def flop(self) -> int:
        """Floating-point operations of the forward."""
        return sum(work.flop for work in self.parts["forward"])


def count_step(module: nn.Module, value: Any, head: Head | None, is_first: bool) -> Counted:
    """Runs a unit's parts once and counts."""
    meter = _Counter(module)
    try:
        output = run_step(module, value, head, is_first, meter)
    except NotImplementedError as error:
        _, is_of_branches, text = str(error).partition("HigherOrderOperator ")
        if not is_of_branches:
            raise
        raise InputError(f"a {type(module).__name__} cannot run: {refusal_of_branches(text.split()[0])}") from None
    own = {_where(t) for t in (*module.parameters(), *module.buffers())}
    saved = {where: size for where, size in meter.saved.items() if where not in own}
    returned = {_where(t) for t in tensors_of(output)}
    forward = meter.changes["forward"]
    return Counted(
        parts={name: tuple(done) for name, done in meter.parts.items()},
        saved=tuple(saved.values()),
        saved_input_bytes=sum(size for where, size in saved.items() if where not in meter.made),
        saved_output_bytes=sum(size for where, size in saved.items() if where in returned and where in meter.made),
        forward_work_bytes=_most(forward) - sum(size for _, size in forward),
        backward_work_bytes=_most(meter.changes.get("backward", [])),
        output=detached(output),
    )


def _most(changes: Iterable[tuple[int, int]]) -> int:
    return max(accumulate((size for _, size in changes), initial=0))


class _Counter:
    """A meter of operations, of the memory that they take, and of the tensors that the forward saves."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parts: dict[str, list[OperatorWork]] = {}
        self.saved: dict[int, int] = {}
        """The bytes of each memory that the forward saves something in."""
        self.made: set[int] = set()
        """Which of these an operation of the forward has made; the others are parameters, buffers and inputs."""
        self.changes: dict[str, list[tuple[int, int]]] = {}
        """By part: a number for each memory that came or went, and its bytes; the gradients of weights are left out."""
        self._alive: dict[int, tuple[int, ref[Any]]] = {}
        """Memory that operations made, while it is there, with its number."""
        self._changes: list[tuple[int, int]] = []
        self._count = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what runs inside."""
        saved: list[Tensor] = []  # they live as long as they are told apart

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor.detach()  # a node that held its own output would never go

        done = self.parts.setdefault(name, [])
        self._changes = []
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _Operations(done, self):
            yield
        made = [self._alive.get(_where(p.grad)) for p in self.module.parameters() if p.grad is not None]
        gradients = {found[0] for found in made if found is not None}
        self.changes[name] = [(number, size) for number, size in self._changes if number not in gradients]
        if name == "forward":
            self.saved = {_where(t): t.untyped_storage().nbytes() for t in saved}
            self.made = self.saved.keys() & self._alive.keys()
        saved.clear()  # the graph holds `keep`, and the backward lets go of what it has read

    def came(self, tensor: Tensor) -> None:
        """Notes memory that an operation has made, and that it will go."""
        memory = tensor.untyped_storage()
        where, size = _where(tensor), memory.nbytes()
        if where in self._alive:
            return
        self._count += 1
        number = self._count

        def gone(_: object) -> None:
            del self._alive[where]
            self._changes.append((number, -size))

        self._alive[where] = number, ref(memory, gone)
        self._changes.append((number, size))

    def passed(self, size_bytes: int) -> None:
        """Notes memory that an operation has had for itself."""
        self._count += 1
        self._changes += [(self._count, size_bytes), (self._count, -size_bytes)]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation that moves bytes, and all memory that is new."""

    def __init__(self, done: list[OperatorWork], memory: _Counter):
        super().__init__()  # type: ignore[no-untyped-call]
        self.done, self.memory = done, memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Lets torch leave Dynamo alone, which it would import to keep it out; that takes longer than most counts."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and notes it."""
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        gpu = next((t.device for t in given if t.is_cuda), None)
        if gpu:
            torch.cuda.reset_peak_memory_stats(gpu)
        output = func(*args, **kwargs)
        made = _tensors(output)
        before = {_where(t) for t in given}
        for tensor in made:
            if _where(tensor) not in before:
                self.memory.came(tensor)
        if gpu:
            self.memory.passed(torch.cuda.max_memory_allocated(gpu) - torch.cuda.memory_allocated(gpu))
        if made and not func.is_view and func._overloadpacket not in _FREE:
            count = _FLOP.get(func._overloadpacket)
            flop = count(*args, **kwargs, out_val=output) if count else 0
            read_bytes, made_bytes = ([t.nbytes for t in own] for own in (given, made))
            if func._overloadpacket is torch.ops.aten.embedding:
                read_bytes[0] = min(read_bytes[0], sum(made_bytes))  # of a table only the rows that are asked for
            class_ = classify(func._overloadpacket.__name__)
            self.done.append(OperatorWork(int(flop), sum(read_bytes) + sum(made_bytes), class_))
        return output


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _where(tensor: Tensor) -> int:
    """Returns what tells a tensor's memory from others, also where it has none; valid while the tensor lives."""
    where: int = tensor.untyped_storage()._cdata
    return where


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = gradient.shape, query.shape, key.shape, value.shape
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


_FREE = frozenset(
    getattr(torch.ops.aten, name) for name in ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty")
)
"""Operations beside views that touch no bytes."""

_FLOP: dict[Any, Any] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Torch's own counts, and those that it lacks."""
