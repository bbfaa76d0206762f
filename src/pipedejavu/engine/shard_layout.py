"""How the parameters of a piece are divided over the replicas of its stage: arithmetic on lengths, without wires.

    parameters   a a a a a a b b b c c
    flattened    a a a a a a b b b c c 0      zeros fill up the last shard
    shards       a a a a | a a b b | b c c 0  one per replica, in the order of their workers

Parameters of different formats are flattened apart, and so is a parameter that several pieces share: all of them then
divide it alike, and its gradients can be added shard by shard.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from pipedejavu.engine.optimizer import Tensors

ALIGNED = 64
"""Parameters whose number of elements is a multiple of this come first, so that they begin at aligned addresses."""


class _Part(NamedTuple):
    """What a shard holds of a parameter."""

    start: int
    """The first element of the flattened parameter."""
    stop: int
    at: int
    """Where it begins in the shard."""


class ShardLayout:
    """Parameters that are flattened together, and the shard of one of `size` members."""

    def __init__(self, shapes: Mapping[str, torch.Size], size: int, position: int):
        self.size, self.position = size, position
        self.shapes = dict(sorted(shapes.items(), key=lambda pair: prod(pair[1]) % ALIGNED > 0))
        self.counts = {name: prod(shape) for name, shape in self.shapes.items()}
        self.length = -(-sum(self.counts.values()) // size)
        """Elements of a shard."""
        self._parts: dict[str, _Part] = {}
        first, start = position * self.length, 0
        for name, count in self.counts.items():
            low, high = max(start, first), min(start + count, first + self.length)
            if low < high:
                self._parts[name] = _Part(low - start, high - start, low - first)
            start += count

    def flatten(self, tensors: Tensors) -> Tensor:
        """Returns the parameters, or their gradients, as one vector with the shards of all members."""
        like = tensors[next(iter(self.shapes))]
        flat = like.detach().new_empty(self.size * self.length)
        for name, view in self.views(flat).items():
            view.copy_(tensors[name].detach())
        flat[sum(self.counts.values()) :].zero_()
        return flat

    def views(self, flat: Tensor) -> Tensors:
        """Returns the parameters in a vector of all shards."""
        views, start = {}, 0
        for name, count in self.counts.items():
            views[name] = flat[start : start + count].view(self.shapes[name])
            start += count
        return views

    def shard(self, flat: Tensor) -> Tensor:
        """Returns this member's shard of a vector of all shards."""
        return flat[self.position * self.length :][: self.length]

    def parts(self, shard: Tensor) -> Tensors:
        """Returns the parts of parameters that this member's shard holds, each as a vector."""
        return {name: shard[p.at : p.at + p.stop - p.start] for name, p in self._parts.items()}

    def part(self, name: str, whole: Tensor) -> Tensor | None:
        """Returns what this member holds of a parameter's tensor, as a vector; None if it holds nothing of it."""
        part = self._parts.get(name)
        return None if part is None else whole.reshape(-1)[part.start : part.stop]
