"""How the stages of a program divide their units over the workers of a group, found once per process."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedejavu.engine.device import device_of
from pipedejavu.engine.job import Batches, Job
from pipedejavu.engine.padding import filled_targets
from pipedejavu.engine.recompute_span import tensors_of
from pipedejavu.facts import InputError
from pipedejavu.program import Program
from pipedejavu.runtime.axis_region import LOSS_UNIT, UnitGraph
from pipedejavu.runtime.axis_rule import argument, name_of, shape_of
from pipedejavu.runtime.compiled_unit import LossCall
from pipedejavu.runtime.division import Division, LayoutKind, divide, drawn_in
from pipedejavu.runtime.loss_rule import LOSS
from pipedejavu.runtime.sequence_region import sequence_lengths

Shapes = tuple[tuple[int, ...], ...]

_KINDS: dict[str, LayoutKind] = {k: k for k in ("stationary-x", "stationary-y", "stationary-w", "context")}
"""Layouts that are found otherwise than columns, rows and heads, which are pairs."""

_MISSING = {"pairs": "heads and pairs of layers", "context": "the sequence of an attention"}
_PAIRS = (
    "no layer whose outputs another one sums over, no attention by heads, and no filters that another layer"
    " reads; use a degree that divides heads and widths, or a plan that divides none"
)
_TOKENS = (
    "its attentions (scaled_dot_product_attention) have {} tokens per sample; use a number of workers that divides the"
    " tokens, or a plan that divides none"
)
_CHANNELS = (
    "no convolution whose filters another layer reads as channels; use a number of workers that divides channels, or"
    " for a model without convolutions another layout"
)


class Divisions:
    """The divisions of a program's stages."""

    def __init__(self, program: Program, job: Job, batches: Batches):
        self.program, self.job, self.batches = program, job, batches
        self.size, layouts = program.plan.place.shards, program.plan.cut.layouts
        self.has_sequence, self.has_vocabulary = "sequence" in layouts, "vocabulary" in layouts
        operators = [layout for layout in layouts if layout not in ("sequence", "vocabulary")]
        (self.layout,) = {_KINDS.get(layout, "pairs") for layout in operators} or {"pairs"}
        self.divides_loss = self.has_sequence or self.has_vocabulary or self.layout == "context"
        """Whether the loss is recorded and divided too."""
        self._tied: list[Tensor] = [p for _, m in job.units for n, p in m.named_parameters() if self._is_tied(p)]
        self._units = stage_units(program)
        self._last = next(piece.stage for piece in program.pieces if len(job.units) - 1 in piece.units)
        self._known: dict[Shapes, dict[int, Division]] = {}
        self._has_loss = False

    def of(self, microbatch: int) -> tuple[Shapes, dict[int, Division]]:
        """Returns the shapes of a microbatch's inputs, and the division of each stage's units for them."""
        inputs = self.batches.inputs(microbatch)
        targets = filled_targets(self.batches.targets(microbatch)) if self.divides_loss else ()
        shapes = tuple(tuple(tensor.shape) for tensor in (*tensors_of(inputs), *target_tensors(targets)))
        if shapes not in self._known:
            self._known[shapes] = self._find(inputs, targets)
        return shapes, self._known[shapes]

    def loss_units(self, stage: int) -> list[str]:
        """Returns the name of the loss if it is divided with the units of a stage."""
        return [LOSS_UNIT] * (self._has_loss and stage == self._last)

    def _find(self, inputs: Any, targets: Any) -> dict[int, Division]:
        graphs = self._record(inputs, targets)
        self._check_draws(graphs)
        divisions = self._divide(graphs, [] if self.has_vocabulary else self._tied)
        if unlike := self._unlike(divisions):
            divisions = self._divide(graphs, unlike)
        lengths = {n for division in divisions.values() for n in sequence_lengths(division.chain)}
        tokens = _TOKENS.format(", ".join(map(str, sorted(lengths))) or "no")
        if all(division.is_whole for division in divisions.values()):
            why = {"pairs": _PAIRS, "context": tokens}.get(self.layout, _CHANNELS)
            raise self._refusal(_MISSING.get(self.layout, self.layout), why)
        if self.has_sequence and not any(d.sequence and d.sequence.splits for d in divisions.values()):
            raise self._refusal(_MISSING["context"], tokens)
        if self.has_vocabulary and not any(map(_divides_classes, divisions.values())):
            raise self._refusal("the vocabulary", self._why_whole(graphs))
        return divisions

    def _record(self, inputs: Any, targets: Any) -> list[UnitGraph]:
        if self.job.graphs is None:
            raise InputError(
                f"plan '{self.program.plan.name}' divides operators, and this job has no graphs of its units"
            )
        if self.divides_loss:
            try:
                graphs = self.job.graphs(self.job.units, inputs, LossCall(self.job.loss, targets))
                self._has_loss = True
                return graphs
            except InputError:  # the loss cannot be recorded, and takes the whole output
                self._has_loss = False
        return self.job.graphs(self.job.units, inputs)

    def _check_draws(self, graphs: list[UnitGraph]) -> None:
        """Raises InputError if workers would draw other random numbers: on a CPU each seeds only its dropouts."""
        for graph in graphs if device_of(self.program, 0).type == "cpu" else []:
            if name := drawn_in(graph):
                raise InputError(
                    f"plan '{self.program.plan.name}' divides operators over {self.size} workers, and unit"
                    f" '{graph.name}' draws random numbers with '{name}', which they would not draw alike; use dropout"
                    " in its place, or a plan that divides no operators"
                )

    def _divide(self, graphs: list[UnitGraph], whole: list[Tensor]) -> dict[int, Division]:
        return {
            stage: divide(
                [*(graphs[unit] for unit in units), *graphs[len(self.job.units) :]]
                if stage == self._last
                else [graphs[unit] for unit in units],
                self.size,
                whole,
                self.layout,
                has_vocabulary=self.has_vocabulary,
                has_sequence=self.has_sequence,
            )
            for stage, units in self._units.items()
        }

    def _unlike(self, divisions: dict[int, Division]) -> list[Tensor]:
        """Returns the tied parameters that stages would divide in different ways."""
        if not self.has_vocabulary:
            return []
        layouts: dict[int, set[Any]] = {}
        for division in divisions.values():
            for node, tensor in division.chain.held.items():
                layouts.setdefault(id(tensor), set()).add(division.layout_of(node))
        return [tensor for tensor in self._tied if len(layouts.get(id(tensor), ())) > 1]

    def _why_whole(self, graphs: list[UnitGraph]) -> str:
        losses = [node for graph in graphs for node in graph.body.graph.nodes if name_of(node) == LOSS]
        if not losses:
            return "its loss is no recorded cross-entropy; leave the layout 'vocabulary' out"
        classes = shape_of(argument(losses[-1], "self"))[1]
        return (
            f"its cross-entropy has {classes:,} classes, which must divide evenly, have no weights of their own, and"
            " come from a linear layer that nothing else reads; change the vocabulary or leave the layout 'vocabulary'"
            " out"
        )

    def _refusal(self, what: str, why: str) -> InputError:
        return InputError(
            f"plan '{self.program.plan.name}' divides operators over {self.size} workers, and the model has none for"
            f" {what} that can be divided by {self.size}: {why}"
        )

    def _is_tied(self, parameter: Tensor) -> bool:
        return sum(any(p is parameter for p in m.parameters()) for _, m in self.job.units) > 1


def target_tensors(targets: Any) -> tuple[Tensor, ...]:
    """Returns the tensors among the targets of a microbatch."""
    return tuple(leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, torch.Tensor))


def stage_units(program: Program) -> dict[int, list[int]]:
    """Returns the units of each stage."""
    units: dict[int, list[int]] = {}
    for piece in program.pieces:
        units.setdefault(piece.stage, []).extend(piece.units)
    return units


def _divides_classes(division: Division) -> bool:
    return any(name_of(node) == LOSS for region in division.regions for node in region.sums)
