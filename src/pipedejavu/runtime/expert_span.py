"""Finds experts in a recorded graph: products of rows that are arranged by expert with weights that are stacked.

Note "spans". A span takes rows to rows: each row passes through the weights of its own expert alone. It begins with
the first product and ends with the last operation that reads stacked weights; between them are operations on single
elements, or on the last dimension. What happens before and after it (gates, the order of the rows, sums over experts)
concerns tokens, not experts, and stays as the model has it. Two forms are known:

    sorted rows   [rows, width], and the end of each expert's rows: grouped products
    slots         [experts, slots, width]: batched products
"""

import operator
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import fx

Shape = tuple[int, ...]

_GROUPED = ("grouped_mm", "grouped_mm_fallback")
_BATCHED = frozenset(("aten::matmul", "aten::bmm"))
_ALIASES = frozenset(f"aten::{name}" for name in ("transpose", "to", "contiguous", "detach", "alias", "clone"))
"""Operations that keep each expert's weights at its place in the first dimension."""
_PER_ROW = frozenset(f"aten::{name}" for name in ("to", "contiguous", "detach", "clone"))
_LAST_DIM = frozenset(f"aten::{name}" for name in ("chunk", "split", "slice", "narrow"))
"""Operations on single rows if their dimension is the last one."""


class ExpertSpan(NamedTuple):
    """One span of a graph."""

    nodes: tuple[fx.Node, ...]
    """In order."""
    rows: fx.Node
    ends: fx.Node | None
    """The end of each expert's rows; None for slots."""
    weights: tuple[fx.Node, ...]
    """Where the graph reads its stacked weights."""
    experts: int

    @property
    def output(self) -> fx.Node:
        """The rows that it returns."""
        return self.nodes[-1]


def find_spans(graph: fx.Graph, parameters: Mapping[str, Shape]) -> list[ExpertSpan]:
    """Returns the expert spans of a graph, whose operations have their shapes in `meta`, and the shapes of parameters.

    The shapes of parameters are those of the whole model, even if the graph's module holds only a rank's part.
    """
    reader = _Reader(graph, parameters)
    spans: list[ExpertSpan] = []
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in taken and (product := reader.product(node)) is not None:
            span = reader.grown(node, product)
            taken.update(span.nodes)
            spans.append(span)
    return spans


class _Product(NamedTuple):
    """A product of rows with stacked weights."""

    rows: fx.Node
    ends: fx.Node | None
    weight: fx.Node
    experts: int


class _Reader:
    """What a graph says of its operations."""

    def __init__(self, graph: fx.Graph, parameters: Mapping[str, Shape]):
        self.nodes, self.parameters = list(graph.nodes), parameters

    def product(self, node: fx.Node) -> _Product | None:
        """Returns an operation as a product of rows with stacked weights, if it is one."""
        if len(node.args) < 2:
            return None
        rows, weight = node.args[0], self.stacked(node.args[1])
        if not isinstance(rows, fx.Node) or weight is None or len(self._shape(weight)) != 3:
            return None
        experts = self._shape(weight)[0]
        ends = node.kwargs.get("offs", node.args[2] if len(node.args) > 2 else None)
        if _operation(node).endswith(_GROUPED) and isinstance(ends, fx.Node):
            return _Product(rows, ends, weight, experts)
        shape = self._shape(rows)
        if _operation(node) in _BATCHED and len(shape) == 3 and shape[0] == experts and self.stacked(rows) is None:
            return _Product(rows, None, weight, experts)
        return None

    def grown(self, first: fx.Node, product: _Product) -> ExpertSpan:
        """Returns the span that begins with a product."""
        inside: set[fx.Node] = {first}
        weights: dict[fx.Node, fx.Node] = {first: product.weight}
        for node in self.nodes[self.nodes.index(first) + 1 :]:
            if (other := self.product(node)) is not None:
                is_same = (other.experts, other.ends) == (product.experts, product.ends)
                if is_same and (other.rows in inside or other.rows is product.rows):
                    inside.add(node)
                    weights[node] = other.weight
                continue
            bias = self._bias(node, product)
            needed = [n for n in node.all_input_nodes if bias is None or bias not in _aliased(n)]
            if needed and all(n in inside for n in needed) and self._is_per_row(node):
                inside.add(node)
                if bias is not None:
                    weights[node] = bias
        return self._trimmed(inside, weights, product)

    def _trimmed(self, inside: set[fx.Node], weights: Mapping[fx.Node, fx.Node], product: _Product) -> ExpertSpan:
        """Returns a span up to the last operation that reads weights and alone is read from outside."""
        order = {node: n for n, node in enumerate(self.nodes)}
        kept: set[fx.Node] = set()
        for last in sorted(weights, key=order.__getitem__, reverse=True):
            kept = _up_to(last, inside)
            if all(user in kept for node in kept if node is not last for user in node.users):
                break
        ordered = tuple(sorted(kept, key=order.__getitem__))
        stacked = tuple(dict.fromkeys(weights[node] for node in ordered if node in weights))
        return ExpertSpan(ordered, product.rows, product.ends, stacked, product.experts)

    def _bias(self, node: fx.Node, product: _Product) -> fx.Node | None:
        """Returns the stacked weights [experts, 1, …] that an operation on slots reads, such as a bias."""
        if product.ends is None:
            for needed in node.all_input_nodes:
                weight = self.stacked(needed)
                if weight is not None and self._shape(weight)[:2] == (product.experts, 1):
                    return weight
        return None

    def _is_per_row(self, node: fx.Node) -> bool:
        name, target = _operation(node), node.target
        if name in _PER_ROW or target is operator.getitem:
            return True
        if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
            return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable
        source = node.args[0]
        if name not in _LAST_DIM or not isinstance(source, fx.Node):
            return False
        position = 1 if name in ("aten::slice", "aten::narrow") else 2
        dim = node.kwargs.get("dim", node.args[position] if len(node.args) > position else 0)
        return dim in (-1, len(self._shape(source)) - 1)

    def stacked(self, argument: object) -> fx.Node | None:
        """Returns where the graph reads the parameter that an argument is a form of, if it may be one per expert."""
        if not isinstance(argument, fx.Node):
            return None
        *_, source = _aliased(argument)
        shape = self.parameters.get(str(source.target)) if source.op == "get_attr" else None
        return source if shape is not None and len(shape) >= 2 and shape[0] > 1 else None

    def _shape(self, node: fx.Node) -> Shape:
        """Returns the shape of a parameter or of an operation's result; empty if it is not known."""
        if node.op == "get_attr" and str(node.target) in self.parameters:
            return self.parameters[str(node.target)]
        known: Shape = tuple(node.meta.get("shape") or getattr(node.meta.get("val"), "shape", None) or ())
        return known


def _up_to(last: fx.Node, inside: set[fx.Node]) -> set[fx.Node]:
    """Returns an operation and what of a span it depends on."""
    kept, queue = {last}, [last]
    while queue:
        new = [n for n in queue.pop().all_input_nodes if n in inside and n not in kept]
        kept.update(new)
        queue += new
    return kept


def _aliased(node: fx.Node) -> Iterator[fx.Node]:
    """Yields a node and what it is another form of."""
    yield node
    while _operation(node) in _ALIASES and isinstance(node.args[0], fx.Node):
        if _operation(node) == "aten::transpose" and {0, -3} & {*node.args[1:]}:
            return
        node = node.args[0]
        yield node


def _operation(node: fx.Node) -> str:
    target = node.target
    return str(target._schema.name) if isinstance(target, torch._ops.OpOverload) else str(target)
