"""Which pieces sum gradients: only their sums need more bits than the gradients themselves."""

from collections import Counter
from typing import Any, Protocol

import torch

from pipedejavu.engine.job import Job
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.wire import Wire, flatten, unflatten
from pipedejavu.program import Action, ActionKind, Program, Value, ValueKind


def is_summed(program: Program, index: int, key: tuple[int, int]) -> bool:
    """Whether an update of a (piece, replica) sums gradients of several microbatches, or of several workers."""
    backwards = (ActionKind.BACKWARD, ActionKind.WEIGHT_BACKWARD)
    updates = Counter[int]()
    for a in program.workers[index].actions:
        if a.what == ValueKind.WEIGHT_GRADIENT and a.kind in (ActionKind.REDUCE, ActionKind.SEND, ActionKind.RECV):
            return True
        if (a.piece, a.replica) == key and a.kind in backwards:
            updates[a.microbatch // program.update_size] += 1
    return max(updates.values(), default=0) > 1


class HoldsGradients(Protocol):
    """A worker, as far as sums of its gradients need it."""

    program: Program
    index: int
    runners: dict[tuple[int, int], PieceRunner]
    job: Job
    values: dict[Value, Any]
    wire: Wire


def reduce_tied(worker: HoldsGradients, a: Action) -> None:
    """Sums the gradients of tied parameters over the pieces that share them."""
    tie = worker.program.groups[a.group].number
    tied = [
        (worker.values[Value.weight_gradient(piece, replica, a.version)], name)
        for piece, replica in worker.program.held(worker.index)
        if replica == a.replica
        for name in worker.runners[piece, replica].initial
        if name in worker.job.ties[tie]
    ]
    local = torch.stack([gradients[name] for gradients, name in tied]).sum(0)
    total = unflatten(worker.wire.add_up(flatten([local]), a.group), [local])[0]
    for gradients, name in tied:
        gradients[name] = total.clone()
