"""A segment: a part of a model's graph as a module that maps the live tensors at its start to those at its end.

Its parameters and buffers are the model's own, under the model's own names. A graph is valid for one shape of inputs; a
segment may hold several graphs. Constants in a graph follow the inputs to another device, and to float64 in a replay.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipedejavu.facts import InputError
from pipedejavu.profile.lifted_graph import TensorSlot, graph_form, lift
from pipedejavu.runtime.compiled_unit import GraphUnit, LiftedUnit, digest

Value = Tensor | tuple[Tensor, ...]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SegmentEntry:
    """A tensor that a segment takes."""

    shape: tuple[int, ...]
    has_gradient: bool
    """Whether it depends on trained parameters; a mask must not require gradients, which changes kernels."""
    is_overwritten: bool
    """Whether the segment changes it in place, so that it needs a copy."""


class Body(nn.Module):
    """A graph for one shape of inputs."""

    def __init__(self, graph: fx.GraphModule, entries: Sequence[SegmentEntry], device: torch.device):
        """Takes a graph that was traced on a device."""
        super().__init__()
        self.graph, self.entries = graph, tuple(entries)
        self.device, self.dtype = device, torch.float32
        self._lifted: tuple[str, fx.GraphModule, tuple[TensorSlot, ...]] | None = None

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs the graph on the device of its inputs."""
        results: tuple[Tensor, ...] = self.graph(*self._take(tensors))
        return results

    def lifted(self, tensors: Sequence[Tensor]) -> LiftedUnit:
        """Returns the graph with the inputs, weights, buffers and constants as arguments."""
        inputs = self._take(tensors)
        if self._lifted is None:
            graph, slots = lift(self.graph)
            self._lifted = digest((self.entries, self.training, graph_form(self.graph))), graph, slots
        key, graph, slots = self._lifted
        return LiftedUnit(key, graph, (*inputs, *(slot.tensor() for slot in slots)))

    def _take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the inputs of the graph, whose constants follow these to their device."""
        if tensors[0].device != self.device:
            self.device, self._lifted = tensors[0].device, None
            _rewrite(self.graph, lambda leaf: self.device if isinstance(leaf, torch.device) else leaf)
        inputs = []
        for tensor, entry in zip(tensors, self.entries, strict=True):
            leaf = tensor if entry.has_gradient else tensor.detach()
            inputs.append(leaf.clone() if entry.is_overwritten else leaf)
        return inputs

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Body":
        """Follows `double()`: constants and conversions of the graph become float64, too."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if fn(torch.empty(0, dtype=torch.float32)).dtype == torch.float64 != self.dtype:
            self.dtype, self._lifted = torch.float64, None
            _rewrite(self.graph, _widened)
        return self


class Segment(GraphUnit):
    """Runs a part of a model with the graph for the shape of its inputs."""

    def __init__(self, name: str, body: Body):
        super().__init__()
        self.name, self.bodies = name, nn.ModuleList([body])
        self._buffer_names: frozenset[str] = frozenset()
        """The model's buffers by name, once there are several graphs; all use the first one's, which may change."""

    def forward(self, value: Value) -> Value:
        """Takes and returns the live tensors: one tensor, or a tuple of several."""
        results: tuple[Tensor, ...] = self.body_for(value)(value if isinstance(value, tuple) else (value,))
        return results if len(results) > 1 else results[0]

    def lifted(self, value: Value) -> LiftedUnit:
        """Returns the graph for the shape of a value, with its tensors as arguments."""
        return self.body_for(value).lifted(value if isinstance(value, tuple) else (value,))

    def body_for(self, value: Value) -> Body:
        """Returns the graph for a value's shape; raises InputError if there is none."""
        shapes, bodies = _shapes_of(value), self._by_shapes()
        if shapes not in bodies:
            raise InputError(
                f"unit '{self.name}' was cut for {' or '.join(map(_written, bodies))} and is given {_written(shapes)};"
                " give every microbatch a shape that the model was cut for"
            )
        return bodies[shapes]

    def takes(self, value: Value) -> bool:
        """Whether there is a graph for a value's shape."""
        return _shapes_of(value) in self._by_shapes()

    def _by_shapes(self) -> dict[Shapes, Body]:
        bodies = [body for body in self.bodies if isinstance(body, Body)]
        return {tuple(entry.shape for entry in body.entries): body for body in bodies}

    def adopt(self, other: "Segment", buffer_names: Collection[str]) -> None:
        """Adds the graphs of the same part of the model for another shape, sharing this segment's parameters.

        They share its buffers too, those of these names; constants may depend on the shape.
        """
        holders = {path: module for path, module in self.named_modules() if module._parameters}
        for path, module in other.named_modules():
            if module._parameters:
                module.__dict__["_parameters"] = holders[path]._parameters
        self.bodies.extend(other.bodies)
        self._buffer_names = frozenset(buffer_names)
        self._share_buffers()

    def _share_buffers(self) -> None:
        """Makes all graphs use the first one's buffers, wherever they have moved since."""
        first: dict[str, Tensor] = {}
        for path, module in self.named_modules(remove_duplicate=False):
            for key, buffer in module._buffers.items():
                name = ".".join(filter(None, (path, key)))
                if buffer is not None and name in self._buffer_names:
                    module._buffers[key] = first.setdefault(name, buffer)
                elif buffer is not None and first:
                    module._buffers[key] = buffer.to(next(iter(first.values())).device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Segment":
        """Follows `to()` and `double()`, which give each graph a copy of its own."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._share_buffers()
        return self

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",  # noqa: ARG002
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules with parameters under their names in the model, without the unit's name as a prefix."""
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
    """Returns a new graph of some operations of a trace."""
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
        made[node].meta["shape"] = _shape_of(node.meta.get("val"))
    for node in outputs:
        if node in states and node not in made:
            made[node] = graph.get_attr(states[node])
    graph.output(tuple(made[node] for node in outputs))
    root: dict[str, Any] = {str(node.target): held[str(node.target)] for node in graph.nodes if node.op == "get_attr"}
    for name, body in root.items():
        if isinstance(body, fx.GraphModule):
            root[name] = _without_checks(body)
    return fx.GraphModule(root, graph)


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _without_checks(body: fx.GraphModule) -> fx.GraphModule:
    """Returns the body of a region as a segment's graph, without assertions."""
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
"""Higher-order operations that run a body in another mode."""


def is_region(node: fx.Node) -> bool:
    """Whether an operation runs a body that segments support."""
    return str(node.target) in _REGIONS


def refusal_of_branches(name: str) -> str:
    """Returns the error text for control flow such as `torch.cond`, which torch retraces in one thread at a time."""
    return (
        f"it calls '{name}', an operation with functions as arguments, which several workers cannot run at a time;"
        " compute both results and choose with torch.where"
    )


def _rewrite(body: fx.GraphModule, change: Callable[[Any], Any]) -> None:
    """Changes constants in the arguments of a graph's operations, including the bodies of regions."""
    for module in body.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op == "call_function":
                node.args = fx.node.map_aggregate(node.args, change)
                node.kwargs = fx.node.map_aggregate(node.kwargs, change)
        module.recompile()


def _widened(leaf: Any) -> Any:
    if not isinstance(leaf, torch.dtype):
        return leaf
    return torch.float64 if leaf.is_floating_point else torch.complex128 if leaf.is_complex else leaf


def _shapes_of(value: Value) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in (value if isinstance(value, tuple) else (value,)))


def _written(shapes: Shapes) -> str:
    return " and ".join("×".join(map(str, shape)) or "a number" for shape in shapes)
