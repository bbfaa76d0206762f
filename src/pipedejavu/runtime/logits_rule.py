"""What each operation makes of deferred logits: other deferred logits, or a cross-entropy that can run in chunks.

A rule takes the source of the logits, the operation and its other arguments. It returns None if it does not know them;
the logits are then computed, and the operation runs on them. Rules compute nothing: `deferred_logits` follows them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipedejavu.runtime.chunked_loss import LossSettings
from pipedejavu.runtime.logits_source import DerivedLogits, LogitsSource, TensorOperation

_DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_REDUCTIONS = ("none", "mean", "sum")
"""In the order of ATen's numbers."""


class ClassLoss(NamedTuple):
    """A cross-entropy of the logits with one class index per token."""

    targets: Tensor
    class_weights: Tensor | None
    settings: LossSettings

    @property
    def is_plain(self) -> bool:
        """Whether all classes and labels count alike."""
        return self.class_weights is None and self.settings.label_smoothing == 0.0


Result = DerivedLogits | LogitsSource | ClassLoss | None
"""What a rule returns: new logits, the same ones, their loss, or None for an operation that it does not know."""
Rule = Callable[..., Result]
"""Takes the source of logits, an operation and its other arguments."""


def name_of(func: Any) -> str:
    """Returns the name of an operation or attribute of tensors, in Python or in ATen."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.rpartition("::")[2]
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


def _cast(source: LogitsSource, func: Any, *args: Any, **kwargs: Any) -> Result:
    """`float()`, `to(dtype)` and the like."""
    dtype = _DTYPES.get(name_of(func))
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.dtype) and dtype is None:
            dtype = argument
        elif isinstance(argument, torch.device | str) and torch.device(argument) == source.hidden.device:
            continue
        elif isinstance(argument, Tensor) or argument not in (None, False, torch.strided, torch.preserve_format):
            return None
    dtype = dtype or source.form.dtype
    if not dtype.is_floating_point or kwargs.get("copy"):
        return None
    if dtype == source.form.dtype:
        return None if name_of(func) == "_to_copy" else source
    return _pointwise(source, TensorOperation(Tensor.to, (dtype,)))


def _scale(source: LogitsSource, func: Any, *args: Any, **kwargs: Any) -> Result:
    """A product with a number, or a quotient."""
    if kwargs or len(args) != 1 or type(args[0]) not in (int, float):
        return None
    return _pointwise(source, TensorOperation(func, args))


def _squash(source: LogitsSource, func: Any, *args: Any, **kwargs: Any) -> Result:
    """`tanh`, between a quotient and a product: a soft cap."""
    return None if args or kwargs else _pointwise(source, TensorOperation(func))


def _pointwise(source: LogitsSource, operation: TensorOperation) -> Result:
    return source.after(operation, pointwise=(*source.pointwise, operation))


def _contiguous(source: LogitsSource, func: Any, *args: Any, **kwargs: Any) -> Result:
    """Nothing, or a copy of a slice."""
    formats = (*args, *kwargs.values())
    if source.is_class_second or any(item is not torch.contiguous_format for item in formats):
        return None
    return source if source.form.is_contiguous() else source.after(TensorOperation(func))


def _detach(source: LogitsSource, func: Any) -> Result:
    bias = None if source.bias is None else source.bias.detach()
    hidden, weight = source.hidden.detach(), source.weight.detach()
    return source.after(TensorOperation(func), hidden=hidden, weight=weight, bias=bias)


def _reshape(source: LogitsSource, func: Any, *args: Any, **kwargs: Any) -> Result:
    """A view that keeps the vocabulary as the last dimension."""
    if source.is_class_second or any(isinstance(item, torch.dtype) for item in (*args, *kwargs.values())):
        return None
    operation = TensorOperation(func, args, kwargs)
    form = operation(source.form)
    if form.dim() < 2 or form.shape[-1] != source.form.shape[-1]:
        return None
    return source.after(operation, form, hidden=source.hidden.reshape(*form.shape[:-1], source.hidden.shape[-1]))


def _index(source: LogitsSource, func: Any, key: Any) -> Result:
    """An index that selects tokens: numbers, slices, `None` and one tensor, with all of the vocabulary."""
    keys = key if isinstance(key, tuple) else (key,)
    if source.is_class_second or not _selects_tokens(keys, source.form.dim()):
        return None
    hidden = source.hidden[key]
    if hidden.dim() < 2:
        return None
    form = None
    if any(isinstance(item, Tensor) for item in keys):
        form = torch.empty((*hidden.shape[:-1], source.form.shape[-1]), dtype=source.form.dtype, device="meta")
    return source.after(TensorOperation(func, (key,)), form, hidden=hidden)


def _selects_tokens(keys: tuple[Any, ...], num_dims: int) -> bool:
    """Whether an index is known, and takes all of the last dimension."""
    tensors = [item for item in keys if isinstance(item, Tensor)]
    others = [item for item in keys if not isinstance(item, Tensor)]
    is_known = all(item is None or item is ... or type(item) in (int, slice) for item in others)
    if not is_known or len(tensors) > 1:
        return False
    taken, num_rests = sum(map(_num_taken, keys)), sum(item is ... for item in others)
    if num_rests > 1 or taken > num_dims:
        return False
    if not num_rests and taken < num_dims:
        return True
    last = keys[-1]
    return last is ... or (isinstance(last, slice) and last == slice(None))


def _num_taken(item: Any) -> int:
    """Returns the number of dimensions that an item of an index stands for."""
    if isinstance(item, Tensor):
        return item.dim() if item.dtype == torch.bool else 1
    return int(item is not None and item is not ...)


def _slice(source: LogitsSource, func: Any, dim: int = 0, *args: Any, **kwargs: Any) -> Result:
    """ATen's slice or selection of one dimension."""
    num_dims = source.form.dim()
    if source.is_class_second:
        return None
    if dim % num_dims == num_dims - 1:
        is_whole = name_of(func) == "slice" and _is_whole(source.form.shape[-1], *args, **kwargs)
        return source if is_whole else None
    hidden = func(source.hidden, dim % num_dims, *args, **kwargs)
    if hidden.dim() < 2:
        return None
    return source.after(TensorOperation(func, (dim, *args), kwargs), hidden=hidden)


def _is_whole(size: int, start: int | None = None, end: int | None = None, step: int = 1) -> bool:
    return not start and (end is None or end >= size) and step == 1


def _move(source: LogitsSource, func: Any, *args: Any, **kwargs: Any) -> Result:
    """A transposition that makes the vocabulary dimension 1 and keeps the order of the others."""
    num_dims = source.form.dim()
    if source.is_class_second or num_dims < 3 or kwargs:
        return None
    distinct = torch.empty([2 + n for n in range(num_dims)], device="meta")  # shows where each dimension goes
    if func(distinct, *args).shape != distinct.movedim(-1, 1).shape:
        return None
    return source.after(TensorOperation(func, args), is_class_second=True)


def _loss(
    source: LogitsSource,
    func: Any,  # noqa: ARG001
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Result:
    """The cross-entropy, with the arguments of `torch.nn.functional`."""
    is_known = size_average is None and reduce is None and reduction in _REDUCTIONS
    if not is_known or not _is_of_classes(source, target, weight):
        return None
    return ClassLoss(target, weight, LossSettings(ignore_index, reduction, label_smoothing))


def _aten_loss(
    source: LogitsSource,
    func: Any,
    target: Any,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Result:
    """The cross-entropy, with the arguments of ATen."""
    if reduction not in range(len(_REDUCTIONS)):
        return None
    name = _REDUCTIONS[reduction]
    return _loss(source, func, target, weight, None, ignore_index, None, name, float(label_smoothing))


def _is_of_classes(source: LogitsSource, target: Any, weight: Tensor | None) -> bool:
    """Whether a loss compares the logits with one class index per token, on their device."""
    if not isinstance(target, Tensor) or target.dtype != torch.int64:
        return False
    if weight is not None and weight.requires_grad:
        return False
    if source.is_class_second != (source.form.dim() > 2):
        return False
    return target.shape == source.hidden.shape[:-1] and target.device == source.hidden.device


RULES: dict[str, Rule] = {
    **dict.fromkeys((*_DTYPES, "to", "_to_copy"), _cast),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), _scale),
    **dict.fromkeys(("div", "__truediv__", "true_divide", "divide"), _scale),
    **dict.fromkeys(("view", "reshape", "flatten", "_unsafe_view"), _reshape),
    **dict.fromkeys(("transpose", "permute", "movedim", "swapaxes", "swapdims"), _move),
    **dict.fromkeys(("slice", "select"), _slice),
    "tanh": _squash,
    "contiguous": _contiguous,
    "detach": _detach,
    "__getitem__": _index,
    "cross_entropy": _loss,
    "cross_entropy_loss": _aten_loss,
}
