"""Compiler passes: each takes a program and returns one with more actions in its sequences."""

from pipedejavu.program.action import (
    BACKWARD,
    DROP,
    FETCH,
    FORWARD,
    GATHER,
    OUTPUT_KINDS,
    RECOMPUTE,
    RECV,
    REDUCE,
    SEND,
    UPDATE,
    Action,
    Via,
)
from pipedejavu.program.effect import Table
from pipedejavu.program.program import Program, shard_group
from pipedejavu.program.value import (
    ACTIVATION,
    CONSENSUS,
    GRADIENT,
    PUSH,
    WEIGHT_GRADIENT,
    WEIGHTS,
    Value,
)

MOVABLE = frozenset((ACTIVATION, GRADIENT, WEIGHT_GRADIENT, WEIGHTS, PUSH, CONSENSUS))
"""Kinds of values that one worker may write and another read."""


def add_recompute(program: Program) -> Program:
    """Adds a RECOMPUTE before each backward of a piece that the plan recomputes."""
    if not program.plan.order.has_recompute:
        return program
    sequences = []
    for worker in program.workers:
        sequence: list[Action] = []
        for a in worker.actions:
            if a.kind in OUTPUT_KINDS and program.recomputed[a.piece]:
                sequence.append(a._replace(kind=RECOMPUTE))
            sequence.append(a)
        sequences.append(tuple(sequence))
    return program.with_actions(sequences)


COLLECTIVES = {
    "col": ("", "", "", "all-reduce"),
    "head": ("", "", "", "all-reduce"),
    "row": ("", "all-reduce", "", ""),
    "sequence": ("all-gather", "reduce-scatter", "all-gather", "reduce-scatter"),
    "vocabulary": ("", "all-reduce", "", "all-reduce"),
    "context": ("all-to-all", "all-to-all", "all-to-all", "all-to-all"),
    "stationary-x": ("", "reduce-scatter", "all-gather", ""),
    "stationary-y": ("all-gather", "", "", "reduce-scatter"),
    "stationary-w": ("all-gather", "reduce-scatter", "all-gather", "reduce-scatter"),
    "expert": ("all-to-all", "all-to-all", "all-to-all", "all-to-all"),
}
"""By layout, the collectives before and after its forward, then before and after its backward."""


def add_layout_collectives(program: Program) -> Program:
    """Adds the all-to-alls of experts, on the inputs and outputs of each piece.

    The sums inside divided operators are part of forwards and backwards.
    """
    if not program.plan.divides_experts or program.plan.place.shards == 1:
        return program
    rows = [COLLECTIVES[layout] for layout in program.plan.cut.layouts]
    sequences = []
    for worker in program.workers:
        sequence: list[Action] = []
        for a in worker.actions:
            is_whole = program.plan.divides_experts and not program.has_experts(a.piece)
            if a.kind not in (FORWARD, RECOMPUTE, BACKWARD) or is_whole:
                sequence.append(a)
                continue
            is_backward = a.kind == BACKWARD
            before, after = (2, 3) if is_backward else (0, 1)
            boundary = Value.gradient if is_backward else Value.activation
            group = Via.among(shard_group(program.pieces[a.piece].stage, program.mesh_of(a.replica)[0]))
            if any(row[before] for row in rows):
                sources = program.outputs[a.piece] if is_backward else program.inputs[a.piece]
                sequence += [Action.on(GATHER, boundary(p, a.microbatch), group) for p in sources]
            sequence.append(a)
            has_output = a.kind == FORWARD or (is_backward and program.inputs[a.piece])
            if any(row[after] for row in rows) and has_output:
                sequence.append(Action.on(REDUCE, boundary(a.piece, a.microbatch), group))
        sequences.append(tuple(sequence))
    return program.with_actions(sequences)


def add_transfers(program: Program) -> Program:
    """Adds a SEND after the action that writes a value and a RECV before the action that reads it on another worker.

    Every ordered pair of workers is a channel, first in, first out, in the sender's order. The receiver takes a value
    early if a later one on the same channel is needed sooner, so both ends agree on the order. A SEND waits only for
    its value and for earlier SENDs, so transfers cannot deadlock.
    """
    made, read = _makers_and_readers(program)
    wanted: dict[tuple[int, int], dict[Value, int]] = {}  # channel -> value -> the position of its first reader
    for index, worker in enumerate(program.workers):
        shard = program.shard_of(index)
        for value, position in read[index].items():
            maker = made.get((shard, value))
            if maker is not None and maker[0] != index:
                wanted.setdefault((maker[0], index), {})[value] = position
        if program.plan.keep.kind == "server":
            # The worker also receives the last reply, because the run repeats the program.
            for piece, replica in program.held(index):
                reply = Value.weights(piece, replica, program.plan.steps)
                if (shard, reply) in made:
                    wanted.setdefault((made[shard, reply][0], index), {})[reply] = len(worker.actions)
    before: list[dict[int, list[Action]]] = [{} for _ in program.workers]
    after: list[dict[int, list[Action]]] = [{} for _ in program.workers]
    for (source, target), needs in wanted.items():
        shard = program.shard_of(source)
        in_order = sorted(needs, key=lambda v: made[shard, v][1])
        receiver, sender = Via.to_worker(target), Via.from_worker(source)
        latest = len(program.workers[target].actions)
        for value in reversed(in_order):
            latest = min(latest, needs[value])
            before[target].setdefault(latest, []).append(Action.on(RECV, value, sender))
        for value in in_order:
            after[source].setdefault(made[shard, value][1], []).append(Action.on(SEND, value, receiver))
    for ahead in before:
        for actions in ahead.values():
            actions.reverse()
    return inserted(program, before, after)


def _makers_and_readers(
    program: Program,
) -> tuple[dict[tuple[int, Value], tuple[int, int]], list[dict[Value, int]]]:
    """Returns the (worker, position) of the last writer of each (shard, value), and each worker's first readers."""
    rows = Table(program).rows
    made: dict[tuple[int, Value], tuple[int, int]] = {}
    read: list[dict[Value, int]] = [{} for _ in program.workers]
    for index, worker in enumerate(program.workers):
        shard, first = program.shard_of(index), read[index]
        for position, a in enumerate(worker.actions):
            reads, writes, adds = rows[a[0]](a, index)
            for value in reads:
                if value not in first and value[0] in MOVABLE:
                    first[value] = position
            if a.kind == FETCH and a.what == ACTIVATION:
                continue  # it was written before it moved to the host, maybe by another worker
            for value in (*writes, *adds):
                if value[0] in MOVABLE and not value[4]:
                    made[shard, value] = (index, position)
    return made, read


def inserted(program: Program, before: list[dict[int, list[Action]]], after: list[dict[int, list[Action]]]) -> Program:
    """Returns the program with actions inserted, by worker and position, before and after its own."""
    sequences = []
    for worker, ahead, later in zip(program.workers, before, after, strict=True):
        sequence: list[Action] = []
        for position, a in enumerate(worker.actions):
            if position in ahead:
                sequence += ahead[position]
            sequence.append(a)
            if position in later:
                sequence += later[position]
        sequence += ahead.get(len(worker.actions), [])
        sequences.append(tuple(sequence))
    return program.with_actions(sequences)


def add_version_drops(program: Program) -> Program:
    """Adds a DROP of each old weight version after its last reader, unless an update in place reuses its memory.

    A version that a REDUCE reads last is dropped before the next update, which needs what the REDUCE makes: a DROP
    right after it would keep forwards waiting for other workers.
    """
    plan = program.plan
    if plan.version.kind not in ("stash", "vertical", "double-buffer") and not plan.compensates_shares:
        return program
    table = Table(program)
    before: list[dict[int, list[Action]]] = []
    after: list[dict[int, list[Action]]] = []
    for index, worker in enumerate(program.workers):
        last: dict[Value, int] = {}
        newest: dict[tuple[int, int], int] = {}
        updates: dict[Value, int] = {}
        for position, a in enumerate(worker.actions):
            last |= {v: position for v in table(a, index)[0] if v.kind == WEIGHTS}
            if a.kind == UPDATE:
                newest[a.piece, a.replica] = a.version
                updates[Value.weights(a.piece, a.replica, a.version)] = position
        drops: dict[int, list[Action]] = {}
        early: dict[int, list[Action]] = {}
        for weights, position in last.items():
            reader = worker.actions[position]
            is_reused = reader.kind == UPDATE and weights.number == reader.version - 1
            if is_reused or weights.number >= newest.get((weights.piece, weights.replica), 0):
                continue
            if reader.kind == REDUCE:
                early.setdefault(updates[weights.at(reader.version + 1)], []).append(Action.on(DROP, weights))
            else:
                drops.setdefault(position, []).append(Action.on(DROP, weights))
        before.append(early)
        after.append(drops)
    return inserted(program, before, after)
