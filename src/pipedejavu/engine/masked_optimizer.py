"""An update of the filters that remain: those left out keep their weights and their optimizer state.

What an optimizer counts per parameter, such as Adam's step, counts the updates of the parameter and not of a filter.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pipedejavu.engine.optimizer import Optimizer, State, Tensors
from pipedejavu.facts import InputError
from pipedejavu.runtime.kept_filters import KeptFilters


class MaskedOptimizer:
    """Updates, by another optimizer, the parts of weights that belong to the filters that remain."""

    def __init__(self, optimizer: Optimizer, kept: KeptFilters):
        self.optimizer, self.kept = optimizer, kept

    def step(
        self, update: int, weights: Tensors, gradients: Tensors, state: State, coefficient: float, out: Tensors
    ) -> None:
        """Writes the new weights to `out`, which may be the gradients, after one update."""
        parts = {name: self.kept.narrow(name, gradient) for name, gradient in gradients.items()}
        old = {name: self.kept.narrow(name, weights[name].detach()) for name in gradients}
        new = {name: out[name] if self.kept.is_whole(name) else torch.empty_like(old[name]) for name in gradients}
        slots = self._narrow_state(state, weights, gradients)
        self.optimizer.step(update, old, parts, slots, coefficient, out=new)
        for name in gradients:
            if not self.kept.is_whole(name):
                whole = out[name].detach().copy_(weights[name].detach())
                self.kept.put(name, whole, new[name])
        self._put_state(state, slots, weights)

    def deltas(
        self, update: int, weights: Tensors, gradients: Tensors, state: State, coefficient: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields what to add to each weight, in the memory of its gradient."""
        parts = {name: self.kept.narrow(name, gradient) for name, gradient in gradients.items()}
        old = {name: self.kept.narrow(name, weights[name].detach()) for name in gradients}
        slots = self._narrow_state(state, weights, gradients)
        for name, delta in self.optimizer.deltas(update, old, parts, slots, coefficient):
            if self.kept.is_whole(name):
                yield name, delta
            else:
                whole = gradients[name].zero_()
                self.kept.put(name, whole, delta)
                yield name, whole
        self._put_state(state, slots, weights)

    def _narrow_state(self, state: State, weights: Tensors, gradients: Tensors) -> State:
        """Returns the state of what remains; that of whole parameters is the state itself."""
        slots: State = {}
        for name in gradients:
            if self.kept.is_whole(name):
                slots[name] = state.setdefault(name, {})
                continue
            slots[name] = {}
            for slot, tensor in state.get(name, {}).items():
                if tensor.dim() and tensor.shape != weights[name].shape:
                    raise InputError(
                        f"the optimizer keeps '{slot}' of '{name}' with another shape than the weight, so it has no"
                        " parts for filters that are left out; use SGD or AdamW, or a plan without feed 'mask'"
                    )
                slots[name][slot] = self.kept.narrow(name, tensor) if tensor.dim() else tensor
        return slots

    def _put_state(self, state: State, slots: State, weights: Tensors) -> None:
        """Writes the state of what remains back; filters without a first update have that of a zero gradient."""
        for name, parts in slots.items():
            if self.kept.is_whole(name):
                continue
            wholes = state.setdefault(name, {})
            first: State = {}
            for slot, part in parts.items():
                if part.dim() and slot not in wholes:
                    if not first:
                        zeros = torch.zeros_like(weights[name].detach(), dtype=part.dtype)
                        for _ in self.optimizer.deltas(0, {name: zeros}, {name: zeros.clone()}, first, 1.0):
                            pass
                    wholes[slot] = first[name][slot]
                if part.dim():
                    self.kept.put(name, wholes[slot], part)
                else:
                    wholes[slot] = part
