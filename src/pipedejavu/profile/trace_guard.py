"""What a model is told that asks, while it is recorded, what only a run knows.

A recording has shapes and no numbers. Numbers that no input decides, as positions are, follow from how they were made;
so the model takes the way here that it takes in training. How a forward is recorded is not known here.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pipedejavu.facts import InputError

_MAKERS = ("arange", "full", "ones", "zeros")
_ARRANGED = ("cat", "clone", "contiguous", "expand", "flatten", "getitem", "pad", "permute", "repeat", "reshape")
_SHAPED = ("squeeze", "stack", "transpose", "tril", "triu", "unsqueeze", "view")
_NUMBERS = ("add", "cumsum", "diff", "float", "int", "long", "mul", "radd", "rmul", "rsub", "sub", "sum", "to")
_TRUTHS = ("all", "and", "any", "bool", "eq", "ge", "gt", "invert", "le", "logical_and", "lt", "ne", "or")
_FOLLOWING = frozenset((*_MAKERS, *_ARRANGED, *_SHAPED, *_NUMBERS, *_TRUTHS))
"""Functions whose result follows from what they are given, by name; that of one that works in place ends with _."""
_PLAIN = (int, float, slice, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format)
_MASKS = "transformers.masking_utils"


@dataclass
class _Made:
    """How a tensor was made from no input."""

    tensor: Tensor
    version: int
    """Of the tensor then; it counts changes in place, those through views too."""
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Tensor | None = None


class TraceGuard(TorchFunctionMode):
    """Answers what needs no number of an input, and lets everything else happen."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []
        """Random numbers: none lies below 0, so that layers which are dropped with that probability never are."""
        self.made: dict[int, _Made] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers comparisons and conditions; remembers how tensors are made."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            raise InputError(
                "the form of a packed sequence depends on the values of its lengths; give the layers padded sequences,"
                " and read each result at its length"
            )
        is_below = func in (Tensor.__lt__, Tensor.lt) and isinstance(args[1], float | int) and args[1] <= 0
        if is_below and any(args[0] is number for number in self.drawn):
            return False
        if func is Tensor.__bool__ and self.knows(args[0]):
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                return bool(self._value(args[0]))
        follows = self._follows(func, args, kwargs)
        found = func(*args, **kwargs)
        if func is torch.rand:
            self.drawn.append(found)
        if follows and isinstance(found, Tensor) and not found.is_inference() and not self.knows(found):
            self.made[id(found)] = _Made(found, found._version, func, args, kwargs)
        return found

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is as it was made from no input."""
        made = self.made.get(id(tensor))
        return made is not None and made.version == tensor._version

    def _follows(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether what a function returns follows from what is known."""
        name = getattr(func, "__name__", "").removeprefix("__").removesuffix("__")
        if name not in _FOLLOWING or "out" in kwargs:
            return False
        leaves = pytree.tree_leaves((args, kwargs))
        return all(self.knows(leaf) if isinstance(leaf, Tensor) else isinstance(leaf, _PLAIN) for leaf in leaves)

    def _value(self, tensor: Tensor) -> Tensor:
        """Computes a known tensor, on the CPU."""
        made = self.made[id(tensor)]
        if made.value is None:
            args, kwargs = pytree.tree_map_only(Tensor, self._value, (made.args, made.kwargs))
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
            made.value = made.call(*args, **kwargs)
        return made.value


@contextmanager
def masks_as_in_training(answers: TraceGuard) -> Iterator[None]:
    """Lets models of transformers make the attention masks that they make in training.

    For a recording of any shape they make a mask that is a tensor, and repeat keys and values for every query head. One
    of a single shape can leave both to the kernel, as they do when they train: that is less to compute and to hand on,
    and the gradients of a head that queries share are added in the same order.
    """
    room = vars(sys.modules[_MASKS]) if _MASKS in sys.modules else {}

    def is_tracing(tensor: Tensor | None = None) -> bool:
        return tensor is not None and not answers.knows(tensor)

    told: dict[str, Callable[..., bool]] = {"is_tracing": is_tracing, "is_torchdynamo_exporting": lambda: False}
    before = {name: room[name] for name in told if name in room}
    room.update({name: told[name] for name in before})
    try:
        yield
    finally:
        room.update(before)
