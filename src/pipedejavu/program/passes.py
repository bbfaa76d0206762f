"""Small passes: each takes a program and returns one with more in its sequences."""

from pipedejavu.program.action import Action
from pipedejavu.program.program import Program
from pipedejavu.program.value import Table, Value

MOVABLE = frozenset("xgdwpc")
"""Whats that one worker may make and another read."""


def add_recompute(program: Program) -> Program:
    """Puts an R before each backward where the plan recomputes."""
    if not program.plan.order.has_recompute:
        return program
    sequences = []
    for worker in program.workers:
        sequence: list[Action] = []
        for a in worker.actions:
            if a.kind in "BI" and program.recomputed[a.piece]:
                sequence.append(a._replace(kind="R"))
            sequence.append(a)
        sequences.append(tuple(sequence))
    return program.with_actions(sequences)


COLLECTIVES = {
    "col": ("", "", "", "all-reduce"),
    "head": ("", "", "", "all-reduce"),
    "row": ("", "all-reduce", "", ""),
    "stationary-x": ("", "reduce-scatter", "all-gather", ""),
    "stationary-y": ("all-gather", "", "", "reduce-scatter"),
    "stationary-w": ("all-gather", "reduce-scatter", "all-gather", "reduce-scatter"),
    "expert": ("all-to-all", "all-to-all", "all-to-all", "all-to-all"),
}
"""What a layout needs before and after its forward, before and after its backward."""


def add_layout_collectives(program: Program) -> Program:
    """Adds the collectives inside divided operators, on the inputs and outputs of each piece."""
    if program.plan.cut.kind != "layout" or program.plan.place.shards == 1:
        return program
    rows = [COLLECTIVES[layout] for layout in program.plan.cut.layouts]
    sequences = []
    for worker in program.workers:
        sequence: list[Action] = []
        for a in worker.actions:
            if a.kind not in "FRB":
                sequence.append(a)
                continue
            before, after = (2, 3) if a.kind == "B" else (0, 1)
            group = f"*t{program.pieces[a.piece].stage}.{a.replica}"
            if any(row[before] for row in rows):
                sources = program.outputs[a.piece] if a.kind == "B" else program.inputs[a.piece]
                what = "g" if a.kind == "B" else "x"
                sequence += [Action("GATHER", p, 0, a.microbatch, -1, what, group) for p in sources]
            sequence.append(a)
            makes = a.kind == "F" or (a.kind == "B" and program.inputs[a.piece])
            if any(row[after] for row in rows) and makes:
                what = "g" if a.kind == "B" else "x"
                sequence.append(Action("REDUCE", a.piece, 0, a.microbatch, -1, what, group))
        sequences.append(tuple(sequence))
    return program.with_actions(sequences)


def add_transfers(program: Program) -> Program:
    """Adds a SEND behind what makes a value and a RECV ahead of what reads it on another worker.

    Every ordered pair of workers is a channel of its own, first in, first out. Its order is the sender's;
    the receiver takes a value ahead of its own need where a later one on the channel is needed sooner. So
    both ends agree on every channel, and since a send waits for nothing but its value and the sends before
    it, no order of transfers can deadlock.
    """
    table = Table(program)
    made = _makers(program, table)
    wanted: dict[tuple[int, int], dict[Value, int]] = {}  # channel -> value -> its first reader's position
    for index, worker in enumerate(program.workers):
        shard = program.shard_of(index)
        for position, a in enumerate(worker.actions):
            for value in table(a, index)[0]:
                maker = made.get((shard, value))
                if maker is not None and maker[0] != index:
                    wanted.setdefault((maker[0], index), {}).setdefault(value, position)
        if program.plan.keep.kind == "server":
            # The last reply, too, reaches its worker: the run repeats the program.
            for piece, replica in program.held(index):
                reply = ("w", piece, replica, program.plan.steps, "")
                if (shard, reply) in made:
                    wanted.setdefault((made[shard, reply][0], index), {})[reply] = len(worker.actions)
    before: list[dict[int, list[Action]]] = [{} for _ in program.workers]
    after: list[dict[int, list[Action]]] = [{} for _ in program.workers]
    for (source, target), needs in wanted.items():
        shard = program.shard_of(source)
        in_order = sorted(needs, key=lambda v: made[shard, v][1])
        latest = len(program.workers[target].actions)
        for value in reversed(in_order):
            latest = min(latest, needs[value])
            before[target].setdefault(latest, []).append(_transfer("RECV", value, f"<{source}"))
        for value in in_order:
            after[source].setdefault(made[shard, value][1], []).append(_transfer("SEND", value, f">{target}"))
    for ahead in before:
        for actions in ahead.values():
            actions.reverse()
    return inserted(program, before, after)


def _makers(program: Program, table: Table) -> dict[tuple[int, Value], tuple[int, int]]:
    """Finds where each value is made last: (shard, value) -> (worker, position)."""
    made: dict[tuple[int, Value], tuple[int, int]] = {}
    for index, worker in enumerate(program.workers):
        shard = program.shard_of(index)
        for position, a in enumerate(worker.actions):
            if a.kind == "FETCH" and a.what == "x":
                continue  # it was made before it waited on the host, maybe by another worker
            _, writes, adds = table(a, index)
            for value in (*writes, *adds):
                if value[0] in MOVABLE and not value[4]:
                    made[shard, value] = (index, position)
    return made


def _transfer(kind: str, value: Value, via: str) -> Action:
    what, piece, replica, index, _ = value
    if what in "xg":
        return Action(kind, piece, 0, index, -1, what, via)
    return Action(kind, piece, replica, -1, index, what, via)


def inserted(program: Program, before: list[dict[int, list[Action]]], after: list[dict[int, list[Action]]]) -> Program:
    """Returns the program with actions added before and after given positions of each worker."""
    sequences = []
    for worker, ahead, behind in zip(program.workers, before, after, strict=True):
        sequence: list[Action] = []
        for position, a in enumerate(worker.actions):
            if position in ahead:
                sequence += ahead[position]
            sequence.append(a)
            if position in behind:
                sequence += behind[position]
        sequence += ahead.get(len(worker.actions), [])
        sequences.append(tuple(sequence))
    return program.with_actions(sequences)


def add_version_drops(program: Program) -> Program:
    """Frees each old weight version behind its last reader, where no update in place has taken it over."""
    if program.plan.version.kind not in ("stash", "vertical", "double-buffer"):
        return program
    table = Table(program)
    after: list[dict[int, list[Action]]] = []
    for index, worker in enumerate(program.workers):
        last: dict[Value, int] = {}
        newest: dict[tuple[int, int], int] = {}
        for position, a in enumerate(worker.actions):
            last |= {v: position for v in table(a, index)[0] if v[0] == "w"}
            if a.kind == "UPDATE":
                newest[a.piece, a.replica] = a.version
        drops: dict[int, list[Action]] = {}
        for (_, piece, replica, version, _), position in last.items():
            is_taken_over = worker.actions[position].kind == "UPDATE"
            if not is_taken_over and version < newest.get((piece, replica), 0):
                drops.setdefault(position, []).append(Action("DROP", piece, replica, -1, version, "w"))
        after.append(drops)
    return inserted(program, [{} for _ in program.workers], after)
