"""Compiler passes that move state between host and device: weights, saved activations and samples."""

from collections.abc import Container
from dataclasses import dataclass

from pipedejavu.program.action import (
    DROP,
    FETCH,
    FORWARD,
    GATHER,
    OFFLOAD,
    OUTPUT_KINDS,
    RECOMPUTE,
    UPDATE,
    Action,
    Via,
)
from pipedejavu.program.effect import rest_of, resting, update_place
from pipedejavu.program.passes import inserted
from pipedejavu.program.program import Program, stage_group
from pipedejavu.program.value import DEVICE, SHARD, WEIGHTS, Value

Inserts = dict[int, list[Action]]


@dataclass
class _Use:
    """A stretch of a worker's sequence in which one piece's weights are read."""

    weights: Value
    last: int
    """The position of the last reader."""
    stays: bool = False
    """Whether the weights stay on the device until their next use."""


def add_residency(program: Program) -> Program:
    """Adds all copies between host and device that the plan's keep axis asks for."""
    program = _add_weights(program)
    program = _add_activations(program)
    return _add_samples(program)


def _add_weights(program: Program) -> Program:
    """Adds a FETCH or GATHER of weights before each use and a DROP after it.

    At most `window + prefetch` pieces are on the device at once: the weights of use j arrive after use
    j − window − prefetch is dropped, and after the update that wrote them.
    """
    keep, ahead = program.plan.keep, program.plan.order.prefetch
    pieces = range(len(program.pieces))
    gathered = {p for p in pieces if update_place(program, p) == SHARD and (WEIGHTS, DEVICE) not in resting(program, p)}
    moving = gathered | {p for p in pieces if rest_of(program, p) == "window"}
    if not moving:
        return program
    capacity = ahead + (1 if gathered else keep.num_windowed)  # pieces on the device at once
    before: list[Inserts] = []
    after: list[Inserts] = []
    for index, worker in enumerate(program.workers):
        uses, updated = _uses(worker.actions, moving, keep.persists)
        brings: Inserts = {}
        latest: dict[Value, _Use] = {}
        for j, use in enumerate(uses):
            weights = use.weights
            free = 0 if keep.persists or j < capacity else uses[j - capacity].last + 1
            earlier = latest.get(weights)
            latest[weights] = use
            if earlier is not None and free <= earlier.last:
                earlier.stays = True  # a drop would come after the next fetch
                continue
            if weights.piece in gathered:
                group = stage_group(program.pieces[weights.piece].stage, program.shard_of(index))
                bring = Action.on(GATHER, weights, Via.among(group))
            else:
                bring = Action.on(FETCH, weights)
            brings.setdefault(max(free, updated.get(weights, -1) + 1), []).append(bring)
        drops: Inserts = {}
        for use in uses:
            if not use.stays:
                drops.setdefault(use.last, []).append(Action.on(DROP, use.weights))
        before.append(brings)
        after.append(drops)
    return inserted(program, before, after)


def _uses(actions: tuple[Action, ...], pieces: Container[int], persists: bool) -> tuple[list[_Use], dict[Value, int]]:
    """Returns the uses of some pieces in order, and the position of the update that writes each version."""
    uses: list[_Use] = []
    updated: dict[Value, int] = {}
    for position, a in enumerate(actions):
        weights = Value.weights(a.piece, a.replica, a.version)
        if a.kind == UPDATE:
            updated[weights] = position
        if a.kind not in _READERS or a.piece not in pieces:
            continue
        candidates = uses if persists else uses[-1:]
        use = next((u for u in candidates if u.weights == weights), None)
        if use:
            use.last = position
        else:
            uses.append(_Use(weights, last=position))
    return uses, updated


_READERS = frozenset((FORWARD, RECOMPUTE, *OUTPUT_KINDS))
"""Kinds that read a piece's weights."""


def _add_activations(program: Program) -> Program:
    """Adds copies of saved activations to the host, and back `prefetch` + 1 compute actions before their backward."""
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
            if program.keeps_saved(a.piece):
                values = [Value.saved(a.piece, a.microbatch)]
            else:
                values = [Value.activation(piece, a.microbatch) for piece in program.inputs[a.piece]]
            for value in values:
                if a.kind == FORWARD:
                    kept[value] = position
                elif a.kind in _READERS:
                    needed.setdefault(value, position)
        outs: Inserts = {}
        ins: Inserts = {}
        for value, position in kept.items():
            back = computes[max(rank[needed[value]] - ahead, 0)]
            if back > position:  # otherwise it would return at once
                outs.setdefault(position, []).append(Action.on(OFFLOAD, value))
                ins.setdefault(back, []).append(Action.on(FETCH, value))
        before.append(ins)
        after.append(outs)
    return inserted(program, before, after)


def _add_samples(program: Program) -> Program:
    """Adds a FETCH of each microbatch's samples, `prefetch` microbatches ahead of its forward."""
    plan = program.plan
    if not plan.prefetches_data:
        return program
    before: list[Inserts] = []
    for worker in program.workers:
        starts = [i for i, a in enumerate(worker.actions) if a.kind == FORWARD and not program.inputs[a.piece]]
        ins: Inserts = {}
        for n, position in enumerate(starts):
            a = worker.actions[position]
            at = starts[max(0, n - plan.order.prefetch)]
            ins.setdefault(at, []).append(Action.on(FETCH, Value.batch(a.piece, a.microbatch)))
        before.append(ins)
    return inserted(program, before, [{} for _ in program.workers])
