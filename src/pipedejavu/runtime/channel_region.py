"""Channels that are divided everywhere: each activation between operators, and each operator as its layout says.

An operator that reads divided channels and makes divided filters has one of three layouts, which are called after what
stays in its place:

    stationary-x   a rank has the weights of its channels: the parts of y are summed, and each rank keeps its filters
    stationary-y   a rank has the weights of its filters: x is gathered
    stationary-w   a rank has the weights of a block of both: x is gathered over the ranks of a row of blocks, and y is
                   summed over those of a column

An operator with only one side divided has the weights of its channels, or of its filters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor, fx

from pipedejavu.runtime.axis_region import CONVOLUTIONS, Region
from pipedejavu.runtime.axis_rule import Axes, argument, name_of, shape_of
from pipedejavu.runtime.param_layout import ParamLayout
from pipedejavu.runtime.reshape_rule import Split, UndividedError

OPERATORS = ("linear", *CONVOLUTIONS)


@dataclass
class ChannelRegion(Region):
    """Activations whose channels are divided together, from the operators that make them to those that read them."""

    made: set[fx.Node] = field(default_factory=set)
    """Operators whose filters it divides."""
    read: set[fx.Node] = field(default_factory=set)
    """Operators whose channels it divides."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights of its operators, by which regions are chosen."""
        return sum(node.meta["val"].nbytes for op in self.made | self.read for node in [weight_of(op)])

    @property
    def nodes(self) -> set[fx.Node]:
        """All tensors that it divides; two regions may share an operator."""
        return {*self.splits}

    def grow(self, node: fx.Node, split: Split) -> None:
        """Divides a tensor and all that follows; raises UndividedError if something cannot be divided."""
        self._place(node, split)
        while self._queue:
            self._spread(self._queue.pop())
        if not self.read or not self.made:
            raise UndividedError("no operator reads it")
        if any(len(s.parts) > 1 for n, s in self.splits.items() if n in self.made):
            raise UndividedError("filters of several parts cannot be scattered")
        inner = self.operations - self.made - self.read
        for operation in inner:
            self._enter(operation)

    def _axes(self, node: fx.Node, axes: Axes) -> None:
        if not is_operator(node):
            super()._axes(node, axes)
            return
        source, bias = argument(node, "input"), argument(node, "bias")
        self.operations.discard(node)
        if source in self.splits and node not in self.read:
            if self.splits[source].dim != channel_dim(node, source) or len(self.splits[source].parts) > 1:
                raise UndividedError(f"'{name_of(node)}' needs the whole dimension")
            self.read.add(node)
        if node in self.splits and node not in self.made:
            if self.splits[node].dim != channel_dim(node, node):
                raise UndividedError(f"'{name_of(node)}' needs the whole dimension")
            self.made.add(node)
            if bias is not None:
                self._place(bias, Split(0, self.splits[node].parts))


def is_operator(node: fx.Node) -> bool:
    """Whether an operation sums channels with weights of its own."""
    if name_of(node) not in OPERATORS or not isinstance(argument(node, "weight"), fx.Node):
        return False
    is_whole = (argument(node, "groups", 1) or 1) == 1 and not argument(node, "transposed", False)
    return is_whole and weight_of(node).op == "get_attr"


def weight_of(node: fx.Node) -> fx.Node:
    """Returns the node of an operator's weight."""
    weight = argument(node, "weight")
    assert isinstance(weight, fx.Node)
    return weight


def channel_dim(operator: fx.Node, tensor: fx.Node) -> int:
    """Returns the dimension of the channels of what an operator reads or makes."""
    return len(shape_of(tensor)) - 1 if name_of(operator) == "linear" else 1


def grid_of(size: int) -> tuple[int, int]:
    """Returns the rows (of channels) and columns (of filters) of the blocks of `stationary-w`, as square as can be."""
    rows = next(n for n in range(isqrt(size), 0, -1) if size % n == 0)
    return rows, size // rows


class OperatorLayout(NamedTuple):
    """What of an operator is divided."""

    reads: bool
    """Whether its channels are divided."""
    makes: bool
    """Whether its filters are divided."""
    kind: str
    """The layout, if both are."""

    def of_weight(self, shape: tuple[int, ...], size: int) -> ParamLayout:
        """Returns the layout of its weight over `size` ranks."""
        if not self.makes or (self.reads and self.kind == "stationary-x"):
            return ParamLayout(shape, 1)
        if not self.reads or self.kind == "stationary-y":
            return ParamLayout(shape, 0)
        return BlockLayout(shape, 0, grid=grid_of(size))


@dataclass(frozen=True)
class BlockLayout(ParamLayout):
    """The layout of a weight of which each rank has a block: some filters, and of these some channels.

    Rank r = p · columns + q has the p-th run of channels, and of each of as many runs of filters the q-th part, so that
    the filters that it keeps of a sum over p are the r-th run of all.
    """

    grid: tuple[int, int] = (1, 1)
    """Rows of channels, and columns of filters."""

    def _sides(self) -> tuple[ParamLayout, ParamLayout]:
        rows = self.grid[0]
        return ParamLayout(self.shape, 0, (self.shape[0] // rows,) * rows), ParamLayout(self.shape, 1)

    def local(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Returns a rank's block, with memory of its own."""
        (rows, columns), (filters, channels) = self.grid, self._sides()
        p, q = divmod(rank, size // rows)
        return channels.local(filters.local(whole, q, columns), p, rows)

    def whole(self, shards: Sequence[Tensor]) -> Tensor:
        """Returns the tensor of which the ranks have these blocks."""
        rows, columns = self.grid
        strips = [torch.cat([shards[p * columns + q] for p in range(rows)], 1) for q in range(columns)]
        return self._sides()[0].whole(strips)
