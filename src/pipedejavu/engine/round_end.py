"""Exchanges between rounds, when nothing is in flight, for replicas that make updates of their own.

A round of HetPipe ends when every replica has added the pushes of the others that it has not pulled. A round of EASGD
begins with an exchange of weights between server and workers; before the first round they all have the same ones.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from pipedejavu.engine.applier import PieceReplica, as_leaves
from pipedejavu.engine.handlers import Handlers, pieces_of
from pipedejavu.engine.job import Read
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.program import Program, Table, Value, ValueKind


class _Need(NamedTuple):
    """Tensors of a (piece, replica) that one worker holds and another reads."""

    reader: int
    holder: int
    piece: PieceReplica


def send_first_weights(handlers: Handlers) -> None:
    """Before a round of EASGD, sends each worker's first weights to the workers that read but do not hold them."""
    if not handlers.first_version or handlers.program.plan.reduce.combiner != "elastic":
        return
    received = _exchange(handlers, _first_reads(handlers.program), lambda key: handlers.values[Value.weights(*key, 0)])
    for key, weights in received.items():
        handlers.values[Value.weights(*key, 0)] = as_leaves(weights)


def add_unpulled_waves(handlers: Handlers) -> None:
    """After a round of HetPipe, adds the waves of other replicas that a replica has not pulled to its weights."""
    plan, program = handlers.program.plan, handlers.program
    if plan.reduce.gate != "bound":
        return
    pushed = handlers.applier.pushed
    received = _exchange(handlers, _others(program), lambda key: _total(pushed[key].values()))
    for key in sorted(pushed):
        piece, replica = key
        others = [received[p, other] for p, other in sorted(received) if p == piece and other != replica]
        newest = Value.weights(*key, plan.steps)
        weights: Tensors = handlers.values[newest]
        moved = {name: w.detach() + sum((t[name] for t in others), torch.zeros_like(w)) for name, w in weights.items()}
        handlers.values[newest] = as_leaves(moved)
        for wave in pushed[key]:
            version = handlers.first_version + plan.steps
            handlers.log.events.append(Read(*key, -1, version, handlers.applier.first_wave + wave))
    pushed.clear()


def _exchange(
    handlers: Handlers, needs: Iterable[_Need], give: Callable[[PieceReplica], Tensors]
) -> dict[PieceReplica, Tensors]:
    """Sends and receives what workers need of each other, in the same order on all; returns what this worker reads."""
    received: dict[PieceReplica, Tensors] = {}
    for reader, holder, piece in sorted(set(needs)):
        key = ("between rounds", piece[0])
        if holder == handlers.index and reader == handlers.index:
            received[piece] = give(piece)
        elif holder == handlers.index:
            handlers.wire.send(tuple(tensor.detach() for tensor in give(piece).values()), reader, key)
        elif reader == handlers.index:
            names = next(runner.initial for (p, _), runner in handlers.runners.items() if p == piece[0])
            received[piece] = dict(zip(names, handlers.wire.receive(holder, key), strict=True))
    return received


def _first_reads(program: Program) -> list[_Need]:
    """Returns the first weights that a worker reads and does not hold."""
    table, holders = Table(program), _holders(program)
    needs = []
    for worker, sequence in enumerate(program.workers):
        reads = {value for a in sequence.actions for value in table(a, worker)[0]}
        keys = sorted({(v.piece, v.replica) for v in reads if v.kind == ValueKind.WEIGHTS and v.number == 0})
        needs += [_Need(worker, holders[key], key) for key in keys if holders[key] != worker]
    return needs


def _others(program: Program) -> list[_Need]:
    """Returns, for each replica of a piece, the need of every other replica; servers need nothing."""
    holders = {key: worker for key, worker in _holders(program).items() if key[1] < program.num_replicas}
    return [
        _Need(holders[piece, replica], worker, (piece, other))
        for (piece, other), worker in holders.items()
        for replica in range(program.num_replicas)
        if replica != other
    ]


def _holders(program: Program) -> dict[PieceReplica, int]:
    return {key: worker for worker in range(len(program.workers)) for key in pieces_of(program, worker)}


def _total(waves: Iterable[Tensors]) -> Tensors:
    first, *others = waves
    return {name: sum((wave[name] for wave in others), tensor) for name, tensor in first.items()}
