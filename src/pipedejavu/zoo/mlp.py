"""Multilayer perceptrons of any widths."""

import itertools
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from pipedejavu.facts import Record
from pipedejavu.zoo.chain import Chain
from pipedejavu.zoo.form import Count, ImageForm


class MlpSize(Record):
    """Size of an MLP; by default one for MNIST."""

    widths: tuple[Count, ...] = Field(default=(784, 512, 256, 128, 10), min_length=2)
    """Features of the input, features of each hidden layer, and classes."""

    def form(self) -> ImageForm:
        """Returns the form of its samples."""
        return ImageForm(shape=self.widths[:1], classes=self.widths[-1])

    def disagreements(self) -> list[str]:
        """Returns a fault if there is a single class."""
        if self.widths[-1] < 2:
            return [f"widths end with {self.widths[-1]} class; a loss over classes needs at least 2"]
        return []

    @model_validator(mode="after")
    def _agree(self) -> Self:
        return self.agreed()


class Layer(nn.Module):
    """A linear layer, with ReLU unless it is the last."""

    def __init__(self, width_in: int, width_out: int, is_last: bool):
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)
        self.is_last = is_last

    def forward(self, hidden: Tensor) -> Tensor:
        """Takes samples of any shape, and flattens them."""
        hidden = self.linear(hidden.flatten(1))
        return hidden if self.is_last else functional.relu(hidden)


class Mlp(Chain):
    """A perceptron; each layer is a unit."""

    def __init__(self, size: MlpSize, *, seed: int = 0, device: torch.device | str | None = None):
        pairs = list(itertools.pairwise(size.widths))
        with torch.device("meta"):
            layers = [Layer(*pair, is_last=n == len(pairs) - 1) for n, pair in enumerate(pairs)]
        super().__init__([(f"layer{n}", layer) for n, layer in enumerate(layers)], seed=seed, device=device)
