"""Sums of gradients over microbatches and workers: which pieces have them, and the REDUCE of a piece's gradients."""

from collections import Counter
from typing import Any, Protocol

import torch
from torch import Tensor

from pipedejavu.engine.byzantine import Sent, StageReplica, spoilt_values
from pipedejavu.engine.job import Job
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import tensors_of
from pipedejavu.engine.sharded_piece import ShardedPiece
from pipedejavu.engine.wire import Wire, flatten, unflatten
from pipedejavu.program import Action, ActionKind, GroupRole, Program, Value, ValueKind
from pipedejavu.program.action import value_of
from pipedejavu.program.value import DEVICE, SHARD

_PASSED: dict[ValueKind | None, Sent] = {ValueKind.ACTIVATION: "activations", ValueKind.GRADIENT: "errors"}
"""What stages pass on for each microbatch."""


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
    sharded: dict[tuple[int, int], ShardedPiece]
    job: Job
    values: dict[Value, Any]
    wire: Wire
    first_version: int


def reduce_gradients(worker: HoldsGradients, a: Action) -> None:
    """Sums the gradients of a piece over a group: on all members, or each shard on one of them if state is divided."""
    role = worker.program.groups[a.group].role
    if role is GroupRole.TIE:
        _reduce_tied(worker, a)
        return
    gradients = sent_gradients(worker, a)
    shards = worker.sharded.get((a.piece, a.replica))
    if shards is not None and role is GroupRole.STAGE:
        worker.values.pop(value_of(a))
        worker.values[value_of(a, DEVICE if shards.zero == 1 else SHARD)] = shards.reduce(gradients, worker.wire)
        return
    layouts = worker.runners[a.piece, a.replica].layouts
    if layouts and worker.program.plan.divides_experts:  # workers with other experts have gradients of those
        is_of_experts = role is GroupRole.EXPERTS
        gradients_of_all = {name: g for name, g in gradients.items() if (name in layouts) == is_of_experts}
        worker.values[value_of(a)] = gradients | _summed(worker, gradients_of_all, a.group)
        return
    worker.values[value_of(a)] = _summed(worker, gradients, a.group)


def _summed(worker: HoldsGradients, gradients: Tensors, group: str) -> Tensors:
    """Returns the sums of gradients over a group, with its helpers if it has any."""
    if not worker.program.groups[group].helpers:
        return add_up(worker.wire, gradients, group)
    parts = [gradient.detach() for gradient in gradients.values()]
    total = worker.wire.push_pull(flatten(parts), group)
    return dict(zip(gradients, unflatten(total, parts), strict=True))


def add_up(wire: Wire, tensors: Tensors, group: str) -> Tensors:
    """Returns the sum of each tensor over a group; all are added as one vector."""
    parts = [tensor.detach() for tensor in tensors.values()]
    return dict(zip(tensors, unflatten(wire.add_up(flatten(parts), group), parts), strict=True))


def sent_tensors(worker: HoldsGradients, a: Action) -> tuple[Tensor, ...]:
    """Returns the tensors of a value as its worker sends them: faulty if the job injects a fault."""
    if a.what == ValueKind.WEIGHT_GRADIENT:
        return tuple(sent_gradients(worker, a).values())
    value, fault, size = worker.values[value_of(a)], worker.job.byzantine, worker.program.update_size
    tensors = tuple(value.values()) if isinstance(value, dict) else tensors_of(value)
    if fault is None or a.what not in _PASSED:
        return tensors
    program, number = worker.program, worker.first_version * size + a.microbatch
    replica = next(q for piece, q in program.held(worker.index) if piece == a.piece)  # the action does not name it
    at = StageReplica(a.piece, program.pieces[a.piece].stage, replica, program.num_replicas)
    return spoilt_values(fault, worker.job.seed, _PASSED[a.what], at, tensors, number)


def sent_gradients(worker: HoldsGradients, a: Action) -> Tensors:
    """Returns the gradients of a piece as its worker sends them: faulty if the job injects a fault."""
    value: Tensors = worker.values[value_of(a)]
    fault = worker.job.byzantine
    stage = worker.program.pieces[a.piece].stage
    if fault is None or not fault.is_faulty(a.replica, worker.program.num_replicas, stage):
        return value
    origin = (worker.job.seed, a.replica, worker.first_version + a.version, a.piece)
    return {name: fault.spoilt(gradient, *origin, n) for n, (name, gradient) in enumerate(value.items())}


def _reduce_tied(worker: HoldsGradients, a: Action) -> None:
    """Sums the gradients of tied parameters over the pieces that share them, which divide them alike."""
    tie = worker.program.groups[a.group].number
    tied: list[tuple[Tensors, str, bool]] = []
    for piece, replica in worker.program.held(worker.index):
        if replica == a.replica and piece in worker.program.tied_pieces[tie]:
            value = Value.weight_gradient(piece, replica, a.version)
            is_shard = value not in worker.values
            gradients = worker.values[value._replace(place=SHARD) if is_shard else value]
            tied += [(gradients, name, is_shard) for name in gradients if name in worker.job.ties[tie]]
    if not tied:  # the zeros at the end of a shard are all that the members hold of the parameter
        return
    local = torch.stack([gradients[name] for gradients, name, _ in tied]).sum(0)
    total = unflatten(worker.wire.add_up(flatten([local]), a.group), [local])[0]
    for gradients, name, is_shard in tied:
        if is_shard:  # a part of the shard's memory
            gradients[name].copy_(total)
        else:
            gradients[name] = total.clone()
