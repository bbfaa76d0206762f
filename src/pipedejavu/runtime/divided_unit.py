"""Divided units: modules that hold one rank's parameters and compute its part of a unit.

A rank divides all units of the stages that it runs at once, since a division may span several. Parameters that units
share stay shared.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from pipedejavu.facts import InputError
from pipedejavu.runtime.axis_region import UnitGraph
from pipedejavu.runtime.division import Division
from pipedejavu.runtime.graph_part import GraphPart
from pipedejavu.runtime.graph_step import Draws
from pipedejavu.runtime.param_layout import DividedUnit, ParamLayout
from pipedejavu.runtime.tensor_group import TensorGroup

Value = Tensor | tuple[Tensor, ...]


class DividedGraph(DividedUnit):
    """A unit of which each rank of a group computes a part, with a graph per shape of its inputs."""

    def __init__(self, name: str, prefix: str, layouts: Mapping[str, ParamLayout]):
        super().__init__()
        self.name, self.prefix, self.layouts = name, prefix, layouts
        self.bodies = nn.ModuleList()
        self.draws = Draws()
        self._by_shapes: dict[tuple[tuple[int, ...], ...], fx.GraphModule] = {}

    def add(self, shapes: tuple[tuple[int, ...], ...], body: fx.GraphModule) -> None:
        """Adds the graph for one shape of inputs."""
        self._by_shapes[shapes] = body
        self.bodies.append(body)

    def forward(self, value: Value) -> Value:
        """Takes and returns what the whole unit does, or the parts of it that the units around it are divided by."""
        tensors = value if isinstance(value, tuple) else (value,)
        shapes = tuple(tuple(t.shape) for t in tensors)
        if shapes not in self._by_shapes:
            raise InputError(
                f"unit '{self.name}' was divided for microbatches of other sizes than {shapes}; give every microbatch"
                " a size of the plan"
            )
        results: tuple[Tensor, ...] = self._by_shapes[shapes](*tensors)
        return results if len(results) > 1 else results[0]

    def seed(self, seed: int, device: torch.device) -> None:
        """Seeds the masks of the next call."""
        if device.type != "cpu":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
            return
        self.draws.generator = self.draws.generator or torch.Generator()
        self.draws.generator.manual_seed(seed)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules with parameters under their names in the model."""
        for body in self.bodies:
            yield from body.named_modules(memo, prefix if self.prefix else "", remove_duplicate)


class UnitDivider:
    """Makes the divided units of one rank."""

    def __init__(self, group: TensorGroup):
        self.group = group
        self._parameters: dict[tuple[int, ParamLayout], Tensor] = {}
        """This rank's part of each whole parameter and buffer, by id and layout."""
        self.units: dict[str, DividedGraph] = {}

    def add(self, division: Division, prefixes: Sequence[str]) -> list[DividedGraph]:
        """Adds the graphs of a chain for one shape of inputs, and returns its units.

        `prefixes` begin the names of each unit's parameters in the model.
        """
        shapes = division_shapes(division)
        for unit, prefix, inputs in zip(division.chain.graphs, prefixes, shapes, strict=True):
            tensors, layouts = self._tensors(division, unit)
            full = {".".join(filter(None, (prefix, name))): layout for name, layout in layouts.items()}
            divided = self.units.setdefault(unit.name, DividedGraph(unit.name, prefix, full))
            if divided.layouts != full:
                raise InputError(f"unit '{unit.name}' is divided in another way for microbatches of another size")
            body = GraphPart(division, unit, self.group, divided.draws).write(tensors)
            if divided.bodies:
                _share_tensors(body, divided.bodies[0], tensors)
            divided.add(inputs, body)
        return [self.units[unit.name] for unit in division.chain.graphs]

    def _tensors(self, division: Division, unit: UnitGraph) -> tuple[dict[str, Tensor], dict[str, ParamLayout]]:
        tensors: dict[str, Tensor] = {}
        layouts: dict[str, ParamLayout] = {}
        for node in unit.body.graph.nodes:
            if node not in division.chain.held:
                continue
            name, whole = str(node.target), division.chain.held[node]
            layout = division.layout_of(node)
            if layout.is_divided:
                layouts[name] = layout
            key = id(whole), layout
            if key not in self._parameters:
                self._parameters[key] = self._local(whole, layout)
            tensors[name] = self._parameters[key]
        return tensors, layouts

    def _local(self, whole: Tensor, layout: ParamLayout) -> Tensor:
        local = layout.local(whole.detach(), self.group.rank, self.group.size)
        return nn.Parameter(local, requires_grad=whole.requires_grad) if isinstance(whole, nn.Parameter) else local


def _share_tensors(body: nn.Module, first: nn.Module, states: Mapping[str, Tensor]) -> None:
    """Makes a graph for another shape use the parameters and buffers of the first, wherever they have moved since."""
    homes = dict(first.named_modules())
    for path, module in body.named_modules():
        home = homes.get(path)
        if home is None:
            continue
        if module._parameters.keys() <= home._parameters.keys():
            module.__dict__["_parameters"] = home._parameters
        for key, own in module._buffers.items():
            known = home._buffers.get(key)
            if own is not None and known is not None:  # constants may depend on the shape
                is_state = ".".join(filter(None, (path, key))) in states
                module._buffers[key] = known if is_state else own.to(known.device)


def division_shapes(division: Division) -> list[tuple[tuple[int, ...], ...]]:
    """Returns the shapes of what each unit takes on a rank."""
    regions = (*division.regions, *([division.sequence] if division.sequence else []))
    splits = {node: split for region in regions for node, split in region.splits.items()}
    shapes = []
    for graph in division.chain.graphs:
        rows = []
        for node in graph.inputs:
            split, shape = splits.get(node), tuple(node.meta["val"].shape)
            rows.append(tuple(n // division.size if split and d == split.dim else n for d, n in enumerate(shape)))
        shapes.append(tuple(rows))
    return shapes
