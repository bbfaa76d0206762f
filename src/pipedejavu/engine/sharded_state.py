"""Whole tensors from the shards of all workers, between rounds: weights, masters and optimizer state by parameter name.

All workers of a group call these functions together, in the same order. Workers that are threads of one process read
each other's shards instead; nothing is in flight then.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine.applier import Applier
from pipedejavu.engine.device import CPU
from pipedejavu.engine.master import masters_of
from pipedejavu.engine.optimizer import LOW, State, Tensors
from pipedejavu.engine.resting_state import RestingState
from pipedejavu.engine.sharded_piece import ShardedPiece
from pipedejavu.engine.wire import Wire

PieceReplica = tuple[int, int]
"""A (piece, replica) pair."""

STEP = "step"
"""The slot that is a number, and so is not divided."""
_FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.complex64, torch.complex128)


class ShardedState(RestingState):
    """The pieces of one worker whose state is divided over replicas."""

    wire: Wire
    applier: Applier

    def __init__(self) -> None:
        self.sharded: dict[PieceReplica, ShardedPiece] = {}
        """By (piece, replica), those whose state is divided."""
        self.fellows: Mapping[int, Any] = {}
        """All workers, if they are threads of this process."""
        self.whole: dict[PieceReplica, Tensors] | None = None
        """Whole masters that were gathered since the last round."""

    def adopt(self) -> None:
        """Forgets the whole masters after other values were put into the shards."""
        self.whole = None


def whole_masters(worker: ShardedState, key: PieceReplica) -> Tensors:
    """Returns the masters of all parameters of a piece, in host memory."""
    shards = worker.sharded[key]
    weights = dict(_joined(worker, key, lambda held, _state: held.shards))
    lows: State = {}
    for slot, tensors in whole_slots(worker, key, (LOW,)):
        lows |= {name: {slot: low} for name, low in tensors.items()}
    return masters_of({name: weights[name] for name in shards.leaves}, lows)


def whole_slots(worker: ShardedState, key: PieceReplica, slots: tuple[str, ...]) -> Iterator[tuple[str, Tensors]]:
    """Yields each slot of a piece's optimizer state, in host memory, for the parameters that have it."""
    table = _table(worker, key, slots)
    names = [*worker.sharded[key].leaves]
    for slot, (formats, values) in zip(slots, table, strict=True):
        present = {name: int(code) for name, code in zip(names, formats, strict=True) if code >= 0}
        if slot == STEP:
            yield slot, {name: torch.tensor(float(v)) for name, v in zip(names, values, strict=True) if name in present}
        elif present:
            yield slot, {name: t for name, t in _joined(worker, key, _SlotPick(slot, present)) if name in present}


class _SlotPick:
    """Picks the vectors of a slot: its parts where they lie in the shards, and zeros for the rest."""

    def __init__(self, slot: str, present: Mapping[str, int]):
        self.slot, self.present = slot, present

    def __call__(self, held: ShardedPiece, state: State) -> list[Tensor]:
        vectors = []
        for layout, shard in zip(held.layouts, held.shards, strict=True):
            codes = {self.present[name] for name in layout.shapes if name in self.present}
            dtype = _FORMATS[max(codes)] if codes else torch.uint8
            vector = torch.zeros(layout.length if codes else 0, dtype=dtype, device=shard.device)
            for name, part in layout.parts(vector).items() if codes else ():
                if self.slot in state.get(name, {}):
                    part.copy_(state[name][self.slot])
            vectors.append(vector)
        return vectors


def _joined(
    worker: ShardedState, key: PieceReplica, pick: Callable[[ShardedPiece, State], list[Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields each parameter with the whole tensor whose shards `pick` returns, by layout."""
    shards = worker.sharded[key]
    rows = _all(worker, key, pick)
    for layout, row in zip(shards.layouts, rows, strict=True):
        if row.numel():
            yield from layout.views(row).items()


def _all(
    worker: ShardedState, key: PieceReplica, pick: Callable[[ShardedPiece, State], list[Tensor]]
) -> Iterator[Tensor]:
    """Yields what each member picks, member after member, in host memory."""
    shards = worker.sharded[key]
    if worker.fellows:
        held = [worker.fellows[member] for member in shards.members]
        keys = [next(k for k in other.sharded if k[0] == key[0] and _is_like(other, k, shards)) for other in held]
        picked = [pick(other.sharded[k], other.applier.state.get(k, {})) for other, k in zip(held, keys, strict=True)]
        for row in zip(*picked, strict=True):
            yield torch.cat([tensor.detach().to(CPU) for tensor in row])
        return
    for vector in pick(shards, worker.applier.state.get(key, {})):
        yield worker.wire.all_gather(vector, shards.group).detach().to(CPU)


def _is_like(other: ShardedState, key: PieceReplica, shards: ShardedPiece) -> bool:
    return other.sharded[key].group == shards.group


def _table(worker: ShardedState, key: PieceReplica, slots: tuple[str, ...]) -> list[tuple[Any, Any]]:
    """Returns for each slot and parameter the number of its format, -1 if it has none, and the value of a number."""
    shards = worker.sharded[key]
    names = [*shards.leaves]

    def pick(_: ShardedPiece, state: State) -> list[Tensor]:
        rows = [[-1.0] * len(names) for _ in range(2 * len(slots))]
        for number, slot in enumerate(slots):
            for column, name in enumerate(names):
                if (tensor := state.get(name, {}).get(slot)) is not None:
                    rows[2 * number][column] = _FORMATS.index(tensor.dtype)
                    rows[2 * number + 1][column] = float(tensor) if slot == STEP else 0.0
        return [torch.tensor(rows, dtype=torch.float64).view(-1)]

    (joined,) = _all(worker, key, pick)
    most = joined.view(len(shards.members), len(slots), 2, len(names)).amax(0)
    return [(row[0].tolist(), row[1].tolist()) for row in most]
