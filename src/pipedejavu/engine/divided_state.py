"""Whole tensors from the parts of a group's workers, between rounds.

All workers of a group call it together, in the same order. Workers that are threads of one process read each other's
parts instead; nothing is in flight then.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from pipedejavu.engine.device import CPU
from pipedejavu.engine.optimizer import LOW, State, Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.wire import Wire
from pipedejavu.engine.wire_group import WireGroup
from pipedejavu.program import Program
from pipedejavu.program.program import shard_group

PieceReplica = tuple[int, int]
"""A (piece, replica) pair."""


class DividedTensor(NamedTuple):
    """A tensor that is divided over the workers of a group."""

    kind: str
    """'weight', 'buffer', or a slot of optimizer state."""
    name: str


class HoldsParts(Protocol):
    """A worker, as far as its parts of tensors are concerned."""

    program: Program
    index: int
    runners: dict[PieceReplica, PieceRunner]
    wire: Wire

    @property
    def fellows(self) -> Mapping[int, "HoldsParts"]:
        """All workers, if they are threads of this process."""

    def held_masters(self, key: PieceReplica) -> Tensors:
        """Returns the newest masters of a piece, as this worker's group divides them."""

    def held_state(self, key: PieceReplica, slots: tuple[str, ...]) -> State:
        """Returns the optimizer state of a piece, as this worker's group divides it."""


def whole_tensors(
    worker: HoldsParts, key: PieceReplica, slots: tuple[str, ...] = ()
) -> Iterator[tuple[DividedTensor, Tensor]]:
    """Yields the tensors of a piece that are divided, whole and in host memory, with some slots of optimizer state."""
    own = _parts(worker, key, slots)
    piece, first = key[0], worker.program.mesh_of(key[1])[0]
    group = shard_group(worker.program.pieces[piece].stage, first)
    members = worker.program.groups[group].workers if own else ()
    step = 1 if worker.program.plan.divides_experts else 0  # workers that divide experts are replicas
    held = [(member, (piece, first + step * n)) for n, member in enumerate(members)]
    others = [_parts(worker.fellows[member], k, slots) for member, k in held] if worker.fellows else []
    ends = WireGroup(worker.wire, group, members, worker.index) if own else None
    for tensor, part in sorted(own.items()):
        layout = worker.runners[key].layouts[tensor.name]
        shards = [other[tensor] for other in others] if others else ends.all_gather(part) if ends else []
        yield tensor, layout.whole([shard.detach().to(CPU) for shard in shards])


def _parts(worker: HoldsParts, key: PieceReplica, slots: tuple[str, ...]) -> dict[DividedTensor, Tensor]:
    """Returns a worker's parts of the tensors of a piece that are divided."""
    runner = worker.runners[key]
    if not runner.layouts:
        return {}
    masters = worker.held_masters(key) | runner.frozen
    parts = {DividedTensor("weight", name): masters[name] for name in runner.layouts if name in masters}
    for name, buffer in runner.saved_buffers():
        if name in runner.layouts:
            parts[DividedTensor("buffer", name)] = buffer
    for name, tensors in worker.held_state(key, slots).items() if slots else ():
        for slot, tensor in tensors.items():
            if name in runner.layouts and slot != LOW and tensor.ndim:
                parts[DividedTensor(slot, name)] = tensor
    return parts
