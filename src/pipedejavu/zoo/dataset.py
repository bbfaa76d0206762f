"""The interface of all data sets, and the order of samples in an epoch.

Both are pure functions: sample i is always the same, and so is the order of an epoch. The caller decides which worker
takes which samples.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pipedejavu.facts import InputError
from pipedejavu.zoo.generator import generator

Indices = Tensor | Sequence[int]


class Dataset(Protocol):
    """Samples by index."""

    def __len__(self) -> int:
        """Returns the number of samples."""
        ...

    def batch(self, indices: Indices) -> tuple[Any, Any]:
        """Returns the inputs and targets of these samples, in this order, on the CPU."""
        ...


@runtime_checkable
class SampledDataset(Dataset, Protocol):
    """Samples that are drawn anew in each step, such as nodes with sampled neighbours."""

    def drawn(self, indices: Indices, step: int) -> tuple[Any, Any]:
        """Returns what `batch` returns, as a pure function of the indices and the step."""
        ...


def order(seed: int, epoch: int, size: int) -> Tensor:
    """Returns a permutation of `size` sample indices, determined by seed and epoch."""
    return torch.randperm(size, generator=generator(seed, "order", epoch), device="cpu")


def check_indices(indices: Indices, size: int) -> Tensor:
    """Returns sample indices as a vector; raises InputError for an index out of range."""
    vector = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
    if vector.ndim != 1:
        raise InputError(f"sample numbers come as a vector, not in the shape {tuple(vector.shape)}")
    wrong = vector[(vector < 0) | (vector >= size)]
    if len(wrong):
        raise InputError(f"there is no sample {int(wrong[0])}; the data set has {size}")
    return vector
