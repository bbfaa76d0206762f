"""A piece of whose experts this worker holds a part: their layouts, and whole tensors from the parts of all workers.

All workers of a group that divides experts join whole tensors together, between rounds. Workers that are threads of one
process read each other's parts instead; nothing is in flight then.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from pipedejavu.engine.applier import Applier
from pipedejavu.engine.device import CPU
from pipedejavu.engine.master import masters_of
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.sharded_state import STEP
from pipedejavu.engine.unit_random import Unit, paused_draws
from pipedejavu.engine.wire import Wire
from pipedejavu.facts import InputError
from pipedejavu.program import Program, Value, ValueKind
from pipedejavu.program.program import expert_group, shard_group, stage_group
from pipedejavu.runtime.divided_experts import DividedExperts
from pipedejavu.runtime.param_layout import ParamLayout
from pipedejavu.runtime.traffic import Counts

PieceReplica = tuple[int, int]
"""A (piece, replica) pair."""


class WireRows:
    """One worker's end of a group that divides experts, on its wire."""

    def __init__(self, wire: Wire, group: str, rank: int, size: int):
        self.wire, self.group, self.rank, self.size = wire, group, rank, size

    def gather(self, counts: Tensor) -> Tensor:
        """Returns the vectors of all workers, as rows."""
        with paused_draws():
            return self.wire.all_gather(counts, self.group).view(self.size, -1)

    def all_to_all(self, rows: Tensor, table: Counts) -> Tensor:
        """Sends rows to the other workers; returns those that they sent."""
        with paused_draws():
            return self.wire.all_to_all(rows, self.group, table)


class ExpertShards:
    """What one worker holds of the experts of a piece."""

    def __init__(self, program: Program, worker: int, piece: int, replica: int):
        stage, (first, self.rank) = program.pieces[piece].stage, program.mesh_of(replica)
        self.group = shard_group(stage, first)
        self.members = program.groups[self.group].workers
        assert self.members[self.rank] == worker
        holders = program.groups.get(expert_group(stage, self.rank))
        self.num_holders = len(holders.workers) if holders else 1
        """Workers that hold the same experts."""
        self.num_replicas = len(program.groups[stage_group(stage)].workers)
        self.layouts: dict[str, ParamLayout] = {}
        """By full name, those of the parameters that are divided."""

    @property
    def size(self) -> int:
        """The number of workers that divide the experts."""
        return len(self.members)

    def divide(self, units: Sequence[Unit], wire: Wire, capacity: float | None) -> list[Unit]:
        """Returns units of which this worker runs its part; takes over their modules and parameters."""
        rows, divided = WireRows(wire, self.group, self.rank, self.size), []
        for number, name, module in units:
            unit = DividedExperts(name, module, rows, capacity)
            self.layouts |= unit.layouts
            divided.append((number, name, unit if unit.layouts else module))
        return divided

    def count_of(self, name: str) -> int:
        """Returns the number of workers that have the same gradient of a parameter after its reduction."""
        return self.num_holders if name in self.layouts else self.num_replicas

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Returns what this worker holds of a parameter's tensor."""
        layout = self.layouts.get(name)
        if layout is None or whole.dim() == 0:
            return whole
        if tuple(whole.shape) != layout.shape:
            sizes = ["×".join(map(str, shape)) for shape in (whole.shape, layout.shape)]
            raise InputError(f"weight '{name}' is {sizes[0]} in the checkpoint and {sizes[1]} in the model")
        return layout.local(whole, self.rank, self.size)


class HoldsExperts(Protocol):
    """A worker, as far as its experts are concerned."""

    index: int
    experts: dict[PieceReplica, ExpertShards]
    values: dict[Value, Any]
    wire: Wire

    applier: Applier

    @property
    def fellows(self) -> Mapping[int, Any]:
        """All workers, if they are threads of this process."""


def newest_masters(worker: HoldsExperts, key: PieceReplica) -> Tensors:
    """Returns the newest masters of a piece as this worker holds them."""
    held = [v for v in worker.values if v.kind == ValueKind.WEIGHTS and (v.piece, v.replica) == key]
    return masters_of(worker.values[max(held, key=lambda v: v.number)], worker.applier.state.get(key, {}))


def whole_expert_masters(worker: HoldsExperts, key: PieceReplica) -> Tensors:
    """Returns the masters of all parameters of a piece; those of experts are in host memory."""
    return newest_masters(worker, key) | _joined(worker, key, newest_masters)


def whole_expert_slot(worker: HoldsExperts, key: PieceReplica, slot: str) -> Tensors:
    """Returns a slot of the optimizer state of the experts of a piece, in host memory, for those that have it."""

    def pick(held: HoldsExperts, own: PieceReplica) -> Tensors:
        state = held.applier.state.get(own, {})
        return {name: state[name][slot] for name in held.experts[own].layouts if slot in state.get(name, {})}

    if slot == STEP:
        return {name: tensor.clone() for name, tensor in pick(worker, key).items()}
    return _joined(worker, key, pick)


def _joined(worker: HoldsExperts, key: PieceReplica, pick: Callable[[HoldsExperts, PieceReplica], Tensors]) -> Tensors:
    """Returns the whole tensors of experts of which `pick` returns a worker's parts."""
    shards = worker.experts[key]
    if worker.fellows:
        held = [worker.fellows[member] for member in shards.members]
        keys = [next(k for k in other.experts if _is_beside(other, k, worker, key)) for other in held]
        parts = [pick(other, k) for other, k in zip(held, keys, strict=True)]
        return {
            name: layout.whole([part[name].detach().to(CPU) for part in parts])
            for name, layout in shards.layouts.items()
            if all(name in part for part in parts)
        }
    mine = pick(worker, key)
    names = [name for name in sorted(shards.layouts) if name in mine]
    return {name: worker.wire.all_gather(mine[name].detach(), shards.group).to(CPU) for name in names}


def _is_beside(other: HoldsExperts, its: PieceReplica, worker: HoldsExperts, key: PieceReplica) -> bool:
    """Whether a piece of another worker has the other experts of a worker's piece."""
    return its[0] == key[0] and other.experts[its].group == worker.experts[key].group


def only(tensors: Tensors, names: Mapping[str, object], *, are_in: bool) -> Tensors:
    """Returns the tensors whose names are among some names, or those whose names are not."""
    return {name: tensor for name, tensor in tensors.items() if (name in names) == are_in}
