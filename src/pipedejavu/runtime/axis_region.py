"""Finds what can be divided together: the tensors that follow when one dimension of a parameter is divided.

From that dimension the division spreads over the recorded operations, forwards and backwards, until each way ends at
parameters or at sums over the divided dimension. Such a region needs one all-reduce per tensor that enters it, in the
backward, and one per sum, in the forward. A pair of a column and a row layer, the heads of an attention, and filters
with the channels that read them are regions; nothing here knows of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from pipedejavu.runtime.axis_rule import Axes, argument, axes_of, is_tensor, name_of, shape_of
from pipedejavu.runtime.loss_rule import Rules
from pipedejavu.runtime.reshape_rule import Split, UndividedError, cut_sizes, through_slice, through_view

VIEWS = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as"))
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")
LOSS_UNIT = "loss"
"""The name of a loss that is recorded after the last unit."""
SPLITS = frozenset(("split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "unsafe_chunk"))


@dataclass(frozen=True)
class UnitGraph:
    """A unit as recorded operations on tensors of one shape; nodes hold a fake tensor in `meta["val"]`."""

    name: str
    body: fx.GraphModule

    def tensor(self, node: fx.Node) -> Any:
        """Returns what a `get_attr` node reads."""
        path, _, key = str(node.target).rpartition(".")
        return getattr(self.body.get_submodule(path), key)

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes of the tensors that the unit takes."""
        return [node for node in self.body.graph.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes of the tensors that it returns."""
        (output,) = (node for node in self.body.graph.nodes if node.op == "output")
        return list(output.args[0])


class GraphChain:
    """Consecutive units of one worker: what one returns is what the next one takes."""

    def __init__(self, graphs: Sequence[UnitGraph]):
        self.graphs = graphs
        self.unit_of: dict[fx.Node, int] = {}
        self.twins: dict[int, list[fx.Node]] = {}
        """By id of a parameter or buffer, the nodes that read it."""
        self.held: dict[fx.Node, Tensor] = {}
        self.before: dict[fx.Node, fx.Node] = {}
        """By input of a unit, the result of the unit before."""
        self.after: dict[fx.Node, list[fx.Node]] = {}
        for number, graph in enumerate(graphs):
            for node in graph.body.graph.nodes:
                self.unit_of[node] = number
                if node.op == "get_attr" and isinstance(graph.tensor(node), Tensor):
                    self.held[node] = graph.tensor(node)
                    self.twins.setdefault(id(self.held[node]), []).append(node)
            if number:
                # A loss takes targets beside the outputs of the last unit.
                for source, target in zip(graphs[number - 1].outputs, graph.inputs, strict=False):
                    self.before[target] = source
                    self.after.setdefault(source, []).append(target)
        self.ends = {*graphs[-1].outputs} if graphs else set()


@dataclass
class Region:
    """Tensors that are divided together over `size` ranks."""

    chain: GraphChain
    size: int
    splits: dict[fx.Node, Split] = field(default_factory=dict)
    sums: set[fx.Node] = field(default_factory=set)
    """Operations that sum over the divided dimension: each rank has a part of the sum."""
    cut: dict[fx.Node, Split] = field(default_factory=dict)
    """Tensors that all ranks have, and of which the region takes each rank's part."""
    entries: set[fx.Node] = field(default_factory=set)
    """Tensors that all ranks have, and whose gradients each rank has a part of."""
    repeats: set[fx.Node] = field(default_factory=set)
    """Attentions whose shared keys and values are repeated for each head first, as they are too few to be divided."""
    operations: set[fx.Node] = field(default_factory=set)
    rules: Rules = field(default_factory=dict)
    """By name of an operation, axes that differ from those of `axis_rule`."""
    _queue: list[fx.Node] = field(default_factory=list)

    @property
    def nodes(self) -> set[fx.Node]:
        """All operations and tensors that it changes."""
        return self.operations | self.splits.keys() | self.cut.keys()

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the whole parameters that it divides."""
        held = {id(t): t for node in self.splits if (t := self.chain.held.get(node)) is not None}
        return sum(t.nbytes for t in held.values())

    def grow(self, node: fx.Node, split: Split) -> None:
        """Divides a tensor and all that follows; raises UndividedError if something cannot be divided."""
        self._place(node, split)
        while self._queue:
            self._spread(self._queue.pop())
        for node in self.splits:
            self.cut.pop(node, None)
        for operation in self.operations:
            self._enter(operation)
        has_rows = any(name_of(node) == "embedding" for node in self.sums)
        if not self.sums or not (has_rows or any(node.op == "call_function" for node in self.splits)):
            raise UndividedError("nothing sums over it")

    def _place(self, node: fx.Node, split: Split) -> None:
        if node in self.splits:
            if self.splits[node] != split:
                raise UndividedError(f"{node} is divided in two ways", ())
            return
        if any(part % self.size for part in split.parts):
            raise UndividedError(f"{'+'.join(map(str, split.parts))} cannot be divided by {self.size}")
        self.splits[node] = split
        self._queue.append(node)

    def _ask(self, node: fx.Node, split: Split) -> None:
        """Divides an operand: a tensor without gradient is cut where it is used, unless it is divided anyway."""
        val = node.meta["val"]
        if node in self.splits or node.op == "get_attr" or val.requires_grad:
            self._place(node, split)
        elif len(split.parts) == 1:
            self.cut[node] = split
        else:
            raise UndividedError(f"{node} is cut into parts")

    def _spread(self, node: fx.Node) -> None:
        split, chain = self.splits[node], self.chain
        if node.op == "get_attr":
            for twin in chain.twins[id(chain.held[node])]:
                self._place(twin, split)
        elif node.op == "placeholder":
            if node not in chain.before:
                raise UndividedError("it comes from another worker")
            self._place(chain.before[node], split)
        else:
            self._apply(node)
        if node not in self.splits:
            return  # it is cut instead
        if node in chain.ends:
            raise UndividedError("it leaves the worker")
        for target in chain.after.get(node, ()):
            self._place(target, split)
        for user in node.users:
            if user.op != "output":
                self._apply(user)

    def _apply(self, node: fx.Node) -> None:
        """Spreads what is known of an operation's operands and result over all of them."""
        name = name_of(node)
        self.operations.add(node)
        if name in VIEWS:
            self._view(node)
        elif name in SPLITS:
            self._parts(node)
        elif "getitem" in str(node.target):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            self._apply(source)
        elif name == "slice":
            self._slice(node)
        elif name == "cat":
            self._cat(node)
        else:
            axes = self.rules[name](node) if name in self.rules else axes_of(node)
            if axes is None:
                raise UndividedError(f"operation '{name or node.target}' has no rule")
            self._axes(node, axes)

    def _axes(self, node: fx.Node, axes: Axes) -> None:
        tensors = [(node, axes.out), *axes.operands]
        known = {names[s.dim]: s.parts for t, names in tensors if (s := self.splits.get(t)) is not None}
        if len(known) > 1:
            raise UndividedError(f"two dimensions of '{name_of(node)}' would be divided")
        ((axis, parts),) = known.items()
        if not axis:
            raise UndividedError(f"'{name_of(node)}' needs the whole dimension", _whole_entries(node, self.splits))
        count = axes.counts.get(axis)
        is_repeated = name_of(node) == "scaled_dot_product_attention" and count is not None
        if count is not None and count % self.size:
            if not is_repeated:
                raise UndividedError(f"{count} groups cannot be divided by {self.size}")
            self.repeats.add(node)
        for operand, names in axes.operands:
            if axis not in names:
                continue
            if node in self.repeats and operand in node.args[1:3]:
                if operand in self.splits:
                    raise UndividedError("shared keys and values are divided otherwise")
                continue
            dim = names.index(axis)
            length = shape_of(operand)[dim]
            self._ask(operand, Split(dim, parts if length == sum(parts) else (length,)))
        if axis in axes.out:
            dim = axes.out.index(axis)
            length = shape_of(node)[dim]
            self._place(node, Split(dim, parts if length == sum(parts) else (length,)))
        else:
            self.sums.add(node)

    def _view(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source in self.splits:
            split = through_view(shape_of(source), shape_of(node), self.splits[source], self.size)
            self._place(node, split)
        elif node in self.splits:
            split = self.splits[node]
            try:
                self._ask(source, through_view(shape_of(node), shape_of(source), split, self.size))
            except UndividedError:
                if len(split.parts) > 1 or source in self.splits or name_of(source) not in ("expand", "repeat"):
                    raise
                self._cut_instead(node, split)

    def _cut_instead(self, node: fx.Node, split: Split) -> None:
        """Computes a tensor whole and takes each rank's part: keys and values of too few heads, once repeated."""
        del self.splits[node]
        self.cut[node] = split
        self.operations.discard(node)

    def _parts(self, node: fx.Node) -> None:
        source, name = node.args[0], name_of(node)
        assert isinstance(source, fx.Node)
        dim = (argument(node, "dim", 0) or 0) % len(shape_of(source))
        items: dict[Any, fx.Node] = {user.args[1]: user for user in node.users if "getitem" in str(user.target)}
        whole = (1,) * shape_of(source)[dim]
        sizes = whole if name == "unbind" else tuple(t.shape[dim] for t in node.meta["val"])
        split = self.splits.get(source)
        if split is None:
            known = {n: s for n, item in items.items() if (s := self.splits.get(item)) is not None}
            one = next(iter(known.values()))
            if name == "unbind":
                split = Split(one.dim + (one.dim >= dim), one.parts)
            else:
                split = one if one.dim != dim else Split(dim, tuple(sizes))
            self._ask(source, split)
            if source not in self.splits:
                raise UndividedError("a part of a tensor without gradient is divided")
            return
        start = 0
        for number, size in enumerate(sizes):
            if number in items:
                if split.dim != dim:
                    gone = name == "unbind" and split.dim > dim
                    self._place(items[number], Split(split.dim - gone, split.parts))
                elif name == "unbind":
                    raise UndividedError("'unbind' needs the whole dimension", sizes)
                else:
                    self._place(items[number], through_slice(split, start, start + size, sizes))
                self.operations.add(items[number])
            start += size

    def _slice(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        dim, start, end = bounds_of(node)
        split = self.splits.get(source)
        if split is None:
            out = self.splits[node]
            self._ask(source, out if out.dim != dim else Split(dim, _cuts(source, dim)))
        elif split.dim != dim:
            self._place(node, split)
        elif argument(node, "step", 1) != 1:
            raise UndividedError("a slice with a step needs the whole dimension")
        else:
            self._place(node, through_slice(split, start, end, _cuts(source, dim)))

    def _cat(self, node: fx.Node) -> None:
        sources: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        dim = argument(node, "dim", 0) % len(shape_of(node))
        known = [s for t in (node, *sources) if (s := self.splits.get(t)) is not None]
        if all(split.dim != dim for split in known):
            for source in sources:
                self._ask(source, known[0])
            self._place(node, known[0])
            return
        for source in sources:
            self._ask(source, self.splits.get(source, Split(dim, (shape_of(source)[dim],))))
        splits = [self.splits.get(source, self.cut.get(source)) for source in sources]
        self._place(node, Split(dim, tuple(part for s in splits if s is not None for part in s.parts)))

    def _enter(self, node: fx.Node) -> None:
        """Notes the operands that all ranks have and that get a gradient from each rank's part."""
        bias = argument(node, "bias") if name_of(node) in ("linear", *CONVOLUTIONS) else None
        bias = node.args[0] if name_of(node) == "addmm" else bias
        shared = node.args[1:3] if node in self.repeats else ()
        for used in node.all_input_nodes:
            if (
                used in shared
                or not is_tensor(used)
                or used in self.splits
                or used in self.cut
                or not used.meta["val"].requires_grad
            ):
                continue
            if not (node in self.sums and used is bias):
                self.entries.add(used)


def bounds_of(node: fx.Node) -> tuple[int, int, int]:
    """Returns the dimension of a slice, its start and its end."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dim = argument(node, "dim", 0) % len(shape_of(source))
    start, end, _ = slice(argument(node, "start"), argument(node, "end")).indices(shape_of(source)[dim])
    return dim, start, max(start, end)


def _cuts(source: fx.Node, dim: int) -> tuple[int, ...]:
    slices = [bounds_of(user) for user in source.users if name_of(user) == "slice"]
    return cut_sizes(shape_of(source)[dim], [(start, end) for d, start, end in slices if d == dim])


def _whole_entries(node: fx.Node, splits: Mapping[fx.Node, Split]) -> tuple[int, ...]:
    """Returns parts of one entry each, if an operation selects entries of the divided dimension."""
    source = node.args[0] if node.args else None
    if name_of(node) != "select" or not isinstance(source, fx.Node) or source not in splits:
        return ()
    return (1,) * shape_of(source)[splits[source].dim]
