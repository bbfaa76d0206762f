"""What the forward of a piece saves for its backward, span by span, and the backward through the spans.

A span is a run of consecutive units that are all recomputed, or all kept; a piece whose units are all treated alike
is one span. The graph of a span begins at leaves of its own, whose gradients start the backward of the span before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine.optimizer import Tensors
from pipedejavu.runtime.host_memory import move_tensor
from pipedejavu.runtime.saved_storage import SavedTensorOffload

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

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors of its input."""
        return tensors_of(self.input_value)


Saved = tuple[RecomputeSpan, ...]
"""What the forward of a piece saves: its spans, in the order of their units."""

Gradients = Sequence[Tensor | None]
"""None for a tensor that does not contribute to the loss."""


def with_loss(saved: Saved, loss: Tensor) -> Saved:
    """Returns the spans of the last piece with the loss as their output, unless the last span is recomputed."""
    *others, last = saved
    return (*others, replace(last, outputs=(loss,)) if last.outputs else last)


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


def backward(saved: Saved, gradients: Gradients, total: Tensors | None = None) -> tuple[tuple[Tensor, ...], Tensors]:
    """Returns the gradients of the inputs and of the weights; the latter are added to `total`, in place, if given."""
    of_inputs, of_weights = _accumulate(saved, gradients, total, weights_only=False)
    return _with_zeros(saved, of_inputs) if any(t.requires_grad for t in saved[0].inputs) else (), of_weights


def backward_input(saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    """Returns the gradients of the inputs; keeps the graph for those of the weights."""
    is_wanted = any(t.requires_grad for t in saved[0].inputs)
    for span in reversed(saved) if is_wanted else ():
        inputs = [t for t in span.inputs if t.requires_grad]
        outputs, heads = _ends(span, gradients)
        of_inputs: Gradients = [None] * len(inputs)
        if inputs and outputs:
            of_inputs = torch.autograd.grad(outputs, inputs, heads, retain_graph=True, allow_unused=True)
        each = iter(of_inputs)
        gradients = [next(each) if t.requires_grad else None for t in span.inputs]
    return _with_zeros(saved, gradients if is_wanted else [None] * len(saved[0].inputs))


def backward_weights(saved: Saved, gradients: Gradients, total: Tensors | None = None) -> Tensors:
    """Returns the gradients of the weights, added to `total`, in place, if given."""
    return _accumulate(saved, gradients, total, weights_only=True)[1]


def _accumulate(
    saved: Saved, gradients: Gradients, total: Tensors | None, weights_only: bool
) -> tuple[Gradients, Tensors]:
    """Runs backward with `total` as the `grad` of the weights, so that autograd accumulates while they are cached.

    Autograd gives each weight a gradient of its own, even if one tensor is used several times. If several spans use
    a weight, its gradient of one span enters the backward of the next, so that the sum has the order of one graph.
    """
    accumulated: Tensors = {}
    for index in reversed(range(len(saved))):
        span, before = saved[index], saved[:index]
        for name, weight in span.weights.items():
            is_last = not any(name in other.weights for other in before)
            weight.grad = total[name] if total is not None and is_last else None
        inputs = [t for t in span.inputs if t.requires_grad and before]
        _run_backward(span, gradients, accumulated, inputs if weights_only else None)
        accumulated |= {name: weight.grad for name, weight in span.weights.items() if weight.grad is not None}
        gradients = [t.grad for t in span.inputs]
        for tensor in (*span.weights.values(), *span.inputs):
            tensor.grad = None
    weights = {name: weight for span in saved for name, weight in span.weights.items()}
    return gradients, {
        name: accumulated[name] if name in accumulated else torch.zeros_like(w) for name, w in weights.items()
    }


def _run_backward(span: RecomputeSpan, gradients: Gradients, accumulated: Tensors, inputs: list[Tensor] | None) -> None:
    """Runs the backward of one span into the `grad` of its weights, and of `inputs` or of all that it has.

    Gradients that later spans have `accumulated` for the same weights enter it.
    """
    outputs, heads = _ends(span, gradients)
    shared = [name for name in span.weights if name in accumulated]
    outputs += [span.weights[name] for name in shared]
    heads += [accumulated[name] for name in shared]
    wanted = None if inputs is None else [*span.weights.values(), *inputs]
    if outputs and wanted != []:
        torch.autograd.backward(outputs, heads, inputs=wanted)


def _ends(span: RecomputeSpan, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs that have a gradient, and their gradients."""
    pairs = [(o, g) for o, g in zip(span.outputs, gradients, strict=True) if o.requires_grad and g is not None]
    return [o for o, _ in pairs], [g for _, g in pairs]


def _with_zeros(saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    """Returns the gradients of the inputs, zeros for those that have none."""
    pairs = zip(saved[0].inputs, gradients, strict=True)
    return tuple(torch.zeros_like(t) if g is None else g for t, g in pairs)
