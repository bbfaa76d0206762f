"""Workers that divide operators: their units are made of graphs, each with this worker's part of the weights.

Each worker of a group runs the same actions. What it passes on, logs and saves is that of a whole replica: activations
between stages are whole on all workers of a group, only the first worker logs, and checkpoints have whole tensors
(`divided_state`).
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from pipedejavu.engine.device import device_of
from pipedejavu.engine.job import Batches, Job
from pipedejavu.engine.recompute_span import tensors_of
from pipedejavu.engine.wire import Wire
from pipedejavu.engine.wire_group import WireGroup
from pipedejavu.facts import InputError
from pipedejavu.plan import Plan
from pipedejavu.plan.plan_trait import why_not_divided
from pipedejavu.program import Program
from pipedejavu.program.program import shard_group
from pipedejavu.runtime.compiled_unit import GraphUnit
from pipedejavu.runtime.divided_unit import UnitDivider
from pipedejavu.runtime.division import Division, LayoutKind, divide

PieceReplica = tuple[int, int]
Shapes = tuple[tuple[int, ...], ...]
Units = list[tuple[str, nn.Module]]


def divides_operators(program: Program) -> bool:
    """Whether workers hold parts of operators; experts are divided otherwise."""
    return program.plan.tensor_shards > 1


def check_divisible(plan: Plan) -> None:
    """Raises InputError if the engine does not divide the operators of such a plan."""
    if what := why_not_divided(plan):
        raise InputError(
            f"plan '{plan.name}' divides operators over workers, and the engine does not run that with {what}; use a"
            " plan without it, or one that divides no operators"
        )


def check_gpus_apart(program: Program) -> None:
    """Raises InputError if threads that divide operators share a GPU.

    A process has one thread for the backwards of a GPU, so that one worker's would wait for the other's for ever.
    """
    devices = [device_of(program, worker) for worker in range(len(program.workers))]
    gpus = [device for device in devices if device.type == "cuda"]
    if divides_operators(program) and len({*gpus}) < len(gpus):
        raise InputError(
            f"plan '{program.plan.name}' divides operators over {len(gpus)} threads of one process, which has"
            f" {len({*gpus})} GPUs; use a GPU for each, or processes (train, or a Trainer under torchrun)"
        )


def layout_kind(layout: str) -> LayoutKind:
    """Returns how a layout of a plan divides: columns, rows and heads are found as pairs."""
    kinds: dict[str, LayoutKind] = {kind: kind for kind in ("stationary-x", "stationary-y", "stationary-w")}
    return kinds.get(layout, "pairs")


class Divisions:
    """The divisions of a program's stages, found once for all workers of this process."""

    def __init__(self, program: Program, job: Job, batches: Batches):
        self.program, self.job, self.batches = program, job, batches
        self.size = program.plan.place.shards
        (self.layout,) = {layout_kind(kind) for kind in program.plan.cut.layouts} or {"pairs"}
        self._tied = [p for _, m in job.units for n, p in m.named_parameters() if self._is_tied(p)]
        self._known: dict[Shapes, dict[int, Division]] = {}

    def of(self, microbatch: int) -> tuple["Shapes", dict[int, Division]]:
        """Returns the shapes of a microbatch's inputs, and the division of each stage's units for them."""
        inputs = self.batches.inputs(microbatch)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_of(inputs))
        if shapes not in self._known:
            self._known[shapes] = self._find(inputs)
        return shapes, self._known[shapes]

    def _find(self, inputs: Any) -> dict[int, Division]:
        if self.job.graphs is None:
            raise InputError(
                f"plan '{self.program.plan.name}' divides operators, and this job has no graphs of its units"
            )
        graphs = self.job.graphs(self.job.units, inputs)
        divisions = {
            stage: divide([graphs[unit] for unit in units], self.size, self._tied, self.layout)
            for stage, units in stage_units(self.program).items()
        }
        if not any(division.regions for division in divisions.values()):
            none = (
                "no layer whose outputs another one sums over, no attention by heads, and no filters that another layer"
                " reads; use a degree that divides heads and widths, or a plan that divides none"
                if self.layout == "pairs"
                else "no convolution whose filters another layer reads as channels; use a number of workers that"
                " divides channels, or for a model without convolutions another layout"
            )
            raise InputError(
                f"plan '{self.program.plan.name}' divides operators over {self.size} workers, and the model has none"
                f" for {'heads and pairs of layers' if self.layout == 'pairs' else self.layout} that can be divided by"
                f" {self.size}: {none}"
            )
        return divisions

    def _is_tied(self, parameter: Tensor) -> bool:
        return sum(any(p is parameter for p in m.parameters()) for _, m in self.job.units) > 1


def stage_units(program: Program) -> dict[int, list[int]]:
    """Returns the units of each stage."""
    units: dict[int, list[int]] = {}
    for piece in program.pieces:
        units.setdefault(piece.stage, []).extend(piece.units)
    return units


class DividedStages:
    """The divided units of a worker, with a graph for each size of microbatches."""

    def __init__(self, program: Program, index: int, wire: Wire, divisions: Divisions):
        self.program, self.index, self.divisions = program, index, divisions
        self._units = stage_units(program)
        stages = sorted({(program.pieces[piece].stage, replica) for piece, replica in program.held(index)})
        self._dividers: dict[PieceReplica, UnitDivider] = {}
        for stage, replica in stages:
            name = shard_group(stage, replica)
            self._dividers[stage, replica] = UnitDivider(WireGroup(wire, name, program.groups[name].workers, index))
        self._added: set[Shapes] = set()
        self.prepare(range(program.update_size))

    def prepare(self, microbatches: Iterable[int]) -> None:
        """Adds graphs for microbatches whose inputs have other shapes than all before, while no worker runs."""
        for number in microbatches:
            shapes, divisions = self.divisions.of(number)
            if shapes in self._added:
                continue
            self._added.add(shapes)
            for (stage, _), divider in self._dividers.items():
                prefixes = [_prefix(*self.divisions.job.units[unit]) for unit in self._units[stage]]
                divider.add(divisions[stage], prefixes)

    def units_of(self, piece: int, replica: int) -> dict[int, nn.Module]:
        """Returns the divided units of a piece by number."""
        stage = self.program.pieces[piece].stage
        modules = self._dividers[stage, replica].units
        names = {unit: self.divisions.job.units[unit][0] for unit in self.program.pieces[piece].units}
        return {unit: modules[name] for unit, name in names.items()}


def _prefix(name: str, module: nn.Module) -> str:
    """Returns what the names of a unit's parameters begin with: a part of a recorded model has the model's names."""
    return "" if isinstance(module, GraphUnit) else name


def is_first(program: Program, index: int) -> bool:
    """Whether a worker speaks for its group."""
    return program.shard_of(index) == 0
