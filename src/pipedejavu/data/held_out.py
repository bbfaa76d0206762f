"""Samples that are held out for evaluation: a share that depends only on the seed, and is never trained on."""

from typing import Any

import torch

from pipedejavu.facts import InputError
from pipedejavu.zoo.dataset import Dataset, Indices, SampledDataset, check_indices
from pipedejavu.zoo.generator import generator


class SampleSubset:
    """Some samples of a data set, under numbers of their own."""

    def __init__(self, data: Dataset, numbers: torch.Tensor):
        self._data, self._numbers = data, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def batch(self, indices: Indices) -> tuple[Any, Any]:
        """Returns the inputs and targets of these samples."""
        return self._data.batch(self._numbers[check_indices(indices, len(self))])

    def drawn(self, indices: Indices, step: int) -> tuple[Any, Any]:
        """Returns these samples as they are drawn in a step, if the data draws them anew in each."""
        numbers = self._numbers[check_indices(indices, len(self))]
        return self._data.drawn(numbers, step) if isinstance(self._data, SampledDataset) else self._data.batch(numbers)


def split_samples(data: Dataset, share: float, seed: int) -> tuple[SampleSubset, SampleSubset]:
    """Returns the samples to train on and those held out, both in the order of the data.

    `share` is a share of the samples, or their number if it is 1 or more.
    """
    size = len(data)
    count = max(1, round(share if share >= 1 else share * size))
    if count >= size:
        raise InputError(
            f"the data has {size} {'sample' if size == 1 else 'samples'}, and --eval {share:g} would hold out {count};"
            " give more data, or other data with --eval-data"
        )
    numbers = torch.randperm(size, generator=generator(seed, "held out"), device="cpu")
    return SampleSubset(data, numbers[count:].sort().values), SampleSubset(data, numbers[:count].sort().values)
