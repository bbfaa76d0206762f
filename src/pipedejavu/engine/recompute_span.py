"""What the forward of a piece saves for its backward, span by span, and the backward through the spans.

A span is a run of consecutive units that are all recomputed, or all kept; a piece whose units are all treated alike
is one span. The graph of a span begins at leaves of its own, whose gradients start the backward of the span before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.staleness import ReboundWeights
from pipedejavu.runtime.host_memory import move_tensor
from pipedejavu.runtime.saved_storage import SavedTensorOffload
from pipedejavu.runtime.split_backward import PendingGradients, backward_inputs

Value = Any
"""What one unit passes to the next: a tensor, or a tuple of tensors."""


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """Returns the tensors of a value as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def like(value: Value, tensors: Sequence[Tensor]) -> Value:
    """Returns tensors as a tuple if `value` is one, else the only tensor."""
    return tuple(tensors) if isinstance(value, tuple) else tensors[0]


@dataclass(frozen=True)
class RecomputeSpan:
    """What the forward of one span saves."""

    input_value: Value
    """The input of the span, as leaves."""
    weights: Tensors
    outputs: tuple[Tensor, ...] = ()
    """Empty for a span that is recomputed, until it has run again."""
    tensor_offload: SavedTensorOffload | None = None
    """In the first span, if activations are offloaded: what autograd saved for the whole piece."""
    rebound: ReboundWeights | None = None
    """In the first span, if the backward reads other weights than the forward: what it reads."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors of its input."""
        return tensors_of(self.input_value)


Saved = tuple[RecomputeSpan, ...]
"""What the forward of a piece saves: its spans, in the order of their units."""

_HALVES = (torch.bfloat16, torch.float16)

Gradients = Sequence[Tensor | None]
"""None for a tensor that does not contribute to the loss."""


def with_loss(saved: Saved, loss: Tensor) -> Saved:
    """Returns the spans of the last piece with the loss as their output, unless the last span is recomputed."""
    *others, last = saved
    return (*others, replace(last, outputs=(loss,)) if last.outputs else last)


def with_saved(
    saved: Saved, tensor_offload: SavedTensorOffload | None = None, rebound: ReboundWeights | None = None
) -> Saved:
    """Returns the spans with what recorded their saved tensors; gradients of rebound weights go to stubs."""
    spans = [*saved]
    if rebound is not None:
        spans = [replace(span, weights={name: rebound.leaves[name] for name in span.weights}) for span in saved]
    return (replace(spans[0], tensor_offload=tensor_offload, rebound=rebound), *spans[1:])


def carried(saved: Saved, device: torch.device) -> Saved:
    """Returns the spans on another device: what autograd saved, and the inputs of spans that are recomputed."""
    spans = []
    for span in saved:
        if span.tensor_offload is not None:
            span.tensor_offload.move(device)
        inputs = [t if span.outputs else move_tensor(t, device).requires_grad_(t.requires_grad) for t in span.inputs]
        spans.append(replace(span, input_value=like(span.input_value, inputs)))
    return tuple(spans)


def memory_of(value: Any) -> Any:
    """Returns the tensors of spans that `carried` moves; returns any other value as it is."""
    if not (isinstance(value, tuple) and value and isinstance(value[0], RecomputeSpan)):
        return value
    tensor_offload = value[0].tensor_offload
    return (
        ()
        if tensor_offload is None
        else (
            tensor_offload.contents,
            *(span.inputs for span in value if not span.outputs),
        )
    )


@dataclass(frozen=True)
class WeightHalf:
    """What the backward of the inputs leaves for the backward of the weights."""

    weights: tuple[Tensors, ...]
    """Of each span."""
    pending: tuple[PendingGradients, ...] = ()
    """Of each span; empty if no input has a gradient, so that the whole backward is the weights' half."""
    saved: Saved = ()
    gradients: Gradients = ()
    """Of the outputs; with `saved`, if nothing is pending."""


def backward(
    saved: Saved, gradients: Gradients, total: Tensors | None = None, *, is_wide: bool = False
) -> tuple[tuple[Tensor, ...], Tensors]:
    """Returns the gradients of the inputs and of the weights; the latter are added to `total`, in place, if given.

    With `is_wide`, gradients of 16-bit weights are added up in float32.
    """
    of_inputs, of_weights = _run_spans(saved, gradients, total, is_wide)
    return _with_zeros(saved, of_inputs) if any(t.requires_grad for t in saved[0].inputs) else (), of_weights


def backward_input(saved: Saved, gradients: Gradients) -> tuple[tuple[Tensor, ...], WeightHalf]:
    """Returns the gradients of the inputs, and what those of the weights need; frees the graph."""
    weights = tuple(span.weights for span in saved)
    if not any(t.requires_grad for t in saved[0].inputs):
        return _with_zeros(saved, [None] * len(saved[0].inputs)), WeightHalf(weights, (), saved, gradients)
    pending: list[PendingGradients] = []
    for span in reversed(saved):
        inputs = [t for t in span.inputs if t.requires_grad]
        of_inputs, of_weights = backward_inputs(*_ends(span, gradients), inputs, span.weights.values())
        pending.insert(0, of_weights)
        each = iter(of_inputs)
        gradients = [next(each) if t.requires_grad else None for t in span.inputs]
    return _with_zeros(saved, gradients), WeightHalf(weights, tuple(pending))


def backward_weights(half: WeightHalf, total: Tensors | None = None, *, is_wide: bool = False) -> Tensors:
    """Returns the gradients of the weights, added to `total`, in place, if given."""
    if half.saved:
        return _run_spans(half.saved, half.gradients, total, is_wide)[1]
    sums = _GradientSums(half.weights, total, is_wide)
    for index in reversed(range(len(half.pending))):
        with sums.of(index) as shared:
            half.pending[index].accumulate(shared)
    return sums.result()


def _run_spans(saved: Saved, gradients: Gradients, total: Tensors | None, is_wide: bool) -> tuple[Gradients, Tensors]:
    """Runs the backward of each span, from the last; returns the gradients of the inputs and of the weights."""
    sums = _GradientSums([span.weights for span in saved], total, is_wide)
    for index in reversed(range(len(saved))):
        span = saved[index]
        with sums.of(index) as shared:
            outputs, heads = _ends(span, gradients)
            outputs += [weight for weight, _ in shared]
            heads += [gradient for _, gradient in shared]
            if outputs:
                torch.autograd.backward(outputs, heads)
        gradients = [t.grad for t in span.inputs]
        for tensor in span.inputs:
            tensor.grad = None
    return gradients, sums.result()


class _GradientSums:
    """Sums weight gradients over spans, with `total` as the `grad` of the weights: autograd adds while they are cached.

    Autograd gives each weight a gradient of its own, even if one tensor is used several times. If several spans use
    a weight, its gradient of one span enters the backward of the next, so that the sum has the order of one graph.

    A sum in float32 of a 16-bit weight cannot be its `grad`: each gradient is added and freed as soon as it is known.
    """

    def __init__(self, weights: Sequence[Tensors], total: Tensors | None, is_wide: bool):
        self.weights, self.total = weights, total
        self.widened = {name for each in weights for name, w in each.items() if is_wide and w.dtype in _HALVES}
        self.accumulated: Tensors = {}
        self.wide: Tensors = {name: total[name] for name in self.widened} if total is not None else {}
        """Sums in float32."""

    @contextmanager
    def of(self, index: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Collects what a span adds to its weights' `grad`; yields its weights with the gradients of later spans."""
        weights, before = self.weights[index], self.weights[:index]
        hooks = []
        for name, weight in weights.items():
            is_last = not any(name in other for other in before)
            is_added = self.total is not None and is_last and name not in self.widened
            weight.grad = self.total[name] if is_added and self.total is not None else None
            if is_last and name in self.widened:
                hook = partial(self._widen, name)
                hooks.append(weight.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        try:
            yield [(weight, self.accumulated[name]) for name, weight in weights.items() if name in self.accumulated]
        finally:
            for hook in hooks:
                hook.remove()
        self.accumulated |= {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        for weight in weights.values():
            weight.grad = None

    def _widen(self, name: str, weight: Tensor) -> None:
        """Adds the gradient of a 16-bit weight to its sum in float32."""
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        if name in self.wide:
            self.wide[name].add_(gradient)
        else:
            self.wide[name] = gradient.float()

    def result(self) -> Tensors:
        """Returns the gradients of all weights, zeros for those that have none."""
        weights = {name: weight for each in self.weights for name, weight in each.items()}
        sums = self.accumulated | self.wide
        for name in weights.keys() - sums.keys():
            dtype = torch.float32 if name in self.widened else weights[name].dtype
            sums[name] = torch.zeros_like(weights[name], dtype=dtype)
        return {name: sums[name] for name in weights}


def _ends(span: RecomputeSpan, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs that have a gradient, and their gradients."""
    pairs = [(o, g) for o, g in zip(span.outputs, gradients, strict=True) if o.requires_grad and g is not None]
    return [o for o, _ in pairs], [g for _, g in pairs]


def _with_zeros(saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    """Returns the gradients of the inputs, zeros for those that have none."""
    pairs = zip(saved[0].inputs, gradients, strict=True)
    return tuple(torch.zeros_like(t) if g is None else g for t, g in pairs)
