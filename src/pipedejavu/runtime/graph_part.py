"""One rank's part of a unit's graph: the same operations on the shapes of its parts, with collectives between them."""

from operator import getitem
from typing import Any

import torch
from torch import fx

from pipedejavu.runtime.axis_region import SPLITS, VIEWS, Region, UnitGraph, bounds_of
from pipedejavu.runtime.axis_rule import argument, is_tensor, name_of, shape_of
from pipedejavu.runtime.channel_region import OperatorLayout, channel_dim, grid_of, weight_of
from pipedejavu.runtime.division import Division
from pipedejavu.runtime.graph_step import (
    Draws,
    Dropout,
    Gather,
    GatheredProduct,
    GatherOnce,
    JoinParts,
    MaskedAttention,
    ScatterSum,
    SequenceAttention,
    Step,
    SumBackward,
    SumForward,
    TakeHeads,
    TakePart,
)
from pipedejavu.runtime.loss_part import SummedLoss, VocabularyLoss, VocabularyRows
from pipedejavu.runtime.loss_rule import LOSS
from pipedejavu.runtime.reshape_rule import Split, local_shape
from pipedejavu.runtime.tensor_group import TensorGroup


class GraphPart:
    """Writes one rank's part of a unit's graph."""

    def __init__(self, division: Division, unit: UnitGraph, group: TensorGroup, draws: Draws):
        self.division, self.unit, self.group, self.draws = division, unit, group, draws
        self.graph, self.root = fx.Graph(), dict[str, Any]()
        self.made: dict[fx.Node, fx.Node] = {}
        self._stepped: dict[tuple[type[Step], fx.Node, Split | None], fx.Node] = {}

    def write(self, tensors: dict[str, Any]) -> fx.GraphModule:
        """Returns the graph; `tensors` has this rank's parameters and buffers by the names of the unit's graph."""
        for node in self.unit.body.graph.nodes:
            if node.op == "placeholder":
                self.made[node] = self.graph.placeholder(node.name)
                if _is_overwritten(node):
                    self.made[node] = self.graph.call_function(torch.ops.aten.clone.default, (self.made[node],))
            elif node.op == "get_attr":
                name = str(node.target)
                self.root[name] = tensors[name] if name in tensors else self.unit.tensor(node)
                self.made[node] = self.graph.get_attr(name)
            elif node.op == "output":
                self.graph.output(tuple(self._result(used) for used in node.args[0]))
            else:
                self.made[node] = self._operation(node)
        return fx.GraphModule(self.root, self.graph)

    def _result(self, used: fx.Node) -> fx.Node:
        """Returns what the unit passes on: parts to the next unit of the worker, and whole tensors to other workers."""
        sequence = self.division.sequence
        if sequence is None or used not in sequence.splits or used not in self.division.chain.ends:
            return self.made[used]
        return self._once(JoinParts, used, sequence.splits[used])

    def _operation(self, node: fx.Node) -> fx.Node:
        if (layout := self.division.operators.get(node)) is not None:
            return self._operator(node, layout)
        region, sequence = self.division.region_of(node), self.division.sequence
        if region is None and node in self.division.on_parts:
            region = sequence
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: self._operand(node, used, region))
        if region is not None and name_of(node) == LOSS:
            return self._loss(node, region, args, kwargs)
        if (step := self._random(node, region, args, kwargs)) is not None:
            return step
        if region is None:
            return self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        if node in region.sums:
            return self._sum(node, list(args), dict(kwargs))
        if (product := self._product(node, args, kwargs)) is not None:
            return product
        return self.graph.call_function(node.target, *self._adapted(node, region, list(args), dict(kwargs)))  # type: ignore[arg-type]

    def _operator(self, node: fx.Node, layout: OperatorLayout) -> fx.Node:
        """Writes an operator whose channels or filters are divided; a bias is added once, after any sum."""
        source, bias = argument(node, "input"), argument(node, "bias")
        x, (rows, columns) = self.made[source], grid_of(self.group.size)
        p, q = divmod(self.group.rank, columns)
        gathers = {"stationary-y": [*range(self.group.size)], "stationary-w": [p * columns + n for n in range(columns)]}
        scatters = {"stationary-x": [*range(self.group.size)], "stationary-w": [n * columns + q for n in range(rows)]}
        is_inner = layout.reads and layout.makes
        if is_inner and len(gathers.get(layout.kind, ())) > 1:
            x = self._step(Gather, x, dim=channel_dim(node, source), members=gathers[layout.kind])
        elif not layout.reads and source.meta["val"].requires_grad:
            x = self._step(SumBackward, x)
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("input", "weight", "bias")}
        kwargs = fx.map_arg(kwargs, self.made.__getitem__)
        y = self.graph.call_function(node.target, (x, self.made[weight_of(node)], None, *node.args[3:]), kwargs)  # type: ignore[arg-type]
        if is_inner and len(scatters.get(layout.kind, ())) > 1:
            y = self._step(ScatterSum, y, dim=channel_dim(node, node), members=scatters[layout.kind])
        elif not layout.makes:
            y = self._step(SumForward, y)
        return y if bias is None else self._biased(node, y, self.made[bias])

    def _product(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node | None:
        """Returns a matrix product that gathers its input again in the backward; None if its input is not gathered."""
        position = {"linear": 0, "addmm": 1, "mm": 0, "matmul": 0}.get(name_of(node))
        if position is None or kwargs or not isinstance(used := node.args[position], fx.Node):
            return None
        sequence = self.division.sequence
        split = sequence.splits.get(used) if sequence is not None else None
        if split is None or (gathered := self._stepped.get((GatherOnce, used, split))) is None:
            return None
        source = self.graph.call_function(getitem, (gathered, 1))
        return self._step(GatheredProduct, source, *args, target=node.target, position=position)

    def _biased(self, node: fx.Node, total: fx.Node, bias: fx.Node) -> fx.Node:
        if name_of(node).startswith("conv"):
            shape = [-1, *(1,) * (len(shape_of(node)) - 2)]
            bias = self.graph.call_function(torch.ops.aten.view.default, (bias, shape))
        return self.graph.call_function(torch.ops.aten.add.Tensor, (total, bias))

    def _operand(self, node: fx.Node, used: fx.Node, region: Region | None) -> fx.Node:
        """Returns what an operation reads in place of a node of the whole graph."""
        sequence, made = self.division.sequence, self.made[used]
        if not is_tensor(used):
            return made
        split = sequence.splits.get(used) if sequence is not None else None
        if region is not None and region is sequence:
            return made if split is not None else self._given(node, used)
        if region is not None and split is not None and used in region.entries and not self._is_shared(node, used):
            return self.graph.call_function(getitem, (self._once(GatherOnce, used, split), 0))
        if split is not None:
            made = self._once(JoinParts, used, split)
        if region is None:
            return made
        if self._is_shared(node, used):
            return self._step(TakeHeads, made, heads=shape_of(node)[1])
        if used in region.cut:
            return self._once(TakePart, used, region.cut[used])
        return self._once(SumBackward, used) if used in region.entries else made

    def _is_shared(self, node: fx.Node, used: fx.Node) -> bool:
        """Whether an operand is the keys or values that several heads share, of which each rank takes its own."""
        return any(node in region.repeats and used in node.args[1:3] for region in self.division.regions)

    def _given(self, node: fx.Node, used: fx.Node) -> fx.Node:
        """Returns what an operation on parts of the sequence reads in place of a tensor that all ranks have."""
        assert self.division.sequence is not None
        if (split := self.division.sequence.part_for(node, used)) is not None:
            return self._once(TakePart, used, split)
        return self._once(SumBackward, used) if used.meta["val"].requires_grad else self.made[used]

    def _once(self, kind: type[Step], used: fx.Node, split: Split | None = None) -> fx.Node:
        """Returns the result of a step on a tensor, for all operations that read it."""
        key = kind, used, split
        if key not in self._stepped:
            sequence = self.division.sequence
            made = self.made[used]
            if kind is TakePart and sequence is not None and split is not None and used in sequence.splits:
                made = self._once(JoinParts, used, sequence.splits[used])
            facts = {} if split is None else split._asdict()
            self._stepped[key] = self._step(kind, made, **facts)
        return self._stepped[key]

    def _step(self, kind: type[Step], *args: Any, **facts: Any) -> fx.Node:
        name = f"step_{len(self.root)}"
        self.root[name] = kind(self.group, **facts)
        return self.graph.call_module(name, args)

    def _sum(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        """Writes an operation whose result is a part of a sum; a bias is added once, after the sum."""
        name, bias = name_of(node), None
        target: Any = node.target
        if name == "embedding":
            return self._summed(node, self._rows(node, args))
        if name == "addmm":
            bias, target, args = node.args[0], torch.ops.aten.mm.default, args[1:3]
        elif (bias := argument(node, "bias")) is not None:
            kwargs.pop("bias", None)
            args = [None if n == 2 else arg for n, arg in enumerate(args)]
        total = self._summed(node, self.graph.call_function(target, tuple(args), kwargs))
        if bias is None:
            return total
        assert isinstance(bias, fx.Node)
        is_part = self.division.sequence is not None and node in self.division.sequence.splits
        has_parts = is_part and bias.meta["val"].requires_grad
        return self._biased(node, total, self._once(SumBackward, bias) if has_parts else self.made[bias])

    def _summed(self, node: fx.Node, parts: fx.Node) -> fx.Node:
        """Returns the sum over the ranks, or this rank's part of it if the sequence is divided after it."""
        sequence = self.division.sequence
        if sequence is None or node not in sequence.splits:
            return self._step(SumForward, parts)
        return self._step(ScatterSum, parts, **sequence.splits[node]._asdict())

    def _rows(self, node: fx.Node, args: list[Any]) -> fx.Node:
        """Writes an embedding of which this rank has some rows; those of other ranks are zeros."""
        length, padding = shape_of(argument(node, "weight"))[0], argument(node, "padding_idx", -1)
        return self._step(VocabularyRows, args[0], args[1], length=length, padding=padding)

    def _loss(self, node: fx.Node, region: Region, args: Any, kwargs: Any) -> fx.Node:
        """Writes a cross-entropy of which this rank has some classes, or some tokens."""
        names = ("weight", "reduction", "ignore_index", "label_smoothing")
        defaults = (None, 1, -100, 0.0)
        facts = {name: argument(node, name, default) for name, default in zip(names, defaults, strict=True)}
        weight = facts.pop("weight")
        if region is not self.division.sequence:
            return self._step(VocabularyLoss, args[0], args[1], **facts)
        if node not in region.sums:
            return self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        given = (self.made[argument(node, "target")], None if weight is None else self.made[weight])
        return self._step(SummedLoss, args[0], args[1], *given, **facts)

    def _random(self, node: fx.Node, region: Region | None, args: Any, kwargs: Any) -> fx.Node | None:
        """Returns the step for a dropout, whose mask is the whole tensor's, or None for other operations."""
        split = region.splits.get(node) if region is not None else None
        if name_of(node) in ("dropout", "dropout_"):
            p = argument(node, "p")
            if not argument(node, "train") or not p:
                return self.made[node.args[0]] if region is None else args[0]  # type: ignore[index]
            return self._step(Dropout, args[0], shape=shape_of(node), p=p, split=split, draws=self.draws)
        if name_of(node) != "scaled_dot_product_attention":
            return None
        p, is_divided = argument(node, "dropout_p", 0.0), region is not None and region is self.division.sequence
        if not p and not is_divided:
            return None
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        given = (*args[:3], mask, bool(argument(node, "is_causal", False)), argument(node, "scale"))
        kind = SequenceAttention if is_divided else MaskedAttention
        return self._step(kind, *given, shape=shape_of(node), p=p, split=split, draws=self.draws)

    def _adapted(
        self, node: fx.Node, region: Region, args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments with the sizes of this rank's part."""
        name, size, split = name_of(node), self.group.size, region.splits.get(node)
        if name in VIEWS:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if name == "flatten":
                return tuple(args), kwargs
            if name == "unflatten":
                dim, parts = argument(node, "dim") % len(shape_of(source)), len(argument(node, "sizes"))
                args[2] = local_shape(shape_of(node), split, size)[dim : dim + parts]
                return tuple(args), kwargs
            return (args[0], local_shape(shape_of(node), split, size)), {}
        if name == "expand":
            return (args[0], local_shape(shape_of(node), split, size)), kwargs
        if name in SPLITS and name != "unbind":
            return self._adapted_parts(node, region, args), kwargs
        source = node.args[0] if node.args else None
        divided = self._split_for(node, source, region) if isinstance(source, fx.Node) else None
        if name == "slice" and divided is not None:
            dim, start, end = bounds_of(node)
            if dim == divided.dim:
                args[1:4] = [dim, start // size, end // size]
                return tuple(args[:4]), {}
        if name in ("conv1d", "conv2d", "conv3d", "convolution") and (groups := argument(node, "groups", 1)) > 1:
            args, kwargs = _with(node, args, kwargs, "groups", groups // size)
        if name == "group_norm" and split is not None and split.dim == 1:
            args, kwargs = _with(node, args, kwargs, "num_groups", argument(node, "num_groups") // size)
        if node in region.repeats:
            args, kwargs = _with(node, args, kwargs, "enable_gqa", False)
        return tuple(args), kwargs

    def _split_for(self, node: fx.Node, source: fx.Node, region: Region) -> Split | None:
        """Returns how an operand is divided when an operation of a region reads it."""
        sequence = self.division.sequence
        if (split := region.splits.get(source)) is None and sequence is not None and region is sequence:
            return sequence.part_for(node, source)
        return split

    def _adapted_parts(self, node: fx.Node, region: Region, args: list[Any]) -> tuple[Any, ...]:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        divided, dim = self._split_for(node, source, region), (argument(node, "dim", 0) or 0) % len(shape_of(source))
        assert divided is not None
        if divided.dim != dim or name_of(node).endswith("chunk"):
            return tuple(args)
        sizes = args[1]
        args[1] = sizes // self.group.size if isinstance(sizes, int) else [n // self.group.size for n in sizes]
        return tuple(args)


def _with(
    node: fx.Node, args: list[Any], kwargs: dict[str, Any], name: str, value: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Returns arguments with one replaced."""
    position = [known.name for known in node.target._schema.arguments].index(name)  # type: ignore[union-attr]
    if position < len(args):
        return [*args[:position], value, *args[position + 1 :]], kwargs
    return args, kwargs | {name: value}


def _is_overwritten(node: fx.Node) -> bool:
    """Whether a unit changes its input in place."""
    targets = [user.target for user in node.users if user.args and user.args[0] is node]
    return any(isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable for t in targets)
