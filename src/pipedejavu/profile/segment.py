"""A part of a model's graph as a module: it takes the tensors that are live where it begins, and returns those that are
live where it ends.

Its parameters and buffers are the model's own, under the model's own names. A graph holds for one shape, and a segment
may have several; they follow their inputs to another device, and a replay to float64.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipedejavu.facts import InputError

Value = Tensor | tuple[Tensor, ...]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SegmentEntry:
    """A tensor that a segment is given."""

    shape: tuple[int, ...]
    has_gradient: bool
    """Whether weights before the segment made it; a mask must not seem to need a gradient, which changes kernels."""
    is_overwritten: bool
    """Whether the segment works in its memory, so that it needs a copy."""


class Body(nn.Module):
    """A graph for one shape."""

    def __init__(self, graph: fx.GraphModule, entries: Sequence[SegmentEntry]):
        super().__init__()
        self.graph, self.entries = graph, tuple(entries)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def forward(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs the graph on the device of what it is given."""
        if given[0].device != self.device:
            self.device = given[0].device
            _rewrite(self.graph, lambda leaf: self.device if isinstance(leaf, torch.device) else leaf)
        inputs = []
        for tensor, entry in zip(given, self.entries, strict=True):
            own = tensor if entry.has_gradient else tensor.detach()
            inputs.append(own.clone() if entry.is_overwritten else own)
        found: tuple[Tensor, ...] = self.graph(*inputs)
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Body":
        """Follows `double`: what the graph makes in any floating-point type it then makes in float64."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if fn(torch.empty(0, dtype=torch.float32)).dtype == torch.float64 != self.dtype:
            self.dtype = torch.float64
            _rewrite(self.graph, _widened)
        return self


class Segment(nn.Module):
    """Runs a part of a model, by the graph for the shape of what it is given."""

    def __init__(self, name: str, body: Body):
        super().__init__()
        self.name, self.bodies = name, nn.ModuleList([body])

    def forward(self, value: Value) -> Value:
        """Takes and returns the live tensors: one, or a tuple of several."""
        found: tuple[Tensor, ...] = self.body_for(value)(value if isinstance(value, tuple) else (value,))
        return found if len(found) > 1 else found[0]

    def body_for(self, value: Value) -> Body:
        """Returns the graph for the shape of a value; raises InputError where there is none."""
        shapes, bodies = _shapes_of(value), self._by_shapes()
        if shapes not in bodies:
            raise InputError(
                f"unit '{self.name}' was cut for {' or '.join(map(_written, bodies))} and is given {_written(shapes)};"
                " give every microbatch a shape that the model was cut for"
            )
        return bodies[shapes]

    def takes(self, value: Value) -> bool:
        """Whether it has a graph for the shape of a value."""
        return _shapes_of(value) in self._by_shapes()

    def _by_shapes(self) -> dict[Shapes, Body]:
        bodies = [body for body in self.bodies if isinstance(body, Body)]
        return {tuple(entry.shape for entry in body.entries): body for body in bodies}

    def adopt(self, other: "Segment") -> None:
        """Takes over the graph of the same part of the model for another shape; both look for weights in one place."""
        own = {path: part for path, part in self.named_modules() if part._parameters}
        for path, part in other.named_modules():
            if part._parameters:
                part.__dict__["_parameters"] = own[path]._parameters
        self.bodies.extend(other.bodies)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",  # noqa: ARG002
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the holders of parameters under the model's own names, whatever the unit is called."""
        for body in self.bodies:
            assert isinstance(body, Body)
            yield from body.graph.named_modules(memo, "", remove_duplicate)


def make_body(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    states: Mapping[fx.Node, str],
    held: Mapping[str, Tensor | nn.Module],
) -> fx.GraphModule:
    """Returns a graph of its own with some operations of a trace."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        for needed in node.all_input_nodes:
            if needed in states and needed not in made:
                made[needed] = graph.get_attr(states[needed])
        assert callable(node.target), "a trace holds operations only"
        target = _REGIONS.get(str(node.target), node.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
        made[node] = graph.call_function(target, args, kwargs)
        made[node].meta["stack_trace"] = node.meta.get("stack_trace")
    for node in outputs:
        if node in states and node not in made:
            made[node] = graph.get_attr(states[node])
    graph.output(tuple(made[node] for node in outputs))
    root: dict[str, Any] = {str(node.target): held[str(node.target)] for node in graph.nodes if node.op == "get_attr"}
    for name, body in root.items():
        if isinstance(body, fx.GraphModule):
            root[name] = _without_checks(body)
    return fx.GraphModule(root, graph)


def _without_checks(body: fx.GraphModule) -> fx.GraphModule:
    """Returns the body of a region like those of segments, without what only asserts."""
    nodes = [n for n in body.graph.nodes if n.op == "call_function" and "_assert" not in str(n.target)]
    states = {n: str(n.target) for n in body.graph.nodes if n.op == "get_attr"}
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in body.graph.nodes if n.op == "output")
    held = {name: getattr(body, name) for name in states.values()}
    return make_body(nodes, inputs, list(output.args[0]), states, held)


def _with_grad(enabled: bool, body: nn.Module, *args: Tensor) -> Any:
    with torch.set_grad_enabled(enabled):
        return body(*args)


def _with_autocast(
    device: str, dtype: torch.dtype | None, enabled: bool, caches: bool | None, body: nn.Module, *args: Tensor
) -> Any:
    with torch.autocast(args[0].device.type if args else device, dtype, enabled, caches):
        return body(*args)


_REGIONS: dict[str, Callable[..., Any]] = {
    "wrap_with_set_grad_enabled": _with_grad,
    "wrap_with_autocast": _with_autocast,
}
"""Operations that run a body under other rules."""


def is_region(node: fx.Node) -> bool:
    """Whether an operation runs a body that segments can run."""
    return str(node.target) in _REGIONS


def refusal_of_branches(name: str) -> str:
    """Returns the sentence for an operation whose body torch records anew in each backward, one thread at a time."""
    return (
        f"it calls '{name}', an operation with functions as arguments, which several workers cannot run at a time;"
        " compute both results and choose with torch.where"
    )


def _rewrite(body: fx.GraphModule, change: Callable[[Any], Any]) -> None:
    """Changes constants in the arguments of a graph's operations, in the bodies of regions too."""
    for part in body.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if node.op == "call_function":
                node.args = fx.node.map_aggregate(node.args, change)
                node.kwargs = fx.node.map_aggregate(node.kwargs, change)
        part.recompile()


def _widened(leaf: Any) -> Any:
    if not isinstance(leaf, torch.dtype):
        return leaf
    return torch.float64 if leaf.is_floating_point else torch.complex128 if leaf.is_complex else leaf


def _shapes_of(value: Value) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in (value if isinstance(value, tuple) else (value,)))


def _written(shapes: Shapes) -> str:
    return " and ".join("×".join(map(str, shape)) or "a number" for shape in shapes)
