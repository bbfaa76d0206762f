"""How consecutive units of a worker are divided over the ranks of its group: which regions, and what each needs.

The layout `pairs` divides each region that a parameter begins and a sum over the divided dimension ends, the largest
first: a column and a row layer, attention by heads, filters and the channels that read them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from torch import Tensor, fx

from pipedejavu.runtime.axis_region import CONVOLUTIONS, GraphChain, Region, UnitGraph
from pipedejavu.runtime.axis_rule import name_of, shape_of
from pipedejavu.runtime.channel_region import ChannelRegion, OperatorLayout, is_operator, weight_of
from pipedejavu.runtime.loss_rule import VOCABULARY_RULES, Rules
from pipedejavu.runtime.param_layout import ParamLayout
from pipedejavu.runtime.reshape_rule import Split, UndividedError
from pipedejavu.runtime.sequence_region import DROPOUTS, SequenceRegion, draws_at_random, sequence_region

LayoutKind = Literal["pairs", "context", "stationary-x", "stationary-y", "stationary-w"]

_MOST_TRIES = 3
"""Divisions of one dimension into parts that are tried."""


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

    chain: GraphChain
    size: int
    regions: tuple[Region, ...]
    operators: Mapping[fx.Node, OperatorLayout] = field(default_factory=dict)
    """Operators whose channels or filters are divided, for the layouts called stationary."""
    sequence: SequenceRegion | None = None
    """Activations that are divided along the sequence, outside of the regions."""

    @cached_property
    def on_parts(self) -> set[fx.Node]:
        """The operations that each rank computes on its part of the sequence."""
        if self.sequence is None:
            return set()
        taken = {node for region in self.regions for node in region.operations}
        nodes = {*self.sequence.splits, *self.sequence.sums}
        nodes |= {source for node in nodes if (source := _source(node)) is not None}
        return {node for node in nodes if node not in taken and self.sequence.runs(node)}

    @property
    def is_whole(self) -> bool:
        """Whether nothing is divided."""
        return not self.regions and (self.sequence is None or not self.sequence.splits)

    def region_of(self, node: fx.Node) -> Region | None:
        """Returns the region that an operation is part of."""
        return next((region for region in self.regions if node in region.operations), None)

    def layout_of(self, node: fx.Node) -> ParamLayout:
        """Returns the layout of the parameter or buffer that a node reads."""
        for region in self.regions:
            if (split := region.splits.get(node)) is not None:
                return ParamLayout(shape_of(node), split.dim, split.parts)
        for operator, layout in self.operators.items():
            if weight_of(operator) is node:
                return layout.of_weight(shape_of(node), self.size)
        return ParamLayout(shape_of(node))

    def collectives(self) -> list[Collective]:
        """Returns the all-reduces of a forward and a backward of the chain, in no order.

        If the sequence is divided, a scattered sum and a gather stand for those of activations; what parameters add in
        the backward is not counted.
        """
        rows = [
            Collective(self.chain.unit_of[node], is_forward, size)
            for node, layout in self.operators.items()
            for is_forward, size in _channel_sums(node, layout)
        ]
        for region in self.regions:
            rows += [Collective(self.chain.unit_of[node], True, _bytes(node)) for node in region.sums]
        entries = {node for region in self.regions for node in region.entries}
        rows += [Collective(self.chain.unit_of[node], False, _bytes(node)) for node in entries]
        cuts = {n for r in self.regions for n in r.cut if n.meta["val"].requires_grad}
        return rows + [Collective(self.chain.unit_of[node], False, _bytes(node) // 2) for node in cuts]


def _source(node: fx.Node) -> fx.Node | None:
    """Returns the operation of whose results a node is one."""
    source = node.args[0] if "getitem" in str(node.target) else None
    return source if isinstance(source, fx.Node) else None


def _bytes(node: fx.Node) -> int:
    return prod(shape_of(node)) * int(node.meta["val"].element_size())


def _channel_sums(node: fx.Node, layout: OperatorLayout) -> Iterator[tuple[bool, int]]:
    """Yields whether each all-reduce of an operator, or pair of a gather and a scattered sum, is in the forward."""
    if layout.reads and not layout.makes:
        yield True, _bytes(node)
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if layout.makes and not layout.reads and source.meta["val"].requires_grad:
        yield False, _bytes(source)
    if layout.makes and layout.reads:  # a gather or scattered sum in each pass: half of an all-reduce
        size = {"stationary-x": _bytes(node), "stationary-y": _bytes(source)}.get(
            layout.kind, _bytes(node) + _bytes(source)
        )
        yield True, size // 2
        yield False, size // 2


def divide(
    graphs: Sequence[UnitGraph],
    size: int,
    whole: Sequence[Tensor] = (),
    layout: LayoutKind = "pairs",
    *,
    has_vocabulary: bool = False,
    has_sequence: bool = False,
) -> Division:
    """Returns the division of a chain over `size` ranks; `whole` are parameters that all ranks keep whole.

    With `has_vocabulary`, rows of embeddings and classes of losses are divided too; with `has_sequence`, activations
    between the divided operators.
    """
    chain = GraphChain(graphs)
    kept = {id(tensor) for tensor in whole}
    if layout == "context":
        return Division(chain, size, (), sequence=sequence_region(chain, size, ()))
    if layout != "pairs":
        return _divide_channels(chain, size, kept, layout)
    rules = VOCABULARY_RULES if has_vocabulary else {}
    found = [r for seed in _seeds(chain) if (r := _region(chain, size, *seed, kept, rules)) is not None]
    chosen: list[Region] = []
    for region in sorted(found, key=lambda region: -region.parameter_bytes):
        if all(region.nodes.isdisjoint(other.nodes) for other in chosen):
            chosen.append(region)
    sequence = sequence_region(chain, size, chosen) if has_sequence and chosen else None
    return Division(chain, size, tuple(chosen), sequence=sequence)


def _divide_channels(chain: GraphChain, size: int, kept: set[int], layout: LayoutKind) -> Division:
    """Divides the channels of all activations that convolutions make and other operators read."""
    regions: list[Region] = []
    makers, readers = set[fx.Node](), set[fx.Node]()
    shared = {id(chain.held[nodes[0]]) for nodes in chain.twins.values() if len(nodes) > 1}
    for node in chain.unit_of:
        if name_of(node) not in CONVOLUTIONS or not is_operator(node) or node in makers:
            continue
        region = ChannelRegion(chain, size)
        try:
            region.grow(node, Split(1, (shape_of(node)[1],)))
        except UndividedError:
            continue
        weights = {id(chain.held[weight_of(op)]) for op in region.made | region.read}
        if weights & (kept | shared) or _draws(chain, region):
            continue
        regions.append(region)
        makers |= region.made
        readers |= region.read
    operators = {
        op: OperatorLayout(op in readers, op in makers, layout) for op in chain.unit_of if op in makers | readers
    }
    return Division(chain, size, tuple(regions), operators)


def _seeds(chain: GraphChain) -> list[tuple[fx.Node, int]]:
    """Returns the first reader of each trained parameter of several dimensions, with each of these."""
    readers = [nodes[0] for nodes in chain.twins.values()]
    trained = [node for node in readers if chain.held[node].requires_grad and chain.held[node].ndim > 1]
    return [(node, dim) for node in trained for dim in range(chain.held[node].ndim)]


def _region(chain: GraphChain, size: int, node: fx.Node, dim: int, kept: set[int], rules: Rules) -> Region | None:
    """Returns what is divided with a dimension of a parameter, or None if it cannot be divided."""
    length = shape_of(node)[dim]
    parts: tuple[int, ...] = (length,)
    for _ in range(_MOST_TRIES):
        region = Region(chain, size, rules=rules)
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


def _draws(chain: GraphChain, region: Region) -> bool:
    """Whether units of a region draw random numbers in a way that cannot be divided."""
    units = {chain.unit_of[node] for node in region.operations}
    return any(drawn_in(chain.graphs[unit]) for unit in units)


def drawn_in(graph: UnitGraph) -> str:
    """Returns the name of an operation that draws random numbers other than a dropout's; empty if there is none."""
    drawn = [node for node in graph.body.graph.nodes if draws_at_random(node)]
    return next((name for node in drawn if (name := name_of(node)) not in DROPOUTS), "")
