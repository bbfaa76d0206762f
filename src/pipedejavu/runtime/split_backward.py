"""A backward pass in two halves that together cost what one pass costs: no matrix product runs twice.

The first half computes the gradients of the inputs. Where a weight enters a matrix product or a convolution, it keeps
the product's other operand and the gradient of its output; all other weights (biases that are added, norms, weights
inside custom functions) get their gradients in the first half. It frees the graph. The second half multiplies what was
kept, and runs the part of the graph between each product and its weights (transposes, casts, reparametrisations).

Which products can wait is decided per graph, not per module. A weight that a deferred product shares with another kind
of operation gets its whole gradient in the first half, so that contributions are summed in the order of one pass.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipedejavu.runtime.product_rule import RULES, WeightRule


@dataclass(frozen=True)
class _Kept:
    """What one product keeps for the second half."""

    rule: WeightRule
    edges: tuple[GradientEdge, ...]
    """Where the gradients of its weights go, in the order of the rule's results."""
    weights: frozenset[Node]
    gradient: Tensor
    """The gradient of the product's output."""

    def ends(self) -> tuple[Sequence[GradientEdge], Sequence[Tensor]]:
        """Computes the gradients of its weights; returns where they go, and them."""
        return self.edges, self.rule(self.gradient)


class PendingGradients:
    """The second half of a backward pass: the gradients of weights, not yet computed or not yet added."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        """In the order in which the first half came to them."""
        self._ready: list[tuple[Tensor, Tensor]] = []
        """Weights whose gradients the first half has computed, with these."""

    def accumulate(self, more: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Adds the gradients to the `grad` of the weights, once; `more` are weights with further contributions.

        A weight that several products share gets the sum of its contributions, as one backward pass would add it. The
        gradients of all others are computed, added and freed one product at a time.
        """
        uses = Counter(weight for kept in self._kept for weight in kept.weights)
        uses.update(get_gradient_edge(weight).node for weight, _ in more)
        edges: list[Any] = [weight for weight, _ in (*more, *self._ready)]
        gradients = [gradient for _, gradient in (*more, *self._ready)]
        kept_products, self._kept, self._ready = self._kept[::-1], [], []
        with torch.no_grad():
            while kept_products:
                kept = kept_products.pop()
                if any(uses[weight] > 1 for weight in kept.weights):
                    to, contributions = kept.ends()
                    edges += to
                    gradients += contributions
                else:
                    torch.autograd.backward(*kept.ends())
                del kept
        if edges:
            torch.autograd.backward(edges, gradients)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it holds: operands and output gradients of products, and gradients that are ready."""
        products = (t for kept in self._kept for t in (*kept.rule.tensors, kept.gradient))
        return (*products, *(gradient for _, gradient in self._ready))

    def _keep(self, rule: WeightRule, edges: tuple[GradientEdge, ...], weights: frozenset[Node]) -> Any:
        """Returns a hook for the node of a product. It refers to no node, so that the graph can be freed."""

        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            if gradients[0] is not None:
                self._kept.append(_Kept(rule, edges, weights, gradients[0]))

        return hook


def backward_inputs(
    outputs: Sequence[Tensor], heads: Sequence[Tensor], inputs: Sequence[Tensor], weights: Iterable[Tensor]
) -> tuple[tuple[Tensor | None, ...], PendingGradients]:
    """Returns the gradients of `inputs`, which are leaves, and the second half: those of `weights`. Frees the graph.

    `outputs` have the gradients `heads`. An input that they do not depend on has the gradient None.
    """
    pending = PendingGradients()
    graph = _Graph(outputs, inputs, {get_gradient_edge(weight).node: weight for weight in weights})
    for node, (rule, edges) in graph.deferred.items():
        reached = frozenset().union(*(graph.below[edge.node] for edge in edges))
        node.register_prehook(pending._keep(rule, edges, reached))
    ready = [weight for node, weight in graph.weights.items() if node in graph.eager]
    del graph
    if not outputs or not (inputs or ready):
        return (None,) * len(inputs), pending
    gradients = torch.autograd.grad(outputs, [*inputs, *ready], heads, allow_unused=True)
    of_weights = zip(ready, gradients[len(inputs) :], strict=True)
    pending._ready = [(weight, gradient) for weight, gradient in of_weights if gradient is not None]
    return gradients[: len(inputs)], pending


class _Graph:
    """The nodes of a graph: which lead to inputs, which to weights alone, and which of their products can wait."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Mapping[Node, Tensor]):
        self.weights = weights
        roots = [get_gradient_edge(output).node for output in outputs]
        self._next = _next_functions(roots)
        leaves = {get_gradient_edge(tensor).node for tensor in inputs}
        self.below: dict[Node, frozenset[Node]] = {}
        """The weights below each node that leads to weights and to no input."""
        self.eager: set[Node] = set()
        """The weights whose gradients the first half computes."""
        self.deferred: dict[Node, tuple[WeightRule, tuple[GradientEdge, ...]]] = {}
        to_input: set[Node] = set()
        for node, edges in self._next.items():
            if node in leaves or any(child in to_input for child, _ in edges):
                to_input.add(node)
                self._sort(node, edges)
            elif node in weights:
                self.below[node] = frozenset((node,))
            elif reached := [self.below[child] for child, _ in edges if child in self.below]:
                self.below[node] = reached[0].union(*reached[1:])
        for root in roots:
            self.eager |= self.below.get(root, frozenset())
        self._exclude()

    def _sort(self, node: Node, edges: Sequence[tuple[Node | None, int]]) -> None:
        """Defers the weights of a node that leads to inputs and to weights, if it is a product; else not."""
        ways = {n: edge for n, edge in enumerate(edges) if edge[0] in self.below}
        if not ways:
            return
        make = RULES.get(node.name())
        rule = make(node, frozenset(ways)) if make else None
        if rule is None:
            self.eager |= self._reached(child for child, _ in ways.values())
        else:
            self.deferred[node] = rule, tuple(GradientEdge(*ways[n]) for n in rule.positions)  # type: ignore[arg-type]

    def _exclude(self) -> None:
        """Takes back products whose weights the first half computes anyway, until there are none."""
        while early := [node for node, (_, edges) in self.deferred.items() if self._weights_of(edges) & self.eager]:
            for node in early:
                self.eager |= self._weights_of(self.deferred.pop(node)[1])

    def _weights_of(self, edges: Iterable[GradientEdge]) -> set[Node]:
        return self._reached(edge.node for edge in edges)

    def _reached(self, nodes: Iterable[Node | None]) -> set[Node]:
        return {weight for node in nodes if node is not None for weight in self.below[node]}


def _next_functions(roots: Iterable[Node]) -> dict[Node, tuple[tuple[Node | None, int], ...]]:
    """Returns the edges of all nodes of a graph; a node comes after those that its edges lead to."""
    done: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
    opened: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
        elif node in opened:
            done[node] = opened[node]
            stack.pop()
        else:
            edges = opened[node] = node.next_functions
            stack += [child for child, _ in edges if child is not None and child not in done]
    return done
