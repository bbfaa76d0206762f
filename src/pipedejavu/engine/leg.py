"""What a forward leaves for its backward, leg by leg, and the backward through it.

A leg is a run of units that are all recomputed, or all kept; a piece of which all are, or none, is one leg. Each starts
from leaves of its own, and hands its gradients to the leg before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine.box import Boxes
from pipedejavu.engine.device import moved
from pipedejavu.engine.optimizer import Tensors

Value = Any
"""What passes between units: a tensor, or a tuple of tensors."""


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """Returns a value's tensors as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def like(value: Value, tensors: Sequence[Tensor]) -> Value:
    """Returns tensors in the form of `value`."""
    return tuple(tensors) if isinstance(value, tuple) else tensors[0]


@dataclass(frozen=True)
class Leg:
    """What one leg leaves."""

    given: Value
    """What it has read, as leaves."""
    weights: Tensors
    outputs: tuple[Tensor, ...] = ()
    """Empty until it has run again, where it is to."""
    boxes: Boxes | None = None
    """Of the first leg: what autograd has saved of the whole piece, where that is to leave."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that it has read."""
        return tensors_of(self.given)


Saved = tuple[Leg, ...]
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
    for leg in saved:
        if leg.boxes is not None:
            leg.boxes.carry(device)
        read = [t if leg.outputs else moved(t, device).requires_grad_(t.requires_grad) for t in leg.inputs]
        found.append(replace(leg, given=like(leg.given, read)))
    return tuple(found)


def memory_of(value: Any) -> Any:
    """Returns the tensors of what a piece leaves that are carried; any other value as it is."""
    if not (isinstance(value, tuple) and value and isinstance(value[0], Leg)):
        return value
    boxes = value[0].boxes
    return () if boxes is None else (boxes.contents, *(leg.inputs for leg in value if not leg.outputs))


def backward(saved: Saved, gradients: Gradients, total: Tensors | None = None) -> tuple[tuple[Tensor, ...], Tensors]:
    """Returns the gradients of the inputs, and those of the weights: added to `total`, in its memory, if given."""
    passed, own = _add_up(saved, gradients, total, weights_only=False)
    return _whole(saved, passed) if any(t.requires_grad for t in saved[0].inputs) else (), own


def backward_input(saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    """Returns the gradients of the inputs; the graph stays for the weights."""
    is_wanted = any(t.requires_grad for t in saved[0].inputs)
    for leg in reversed(saved) if is_wanted else ():
        inputs = [t for t in leg.inputs if t.requires_grad]
        outputs, heads = _ends(leg, gradients)
        found: Gradients = [None] * len(inputs)
        if inputs and outputs:
            found = torch.autograd.grad(outputs, inputs, heads, retain_graph=True, allow_unused=True)
        each = iter(found)
        gradients = [next(each) if t.requires_grad else None for t in leg.inputs]
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
        leg, before = saved[index], saved[:index]
        outputs, heads = _ends(leg, gradients)
        for name, weight in leg.weights.items():
            is_last = not any(name in other.weights for other in before)
            weight.grad = total[name] if total is not None and is_last else None
            if name in own:
                outputs.append(weight)
                heads.append(own[name])
        wanted = [*leg.weights.values(), *(t for t in leg.inputs if t.requires_grad and before)]
        if outputs and (wanted or not weights_only):
            torch.autograd.backward(outputs, heads, inputs=wanted if weights_only else None)
        own |= {name: weight.grad for name, weight in leg.weights.items() if weight.grad is not None}
        gradients = [t.grad for t in leg.inputs]
        for tensor in (*leg.weights.values(), *leg.inputs):
            tensor.grad = None
    weights = {name: weight for leg in saved for name, weight in leg.weights.items()}
    return gradients, {name: own[name] if name in own else torch.zeros_like(w) for name, w in weights.items()}


def _ends(leg: Leg, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs that a gradient can start from, and those gradients."""
    pairs = [(o, g) for o, g in zip(leg.outputs, gradients, strict=True) if o.requires_grad and g is not None]
    return [o for o, _ in pairs], [g for _, g in pairs]


def _whole(saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    """Returns the gradients of the inputs, with zeros for those that have none."""
    pairs = zip(saved[0].inputs, gradients, strict=True)
    return tuple(torch.zeros_like(t) if g is None else g for t, g in pairs)
