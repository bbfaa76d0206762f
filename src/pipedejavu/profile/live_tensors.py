"""Tensor liveness: which tensors cross each position of a graph, and where the graph may be cut.

Position p lies before operation p. A cut there passes on every tensor that is made before p and read at or after p,
even if the read is far later: that is how skip connections pass through the units that they skip.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from pipedejavu.profile.model_trace import Trace

_WRITES = {"aten::batch_norm": (3, 4), "aten::instance_norm": (3, 4)}
"""Arguments that an operation changes although its schema does not say so: running statistics."""
_MAY_RETURN_INPUT = frozenset(("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout"))


class TensorLiveness:
    """The live tensors at each position of a trace, and whether it may be cut there."""

    def __init__(self, trace: Trace):
        self.trace = trace = replace(trace, nodes=_with_early_writes(trace))
        self.size = len(trace.nodes)
        self.index = {node: n for n, node in enumerate(trace.nodes)}
        self.overwritten: set[fx.Node] = set()
        """Inputs that the model changes in place."""
        self.last: dict[fx.Node, int] = {}
        """Index of the last operation that reads each value; the number of operations for outputs."""
        for n, node in enumerate(trace.nodes):
            self.last.update((used, n) for used in node.all_input_nodes if used not in trace.states)
        for node in trace.outputs:
            if isinstance(node, fx.Node) and node not in trace.states:
                self.last[node] = self.size
        self._legal = self._positions()

    def first(self, node: fx.Node) -> int:
        """Returns the first position at which a value can be live."""
        return self.index[node] + 1 if node in self.index else 0

    def at(self, position: int) -> list[fx.Node]:
        """Returns the values that are live at a position, in the order in which they are made."""
        if position == 0:
            return list(self.trace.inputs)
        values = [*self.trace.inputs, *self.trace.nodes[:position]]
        return [v for v in values if self.first(v) <= position <= self.last.get(v, -1)]

    def size_bytes(self, position: int) -> int:
        """Returns the bytes that a cut at a position passes on."""
        return sum(v.meta["val"].nbytes for v in self.at(position))

    def is_legal(self, position: int) -> bool:
        """Whether all live values can be passed on at a position, and no value is changed in place across it."""
        return position in self._legal

    def _positions(self) -> frozenset[int]:
        legal = set(range(1, self.size))
        for value, last in self.last.items():
            if not _can_pass(value.meta.get("val")):
                legal -= {*range(self.first(value), last + 1)}
        for start, end in self._changes():
            legal -= {*range(start, end + 1)}
        counts = self._num_live()
        return frozenset(p for p in legal if counts[p])

    def _num_live(self) -> list[int]:
        """Returns how many values are live at each position from 0 to the number of operations."""
        changes = [0] * (self.size + 2)
        for value, last in self.last.items():
            if (first := self.first(value)) <= last:
                changes[first] += 1
                changes[last + 1] -= 1
        return [*accumulate(changes)][:-1]

    def _changes(self) -> Iterator[tuple[int, int]]:
        """Yields the range of positions between the creation of a value and each change of it in place."""
        uses: dict[fx.Node, list[int]] = {}
        for n, node in enumerate(self.trace.nodes):
            for state in self.trace.states.keys() & {*node.all_input_nodes}:
                uses.setdefault(state, []).append(n)
        for n, node in enumerate(self.trace.nodes):
            for changed in _written(node):
                base = _base(changed)
                if base in self.trace.states:
                    yield min(uses.get(base, [n])[0], n) + 1, max(uses.get(base, [n])[-1], n)
                    continue
                if base not in self.index:
                    self.overwritten.add(base)
                yield self.first(base), n


def _with_early_writes(trace: Trace) -> tuple[fx.Node, ...]:
    """Returns the operations, with buffers written as soon as their new values exist instead of at the end."""
    nodes = list(trace.nodes)
    bases = {_base(node) for node in nodes if node.target is not torch.ops.aten.copy_.default}
    for write in [n for n in nodes if n.target is torch.ops.aten.copy_.default and n.args[0] in trace.states]:
        if write.users or write.args[0] in bases:  # the old contents are still read
            continue
        nodes.remove(write)
        needed = [n for n, node in enumerate(nodes) if node is write.args[1] or write.args[0] in node.all_input_nodes]
        nodes.insert(max(needed, default=-1) + 1, write)
    return tuple(nodes)


def _can_pass(value: Any) -> bool:
    """Whether a value is a single tensor of known shape."""
    return isinstance(value, Tensor) and all(isinstance(length, int) for length in value.shape)


def _written(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments that an operation changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    written: list[Any] = [node.args[n] for n in _WRITES.get(schema.name, ()) if n < len(node.args)]
    for n, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(node.kwargs.get(argument.name) if argument.kwarg_only else _nth(node.args, n))
    return [arg for arg in written if isinstance(arg, fx.Node)]


def _base(node: fx.Node) -> fx.Node:
    """Returns the value that owns a node's memory, by following views and in-place changes back to it."""
    while node.op == "call_function":
        if node.target is getitem:
            source = node.args[0]
        elif isinstance(node.target, torch._ops.OpOverload):
            schema = node.target._schema
            aliased = [n for n, a in enumerate(schema.arguments) if a.alias_info is not None]
            aliased = [0] if schema.name in _MAY_RETURN_INPUT else aliased
            source = _nth(node.args, aliased[0]) if aliased else None
        else:
            source = None
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def _nth(args: Sequence[Any], n: int) -> Any:
    return args[n] if n < len(args) else None


def module_paths(nodes: Sequence[fx.Node]) -> list[str]:
    """Returns the path of the module that each operation ran in; the previous one's path if it is not recorded."""
    paths: list[str] = []
    for node in nodes:
        stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
        inner = [path for path, _ in stack.values()][-1:]
        paths.append((inner or paths[-1:] or [""])[0])
    return paths
