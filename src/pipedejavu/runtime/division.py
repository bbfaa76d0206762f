"""How consecutive units of a worker are divided over the ranks of its group: which regions, and what each needs.

The layout `pairs` divides each region that a parameter begins and a sum over the divided dimension ends, the largest
first: a column and a row layer, attention by heads, filters and the channels that read them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, fx

from pipedejavu.facts import InputError
from pipedejavu.runtime.axis_region import Chain, Region, UnitGraph
from pipedejavu.runtime.axis_rule import name_of, shape_of
from pipedejavu.runtime.param_layout import ParamLayout
from pipedejavu.runtime.reshape_rule import Split, UndividedError

_MOST_TRIES = 3
"""Divisions of one dimension into parts that are tried."""
_DROPOUT = frozenset(("dropout", "dropout_", "scaled_dot_product_attention"))
"""Random operations whose masks can be drawn whole and divided."""


class Collective(NamedTuple):
    """A collective of a divided unit."""

    unit: int
    """The number of the unit in the chain."""
    is_forward: bool
    size_bytes: int
    """Bytes of the tensor that is summed."""


@dataclass(frozen=True)
class Division:
    """The regions of a chain of units that are divided over `size` ranks."""

    chain: Chain
    size: int
    regions: tuple[Region, ...]

    def region_of(self, node: fx.Node) -> Region | None:
        """Returns the region that an operation is part of."""
        return next((region for region in self.regions if node in region.operations), None)

    def layout_of(self, node: fx.Node) -> ParamLayout:
        """Returns the layout of the parameter or buffer that a node reads."""
        for region in self.regions:
            if (split := region.splits.get(node)) is not None:
                return ParamLayout(shape_of(node), split.dim, split.parts)
        return ParamLayout(shape_of(node))

    def collectives(self) -> list[Collective]:
        """Returns the all-reduces of a forward and a backward of the chain, in no order."""
        rows = []
        for region in self.regions:
            rows += [Collective(self.chain.unit_of[node], True, _bytes(node)) for node in region.sums]
        entries = {node for region in self.regions for node in region.entries}
        rows += [Collective(self.chain.unit_of[node], False, _bytes(node)) for node in entries]
        cuts = {n for r in self.regions for n in r.cut if n.meta["val"].requires_grad}
        return rows + [Collective(self.chain.unit_of[node], False, _bytes(node) // 2) for node in cuts]


def _bytes(node: fx.Node) -> int:
    return prod(shape_of(node)) * int(node.meta["val"].element_size())


def divide(graphs: Sequence[UnitGraph], size: int, whole: Sequence[Tensor] = ()) -> Division:
    """Returns the division of a chain over `size` ranks; `whole` are parameters that all ranks keep whole."""
    chain = Chain(graphs)
    kept = {id(tensor) for tensor in whole}
    found = [region for seed in _seeds(chain) if (region := _region(chain, size, *seed, kept)) is not None]
    chosen: list[Region] = []
    for region in sorted(found, key=lambda region: -region.parameter_bytes):
        if all(region.nodes.isdisjoint(other.nodes) for other in chosen):
            chosen.append(region)
    return Division(chain, size, tuple(chosen))


def _seeds(chain: Chain) -> list[tuple[fx.Node, int]]:
    """Returns the first reader of each trained parameter of several dimensions, with each of these."""
    readers = [nodes[0] for nodes in chain.twins.values()]
    trained = [node for node in readers if chain.held[node].requires_grad and chain.held[node].ndim > 1]
    return [(node, dim) for node in trained for dim in range(chain.held[node].ndim)]


def _region(chain: Chain, size: int, node: fx.Node, dim: int, kept: set[int]) -> Region | None:
    """Returns what is divided with a dimension of a parameter, or None if it cannot be divided."""
    length = shape_of(node)[dim]
    parts: tuple[int, ...] = (length,)
    for _ in range(_MOST_TRIES):
        region = Region(chain, size)
        try:
            region.grow(node, Split(dim, parts))
        except UndividedError as error:
            known = sum(error.parts)
            if not known or any(part * length % known for part in error.parts):
                return None
            scaled = tuple(part * length // known for part in error.parts)
            if scaled == parts:
                return None
            parts = scaled
            continue
        divided = {id(t) for n in region.splits if (t := chain.held.get(n)) is not None}
        return None if divided & kept or _draws(chain, region) else region
    return None


def _draws(chain: Chain, region: Region) -> bool:
    """Whether units of a region draw random numbers in a way that cannot be divided."""
    units = {chain.unit_of[node] for node in region.operations}
    for unit in units:
        for node in chain.graphs[unit].body.graph.nodes:
            is_random = isinstance(node.target, torch._ops.OpOverload) and (
                torch.Tag.nondeterministic_seeded in node.target.tags
            )
            if is_random and name_of(node) not in _DROPOUT:
                return True
    return False


def check_divided(division: Division, what: str) -> None:
    """Raises InputError if nothing of a chain can be divided."""
    if not division.regions:
        raise InputError(
            f"{what} has no operator that can be divided by {division.size}: no layer whose outputs another layer sums"
            " over, nor attention by heads, has a size that is a multiple of it; use a degree that divides heads and"
            " widths, or a plan without tensor parallelism"
        )
