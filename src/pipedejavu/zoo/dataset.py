"""What every data set offers, and the order in which an epoch visits its samples.

Both are pure functions of what they are given: sample i is always the same, and so is an epoch's order. Who takes
which samples of an order is the caller's business.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pipedejavu.facts import InputError
from pipedejavu.zoo.generator import generator

Indices = Tensor | Sequence[int]


class Dataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """Returns the number of samples."""
        ...

    def batch(self, indices: Indices) -> tuple[Any, Any]:
        """Returns inputs and targets of these samples, in this order, on the CPU."""
        ...


def order(seed: int, epoch: int, size: int) -> Tensor:
    """Returns a permutation of `size` sample numbers, one for each seed and epoch."""
    return torch.randperm(size, generator=generator(seed, "order", epoch), device="cpu")


def check_indices(indices: Indices, size: int) -> Tensor:
    """Returns sample numbers as a vector; raises InputError for one that is not there."""
    found = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
    if found.ndim != 1:
        raise InputError(f"sample numbers come as a vector, not in the shape {tuple(found.shape)}")
    wrong = found[(found < 0) | (found >= size)]
    if len(wrong):
        raise InputError(f"there is no sample {int(wrong[0])}; the data set has {size}")
    return found
