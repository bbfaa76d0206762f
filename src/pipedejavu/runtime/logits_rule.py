"""What each operation makes of deferred logits: other deferred logits, or their cross-entropy in chunks.

A rule takes the logits, the operation and its other arguments. It returns NotImplemented if it does not know them; the
logits are then computed, and the operation runs on them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipedejavu.runtime.chunked_loss import LossSettings, chunked_cross_entropy
from pipedejavu.runtime.deferred_logits import DeferredLogits, Rule, name_of
from pipedejavu.runtime.fused_loss import can_fuse

_DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_REDUCTIONS = ("none", "mean", "sum")
"""In the order of ATen's numbers."""


def _cast(logits: DeferredLogits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """`float()`, `to(dtype)` and the like."""
    dtype = _DTYPES.get(name_of(func))
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.dtype) and dtype is None:
            dtype = argument
        elif isinstance(argument, torch.device | str) and torch.device(argument) == logits.device:
            continue
        elif argument not in (None, False, torch.strided, torch.preserve_format):
            return NotImplemented
    dtype = dtype or logits.dtype
    if not dtype.is_floating_point or kwargs.get("copy"):
        return NotImplemented
    if dtype == logits.dtype:
        return NotImplemented if name_of(func) == "_to_copy" else logits
    return _pointwise(logits, partial(_to, dtype=dtype))


def _to(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.to(dtype)


def _scale(logits: DeferredLogits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A product with a number, or a quotient."""
    if kwargs or len(args) != 1 or type(args[0]) not in (int, float):
        return NotImplemented
    return _pointwise(logits, partial(_called, func, argument=args[0]))


def _called(func: Any, logits: Tensor, argument: float) -> Tensor:
    result: Tensor = func(logits, argument)
    return result


def _squash(logits: DeferredLogits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """`tanh`, between a quotient and a product: a soft cap."""
    return NotImplemented if args or kwargs else _pointwise(logits, func)


def _pointwise(logits: DeferredLogits, function: Callable[[Tensor], Tensor]) -> DeferredLogits:
    source = replace(logits.source, pointwise=(*logits.source.pointwise, function))
    return logits.derive(source, function)


def _contiguous(logits: DeferredLogits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Nothing, or a copy of a slice."""
    formats = (*args, *kwargs.values())
    if logits.source.is_class_second or any(item is not torch.contiguous_format for item in formats):
        return NotImplemented
    return logits if logits.form.is_contiguous() else logits.derive(logits.source, func)


def _detach(logits: DeferredLogits, func: Any) -> Any:
    source = logits.source
    bias = None if source.bias is None else source.bias.detach()
    source = replace(source, hidden=source.hidden.detach(), weight=source.weight.detach(), bias=bias)
    return logits.derive(source, func)


def _reshape(logits: DeferredLogits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A view that keeps the vocabulary as the last dimension."""
    if logits.source.is_class_second or any(isinstance(item, torch.dtype) for item in (*args, *kwargs.values())):
        return NotImplemented
    operation = partial(_again, func, args=args, kwargs=kwargs)
    shape = operation(logits.form).shape
    if len(shape) < 2 or shape[-1] != logits.shape[-1]:
        return NotImplemented
    hidden = logits.source.hidden
    return logits.derive(replace(logits.source, hidden=hidden.reshape(*shape[:-1], hidden.shape[-1])), operation)


def _again(func: Any, logits: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    result: Tensor = func(logits, *args, **kwargs)
    return result


def _index(logits: DeferredLogits, func: Any, key: Any) -> Any:
    """An index that selects tokens: numbers, slices, `None` and one tensor, with all of the vocabulary."""
    keys = key if isinstance(key, tuple) else (key,)
    if logits.source.is_class_second or not _selects_tokens(keys, logits.dim()):
        return NotImplemented
    hidden = logits.source.hidden[key]
    if hidden.dim() < 2:
        return NotImplemented
    form = None
    if any(isinstance(item, Tensor) for item in keys):
        form = torch.empty((*hidden.shape[:-1], logits.shape[-1]), dtype=logits.dtype, device="meta")
    operation = partial(_again, func, args=(key,), kwargs={})
    return logits.derive(replace(logits.source, hidden=hidden), operation, form)


def _selects_tokens(keys: tuple[Any, ...], num_dims: int) -> bool:
    """Whether an index is known, and takes all of the last dimension."""
    tensors = [item for item in keys if isinstance(item, Tensor)]
    others = [item for item in keys if not isinstance(item, Tensor)]
    is_known = all(item is None or item is ... or type(item) in (int, slice) for item in others)
    if not is_known or len(tensors) > 1 or any(isinstance(item, DeferredLogits) for item in tensors):
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


def _slice(logits: DeferredLogits, func: Any, dim: int = 0, *args: Any, **kwargs: Any) -> Any:
    """ATen's slice or selection of one dimension."""
    if logits.source.is_class_second:
        return NotImplemented
    if dim % logits.dim() == logits.dim() - 1:
        is_whole = name_of(func) == "slice" and _is_whole(logits.shape[-1], *args, **kwargs)
        return logits if is_whole else NotImplemented
    hidden = func(logits.source.hidden, dim % logits.dim(), *args, **kwargs)
    if hidden.dim() < 2:
        return NotImplemented
    operation = partial(_again, func, args=(dim, *args), kwargs=kwargs)
    return logits.derive(replace(logits.source, hidden=hidden), operation)


def _is_whole(size: int, start: int | None = None, end: int | None = None, step: int = 1) -> bool:
    return not start and (end is None or end >= size) and step == 1


def _move(logits: DeferredLogits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A transposition that makes the vocabulary dimension 1 and keeps the order of the others."""
    if logits.source.is_class_second or logits.dim() < 3 or kwargs:
        return NotImplemented
    distinct = torch.empty([2 + n for n in range(logits.dim())], device="meta")  # follows where each dimension goes
    if func(distinct, *args).shape != distinct.movedim(-1, 1).shape:
        return NotImplemented
    return logits.derive(replace(logits.source, is_class_second=True), partial(_again, func, args=args, kwargs={}))


def _loss(
    logits: DeferredLogits,
    func: Any,  # noqa: ARG001
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The cross-entropy, with the arguments of `torch.nn.functional`."""
    settings = LossSettings(ignore_index, reduction, label_smoothing)
    is_known = size_average is None and reduce is None and reduction in _REDUCTIONS
    if not is_known or not _is_of_classes(logits, target, weight):
        return NotImplemented
    source, use = logits.source, logits.origin.use
    use.num_losses += 1
    (use.num_classes, use.width), use.itemsize = source.weight.shape, source.hidden.element_size()
    use.num_logits = target.numel() * use.num_classes
    pointwise = partial(_all, functions=source.pointwise)
    is_plain = weight is None and label_smoothing == 0.0
    use.is_fused = can_fuse(source.hidden.dtype, is_plain=is_plain, pointwise=pointwise)
    if use.choose is not None:
        use.num_chunks = use.choose(use)
    if use.num_chunks <= 1:
        return torch.nn.functional.cross_entropy(
            logits.compute(), target, weight, ignore_index=ignore_index, reduction=reduction,
            label_smoothing=label_smoothing,
        )  # fmt: skip
    logits.origin.check()
    loss = chunked_cross_entropy(
        source.hidden.reshape(-1, source.hidden.shape[-1]),
        source.weight,
        source.bias,
        target.reshape(-1),
        weight,
        num_chunks=use.num_chunks,
        settings=settings,
        pointwise=pointwise,
        is_early=use.is_early,
    )
    return loss.view(target.shape) if reduction == "none" else loss


def _aten_loss(
    logits: DeferredLogits,
    func: Any,
    target: Any,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """The cross-entropy, with the arguments of ATen."""
    if reduction not in range(len(_REDUCTIONS)):
        return NotImplemented
    name = _REDUCTIONS[reduction]
    return _loss(logits, func, target, weight, None, ignore_index, None, name, float(label_smoothing))


def _is_of_classes(logits: DeferredLogits, target: Any, weight: Tensor | None) -> bool:
    """Whether a loss compares the logits with one class index per token, on their device."""
    if not isinstance(target, Tensor) or isinstance(target, DeferredLogits) or target.dtype != torch.int64:
        return False
    if weight is not None and (weight.requires_grad or isinstance(weight, DeferredLogits)):
        return False
    if logits.source.is_class_second != (logits.dim() > 2):
        return False
    return target.shape == logits.source.hidden.shape[:-1] and target.device == logits.device


def _all(logits: Tensor, functions: tuple[Callable[[Tensor], Tensor], ...]) -> Tensor:
    for function in functions:
        logits = function(logits)
    return logits


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
