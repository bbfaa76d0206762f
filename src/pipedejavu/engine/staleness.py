"""Arithmetic that restores what stale weights cost; the formulas are in docs/algorithms/asynchronous-pipelines.md.

It knows tensors, and neither plans nor when weights are read.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipedejavu.engine.optimizer import State, Tensors
from pipedejavu.runtime.saved_storage import begin_at, stub

VELOCITY = "velocity"
"""The slot of the smoothed difference of a weight's versions."""


def add_to_velocity(state: State, old: Tensors, new: Tensors, decay: float) -> None:
    """Updates the velocity δ of each weight in place: δ ← decay·δ + (1 − decay)·(new − old)."""
    for name, weight in new.items():
        step = weight.detach() - old[name].detach()
        slots = state.setdefault(name, {})
        if VELOCITY in slots:
            slots[VELOCITY].mul_(decay).add_(step, alpha=1 - decay)
        else:
            slots[VELOCITY] = step.mul_(1 - decay)


def load_velocities(
    state: State, names: Iterable[str], find: Callable[[str], Tensor | None], device: torch.device
) -> None:
    """Adds copies of the saved velocities to the state of the named weights, where there are any."""
    for name in names:
        if (velocity := find(name)) is not None:
            state.setdefault(name, {})[VELOCITY] = velocity.to(device, copy=True)


def extrapolate(weights: Tensors, state: State, updates: int) -> Tensors:
    """Returns the weights as they will be, or with a negative number were, some updates away: w + updates·δ."""
    moved = {}
    for name, weight in weights.items():
        velocity = state.get(name, {}).get(VELOCITY)
        moved[name] = weight.detach() if velocity is None else weight.detach() + updates * velocity
    return moved


def compensate(summed: Tensors, newest: Tensors, read: Tensors, strength: float, coefficient: float) -> Tensors:
    """Returns sums for g = coefficient·summed with g + strength·g⊙g⊙(newest − read) in place of g."""
    return {
        name: gradient + strength * coefficient * gradient * gradient * (newest[name].detach() - read[name].detach())
        for name, gradient in summed.items()
    }


class _WeightView:
    """What stands for a saved tensor that is a view of a weight; `start` counts elements from the weight's first."""

    def __init__(self, name: str, tensor: Tensor, start: int):
        self.name, self.layout, self.start = name, (tensor.shape, tensor.stride()), start


class ReboundWeights(saved_tensors_hooks):
    """A context for a forward whose saved tensors forget its weights, so that the backward reads others.

    `leaves` are stubs without memory for the weights; gradients of weights go to them.
    """

    def __init__(self, weights: Tensors):
        super().__init__(self._pack, self._unpack)
        self._spans: dict[int, list[tuple[int, int, str]]] = {}
        """By address of a storage, which several weights may share: the first and last element of each weight."""
        for name, weight in weights.items():
            first = int(weight.storage_offset())
            address = weight.untyped_storage().data_ptr()
            self._spans.setdefault(address, []).append((first, first + weight.numel(), name))
        self.leaves = {name: stub(weight.detach()).requires_grad_() for name, weight in weights.items()}
        self.version = 0
        """The version that the forward reads."""
        self.bound: Tensors = {}
        """The weights of the backward; the caller sets them before it runs."""

    def linked(self, weights: Tensors) -> Tensors:
        """Returns the weights with graphs that begin at the leaves."""
        return {name: begin_at(self.leaves[name], weight.detach()) for name, weight in weights.items()}

    def _pack(self, tensor: Tensor) -> Tensor | _WeightView:
        at = int(tensor.storage_offset())
        for first, end, name in self._spans.get(tensor.untyped_storage().data_ptr(), ()):
            if first <= at < end:
                return _WeightView(name, tensor, at - first)
        return tensor.detach()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _WeightView):
            weight = self.bound[packed.name]
            return weight.as_strided(*packed.layout, weight.storage_offset() + packed.start)
        tensor: Tensor = packed
        return tensor
