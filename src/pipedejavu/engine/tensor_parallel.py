"""Workers that divide operators: their units are made of graphs, each with this worker's part of the weights.

Each worker of a group runs the same actions. What it passes on, logs and saves is that of a whole replica: activations
between stages are whole on all workers of a group, only the first worker logs, and checkpoints have whole tensors
(`divided_state`).
"""

from torch import Tensor, nn

from pipedejavu.engine.device import device_of
from pipedejavu.engine.job import Batches, Job
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
        self._known: dict[int, list[Division]] | None = None

    def of(self, stage: int) -> list[Division]:
        """Returns the divisions of a stage's units, one for each size of microbatches."""
        if self._known is None:
            self._known = self._find()
        return self._known[stage]

    def _find(self) -> dict[int, list[Division]]:
        if self.job.graphs is None:
            raise InputError(
                f"plan '{self.program.plan.name}' divides operators, and this job has no graphs of its units"
            )
        tied = [p for _, m in self.job.units for n, p in m.named_parameters() if self._is_tied(p)]
        divisions: dict[int, list[Division]] = {}
        count = self.program.update_size
        firsts = {self.batches.length(number): number for number in reversed(range(count))}
        for number in sorted(firsts.values()):
            graphs = self.job.graphs(self.job.units, self.batches.inputs(number))
            for stage, units in stage_units(self.program).items():
                chain = [graphs[unit] for unit in units]
                divisions.setdefault(stage, []).append(divide(chain, self.size, tied, self.layout))
        if not any(division.regions for rows in divisions.values() for division in rows):
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


def divided_units(
    program: Program, index: int, wire: Wire, divisions: Divisions
) -> dict[PieceReplica, dict[int, nn.Module]]:
    """Returns the divided units of a worker, by (piece, replica) and number."""
    rows: dict[PieceReplica, dict[int, nn.Module]] = {}
    units = stage_units(program)
    for stage, replica in sorted({(program.pieces[piece].stage, q) for piece, q in program.held(index)}):
        name = shard_group(stage, replica)
        divider = UnitDivider(WireGroup(wire, name, program.groups[name].workers, index))
        prefixes = [_prefix(*divisions.job.units[unit]) for unit in units[stage]]
        for division in divisions.of(stage):
            modules = divider.add(division, prefixes)
        for piece, held in program.held(index):
            if program.pieces[piece].stage == stage and held == replica:
                numbers = units[stage]
                rows[piece, held] = {u: modules[numbers.index(u)] for u in program.pieces[piece].units}
    return rows


def _prefix(name: str, module: nn.Module) -> str:
    """Returns what the names of a unit's parameters begin with: a part of a recorded model has the model's names."""
    return "" if isinstance(module, GraphUnit) else name


def is_first(program: Program, index: int) -> bool:
    """Whether a worker speaks for its group."""
    return program.shard_of(index) == 0
