"""Token sequences: windows of a text or random ones, with the targets of an objective."""

from typing import Protocol

import torch
from torch import Tensor

from pipedejavu.zoo.chain import Flow
from pipedejavu.zoo.dataset import Indices, check_indices
from pipedejavu.zoo.form import TokenForm
from pipedejavu.zoo.generator import generator
from pipedejavu.zoo.loss import IGNORED

_MASKED_SHARE = 0.15


class Windows(Protocol):
    """A source of token windows."""

    def __len__(self) -> int:
        """Returns the number of windows."""
        ...

    def windows(self, indices: Tensor) -> Tensor:
        """Returns token ids [samples, context + 1]."""
        ...


class Sequences:
    """Windows of tokens with the inputs and targets of an objective."""

    def __init__(self, source: Windows, form: TokenForm, seed: int):
        self.form = form
        self._source = source
        self._seed = seed

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: Indices) -> tuple[Flow, Tensor]:
        """Returns token ids and targets [samples, context]; for 'reversed', inputs are (source, shifted target)."""
        vector = check_indices(indices, len(self))
        windows = self._source.windows(vector)
        tokens = windows[:, :-1]
        match self.form.objective:
            case "next":
                return tokens, windows[:, 1:]
            case "masked":
                return self._masked(tokens, vector)
            case "reversed":
                target = tokens.flip(1)
                begin = torch.full_like(target[:, :1], self.form.special)
                return (tokens, torch.cat([begin, target[:, :-1]], dim=1)), target

    def _masked(self, tokens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Masks about one token in seven, at least one per sample; a sample's masks are always the same."""
        is_masked = torch.zeros_like(tokens, dtype=torch.bool)
        for row, index in zip(is_masked, indices.tolist(), strict=True):
            draws = torch.rand(len(row), generator=generator(self._seed, "mask", index), device="cpu")
            row.copy_(draws <= max(_MASKED_SHARE, float(draws.min())))
        return tokens.masked_fill(is_masked, self.form.special), tokens.masked_fill(~is_masked, IGNORED)
