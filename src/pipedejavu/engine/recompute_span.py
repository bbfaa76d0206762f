"""What a forward leaves for its backward, leg by leg, and the backward through it.

A leg is a run of units that are all recomputed, or all kept; a piece of which all are, or none, is one leg. Each starts
from leaves of its own, and hands its gradients to the leg before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine.device import moved
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.saved_tensors import SavedTensorOffload

Value = Any
"""What passes between units: a tensor, or a tuple of tensors."""


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """Returns a value's tensors as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def like(value: Value, tensors: Sequence[Tensor]) -> Value:
    """Returns tensors in the form of `value`."""
    return tuple(tensors) if isinstance(value, tuple) else tensors[0]


@dataclass(frozen=True)
class RecomputeSpan:
    """What one leg leaves."""

    given: Value
    """What it has read, as leaves."""
    weights: Tensors
    outputs: tuple[Tensor, ...] = ()
    """Empty until it has run again, where it is to."""
    tensor_offload: SavedTensorOffload | None = None
    """Of the first leg: what autograd has saved of the whole piece, where that is to leave."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that it has read."""
        return tensors_of(self.given)


Saved = tuple[RecomputeSpan, ...]
"""What a piece leaves: its legs, in the order of their units."""

Gradients = Sequence[Tensor | None]
"""None for what has no part in the loss."""


def with_loss(saved: Saved, loss: Tensor) -> Saved:
    """Returns what the last piece leaves when its loss is known: the last leg ends there, unless it runs again."""
    *others, last = saved
    return (*others, replace(last, outputs=(loss,)) if last.outputs else last)


def carried(saved: Saved, device: torch.device) -> Saved:
    """Returns what a piece leaves on another device: what autograd has saved, and what waits to be read again."""
    found = []
    for recompute_span in saved:
        if recompute_span.tensor_offload is not None:
            recompute_span.tensor_offload.carry(device)
        read = [
            t if recompute_span.outputs else moved(t, device).requires_grad_(t.requires_grad)
            for t in recompute_span.inputs
        ]
        found.append(replace(recompute_span, given=like(recompute_span.given, read)))
    return tuple(found)


def memory_of(value: Any) -> Any:
    """Returns the tensors of what a piece leaves that are carried; any other value as it is."""
    if not (isinstance(value, tuple) and value and isinstance(value[0], RecomputeSpan)):
        return value
    tensor_offload = value[0].tensor_offload
    return (
        ()
        if tensor_offload is None
        else (
            tensor_offload.contents,
            *(recompute_span.inputs for recompute_span in value if not recompute_span.outputs),
        )
    )


def backward(saved: Saved, gradients: Gradients, total: Tensors | None = None) -> tuple[tuple[Tensor, ...], Tensors]:
    """Returns the gradients of the inputs, and those of the weights: added to `total`, in its memory, if given."""
    passed, own = _add_up(saved, gradients, total, weights_only=False)
    return _whole(saved, passed) if any(t.requires_grad for t in saved[0].inputs) else (), own


def backward_input(saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    """Returns the gradients of the inputs; the graph stays for the weights."""
    is_wanted = any(t.requires_grad for t in saved[0].inputs)
    for recompute_span in reversed(saved) if is_wanted else ():
        inputs = [t for t in recompute_span.inputs if t.requires_grad]
        outputs, heads = _ends(recompute_span, gradients)
        found: Gradients = [None] * len(inputs)
        if inputs and outputs:
            found = torch.autograd.grad(outputs, inputs, heads, retain_graph=True, allow_unused=True)
        each = iter(found)
        gradients = [next(each) if t.requires_grad else None for t in recompute_span.inputs]
    return _whole(saved, gradients if is_wanted else [None] * len(saved[0].inputs))


def backward_weights(saved: Saved, gradients: Gradients, total: Tensors | None = None) -> Tensors:
    """Returns the gradients of the weights: added to `total`, in its memory, if given."""
    return _add_up(saved, gradients, total, weights_only=True)[1]


def _add_up(saved: Saved, gradients: Gradients, total: Tensors | None, weights_only: bool) -> tuple[Gradients, Tensors]:
    """Runs backward with `total` as the weights' gradients, so that autograd adds to each while it is in the cache.

    Autograd gives every weight memory of its own, also where it hands one tensor out several times. What a weight has
    got from one leg it brings to the next that reads it, where the sum goes on in the order of a single graph.
    """
    own: Tensors = {}
    for index in reversed(range(len(saved))):
        recompute_span, before = saved[index], saved[:index]
        outputs, heads = _ends(recompute_span, gradients)
        for name, weight in recompute_span.weights.items():
            is_last = not any(name in other.weights for other in before)
            weight.grad = total[name] if total is not None and is_last else None
            if name in own:
                outputs.append(weight)
                heads.append(own[name])
        wanted = [*recompute_span.weights.values(), *(t for t in recompute_span.inputs if t.requires_grad and before)]
        if outputs and (wanted or not weights_only):
            torch.autograd.backward(outputs, heads, inputs=wanted if weights_only else None)
        own |= {name: weight.grad for name, weight in recompute_span.weights.items() if weight.grad is not None}
        gradients = [t.grad for t in recompute_span.inputs]
        for tensor in (*recompute_span.weights.values(), *recompute_span.inputs):
            tensor.grad = None
    weights = {name: weight for recompute_span in saved for name, weight in recompute_span.weights.items()}
    return gradients, {name: own[name] if name in own else torch.zeros_like(w) for name, w in weights.items()}


def _ends(recompute_span: RecomputeSpan, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs that a gradient can start from, and those gradients."""
    pairs = [
        (o, g) for o, g in zip(recompute_span.outputs, gradients, strict=True) if o.requires_grad and g is not None
    ]
    return [o for o, _ in pairs], [g for _, g in pairs]


def _whole(saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    """Returns the gradients of the inputs, with zeros for those that have none."""
    pairs = zip(saved[0].inputs, gradients, strict=True)
    return tuple(torch.zeros_like(t) if g is None else g for t, g in pairs)
