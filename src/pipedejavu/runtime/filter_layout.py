"""Filters that can be left out: which parameters and buffers follow the filters of a model's convolutions.

A group is a set of convolutions whose filters are left out together, since later operations tie their channels: one
convolution in a chain, all that a residual connection adds up. It is the region that `ChannelRegion` finds when a rank
holds a single filter, so everything that follows has a part per filter. Knows nothing of budgets and of chance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import fx, nn

from pipedejavu.facts import InputError
from pipedejavu.runtime.axis_region import CONVOLUTIONS, GraphChain, UnitGraph
from pipedejavu.runtime.axis_rule import argument, name_of, shape_of
from pipedejavu.runtime.channel_region import OPERATORS, ChannelRegion, is_operator, weight_of
from pipedejavu.runtime.reshape_rule import Split, UndividedError


class FilterGroup(NamedTuple):
    """Filters that are left out together."""

    name: str
    """The full name of the first weight that makes them."""
    size: int


class FilterDim(NamedTuple):
    """A dimension of a parameter or buffer that follows the filters of a group."""

    dim: int
    group: int
    run: int
    """Consecutive entries per filter: more than one after a flattened image."""
    is_read: bool
    """Whether the operator sums over it: the channels that a later layer reads."""


class _Product(NamedTuple):
    """A convolution or a linear layer."""

    num_products: int
    """Multiplications for one batch, with all filters."""
    made: int
    """The group of its filters, or -1."""
    read: int
    """The group of its channels, or -1."""


@dataclass(frozen=True)
class FilterLayout:
    """The groups of a model's filters, in the order of its operations."""

    groups: tuple[FilterGroup, ...]
    dims: dict[str, tuple[FilterDim, ...]]
    """By full name, the dimensions that follow filters, for parameters and buffers that have any."""
    products: tuple[_Product, ...]

    def counts(self, drops: Sequence[float]) -> tuple[int, ...]:
        """Returns how many filters of each group remain if these shares are left out; at least one."""
        pairs = zip(self.groups, drops, strict=True)
        return tuple(max(1, round(group.size * (1 - share))) for group, share in pairs)

    def cost(self, counts: Sequence[int]) -> float:
        """Returns the share of all multiplications that remains with so many filters of each group."""
        shares = [count / group.size for count, group in zip(counts, self.groups, strict=True)] + [1.0]
        whole = sum(product.num_products for product in self.products)
        return sum(n * shares[made] * shares[read] for n, made, read in self.products) / whole


def find_filters(units: Sequence[tuple[str, nn.Module]], graphs: Sequence[UnitGraph]) -> FilterLayout:
    """Returns the filters that can be left out; raises InputError if there are none."""
    chain = GraphChain(graphs)
    operators = [node for node in chain.unit_of if name_of(node) in OPERATORS]
    regions: list[ChannelRegion] = []
    for node in operators:
        is_known = any(node in region.made for region in regions)
        if name_of(node) in CONVOLUTIONS and is_operator(node) and not is_known:
            region = _region(chain, node)
            regions += [region] if region is not None else []
    if not regions:
        raise InputError(
            "the model has no convolution whose filters can be left out, so no replica can compute a part of it; use a"
            " model with convolutions that another layer reads, such as zoo:vgg-small, or a plan without feed 'mask'"
        )
    names = _names(units)
    groups, dims = [], dict[str, set[FilterDim]]()
    for number, region in enumerate(regions):
        first = next(node for node in operators if node in region.made)
        groups.append(FilterGroup(names[id(chain.held[weight_of(first)])][0], shape_of(first)[1]))
        for node, dim in _dims(region, number, shape_of(first)[1]):
            for name in names[id(chain.held[node])]:
                dims.setdefault(name, set()).add(dim)
    in_order = {name: tuple(sorted(some)) for name, some in dims.items()}
    return FilterLayout(tuple(groups), in_order, tuple(_product(node, regions) for node in operators))


def _names(units: Sequence[tuple[str, nn.Module]]) -> dict[int, list[str]]:
    """Returns the full names of each parameter and buffer, by id."""
    names: dict[int, list[str]] = {}
    for unit, module in units:
        parameters = module.named_parameters(prefix=unit, remove_duplicate=False)
        for full, tensor in (*parameters, *module.named_buffers(prefix=unit, remove_duplicate=False)):
            names.setdefault(id(tensor), []).append(full)
    return names


def _dims(region: ChannelRegion, number: int, size: int) -> Iterator[tuple[fx.Node, FilterDim]]:
    """Yields the parameters and buffers that follow the filters of a region, each with the dimension that does."""
    follows = {node: split.dim for node, split in region.splits.items() if node.op == "get_attr"}
    follows |= {weight_of(node): 0 for node in region.made}
    for node, dim in follows.items():
        yield node, FilterDim(dim, number, shape_of(node)[dim] // size, False)
    for node in map(weight_of, region.read):
        yield node, FilterDim(1, number, shape_of(node)[1] // size, True)


def _region(chain: GraphChain, node: fx.Node) -> ChannelRegion | None:
    """Returns what follows the filters of a convolution, or None if they cannot be left out."""
    size = shape_of(node)[1]
    region = ChannelRegion(chain, size)
    try:
        region.grow(node, Split(1, (size,)))
    except UndividedError:
        return None
    weights = {id(chain.held[weight_of(operator)]) for operator in region.made | region.read}
    is_shared = any(len(chain.twins[weight]) > 1 for weight in weights)
    is_grouped = any(
        name_of(operation) in CONVOLUTIONS and not is_operator(operation) for operation in region.operations
    )
    return None if is_shared or is_grouped else region


def _product(node: fx.Node, regions: Sequence[ChannelRegion]) -> _Product:
    weight = argument(node, "weight")
    number = prod(shape_of(node)) * prod(shape_of(weight)[1:])
    made = next((n for n, region in enumerate(regions) if node in region.made), -1)
    return _Product(number, made, next((n for n, region in enumerate(regions) if node in region.read), -1))
