"""One rank's part of a unit's graph: the same operations on the shapes of its parts, with collectives between them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from pipedejavu.runtime import tensor_group
from pipedejavu.runtime.axis_region import SPLITS, VIEWS, Region, UnitGraph, bounds_of
from pipedejavu.runtime.axis_rule import argument, is_tensor, name_of, shape_of
from pipedejavu.runtime.channel_region import OperatorLayout, channel_dim, grid_of, weight_of
from pipedejavu.runtime.division import Division
from pipedejavu.runtime.member_group import MemberGroup
from pipedejavu.runtime.reshape_rule import Split, local_shape
from pipedejavu.runtime.tensor_group import TensorGroup


class Draws:
    """Where a unit draws its masks: a generator of its own on a CPU, as threads share the global one."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def mask(self, like: Tensor, shape: Sequence[int], p: float, split: Split | None, group: TensorGroup) -> Tensor:
        """Returns this rank's part of the mask that a dropout of the whole tensor draws."""
        if like.is_cuda:
            mask = functional.dropout(like.new_ones(tuple(shape)), p, True)
        else:
            mask = like.new_empty(tuple(shape)).bernoulli_(1 - p, generator=self.generator).div_(1 - p)
        if split is None:
            return mask
        starts = [part // group.size for part in split.parts]
        runs = torch.split(mask, [*split.parts], split.dim)
        own = [r.narrow(split.dim, n * group.rank, n) for r, n in zip(runs, starts, strict=True)]
        return torch.cat(own, split.dim)


class _Step(nn.Module):
    """A step of a divided graph that is no operation of torch."""

    def __init__(self, group: TensorGroup, **facts: Any):
        super().__init__()
        self.group, self.facts = group, facts


class SumForward(_Step):
    """Adds up the parts of a sum."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks."""
        return tensor_group.sum_forward(tensor, self.group)


class SumBackward(_Step):
    """Where a tensor of all ranks enters what is divided."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the tensor; its gradient is the sum over the ranks."""
        return tensor_group.sum_backward(tensor, self.group)


class Gather(_Step):
    """Gathers the parts of some ranks, for operators of which each computes another part."""

    def __init__(self, group: TensorGroup, **facts: Any):
        members = facts["members"]
        super().__init__(group if len(members) == group.size else MemberGroup(group, members), **facts)

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the parts of the ranks, joined along the divided dimension."""
        return tensor_group.gather(tensor, self.facts["dim"], self.group)


class ScatterSum(Gather):
    """Adds up parts of a sum over some ranks, each of which keeps a part of it."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part of the sum."""
        return tensor_group.scatter_sum(tensor, self.facts["dim"], self.group)


class TakePart(_Step):
    """Takes this rank's part of a tensor of all ranks."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the part along the divided dimension."""
        dim: int = self.facts["dim"]
        if tensor.requires_grad:
            return tensor_group.take_part(tensor, dim, self.group)
        return tensor.chunk(self.group.size, dim)[self.group.rank]


class TakeHeads(_Step):
    """Takes this rank's heads of keys or values that several heads share."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the keys or values of each of this rank's heads."""
        repeated = tensor.repeat_interleave(self.facts["heads"] // tensor.shape[1], 1)
        return tensor_group.take_part(repeated, 1, self.group)


class Dropout(_Step):
    """A dropout whose mask is the part of the whole tensor's."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the tensor without the dropped elements."""
        facts, draws = self.facts, self.facts["draws"]
        mask: Tensor = draws.mask(tensor, facts["shape"], facts["p"], facts["split"], self.group)
        return tensor * mask


class MaskedAttention(_Step):
    """Scaled dot-product attention with dropout, whose mask is the part of the whole attention's."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> Tensor:
        """Returns the mixed values."""
        if key.shape[1] != query.shape[1]:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        factor = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        scores = (query * factor) @ (key * factor).transpose(-2, -1)
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        elif mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        shares = torch.softmax(scores, -1)
        facts = self.facts
        shape = (*facts["shape"][:3], key.shape[2])
        kept: Tensor = shares * facts["draws"].mask(shares, shape, facts["p"], facts["split"], self.group)
        return kept @ value


class GraphPart:
    """Writes one rank's part of a unit's graph."""

    def __init__(self, division: Division, unit: UnitGraph, group: TensorGroup, draws: Draws):
        self.division, self.unit, self.group, self.draws = division, unit, group, draws
        self.graph, self.root = fx.Graph(), dict[str, Any]()
        self.made: dict[fx.Node, fx.Node] = {}
        self._entered: dict[fx.Node, fx.Node] = {}
        self._taken: dict[fx.Node, fx.Node] = {}

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
                self.graph.output(tuple(self.made[used] for used in node.args[0]))
            else:
                self.made[node] = self._operation(node)
        return fx.GraphModule(self.root, self.graph)

    def _operation(self, node: fx.Node) -> fx.Node:
        if (layout := self.division.operators.get(node)) is not None:
            return self._operator(node, layout)
        region = self.division.region_of(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: self._operand(node, used, region))
        if (step := self._random(node, region, args, kwargs)) is not None:
            return step
        if region is None:
            return self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        if node in region.sums:
            return self._sum(node, list(args), dict(kwargs))
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

    def _biased(self, node: fx.Node, total: fx.Node, bias: fx.Node) -> fx.Node:
        if name_of(node).startswith("conv"):
            shape = [-1, *(1,) * (len(shape_of(node)) - 2)]
            bias = self.graph.call_function(torch.ops.aten.view.default, (bias, shape))
        return self.graph.call_function(torch.ops.aten.add.Tensor, (total, bias))

    def _operand(self, node: fx.Node, used: fx.Node, region: Region | None) -> fx.Node:
        """Returns what an operation reads in place of a node of the whole graph."""
        made = self.made[used]
        if region is None or not is_tensor(used):
            return made
        if node in region.repeats and used in node.args[1:3]:
            return self._step(TakeHeads, made, heads=shape_of(node)[1])
        if used in region.cut:
            if used not in self._taken:
                self._taken[used] = self._step(TakePart, made, dim=region.cut[used].dim)
            return self._taken[used]
        if used in region.entries:
            if used not in self._entered:
                self._entered[used] = self._step(SumBackward, made)
            return self._entered[used]
        return made

    def _step(self, kind: type[_Step], *args: Any, **facts: Any) -> fx.Node:
        name = f"step_{len(self.root)}"
        self.root[name] = kind(self.group, **facts)
        return self.graph.call_module(name, args)

    def _sum(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        """Writes an operation whose result is a part of a sum; a bias is added once, after the sum."""
        name, bias = name_of(node), None
        target: Any = node.target
        if name == "addmm":
            bias, target, args = self._bias(node.args[0]), torch.ops.aten.mm.default, args[1:3]
        elif (used := argument(node, "bias")) is not None:
            bias = self._bias(used)
            kwargs.pop("bias", None)
            args = [None if n == 2 else arg for n, arg in enumerate(args)]
        total = self._step(SumForward, self.graph.call_function(target, tuple(args), kwargs))
        return total if bias is None else self._biased(node, total, bias)

    def _bias(self, used: Any) -> fx.Node:
        assert isinstance(used, fx.Node)
        return self.made[used]

    def _random(self, node: fx.Node, region: Region | None, args: Any, kwargs: Any) -> fx.Node | None:
        """Returns the step for a dropout, whose mask is the whole tensor's, or None for other operations."""
        split = region.splits.get(node) if region is not None else None
        if name_of(node) in ("dropout", "dropout_"):
            p = argument(node, "p")
            if not argument(node, "train") or not p:
                return self.made[node.args[0]] if region is None else args[0]  # type: ignore[index]
            return self._step(Dropout, args[0], shape=shape_of(node), p=p, split=split, draws=self.draws)
        p = argument(node, "dropout_p", 0.0) if name_of(node) == "scaled_dot_product_attention" else 0.0
        if not p:
            return None
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        given = (*args[:3], mask, bool(argument(node, "is_causal", False)), argument(node, "scale"))
        return self._step(MaskedAttention, *given, shape=shape_of(node), p=p, split=split, draws=self.draws)

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
        divided = region.splits.get(source) if isinstance(source, fx.Node) else None
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

    def _adapted_parts(self, node: fx.Node, region: Region, args: list[Any]) -> tuple[Any, ...]:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        divided, dim = region.splits[source], (argument(node, "dim", 0) or 0) % len(shape_of(source))
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
