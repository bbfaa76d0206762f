"""Counts what a unit's operations do: floating-point operations, bytes read and written, bytes saved for the backward.

It counts real tensors and those without memory alike, and knows no device.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from pipedejavu.profile.operator import classify
from pipedejavu.profile.step import Head, detached, run_step


class Work(NamedTuple):
    """What one operation does."""

    flop: int
    size_bytes: int
    """Read and written."""
    class_: str
    """Of operators that are about as efficient as each other."""


@dataclass(frozen=True)
class Counted:
    """What a unit's parts do on one microbatch."""

    parts: Mapping[str, tuple[Work, ...]]
    saved_bytes: int
    """What autograd keeps from the forward for the backward; parameters and buffers are there anyway."""
    output: Any

    @property
    def flop(self) -> int:
        """Floating-point operations of the forward."""
        return sum(work.flop for work in self.parts["forward"])


def count_step(module: nn.Module, value: Any, head: Head | None, is_first: bool) -> Counted:
    """Runs a unit's parts once and counts."""
    meter = _Counter()
    output = run_step(module, value, head, is_first, meter)
    own = {_where(t) for t in (*module.parameters(), *module.buffers())}
    saved_bytes = sum(size for where, size in meter.saved.items() if where not in own)
    return Counted({name: tuple(done) for name, done in meter.parts.items()}, saved_bytes, detached(output))


class _Counter:
    """A meter of operations, and of the tensors that the forward saves."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Work]] = {}
        self.saved: dict[int, int] = {}
        """The bytes of each memory that the forward saves something in."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what runs inside."""
        saved: list[Tensor] = []  # they live as long as they are told apart

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        done = self.parts.setdefault(name, [])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _Operations(done):
            yield
        if name == "forward":
            self.saved = {_where(t): t.untyped_storage().nbytes() for t in saved}


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation that moves bytes."""

    def __init__(self, done: list[Work]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.done = done

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and notes it."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        made = _tensors(output)
        if made and not func.is_view and func._overloadpacket not in _FREE:
            count = _FLOP.get(func._overloadpacket)
            flop = count(*args, **kwargs, out_val=output) if count else 0
            read_bytes, made_bytes = ([t.nbytes for t in own] for own in (_tensors((args, kwargs)), made))
            if func._overloadpacket is torch.ops.aten.embedding:
                read_bytes[0] = min(read_bytes[0], sum(made_bytes))  # of a table only the rows that are asked for
            class_ = classify(func._overloadpacket.__name__)
            self.done.append(Work(int(flop), sum(read_bytes) + sum(made_bytes), class_))
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
