"""A learning rate of an algorithm of its own, chosen by the loss on samples that it was not trained on."""

from collections.abc import Callable
from math import inf, isfinite
from typing import Any

from pipedejavu.zoo import Dataset
from pipedejavu.zoo.dataset import Indices, check_indices

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3)
"""Learning rates to choose from, ascending."""
HELD_OUT = 5
"""One of so many training samples, the last ones, is held out while a rate is chosen."""


class DatasetPart:
    """Neighbouring samples of a data set, numbered from 0."""

    def __init__(self, whole: Dataset, samples: range):
        self.whole, self.samples = whole, samples

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Indices) -> tuple[Any, Any]:
        """Returns the inputs and targets of some samples of the part."""
        return self.whole.batch(check_indices(indices, len(self)) + self.samples.start)


def hold_out(data: Dataset) -> tuple[DatasetPart, DatasetPart]:
    """Returns the samples to train on and the last ones, held out."""
    edge = len(data) - len(data) // HELD_OUT
    return DatasetPart(data, range(edge)), DatasetPart(data, range(edge, len(data)))


def choose_rate(loss_at: Callable[[float], float], middle: float) -> float:
    """Returns the rate with the least loss: of `middle` and its neighbours, then on while the best is at the edge.

    A loss that is no number counts as infinite; ties go to the lowest rate.
    """
    start = RATES.index(middle)
    low, high = max(0, start - 1), min(len(RATES) - 1, start + 1)
    losses = {step: _finite(loss_at(RATES[step])) for step in range(low, high + 1)}
    while True:
        best = min(sorted(losses), key=losses.__getitem__)
        beyond = best - 1 if best == min(losses) else best + 1
        if beyond in losses or not 0 <= beyond < len(RATES):
            return RATES[best]
        losses[beyond] = _finite(loss_at(RATES[beyond]))


def _finite(loss: float) -> float:
    return loss if isfinite(loss) else inf
