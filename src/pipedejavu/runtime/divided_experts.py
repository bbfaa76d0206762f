"""A unit whose experts are divided over the ranks of a group; all else of it runs on each rank's own samples."""

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from pipedejavu.facts import InputError
from pipedejavu.runtime.compiled_unit import GraphUnit
from pipedejavu.runtime.expert_exchange import RowGroup, run_capped, run_slots, run_sorted
from pipedejavu.runtime.expert_span import ExpertSpan, find_spans
from pipedejavu.runtime.param_layout import DividedUnit, ParamLayout
from pipedejavu.runtime.stacked_experts import expert_layouts, parameter_shapes, recorded_graphs, slot_experts


class DividedExperts(DividedUnit):
    """Runs a copy of a unit with this rank's part of its experts, and all other tensors of the unit.

    `layouts` has the full names of parameters.
    """

    def __init__(self, name: str, unit: nn.Module, group: RowGroup, capacity: float | None = None):
        """Divides a unit; with a `capacity`, each expert has slots for that many times an even share of the rows."""
        super().__init__()
        self.unit, self.group, self.capacity = _like(unit), group, capacity
        self._source = (unit,)  # in a tuple, as it is no part of this module
        layouts, self._wholes = expert_layouts(unit), parameter_shapes(unit)
        prefix = "" if isinstance(unit, GraphUnit) else f"{name}."
        self.layouts: Mapping[str, ParamLayout] = {prefix + inner: layout for inner, layout in layouts.items()}
        self._known: set[str] = set()
        """Names of the recorded graphs that are divided."""
        check_experts(name, layouts, group.size)
        if not isinstance(unit, GraphUnit):
            parts = [self.unit.get_submodule(path) for path, _ in slot_experts(unit)]
            if parts and capacity is not None:
                raise InputError(
                    f"unit '{name}' has slots of its own for the tokens of each expert, so cut.capacity would be a"
                    " second limit; leave cut.capacity out"
                )
            for part in parts:
                part.forward = partial(_run_slots, group, part.forward)
        holders = dict(self.unit.named_modules(remove_duplicate=False))
        for inner, layout in layouts.items():
            path, _, key = inner.rpartition(".")
            whole = holders[path]._parameters[key]
            assert whole is not None
            if not whole.requires_grad:
                raise InputError(
                    f"unit '{name}' has experts that are not trained, which the plan cannot divide: '{inner}'; train"
                    " them, or use another plan"
                )
            holders[path]._parameters[key] = nn.Parameter(layout.local(whole.detach(), group.rank, group.size))

    def forward(self, value: Any) -> Any:
        """Runs the unit; all ranks of the group call it together."""
        if isinstance(self.unit, GraphUnit):
            for name, _ in recorded_graphs(self._source[0]):
                if name not in self._known:  # a graph for another shape of inputs may be recorded later
                    self._known.add(name)
                    self._divide(self._taken(name))
        return self.unit(value)

    def _taken(self, name: str) -> fx.GraphModule:
        """Returns a copy of a graph of the unit with this rank's parameters."""
        holder, _, _ = name.rpartition(".")
        shapes, _, number = holder.rpartition(".")
        graphs = self.unit.get_submodule(shapes)
        assert isinstance(graphs, nn.ModuleList)
        if int(number) == len(graphs):
            graphs.append(_like(self._source[0].get_submodule(holder)))
        graph = self.unit.get_submodule(name)
        assert isinstance(graph, fx.GraphModule)
        first = dict(self.unit.named_modules(remove_duplicate=False))
        for path, module in graph.named_modules():
            if module._parameters:
                module.__dict__["_parameters"] = first[path]._parameters
        return graph

    def _divide(self, graph: fx.GraphModule) -> None:
        for number, span in enumerate(find_spans(graph.graph, self._wholes)):
            name = f"experts_{number}"
            graph.add_module(name, _SpanExperts(span, self.group, self.capacity))
            inputs = (span.rows, *((span.ends,) if span.ends is not None else ()), *span.weights)
            with graph.graph.inserting_after(span.output):
                call = graph.graph.call_module(name, inputs)
            span.output.replace_all_uses_with(call)
            for node in reversed(span.nodes):
                graph.graph.erase_node(node)
        graph.recompile()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules of the unit under their own names."""
        yield from self.unit.named_modules(memo, prefix, remove_duplicate)


def _like(module: nn.Module) -> nn.Module:
    """Returns a copy of a module with the same parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    return copy.deepcopy(module, memo)


def check_experts(name: str, layouts: Mapping[str, ParamLayout], size: int) -> None:
    """Raises InputError if the experts of a unit cannot be divided evenly."""
    for experts in sorted({layout.shape[0] for layout in layouts.values()}):
        if experts < size:
            raise InputError(
                f"unit '{name}' has {experts} experts, and the plan divides them over {size} workers; use {experts}"
                " shards or fewer"
            )
        if experts % size:
            raise InputError(
                f"unit '{name}' has {experts} experts, which {size} workers cannot divide evenly; use a number of"
                f" shards that divides {experts}"
            )


def _run_slots(group: RowGroup, run: Any, rows: Tensor) -> Tensor:
    return run_slots(rows, group, run)


class _SpanExperts(nn.Module):
    """A span of a recorded graph, on this rank's experts and the rows of all ranks."""

    def __init__(self, span: ExpertSpan, group: RowGroup, capacity: float | None):
        super().__init__()
        self.body, self.group, self.capacity = _body(span), group, capacity
        self.is_sorted = span.ends is not None

    def forward(self, rows: Tensor, *others: Tensor) -> Tensor:
        """Takes and returns this rank's rows for all experts; `others` are the ends of sorted rows, and the weights."""
        if not self.is_sorted:
            return run_slots(rows, self.group, lambda there: self.body(there, *others))
        ends, *weights = others

        def run(there: Tensor, ends_there: Tensor) -> Tensor:
            result: Tensor = self.body(there, ends_there, *weights)
            return result

        if self.capacity is not None:
            return run_capped(rows, ends, self.group, run, self.capacity)
        return run_sorted(rows, ends, self.group, run)


def _body(span: ExpertSpan) -> fx.GraphModule:
    """Returns the operations of a span as a graph of its rows, their ends, and its weights."""
    graph = fx.Graph()
    inputs = [span.rows, *([span.ends] if span.ends is not None else []), *span.weights]
    made = {node: graph.placeholder(f"input_{n}") for n, node in enumerate(inputs)}

    def copied(node: fx.Node) -> fx.Node:
        if node not in made:  # an operation of the span, or another form of its weights
            for needed in node.all_input_nodes:
                copied(needed)
            made[node] = graph.node_copy(node, made.__getitem__)
        return made[node]

    graph.output(copied(span.output))
    return fx.GraphModule({}, graph)
