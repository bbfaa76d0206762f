"""Graphs without tensors of their own: the weights, buffers and constants of a graph become its last arguments.

Graphs of alike units then differ by names only, and one of them can run all.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor, fx, nn


class TensorSlot(NamedTuple):
    """Where a graph reads one of its tensors: what the module holds under a name at the time of a call."""

    module: nn.Module
    key: str

    def tensor(self) -> Tensor:
        """Returns the tensor that is there now."""
        tensor: Tensor = getattr(self.module, self.key)
        return tensor


def lift(body: fx.GraphModule) -> tuple[fx.GraphModule, tuple[TensorSlot, ...]]:
    """Returns a graph that takes the inputs of `body`, then its tensors, and where `body` has these."""
    graph, slots, root = fx.Graph(), list[TensorSlot](), dict[str, Any]()
    made: dict[fx.Node, fx.Node] = {}
    states: dict[fx.Node, list[fx.Node]] = {}
    for node in body.graph.nodes:
        if node.op == "placeholder":
            made[node] = graph.placeholder(f"input_{len(made)}")
    regions: list[tuple[fx.Node, fx.GraphModule]] = []
    for node in body.graph.nodes:
        if node.op != "get_attr":
            continue
        path, _, key = str(node.target).rpartition(".")
        holder = body.get_submodule(path)
        attribute = getattr(holder, key)
        if not isinstance(attribute, fx.GraphModule):
            made[node] = graph.placeholder(f"state_{len(slots)}")
            slots.append(TensorSlot(holder, key))
            continue
        region, inner = lift(attribute)
        regions.append((node, region))
        states[node] = [graph.placeholder(f"state_{len(slots) + n}") for n in range(len(inner))]
        slots += inner
    for number, (node, region) in enumerate(regions):
        root[f"region_{number}"] = region
        made[node] = graph.get_attr(f"region_{number}")
    for node in body.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
            more = [state for used in node.args if isinstance(used, fx.Node) for state in states.get(used, ())]
            made[node] = graph.call_function(node.target, (*args, *more), kwargs)
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], made.__getitem__))
    return fx.GraphModule(root, graph), tuple(slots)


def graph_form(body: fx.GraphModule) -> tuple[Hashable, ...]:
    """Returns a graph's operations, with nodes numbered instead of named."""
    number = {node: n for n, node in enumerate(body.graph.nodes)}
    lines: list[Hashable] = []
    for node in body.graph.nodes:
        if node.op == "get_attr":
            path, _, key = str(node.target).rpartition(".")
            attribute = getattr(body.get_submodule(path), key)
            lines.append(graph_form(attribute) if isinstance(attribute, fx.GraphModule) else tensor_form(attribute))
            continue
        target = "" if node.op == "placeholder" else str(node.target)
        args: Any = fx.map_arg((node.args, node.kwargs), lambda used: f"%{number[used]}")
        lines.append((node.op, target, repr(args)))
    return tuple(lines)


def tensor_form(tensor: Tensor) -> tuple[Hashable, ...]:
    """Returns a tensor's shape and dtype, and whether it is a parameter and trained."""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter)
