"""The trace guard: evaluates conditions on tensors while a model is traced, if no input determines them.

A trace has shapes but no numbers. Tensors that do not depend on any input, such as positions, can be recomputed from
how they were made; so a condition on them takes the branch that it takes in training. This file does not know how a
forward is traced.
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
"""Functions whose result depends only on their arguments, by name; in-place variants end with an underscore."""
_PLAIN = (int, float, slice, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format)
_MASKS = "transformers.masking_utils"


@dataclass
class _Made:
    """How a tensor that depends on no input was made."""

    tensor: Tensor
    version: int
    """The tensor's version counter at that time; it counts in-place changes, also through views."""
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Tensor | None = None


class TraceGuard(TorchFunctionMode):
    """Answers comparisons and conditions that do not depend on the inputs; all other calls run as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []
        """Random numbers; none is below 0, so that layers dropped with probability 0 are never dropped."""
        self.made: dict[int, _Made] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers comparisons and conditions; records how tensors are made."""
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
        result = func(*args, **kwargs)
        if func is torch.rand:
            self.drawn.append(result)
        if follows and isinstance(result, Tensor) and not result.is_inference() and not self.knows(result):
            self.made[id(result)] = _Made(result, result._version, func, args, kwargs)
        return result

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on no input and was not changed since it was made."""
        made = self.made.get(id(tensor))
        return made is not None and made.version == tensor._version

    def _follows(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a function's result depends only on known tensors and constants."""
        name = getattr(func, "__name__", "").removeprefix("__").removesuffix("__")
        if name not in _FOLLOWING or "out" in kwargs:
            return False
        leaves = pytree.tree_leaves((args, kwargs))
        return all(self.knows(leaf) if isinstance(leaf, Tensor) else isinstance(leaf, _PLAIN) for leaf in leaves)

    def _value(self, tensor: Tensor) -> Tensor:
        """Computes a known tensor on the CPU."""
        made = self.made[id(tensor)]
        if made.value is None:
            args, kwargs = pytree.tree_map_only(Tensor, self._value, (made.args, made.kwargs))
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
            made.value = made.call(*args, **kwargs)
        return made.value


@contextmanager
def masks_as_in_training(guard: TraceGuard) -> Iterator[None]:
    """Makes transformers models create the same attention masks as in training.

    While they are traced, these models normally create the mask as a tensor and repeat keys and values for every query
    head. In training the attention kernel does both, which computes less and passes less on, and sums the gradients of
    shared heads in another order. A trace for a single shape can do as in training.
    """
    masking = vars(sys.modules[_MASKS]) if _MASKS in sys.modules else {}

    def is_tracing(tensor: Tensor | None = None) -> bool:
        return tensor is not None and not guard.knows(tensor)

    answers: dict[str, Callable[..., bool]] = {"is_tracing": is_tracing, "is_torchdynamo_exporting": lambda: False}
    before = {name: masking[name] for name in answers if name in masking}
    masking.update({name: answers[name] for name in before})
    try:
        yield
    finally:
        masking.update(before)
