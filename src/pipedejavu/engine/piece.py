"""A piece at work: its units, run forward and backward under one version of their weights.

It owns no weights and no versions; both are handed in. Randomness inside a unit (dropout) depends on the
run's seed, the microbatch and the unit alone, so that it is the same wherever, whenever and however often the
unit runs.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipedejavu.engine.optimizer import Tensors

Value = Any
"""What passes between units: a tensor, or a tuple of tensors."""

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)

_random = threading.Lock()


@dataclass(frozen=True)
class Saved:
    """What a forward leaves for its backward."""

    inputs: tuple[Tensor, ...]
    weights: Tensors
    outputs: tuple[Tensor, ...]


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """Returns a value's tensors as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def like(value: Value, tensors: Sequence[Tensor]) -> Value:
    """Returns tensors in the form of `value`."""
    return tuple(tensors) if isinstance(value, tuple) else tensors[0]


class PieceRunner:
    """Runs one piece; `units` are (number, name, module) in order."""

    def __init__(self, units: Sequence[tuple[int, str, nn.Module]], seed: int):
        self.units, self.seed = units, seed
        self.names: dict[str, str] = {}
        """Each parameter's full name, and the name that stands for it where the piece holds it twice."""
        self.initial: Tensors = {}
        first: dict[int, str] = {}
        for _, unit, module in units:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                full = f"{unit}.{name}"
                self.names[full] = first.setdefault(id(parameter), full)
                if self.names[full] == full:
                    self.initial[full] = parameter.detach().clone()
        # A leaf, and a sample that will be read again, must not be changed; a copy may.
        self._works_in_place = any(getattr(m, "inplace", False) for _, _, unit in units[:1] for m in unit.modules())
        self._calm: set[int] = set()
        """Units that were seen to draw no random numbers; the others wait for their turn with the generator."""

    def forward(
        self, weights: Tensors, value: Value, microbatch: int, keeps_buffers: bool = False, is_first: bool = False
    ) -> tuple[Value, Saved]:
        """Runs the units; with `keeps_buffers`, running statistics stay as they are (for recomputing).

        The first piece's inputs are samples, whose gradient nobody wants.
        """
        inputs = tuple(t.detach().requires_grad_(t.is_floating_point() and not is_first) for t in tensors_of(value))
        value = like(value, [t.clone() for t in inputs] if self._works_in_place else inputs)
        for number, unit, module in self.units:
            own = {n: weights[self.names[f"{unit}.{n}"]] for n, _ in module.named_parameters(remove_duplicate=False)}
            if keeps_buffers:
                own |= {name: buffer.clone() for name, buffer in module.named_buffers()}
            if number in self._calm:
                value = functional_call(module, own, (value,), tie_weights=False)
                continue
            with _random:
                torch.manual_seed(_mixed(self.seed, microbatch, number))
                before = torch.get_rng_state()
                value = functional_call(module, own, (value,), tie_weights=False)
                if not _looks_random(module) and torch.equal(before, torch.get_rng_state()):
                    self._calm.add(number)
        return value, Saved(inputs, weights, tensors_of(value))

    def backward(self, saved: Saved, gradients: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensors]:
        """Returns the gradients of the inputs and of the weights."""
        inputs = [t for t in saved.inputs if t.requires_grad]
        found = _grad(saved, gradients, [*inputs, *saved.weights.values()], keeps_graph=False)
        return _padded(saved.inputs, found[: len(inputs)]), _named(saved.weights, found[len(inputs) :])

    def backward_input(self, saved: Saved, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the gradients of the inputs; the graph stays for the weights."""
        inputs = [t for t in saved.inputs if t.requires_grad]
        return _padded(saved.inputs, _grad(saved, gradients, inputs, keeps_graph=True)) if inputs else ()

    def backward_weights(self, saved: Saved, gradients: Sequence[Tensor]) -> Tensors:
        """Returns the gradients of the weights."""
        return _named(saved.weights, _grad(saved, gradients, [*saved.weights.values()], keeps_graph=False))


def _looks_random(module: nn.Module) -> bool:
    """Whether a module holds dropout; other devices have generators that are not watched."""
    return any(isinstance(m, _RANDOM) or getattr(m, "dropout", 0) for m in module.modules())


def _grad(
    saved: Saved, gradients: Sequence[Tensor], wanted: Sequence[Tensor], keeps_graph: bool
) -> tuple[Tensor | None, ...]:
    pairs = [(o, g) for o, g in zip(saved.outputs, gradients, strict=True) if o.requires_grad]
    if not wanted:
        return ()
    outputs, heads = [o for o, _ in pairs], [g for _, g in pairs]
    return torch.autograd.grad(outputs, wanted, heads, retain_graph=keeps_graph, allow_unused=True)


def _padded(inputs: tuple[Tensor, ...], found: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Gives every input a gradient: zeros where it has none."""
    left = iter(found)
    gradients = [next(left) if t.requires_grad else None for t in inputs]
    return tuple(torch.zeros_like(t) if g is None else g for t, g in zip(inputs, gradients, strict=True))


def _named(weights: Tensors, found: Sequence[Tensor | None]) -> Tensors:
    return {n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(weights.items(), found, strict=True)}


def _mixed(*numbers: int) -> int:
    """Mixes numbers into a seed (the finaliser of splitmix64 over each)."""
    seed = 0
    for number in numbers:
        seed = (seed ^ number) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        seed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        seed = (seed ^ seed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        seed ^= seed >> 31
    return seed & (1 << 63) - 1
