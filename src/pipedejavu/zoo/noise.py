"""Random data of any shape, made sample by sample from a seed and the sample's number; nothing is stored."""

import torch
from torch import Tensor

from pipedejavu.zoo.chain import Flow
from pipedejavu.zoo.dataset import Indices, check_indices
from pipedejavu.zoo.form import ImageForm, TokenForm
from pipedejavu.zoo.generator import generator


class RandomImages:
    """A pattern for each class plus noise of the same strength, so that a model can learn it."""

    def __init__(self, form: ImageForm, size: int, seed: int, is_test: bool = False):
        self.form = form
        self._size = size
        self._seed = seed
        self._split = "test" if is_test else "train"

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: Indices) -> tuple[Flow, Tensor]:
        """Returns fp32 arrays and labels as numbers."""
        samples = [self._sample(n) for n in check_indices(indices, self._size).tolist()]
        labels = torch.tensor([label for _, label in samples], dtype=torch.int64, device="cpu")
        arrays = [array for array, _ in samples]
        return torch.stack(arrays) if arrays else torch.zeros(0, *self.form.shape, device="cpu"), labels

    def _sample(self, index: int) -> tuple[Tensor, int]:
        draw = generator(self._seed, "image", self._split, index)
        label = int(torch.randint(self.form.classes, (), generator=draw, device="cpu"))
        pattern = generator(self._seed, "pattern", label)
        shape = self.form.shape
        noise = torch.randn(shape, generator=draw, device="cpu")
        return torch.randn(shape, generator=pattern, device="cpu") + noise, label


class RandomTokens:
    """Windows of tokens, all equally likely."""

    def __init__(self, form: TokenForm, size: int, seed: int, is_test: bool = False):
        self._form = form
        self._size = size
        self._seed = seed
        self._split = "test" if is_test else "train"

    def __len__(self) -> int:
        return self._size

    def windows(self, indices: Tensor) -> Tensor:
        """Returns token numbers [samples, context + 1]."""
        made = torch.empty(len(indices), self._form.context + 1, dtype=torch.int64, device="cpu")
        for row, index in zip(made, indices.tolist(), strict=True):
            row.random_(self._form.num_plain, generator=generator(self._seed, "tokens", self._split, index))
        return made
