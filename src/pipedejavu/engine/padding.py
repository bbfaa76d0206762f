"""Microbatches that a short batch has no samples for: other samples fill them, and do not count."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Padding(NamedTuple):
    """The targets of samples that only fill a microbatch."""

    targets: Any


def without_padding(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Returns a loss that is 0, with gradients of 0, for samples that only fill a microbatch."""

    def total(output: Any, targets: Any) -> Tensor:
        return loss(output, targets.targets) * 0 if isinstance(targets, Padding) else loss(output, targets)

    return total


def filled_targets(targets: Any) -> Any:
    """Returns targets as they are without the mark of samples that only fill a microbatch."""
    return targets.targets if isinstance(targets, Padding) else targets
