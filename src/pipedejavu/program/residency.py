"""Passes for state that does not rest on the device: weights that come and go, activations that wait on
the host, and samples that are brought in ahead.
"""

from collections.abc import Container
from dataclasses import dataclass

from pipedejavu.program.action import Action
from pipedejavu.program.passes import inserted
from pipedejavu.program.program import Program
from pipedejavu.program.value import Value, rest_of, resting, update_place

Inserts = dict[int, list[Action]]


@dataclass
class _Use:
    """A stretch of a worker's sequence in which one piece's weights are read."""

    piece: int
    replica: int
    version: int
    last: int
    stays: bool = False
    """Whether the weights are still there at their next use."""


def add_residency(program: Program) -> Program:
    """Adds all movement between the resting places of state and the device."""
    program = _add_weights(program)
    program = _add_activations(program)
    return _add_samples(program)


def _add_weights(program: Program) -> Program:
    """Brings weights in before each use and frees them behind it.

    At most `window + prefetch` pieces are there at once: use j comes in when use j − window − prefetch has
    been dropped, and not before the update that wrote it.
    """
    keep, ahead = program.plan.keep, program.plan.order.prefetch
    pieces = range(len(program.pieces))
    gathered = {p for p in pieces if update_place(program, p) == "shard" and ("w", "") not in resting(program, p)}
    moving = gathered | {p for p in pieces if rest_of(program, p) == "window"}
    if not moving:
        return program
    room = ahead + (1 if gathered else keep.window)
    before: list[Inserts] = []
    after: list[Inserts] = []
    for worker in program.workers:
        uses, updated = _uses(worker.actions, moving, keep.persists)
        brings: Inserts = {}
        latest: dict[tuple[int, int, int], _Use] = {}
        for j, use in enumerate(uses):
            key = (use.piece, use.replica, use.version)
            free = 0 if keep.persists or j < room else uses[j - room].last + 1
            earlier = latest.get(key)
            latest[key] = use
            if earlier is not None and free <= earlier.last:
                earlier.stays = True  # it would come back before it has left
                continue
            bring = _gather(program, use) if use.piece in gathered else _weights("FETCH", use)
            brings.setdefault(max(free, updated.get(key, -1) + 1), []).append(bring)
        drops: Inserts = {}
        for use in uses:
            if not use.stays:
                drops.setdefault(use.last, []).append(_weights("DROP", use))
        before.append(brings)
        after.append(drops)
    return inserted(program, before, after)


def _uses(
    actions: tuple[Action, ...], pieces: Container[int], persists: bool
) -> tuple[list[_Use], dict[tuple[int, int, int], int]]:
    """Returns the uses of some pieces in order, and the position of the update that writes each version."""
    uses: list[_Use] = []
    updated: dict[tuple[int, int, int], int] = {}
    for position, a in enumerate(actions):
        if a.kind == "UPDATE":
            updated[a.piece, a.replica, a.version] = position
        if a.kind not in ("F", "R", "B", "I") or a.piece not in pieces:
            continue
        key = (a.piece, a.replica, a.version)
        candidates = uses if persists else uses[-1:]
        use = next((u for u in candidates if (u.piece, u.replica, u.version) == key), None)
        if use:
            use.last = position
        else:
            uses.append(_Use(*key, last=position))
    return uses, updated


def _weights(kind: str, use: _Use) -> Action:
    return Action(kind, use.piece, use.replica, -1, use.version, "w")


def _gather(program: Program, use: _Use) -> Action:
    return _weights("GATHER", use)._replace(via=f"*s{program.pieces[use.piece].stage}")


def _add_activations(program: Program) -> Program:
    """Moves what waits for the backward pass to the host and back, `prefetch` + 1 actions ahead."""
    if program.plan.keep.activations != "host":
        return program
    ahead = program.plan.order.prefetch + 1
    before: list[Inserts] = []
    after: list[Inserts] = []
    for worker in program.workers:
        kept: dict[Value, int] = {}
        needed: dict[Value, int] = {}
        computes = [i for i, a in enumerate(worker.actions) if a.lane == "compute"]
        rank = {position: n for n, position in enumerate(computes)}
        for position, a in enumerate(worker.actions):
            what, pieces = ("s", (a.piece,)) if program.keeps_saved(a.piece) else ("x", program.inputs[a.piece])
            for value in ((what, piece, 0, a.microbatch, "") for piece in pieces):
                if a.kind == "F":
                    kept[value] = position
                elif a.kind in ("R", "B", "I"):
                    needed.setdefault(value, position)
        outs: Inserts = {}
        ins: Inserts = {}
        for value, position in kept.items():
            back = computes[max(rank[needed[value]] - ahead, 0)]
            if back > position:  # otherwise it would come back at once
                outs.setdefault(position, []).append(_saved("OFFLOAD", value))
                ins.setdefault(back, []).append(_saved("FETCH", value))
        before.append(ins)
        after.append(outs)
    return inserted(program, before, after)


def _saved(kind: str, value: Value) -> Action:
    what, piece, _, microbatch, _ = value
    return Action(kind, piece, 0, microbatch, -1, what)


def _add_samples(program: Program) -> Program:
    """Brings the samples of a microbatch to the device `prefetch` microbatches ahead."""
    plan = program.plan
    if not plan.prefetches_data:
        return program
    before: list[Inserts] = []
    for worker in program.workers:
        starts = [i for i, a in enumerate(worker.actions) if a.kind == "F" and not program.inputs[a.piece]]
        ins: Inserts = {}
        for n, position in enumerate(starts):
            a = worker.actions[position]
            at = starts[max(0, n - plan.order.prefetch)]
            ins.setdefault(at, []).append(Action("FETCH", a.piece, 0, a.microbatch, -1, "b"))
        before.append(ins)
    return inserted(program, before, [{} for _ in program.workers])
