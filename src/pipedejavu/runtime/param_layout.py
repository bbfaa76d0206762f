"""How the parameters and buffers of a divided unit lie on the ranks of its group.

A divided unit is a module with the parameters of its rank, under the names of the model. It states the layout of each
of them, so that the engine, global norms, checkpoints and audits can tell shards from copies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ParamLayout:
    """The layout of one parameter or buffer: divided along a dimension, or the same on all ranks.

    The gradient of a parameter that is not divided is the same on all ranks too: if a rank's own is only a part of it,
    a unit uses the parameter through `sum_backward`.
    """

    shape: tuple[int, ...]
    """The whole parameter's."""
    dim: int | None = None
    """The dimension that is divided; None if all ranks have the whole parameter."""
    parts: tuple[int, ...] = ()
    """Sizes of consecutive parts of that dimension, each divided evenly; by default the dimension is one part. Fused
    queries, keys and values are three."""

    @property
    def is_divided(self) -> bool:
        """Whether each rank has another part."""
        return self.dim is not None

    def rows(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Returns the starts and ends, along the divided dimension, of what a rank has."""
        assert self.dim is not None
        runs, start = [], 0
        for part in self.parts or (self.shape[self.dim],):
            assert part % size == 0, f"{part} rows over {size} ranks"
            runs.append((start + part // size * rank, start + part // size * (rank + 1)))
            start += part
        return runs

    def local(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Returns a rank's part of a tensor, with memory of its own; the tensor itself if it is not divided."""
        if self.dim is None:
            return whole
        return torch.cat([whole.narrow(self.dim, a, b - a) for a, b in self.rows(rank, size)], self.dim)

    def whole(self, shards: Sequence[Tensor]) -> Tensor:
        """Returns the tensor of which the ranks have these parts."""
        if self.dim is None:
            return shards[0]
        result = shards[0].new_empty(self.shape)
        for rank, shard in enumerate(shards):
            runs = self.rows(rank, len(shards))
            for (a, b), part in zip(runs, torch.split(shard, [b - a for a, b in runs], self.dim), strict=True):
                result.narrow(self.dim, a, b - a).copy_(part)
        return result


class DividedUnit(nn.Module):
    """A unit of which each rank of a group computes a part; it takes and returns what the whole unit does."""

    layouts: Mapping[str, ParamLayout]
    """By name inside the unit, the layout of each parameter and buffer that is divided; all others are whole."""
