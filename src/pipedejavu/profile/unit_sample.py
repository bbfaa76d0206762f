"""Shots: a model's units with a microbatch of one size, for the sizes that the model takes."""

import copy
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedejavu.profile.dedup import likeness
from pipedejavu.profile.sequential import Units
from pipedejavu.profile.unit_step import Head, detached, moved, run_step


@dataclass(frozen=True)
class UnitSample:
    """A model's units for microbatches of one size, and such a microbatch."""

    units: Units
    inputs: Any
    """As the first unit takes them."""
    targets: Any
    loss: Callable[[Any, Any], Tensor]
    """Takes what the last unit returns and the targets."""

    @property
    def samples(self) -> int:
        """The size of the microbatch."""
        return next(len(leaf) for leaf in pytree.tree_leaves(self.targets) if isinstance(leaf, Tensor))

    def head(self, index: int, targets: Any) -> Head | None:
        """Returns what follows a unit: the loss for the last, nothing for the others."""
        return partial(_loss, self.loss, targets) if index == len(self.units) - 1 else None


def _loss(loss: Callable[[Any, Any], Tensor], targets: Any, output: Any) -> Tensor:
    return loss(output, targets)


def has_same_units(unit_sample: UnitSample, other: UnitSample) -> bool:
    """Whether the units of two sizes correspond one to one."""
    one, two = ([(name, list(map(id, m.parameters()))) for name, m in found.units] for found in (unit_sample, other))
    return one == two


def make_samples(make: Callable[[int], UnitSample], sizes: Sequence[int]) -> list[UnitSample]:
    """Makes a shot of each size; one sample is left out where the model refuses it and the last size is another.

    Batch statistics need more than one value of each channel, and a model may squeeze a batch of one away.
    """
    found = []
    for size in sizes:
        is_needed = size > 1 or sizes[-1] == 1
        try:
            unit_sample = make(size)
            if not is_needed:
                _try(unit_sample)
        except Exception:  # whatever a model makes of one sample
            if is_needed:
                raise
            continue
        found.append(unit_sample)
    return found


def _try(unit_sample: UnitSample) -> None:
    """Runs copies of the units once, on the CPU, of those that are alike one; raises what they raise."""
    cpu = torch.device("cpu")
    value, targets = moved(unit_sample.inputs, cpu), moved(unit_sample.targets, cpu)
    known: dict[Hashable, Any] = {}
    for index, (_, module) in enumerate(unit_sample.units):
        head = unit_sample.head(index, targets)
        key = (likeness(module, value), head is None, index == 0)
        if key not in known:
            own = copy.deepcopy(module).to(cpu)
            known[key] = detached(run_step(own, value, head, index == 0, _Unmeasured()))
        value = known[key]


class _Unmeasured:
    """A meter that notes nothing."""

    def part(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Lets a part run."""
        return nullcontext()
