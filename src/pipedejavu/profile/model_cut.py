"""Cuts any module, unchanged, into units that run one after another.

A chain is read as it is. Any other model is traced as a graph and cut where its blocks begin or, if it has too few
blocks, between any two operations that read parameters. Positions inside a residual block are avoided: a cut there
would pass on much more than one just before or after the block.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from pipedejavu.facts import InputError
from pipedejavu.facts.start_phase import START
from pipedejavu.profile.live_tensors import TensorLiveness, module_paths
from pipedejavu.profile.meta_model import Mode, mode_of
from pipedejavu.profile.model_trace import Trace, trace
from pipedejavu.profile.module_hook import check_backward_hooks, check_parameter_hooks
from pipedejavu.profile.segment import Body, Segment, SegmentEntry, Value, make_body
from pipedejavu.profile.sequential import Units, is_chain, read_chain

CutMethod = Literal["chain", "blocks", "graph"]

_NEAR = 4
"""Number of neighbouring positions on each side that a position is compared with."""
_MUCH = 1.5
"""A position may pass on at most this many times the bytes of its neighbours."""


@dataclass(frozen=True, eq=False)
class ModelCut:
    """A model as units, and how its inputs and outputs map to theirs."""

    units: Units
    method: CutMethod
    """How the units were made: read from a chain, cut where blocks begin, or cut between any operations."""
    flat: Callable[[Any], Value]
    """Maps the model's inputs to the tensors that the first unit takes."""
    output: Callable[[Value], Any]
    """Maps the last unit's result to the model's output."""
    model: nn.Module
    begins: tuple[int, ...] = ()
    """Index of the first operation of each unit after the first, then the number of operations; empty for a chain."""
    operations: tuple[str, ...] = ()
    """The module and the operator of each operation; empty for a chain."""

    def fit(self, inputs: Any) -> None:
        """Makes the units accept inputs of another shape too, by tracing the model again; a chain accepts any."""
        first = self.units[0][1]
        if not isinstance(first, Segment) or first.takes(self.flat(inputs)):
            return
        others = cut_model(self.model, inputs, self.begins, self.operations).units
        if [_contents(*unit) for unit in others] != [_contents(*unit) for unit in self.units]:
            raise InputError(
                f"a {type(self.model).__name__} is cut into other units for microbatches of another size; give all of"
                " them one size"
            )
        buffer_names = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        for (_, unit), (_, other) in zip(self.units, others, strict=True):
            assert isinstance(unit, Segment)
            assert isinstance(other, Segment)
            unit.adopt(other, buffer_names)


def _contents(name: str, unit: nn.Module) -> tuple[str, frozenset[str]]:
    return name, frozenset(parameter for parameter, _ in unit.named_parameters(remove_duplicate=False))


def cut_model(model: nn.Module, inputs: Any, begins: Sequence[int] = (), operations: Sequence[str] = ()) -> ModelCut:
    """Cuts a model for inputs of one shape: a tensor, a tuple of arguments, or a mapping of keyword arguments.

    `ModelCut.fit` adds other shapes. `begins` repeats an earlier cut; with its `operations`, even one for a shape that
    has a few other operations. However the units are grouped into pieces, outputs and gradients equal the model's;
    parameters are the model's own, under its own names. Raises InputError for a model that cannot be traced.
    """
    with START.phase("cut"):
        return _cut_model(model, inputs, begins, operations)


def _cut_model(model: nn.Module, inputs: Any, begins: Sequence[int], operations: Sequence[str]) -> ModelCut:
    check_parameter_hooks(model)
    if is_chain(model):
        return ModelCut(read_chain(model), "chain", _same, _same, model)
    check_backward_hooks(model)
    traced = trace(model, inputs)
    live = TensorLiveness(traced)
    if not any(isinstance(leaf, fx.Node) for leaf in traced.outputs):
        raise InputError(f"a {type(model).__name__} cannot be cut: its output holds no tensor")
    method, positions = _positions(live)
    known = _operations(live)
    if begins:
        begins = _moved(begins, operations or known, known)
        _check_begins(model, live, begins)
        positions = [*begins[:-1]]
    units = _segments(live, positions)
    leaves, spec = traced.outputs, traced.spec
    return ModelCut(
        units, method, traced.form.flat, lambda value: _restored(value, leaves, spec), model,
        (*positions, live.size), known,
    )  # fmt: skip


def _operations(live: TensorLiveness) -> tuple[str, ...]:
    nodes = live.trace.nodes
    return tuple(f"{path} {node.target}" for path, node in zip(module_paths(nodes), nodes, strict=True))


def _moved(begins: Sequence[int], before: Sequence[str], after: Sequence[str]) -> Sequence[int]:
    """Returns the places of a cut in a graph with a few other operations, as a microbatch of one sample may have."""
    if before == after or len(before) != begins[-1]:
        return begins
    matches = SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    place = {match.a + n: match.b + n for match in matches for n in range(match.size)}
    moved = [place[position] for position in begins[:-1] if position in place]
    return (*moved, len(after)) if len(moved) == len(begins) - 1 else begins


def _check_begins(model: nn.Module, live: TensorLiveness, begins: Sequence[int]) -> None:
    """Raises InputError if a cut was made for another graph."""
    *positions, size = begins
    legal = [p for p in positions if 0 < p < live.size and live.is_legal(p)]
    if size != live.size or legal != positions or sorted({*legal}) != legal:
        raise InputError(
            f"a {type(model).__name__} has {live.size} operations here, and the cut was made for {size} and their"
            " values; make the plan for this model and this size of microbatches again"
        )


def _same(value: Any) -> Any:
    return value


def _restored(value: Value, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """Returns a model's output from the tensors that the last unit returns."""
    tensors = iter(value if isinstance(value, tuple) else (value,))
    return pytree.tree_unflatten([next(tensors) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], spec)


def _positions(live: TensorLiveness) -> tuple[CutMethod, list[int]]:
    """Returns how and where to cut: by blocks if they contain at least half of the operations that read parameters."""
    traced, users = live.trace, _weighted(live.trace)
    blocks = _blocks(module_paths(traced.nodes))
    if 2 * sum(bool(blocks[n]) for n in users) >= len(users):
        edges = [p for p in range(1, live.size) if blocks[p] != blocks[p - 1] and live.is_legal(p)]
        outer = frozenset(p for p in edges if blocks[p][:1] != blocks[p - 1][:1])
        kept = _with_weights(_cheap(live, edges, outer), users, live)
        if kept:
            return "blocks", kept
    between = []
    for first, second in pairwise(users):
        legal = [p for p in range(first + 1, second + 1) if live.is_legal(p)]
        if legal:
            between.append(min(reversed(legal), key=live.size_bytes))
    return "graph", _with_weights(_cheap(live, between), users, live)


def _weighted(traced: Trace) -> list[int]:
    """Returns the indices of the operations that read trained parameters."""
    weights = {node for node, name in traced.states.items() if _is_weight(traced.held[name])}
    return [n for n, node in enumerate(traced.nodes) if not weights.isdisjoint(node.all_input_nodes)]


def _is_weight(held: Tensor | nn.Module) -> bool:
    """Whether an attribute of a graph is a trained parameter; a frozen one is not."""
    return isinstance(held, nn.Parameter) and held.requires_grad


def _blocks(paths: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the blocks that contain each operation: numbered modules with siblings, outermost first."""
    numbered: dict[str, set[str]] = {}
    prefixes = []
    for path in paths:
        parts = path.split(".")
        enclosing = [".".join(parts[: n + 1]) for n, part in enumerate(parts) if part.partition("@")[0].isdigit()]
        prefixes.append(enclosing)
        for block in enclosing:
            numbered.setdefault(block.rpartition(".")[0], set()).add(block)
    return [tuple(b for b in enclosing if len(numbered[b.rpartition(".")[0]]) > 1) for enclosing in prefixes]


def _cheap(live: TensorLiveness, positions: Sequence[int], wanted: Collection[int] = ()) -> list[int]:
    """Drops positions with much cheaper ones nearby on both sides, as inside a residual block, except `wanted` ones."""
    costs = [live.size_bytes(p) for p in positions]
    kept = []
    for n, position in enumerate(positions):
        before, after = costs[max(0, n - _NEAR) : n], costs[n + 1 : n + 1 + _NEAR]
        if position in wanted or not before or not after or costs[n] <= _MUCH * max(min(before), min(after)):
            kept.append(position)
    return kept


def _with_weights(positions: Sequence[int], users: Sequence[int], live: TensorLiveness) -> list[int]:
    """Drops positions so that every unit has parameters; operations without any join the next unit."""
    kept: list[int] = []
    for position in positions:
        start = kept[-1] if kept else 0
        if any(start <= n < position for n in users):
            kept.append(position)
        elif kept and live.size_bytes(position) <= live.size_bytes(kept[-1]):
            kept[-1] = position
    while kept and not any(n >= kept[-1] for n in users):
        kept.pop()
    return kept


def _segments(live: TensorLiveness, positions: Sequence[int]) -> Units:
    traced = live.trace
    ends = [*positions, live.size]
    outputs = [leaf for leaf in traced.outputs if isinstance(leaf, fx.Node)]
    names = _names(traced, [0, *ends])
    units, carries = [], [False] * len(traced.inputs)
    value = tuple(node.meta["val"] for node in traced.inputs)
    mode = mode_of(list(traced.held.values()))
    for name, (start, end) in zip(names, pairwise([0, *ends]), strict=True):
        inputs, results = live.at(start), outputs if end == live.size else live.at(end)
        body = make_body(traced.nodes[start:end], inputs, results, traced.states, traced.held)
        entries = [
            SegmentEntry(tuple(node.meta["val"].shape), carried, node in live.overwritten)
            for node, carried in zip(inputs, carries, strict=True)
        ]
        device = value[0].device if value else torch.device("cpu")
        units.append((name, Segment(name, Body(body, entries, device))))
        value, carries = _dry_run(body, value, carries, mode)
    return units


def _dry_run(
    body: fx.GraphModule, value: tuple[Tensor, ...], carries: Sequence[bool], mode: Mode
) -> tuple[tuple[Tensor, ...], list[bool]]:
    """Runs a segment on fake tensors; returns its results, and whether each depends on trained parameters."""
    with mode, torch.enable_grad():
        inputs = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).requires_grad_(carried)
            for t, carried in zip(value, carries, strict=True)
        ]
        tensors = [*body.named_parameters(remove_duplicate=False), *body.named_buffers(remove_duplicate=False)]
        states: dict[str, Tensor] = {name: _without_memory(tensor, mode) for name, tensor in tensors}
        results = torch.func.functional_call(body, states, tuple(t.clone() for t in inputs), strict=False)
    return tuple(results), [t.requires_grad for t in results]


def _without_memory(tensor: Tensor, mode: Mode) -> Tensor:
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


def _names(traced: Trace, edges: Sequence[int]) -> list[str]:
    """Returns a unique name for each unit: that of its block, or of the module whose parameters it reads first."""
    paths = module_paths(traced.nodes)
    blocks, users = _blocks(paths), _weighted(traced)
    names: list[str] = []
    for number, (start, end) in enumerate(pairwise(edges)):
        readers = [n for n in users if start <= n < end]
        at = readers[0] if readers else start
        inner = blocks[at][-1] if blocks[at] else paths[at]
        name = inner or f"part{number}"
        count = sum(other.partition("~")[0] == name for other in names)
        names.append(f"{name}~{count + 1}" if count else name)
    return names
