"""Random data of any shape, generated per sample from a seed and the sample's index; nothing is stored."""

import torch
from torch import Tensor

from pipedejavu.zoo.chain import Flow
from pipedejavu.zoo.dataset import Indices, check_indices
from pipedejavu.zoo.form import ImageForm, TokenForm
from pipedejavu.zoo.generator import generator

_MOST_BYTES = 64 << 20
"""Most bytes of cached patterns."""


class RandomImages:
    """A pattern per class plus noise of the same strength, so that a model can learn it."""

    def __init__(self, form: ImageForm, size: int, seed: int, is_test: bool = False):
        self.form = form
        self._size = size
        self._seed = seed
        self._split = "test" if is_test else "train"
        self._patterns: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: Indices) -> tuple[Flow, Tensor]:
        """Returns float32 arrays and labels."""
        numbers = check_indices(indices, self._size).tolist()
        images = torch.empty(len(numbers), *self.form.shape, device="cpu")
        labels = torch.empty(len(numbers), device="cpu", dtype=torch.int64)
        for image, label, number in zip(images, labels, numbers, strict=True):
            draw = generator(self._seed, "image", self._split, number)
            label.random_(self.form.classes, generator=draw)
            image.normal_(generator=draw).add_(self._pattern(int(label)))
        return images, labels

    def _pattern(self, label: int) -> Tensor:
        """Returns the pattern of a class; the first few are cached."""
        pattern = self._patterns.get(label)
        if pattern is None:
            source = generator(self._seed, "pattern", label)
            pattern = torch.randn(self.form.shape, generator=source, device="cpu")
            if (len(self._patterns) + 1) * pattern.nbytes <= _MOST_BYTES:
                self._patterns[label] = pattern
        return pattern


class RandomTokens:
    """Windows of uniformly random tokens."""

    def __init__(self, form: TokenForm, size: int, seed: int, is_test: bool = False):
        self._form = form
        self._size = size
        self._seed = seed
        self._split = "test" if is_test else "train"

    def __len__(self) -> int:
        return self._size

    def windows(self, indices: Tensor) -> Tensor:
        """Returns token ids [samples, context + 1]."""
        made = torch.empty(len(indices), self._form.context + 1, dtype=torch.int64, device="cpu")
        for row, index in zip(made, indices.tolist(), strict=True):
            row.random_(self._form.num_plain, generator=generator(self._seed, "tokens", self._split, index))
        return made
