"""Unit samples: a model's units with a microbatch of one size, for the sizes that the model accepts."""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedejavu.profile.dedup import unit_key
from pipedejavu.profile.sequential import Units
from pipedejavu.profile.unit_step import LossHead, NullMeter, detached, moved, run_step


@dataclass(frozen=True)
class UnitSample:
    """A model's units for one microbatch size, and a microbatch of that size."""

    units: Units
    inputs: Any
    """Inputs of the first unit."""
    targets: Any
    loss: Callable[[Any, Any], Tensor]
    """Takes the last unit's output and the targets."""

    @property
    def samples(self) -> int:
        """Samples in the microbatch."""
        return next(len(leaf) for leaf in pytree.tree_leaves(self.targets) if isinstance(leaf, Tensor))

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs of the first unit."""
        return sum(leaf.nbytes for leaf in pytree.tree_leaves(self.inputs) if isinstance(leaf, Tensor))

    def head(self, index: int, targets: Any) -> LossHead | None:
        """Returns the loss of the last unit's output, None for the other units."""
        return LossHead(self.loss, targets) if index == len(self.units) - 1 else None


def has_same_units(unit_sample: UnitSample, other: UnitSample) -> bool:
    """Whether the units of two samples have the same names and parameters."""
    one, two = ([(name, list(map(id, m.parameters()))) for name, m in each.units] for each in (unit_sample, other))
    return one == two


def make_samples(make: Callable[[int], UnitSample], sizes: Sequence[int]) -> list[UnitSample]:
    """Makes a sample of each size; leaves out size 1 if the model refuses it, unless it is the last size.

    Batch statistics need more than one value per channel, and a model may squeeze a batch of one away.
    """
    unit_samples = []
    for size in sizes:
        is_needed = size > 1 or sizes[-1] == 1
        try:
            unit_sample = make(size)
            if not is_needed:
                _try(unit_sample)
        except Exception:  # a model may raise anything for one sample
            if is_needed:
                raise
            continue
        unit_samples.append(unit_sample)
    return unit_samples


def _try(unit_sample: UnitSample) -> None:
    """Runs a copy of each distinct unit once on the CPU; lets its exceptions pass."""
    cpu = torch.device("cpu")
    value, targets = moved(unit_sample.inputs, cpu), moved(unit_sample.targets, cpu)
    known: dict[Hashable, Any] = {}
    for index, (_, module) in enumerate(unit_sample.units):
        head = unit_sample.head(index, targets)
        key = (unit_key(module, value), head is None, index == 0)
        if key not in known:
            unit = copy.deepcopy(module).to(cpu)
            known[key] = detached(run_step(unit, value, head, index == 0, NullMeter()))
        value = known[key]
