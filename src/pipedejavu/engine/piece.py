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
    """Runs one piece; `units` are (number, name, module) in order. One thread at a time may use it."""

    def __init__(self, units: Sequence[tuple[int, str, nn.Module]], seed: int):
        self.units, self.seed = units, seed
        self.names: dict[str, str] = {}
        """Each parameter's full name, and the name that stands for it where the piece holds it twice."""
        self.initial: Tensors = {}
        self._slots: list[tuple[dict[str, Any], str, str, Tensor]] = []
        """Where the modules look for parameters: a module's own dictionary, the key there, the full name, and the
        tensor that is there while the piece is at rest."""
        first: dict[int, str] = {}
        for _, unit, module in units:
            for path, part in module.named_modules(prefix=unit, remove_duplicate=False):
                for key, parameter in part._parameters.items():
                    if parameter is None:
                        continue
                    full = ".".join(filter(None, (path, key)))
                    self.names[full] = first.setdefault(id(parameter), full)
                    self._slots.append((part._parameters, key, self.names[full], parameter))
                    if self.names[full] == full:
                        self.initial[full] = parameter.detach()
        # A leaf, and a sample that will be read again, must not be changed; a copy may.
        self._works_in_place = any(getattr(m, "inplace", False) for _, _, unit in units[:1] for m in unit.modules())
        self._random = {number for number, _, unit in units if _looks_random(unit)}
        """Units that hold dropout, whatever they draw."""
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
        buffers = self._buffers() if keeps_buffers else []
        try:
            for place, key, name, _ in self._slots:
                place[key] = weights[name]
            for place, key, buffer in buffers:
                place[key] = buffer.clone()
            for number, _, module in self.units:
                value = module(value) if number in self._calm else self._run_seeded(number, module, value, microbatch)
        finally:
            for place, key, _, tensor in self._slots:
                place[key] = tensor
            for place, key, tensor in buffers:
                place[key] = tensor
        return value, Saved(inputs, weights, tensors_of(value))

    def _buffers(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Returns the modules' buffers, and where they are."""
        parts = [part for _, _, module in self.units for part in module.modules()]
        return [(p._buffers, key, buffer) for p in parts for key, buffer in p._buffers.items() if buffer is not None]

    def to(self, device: torch.device) -> "PieceRunner":
        """Moves the buffers to a device, those that are one to one; weights come with each call."""
        buffers = self._buffers()
        moved = {id(buffer): buffer.to(device) for _, _, buffer in buffers}
        for place, key, buffer in buffers:
            place[key] = moved[id(buffer)]
        return self

    def _run_seeded(self, number: int, module: nn.Module, value: Value, microbatch: int) -> Value:
        """Runs a unit that may draw random numbers."""
        with _random:
            generators = _generators(tensors_of(value)[0].device)
            for generator in generators:
                generator.manual_seed(mixed(self.seed, microbatch, number))
            if number in self._random:
                return module(value)
            before = [generator.get_state() for generator in generators]
            value = module(value)
            if all(
                torch.equal(generator.get_state(), state) for generator, state in zip(generators, before, strict=True)
            ):
                self._calm.add(number)
        return value

    def backward(
        self, saved: Saved, gradients: Sequence[Tensor], total: Tensors | None = None
    ) -> tuple[tuple[Tensor, ...], Tensors]:
        """Returns the gradients of the inputs, and those of the weights: added to `total`, in its memory, if given."""
        own = _summed_up(saved, gradients, total, wanted=None)
        if not any(t.requires_grad for t in saved.inputs):
            return (), own
        passed = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in saved.inputs)
        for tensor in saved.inputs:
            tensor.grad = None
        return passed, own

    def backward_input(self, saved: Saved, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the gradients of the inputs; the graph stays for the weights."""
        inputs = [t for t in saved.inputs if t.requires_grad]
        outputs, heads = _ends(saved, gradients)
        if not inputs or not outputs:
            return tuple(torch.zeros_like(t) for t in saved.inputs)
        found = iter(torch.autograd.grad(outputs, inputs, heads, retain_graph=True, allow_unused=True))
        passed = [next(found) if t.requires_grad else None for t in saved.inputs]
        return tuple(torch.zeros_like(t) if g is None else g for t, g in zip(saved.inputs, passed, strict=True))

    def backward_weights(self, saved: Saved, gradients: Sequence[Tensor], total: Tensors | None = None) -> Tensors:
        """Returns the gradients of the weights: added to `total`, in its memory, if given."""
        return _summed_up(saved, gradients, total, wanted=[*saved.weights.values()])


def _summed_up(
    saved: Saved, gradients: Sequence[Tensor], total: Tensors | None, wanted: list[Tensor] | None
) -> Tensors:
    """Runs backward with `total` as the weights' gradients, so that autograd adds to each while it is in the cache.

    Autograd gives every weight memory of its own, also where it hands one tensor out several times.
    """
    outputs, heads = _ends(saved, gradients)
    for name, weight in saved.weights.items():
        weight.grad = None if total is None else total[name]
    if outputs and wanted != []:
        torch.autograd.backward(outputs, heads, inputs=wanted)
    own = {}
    for name, weight in saved.weights.items():
        gradient = weight.grad
        own[name] = torch.zeros_like(weight) if gradient is None else gradient
        weight.grad = None
    return own


def _ends(saved: Saved, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs that a gradient can start from, and those gradients."""
    pairs = [(o, g) for o, g in zip(saved.outputs, gradients, strict=True) if o.requires_grad]
    return [o for o, _ in pairs], [g for _, g in pairs]


def _generators(device: torch.device) -> list[torch.Generator]:
    """Returns the generators that a unit on a device may draw from.

    `torch.manual_seed` would seed those of all devices, and where CUDA has not been used keep a stack trace each time,
    for the day that it is: more than half a millisecond.
    """
    return [torch.default_generator] + ([torch.cuda.default_generators[device.index]] if device.type == "cuda" else [])


def _looks_random(module: nn.Module) -> bool:
    """Whether a module holds dropout, whatever it drew this time."""
    return any(isinstance(m, _RANDOM) or getattr(m, "dropout", 0) for m in module.modules())


def mixed(*numbers: int) -> int:
    """Mixes numbers into a seed (the finaliser of splitmix64 over each)."""
    seed = 0
    for number in numbers:
        seed = (seed ^ number) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        seed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        seed = (seed ^ seed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        seed ^= seed >> 31
    return seed & (1 << 63) - 1
