"""Places that a plan gives to the units of a model, instead of those that the optimizer would choose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from pipedejavu.facts import InputError
from pipedejavu.hybrid.placement import Place

AssignedPlace = Place | Literal["window"]
"""A place of a unit's state; `window`: in host memory with the weights, which are fetched for each use."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The units of a model, and the place of each.

    Of parameters that several units share, the first of these units has the state.
    """

    units: Sequence[tuple[str, nn.Module]]
    """Names and modules, in the order of the forward pass."""
    places: Sequence[AssignedPlace]
    """By unit."""
    visitors: int = 1
    """Units whose streamed state is fetched during a backward pass, as far as memory allows."""
    window: int = 1
    """Units with the place `window` whose weights are on the GPU at a time."""
    sums_wide: bool = False
    """Whether the bf16 gradients of several microbatches are added up in float32."""

    def __post_init__(self) -> None:
        if len(self.places) != len(self.units):
            raise InputError(
                f"an assignment gives {len(self.places)} places to {len(self.units)} units; give one place for each"
            )
        if self.visitors < 1 or self.window < 1:
            raise InputError(
                f"an assignment has {self.visitors} visitors and a window of {self.window}; give numbers of 1 or more"
            )
