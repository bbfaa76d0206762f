"""What workers that make updates of their own tell each other between two rounds, when nothing is in flight.

A round of HetPipe ends when every replica has taken in what the others have pushed and it has not pulled. A round of
EASGD begins with weights that server and workers know of each other; before the first one they all have the same.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from pipedejavu.engine.applier import Home, as_leaves
from pipedejavu.engine.handlers import Handlers, homes_of
from pipedejavu.engine.job import Read
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.program import Program, Table


class _Need(NamedTuple):
    """A worker that is to know something of a piece of a replica, and the worker that holds it."""

    reader: int
    holder: int
    home: Home


def meet(own: Handlers) -> None:
    """Before a round, tells those who read a worker's first weights, and do not hold them, what they are."""
    if not own.first_version or own.program.plan.reduce.combiner != "elastic":
        return
    found = _exchange(own, _first_reads(own.program), lambda home: own.values["w", *home, 0, ""])
    for (piece, replica), weights in found.items():
        own.values["w", piece, replica, 0, ""] = as_leaves(weights)


def drain(own: Handlers) -> None:
    """Behind a round, adds to each replica's weights what the others have pushed in waves that it has not pulled."""
    plan, program = own.program.plan, own.program
    if plan.reduce.gate != "bound":
        return
    pushed = own.applier.pushed
    found = _exchange(own, _others(program), lambda home: _total(pushed[home].values()))
    for home in sorted(pushed):
        others = [found[piece, replica] for piece, replica in sorted(found) if piece == home[0] and replica != home[1]]
        weights: Tensors = own.values["w", *home, plan.steps, ""]
        moved = {name: w.detach() + sum((t[name] for t in others), torch.zeros_like(w)) for name, w in weights.items()}
        own.values["w", *home, plan.steps, ""] = as_leaves(moved)
        for wave in pushed[home]:
            version = own.first_version + plan.steps
            own.log.events.append(Read(*home, -1, version, own.applier.first_wave + wave))
    pushed.clear()


def _exchange(own: Handlers, needs: Iterable[_Need], give: Callable[[Home], Tensors]) -> dict[Home, Tensors]:
    """Hands over what all workers need, one thing after the other, in one order for all; returns what is read here."""
    found: dict[Home, Tensors] = {}
    for reader, holder, home in sorted(set(needs)):
        key = ("between rounds", home[0])
        if holder == own.index and reader == own.index:
            found[home] = give(home)
        elif holder == own.index:
            own.wire.send(tuple(tensor.detach() for tensor in give(home).values()), reader, key)
        elif reader == own.index:
            names = next(runner.initial for (piece, _), runner in own.runners.items() if piece == home[0])
            found[home] = dict(zip(names, own.wire.receive(holder, key), strict=True))
    return found


def _first_reads(program: Program) -> list[_Need]:
    """Returns who reads the first weights of a piece that it does not hold."""
    table, holders = Table(program), _holders(program)
    found = []
    for worker, sequence in enumerate(program.workers):
        reads = {value for a in sequence.actions for value in table(a, worker)[0]}
        homes = sorted({(v[1], v[2]) for v in reads if v[0] == "w" and v[3] == 0})
        found += [_Need(worker, holders[home], home) for home in homes if holders[home] != worker]
    return found


def _others(program: Program) -> list[_Need]:
    """Returns each replica of a piece beside each other one, servers apart."""
    holders = {home: worker for home, worker in _holders(program).items() if home[1] < program.num_replicas}
    return [
        _Need(holders[piece, replica], worker, (piece, other))
        for (piece, other), worker in holders.items()
        for replica in range(program.num_replicas)
        if replica != other
    ]


def _holders(program: Program) -> dict[Home, int]:
    return {home: worker for worker in range(len(program.workers)) for home in homes_of(program, worker)}


def _total(waves: Iterable[Tensors]) -> Tensors:
    first, *others = waves
    return {name: sum((wave[name] for wave in others), tensor) for name, tensor in first.items()}
