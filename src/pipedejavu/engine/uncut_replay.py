"""Replays the user's uncut model, so that an audit also covers the cut into units.

Each weight has the version that its piece read. Casts to a lower precision inside the model are widened to float64, and
dropout draws the same numbers as in the units: random operations run in the same order, so counting them tells which
unit each belongs to.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipedejavu.engine.filter_masks import FilterMasks
from pipedejavu.engine.grouped_product import grouped_product, is_grouped_product
from pipedejavu.engine.job import Job
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.recompute_span import tensors_of
from pipedejavu.engine.unit_random import Unit, mixed


class UncutModel(NamedTuple):
    """The user's model, and how the user calls it."""

    model: nn.Module
    inputs: Callable[[int], Any]
    """Returns the inputs of a microbatch in the user's format."""
    call: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
    """Returns the positional and keyword arguments of the model for given inputs."""
    loss: Callable[[Any, Any], Tensor]
    """Returns the loss from the model's own output and the targets."""
    say: Callable[[str], None]
    """Called with the reason if the replay has to run the units instead of the model."""


class UncutReplay:
    """Differentiates a copy of the user's model in float64."""

    def __init__(self, uncut: UncutModel, job: Job, units: Sequence[Unit], masks: FilterMasks | None = None):
        self.uncut, self.job, self.units, self.masks = uncut, job, units, masks
        self.model = copy.deepcopy(uncut.model).double()
        firsts = {id(p): name for name, p in self.model.named_parameters()}
        self.names = {name: firsts[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False)}
        self._counts: dict[tuple[torch.Size, ...], list[int]] = {}
        """By the shapes of the inputs, the number of random operations per unit."""
        self._reason = "faulty replicas hand over the gradients of units" if job.byzantine else ""

    def gradients(self, microbatch: int, reads: Sequence[Tensors], value: Any, targets: Any) -> list[Tensors] | None:
        """Returns the weight gradients of each piece; `value` is the input of the first unit.

        The first piece that holds a tied weight gets its whole gradient, the others zero. If the model cannot be run as
        its units were, reports why and returns None, for this and every later call.
        """
        if self._reason:
            return None
        result = self._differentiate(microbatch, reads, value, targets)
        if not isinstance(result, str):
            return result
        self._reason = result
        self.uncut.say(f"the audit replays the model's units and not the model itself: {result}")
        return None

    def _differentiate(
        self, microbatch: int, reads: Sequence[Tensors], value: Any, targets: Any
    ) -> list[Tensors] | str:
        weights: Tensors = {}
        for name, weight in ((name, weight) for read in reads for name, weight in read.items()):
            first = self.names[name]
            if first in weights and not torch.equal(weights[first], weight):
                return f"its units read '{name}' at different versions"
            weights.setdefault(first, weight.detach().clone().requires_grad_())
        counts = self._counts_of(value)
        args, kwargs = self.uncut.call(widened(self.uncut.inputs(microbatch)))
        used = self._used(microbatch, weights)
        with _AsUnits(counts, [mixed(self.job.seed, microbatch, number) for number, _, _ in self.units]) as mode:
            output = torch.func.functional_call(self.model, used, args, kwargs)
            loss = self.uncut.loss(output, targets)
            if mode.count != sum(counts):
                return f"it draws {mode.count} times and its units {sum(counts)} times"
            gradients = torch.autograd.grad(loss, [*weights.values()], allow_unused=True)
        if mode.count != sum(counts):
            return "it draws again in its backward, as gradient checkpointing does"
        left = dict(zip(weights, gradients, strict=True))
        pieces = []
        for read in reads:
            by_name = {name: left.pop(self.names[name], None) for name in read}
            pieces.append({name: torch.zeros_like(read[name]) if g is None else g for name, g in by_name.items()})
        return pieces

    def _used(self, microbatch: int, weights: Tensors) -> Tensors:
        """Returns what a microbatch computes with: with masks, the parts of weights and statistics that remain."""
        if self.masks is None:
            return weights
        kept = self.masks.of_microbatch(microbatch)
        buffers = {name: kept.narrow(name, buffer) for name, buffer in self.model.named_buffers()}
        return buffers | {name: kept.used(name, weight) for name, weight in weights.items()}

    def _counts_of(self, value: Any) -> list[int]:
        """Returns the number of random operations per unit for inputs of these shapes, by running the units."""
        shapes = tuple(tensor.shape for tensor in tensors_of(value))
        if shapes not in self._counts:
            counts = []
            for _, _, module in copy.deepcopy(self.units):
                with torch.no_grad(), _Random() as mode:
                    value = module(value)
                counts.append(mode.count)
            self._counts[shapes] = counts
        return self._counts[shapes]


class _Random(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and counts it if it draws random numbers."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draw()
        return (grouped_product if is_grouped_product(func) else func)(*args, **(kwargs or {}))

    def draw(self) -> None:
        """Called before an operation that draws random numbers."""
        self.count += 1


class _AsUnits(_Random):  # type: ignore[no-untyped-call]
    """Seeds the generator before the first draw of each unit, as a worker does, and widens casts."""

    def __init__(self, counts: Sequence[int], seeds: Sequence[int]):
        super().__init__()
        begins = [0, *accumulate(counts)]
        self.seeds = {begin: seed for begin, count, seed in zip(begins, counts, seeds, strict=False) if count}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation with every floating-point dtype in its arguments replaced by float64."""
        args, kwargs = pytree.tree_map_only(torch.dtype, _widened, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def draw(self) -> None:
        """Seeds the generator if the draw is a unit's first."""
        if self.count in self.seeds:
            torch.default_generator.manual_seed(self.seeds[self.count])
        super().draw()


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def widened(value: Any) -> Any:
    """Returns a value of any form with its floating-point tensors in float64."""
    return pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, value)
