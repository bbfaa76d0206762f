"""Workers that divide operators: their units are made of graphs, each with this worker's part of the weights.

Each worker of a group runs the same actions. What it passes on, logs and saves is that of a whole replica: activations
between stages are whole on all workers of a group, only the first worker logs, and checkpoints have whole tensors
(`divided_state`).
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from pipedejavu.engine.device import device_of
from pipedejavu.engine.padding import without_padding
from pipedejavu.engine.recompute_span import tensors_of
from pipedejavu.engine.stage_division import Divisions, Shapes, stage_units, target_tensors
from pipedejavu.engine.wire import Wire
from pipedejavu.engine.wire_group import WireGroup
from pipedejavu.facts import InputError
from pipedejavu.plan import Plan
from pipedejavu.plan.plan_trait import why_not_divided
from pipedejavu.program import Program
from pipedejavu.program.program import shard_group
from pipedejavu.runtime.compiled_unit import GraphUnit
from pipedejavu.runtime.divided_unit import DividedGraph, UnitDivider

PieceReplica = tuple[int, int]


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
        self._losses: dict[PieceReplica, DividedGraph] = {}
        self._added: set[Shapes] = set()
        self.prepare(range(program.update_size))

    def prepare(self, microbatches: Iterable[int]) -> None:
        """Adds graphs for microbatches whose inputs have other shapes than all before, while no worker runs."""
        for number in microbatches:
            shapes, divisions = self.divisions.of(number)
            if shapes in self._added:
                continue
            self._added.add(shapes)
            for (stage, replica), divider in self._dividers.items():
                prefixes = [_prefix(*self.divisions.job.units[unit]) for unit in self._units[stage]]
                graphs = divider.add(divisions[stage], [*prefixes, *self.divisions.loss_units(stage)])
                if len(graphs) > len(prefixes):
                    self._losses[stage, replica] = graphs[-1]

    def units_of(self, piece: int, replica: int) -> dict[int, nn.Module]:
        """Returns the divided units of a piece by number."""
        stage = self.program.pieces[piece].stage
        modules = self._dividers[stage, replica].units
        names = {unit: self.divisions.job.units[unit][0] for unit in self.program.pieces[piece].units}
        return {unit: modules[name] for unit, name in names.items()}

    def loss(self, piece: int, replica: int) -> Callable[[Any, Any], Tensor] | None:
        """Returns the loss as a function of what the last piece returns and the targets; None if it is not divided."""
        graph = self._losses.get((self.program.pieces[piece].stage, replica))
        if graph is None:
            return None
        return without_padding(
            lambda output, targets: one_tensor(graph((*tensors_of(output), *target_tensors(targets))))
        )


def one_tensor(value: Any) -> Tensor:
    """Returns a loss, which is one tensor."""
    assert isinstance(value, Tensor)
    return value


def _prefix(name: str, module: nn.Module) -> str:
    """Returns what the names of a unit's parameters begin with: a part of a recorded model has the model's names."""
    return "" if isinstance(module, GraphUnit) else name


def is_first(program: Program, index: int) -> bool:
    """Whether a worker speaks for its group."""
    return program.shard_of(index) == 0
