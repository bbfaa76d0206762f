"""`verify`: checks that a program does what its plan says, without running it.

It checks that every piece of every microbatch is computed once, that values are written once and before they are read,
that both ends of each transfer and all members of each collective agree, that no actions wait for each other in a
cycle, that weight versions are those of the plan, and that memory suffices.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from pipedejavu.analysis.graph import Graph, build_graph
from pipedejavu.analysis.liveness import Liveness, Stay, count_versions
from pipedejavu.facts import FaultsError, format_bytes, paused_collector
from pipedejavu.plan.rule import check_plan
from pipedejavu.program.action import (
    BACKWARD,
    COMPUTE_KINDS,
    FETCH,
    FORWARD,
    GATHER,
    INPUT_BACKWARD,
    OFFLOAD,
    RECOMPUTE,
    RECV,
    REDUCE,
    SEND,
    SUM,
    UPDATE,
    WEIGHT_BACKWARD,
    Action,
    ActionKind,
    UpdatePlace,
    value_of,
)
from pipedejavu.program.effect import TAKING, Table, resting
from pipedejavu.program.program import Group, GroupRole, Program, stage_group
from pipedejavu.program.value import HOST, OPTIMIZER_STATE, WEIGHT_GRADIENT, WEIGHTS, Value

MAX_FAULTS = 20

PieceReplica = tuple[int, int]
"""A (piece, replica) pair."""


def verify(program: Program, graph: Graph | None = None) -> Graph:
    """Returns the program's graph, built unless given; raises FaultsError with the first 20 faults."""
    check_plan(program.plan, program.profile)
    graph = graph or build_graph(program)
    with paused_collector():
        faults = _find_faults(program, graph)
    if len(faults) > MAX_FAULTS:
        faults = [*faults[:MAX_FAULTS], f"… and {len(faults) - MAX_FAULTS} more"]
    if faults:
        raise FaultsError(f"the program of plan '{program.plan.name}'", faults)
    return graph


def _find_faults(program: Program, graph: Graph) -> list[str]:
    faults = [*_partner_faults(graph), *_once_faults(program), *graph.faults]
    faults += _version_faults(program)
    faults += _update_faults(program)
    faults += _server_faults(program)
    faults += _rest_faults(program)
    if not faults:  # the remaining checks walk the graph and need one without faults
        faults += _cycle_faults(graph)
    if not faults:
        faults += _memory_faults(program)
    return faults


def _partner_faults(graph: Graph) -> Iterator[str]:
    """Checks that transfers have both ends and collectives all members, and that these name the same value."""
    program = graph.program
    present = range(len(program.workers))
    for members in graph.joint.values():
        actions = [program.workers[w].actions[position] for w, position in members]
        workers = [w for w, _ in members]
        first = actions[0]
        if first.kind in (SEND, RECV):
            if len(actions) < 2:
                kind = RECV if first.kind == SEND else SEND
                yield f"worker {workers[0]}: {first} has no {kind} on worker {first.peer}"
            elif value_of(actions[0]) != value_of(actions[1]):
                yield f"worker {workers[0]}: {first} meets worker {workers[1]}'s {actions[1]}"
            continue
        group = program.groups.get(first.group)
        if group is None:
            yield f"worker {workers[0]}: {first} names a group that does not exist"
            continue
        expected = sorted({*group.workers, *group.helpers} & set(present))
        if sorted(workers) != expected:
            yield f"{first} has workers {sorted(workers)}, its group {expected}"
        is_tie = group.role is GroupRole.TIE  # tied pieces have different numbers, and replicas always do
        # Shards that divide experts have microbatches of their own.
        has_own = group.role is GroupRole.SHARDS and program.plan.divides_experts
        meanings = {(a.what, -1 if is_tie else a.piece, -1 if has_own else a.microbatch, a.version) for a in actions}
        if len(meanings) > 1 or not _have_their_kinds(workers, actions, group):
            texts = ", ".join(f"worker {w}: {a}" for w, a in zip(workers, actions, strict=True))
            yield f"members of one collective differ: {texts}"


def _have_their_kinds(workers: Sequence[int], actions: Sequence[Action], group: Group) -> bool:
    """Whether all workers of a collective do the same, and its helpers, alone, sum."""
    kinds = {a.kind for w, a in zip(workers, actions, strict=True) if w not in group.helpers}
    helping = {a.kind for w, a in zip(workers, actions, strict=True) if w in group.helpers}
    return len(kinds) <= 1 and SUM not in kinds and helping <= {SUM}


def _once_faults(program: Program) -> Iterator[str]:
    """Checks that every (piece, microbatch) has one F, one B or one I and W, and one R if the plan recomputes it."""
    counts: Counter[tuple[ActionKind, int, int, int]] = Counter()
    for index, worker in enumerate(program.workers):
        shard = program.shard_of(index)
        counts.update((a[0], a[1], a[3], shard) for a in worker.actions if a[0] in COMPUTE_KINDS)
    plan, size = program.plan, program.update_size
    count = plan.feed.microbatches if program.copies > 1 else size
    microbatches = [i for i in range(size * plan.steps) if i % size < count]
    shards = range(plan.tensor_shards if program.copies == 1 else 1)
    for piece in range(len(program.pieces)):
        recomputes = 1 if program.recomputed[piece] else 0
        for i in microbatches:
            for shard in shards:
                f, b, r, ih, wh = (counts.pop((kind, piece, i, shard), 0) for kind in _COMPUTES)
                if f != 1:
                    yield f"piece {piece} has {f} forwards of microbatch {i}, not 1"
                if (b, ih, wh) not in ((1, 0, 0), (0, 1, 1)):
                    yield f"piece {piece} has {b} B, {ih} I, {wh} W of microbatch {i}; one B, or one I and one W"
                if r != recomputes:
                    yield f"piece {piece} recomputes microbatch {i} {r} times, not {recomputes}"
    for kind, piece, i, _ in counts:
        yield f"{kind} of piece {piece}, microbatch {i}, is not in the plan"


_COMPUTES = (FORWARD, BACKWARD, RECOMPUTE, INPUT_BACKWARD, WEIGHT_BACKWARD)


def _version_faults(program: Program) -> Iterator[str]:
    """Checks that forwards read the version of the plan, and that the other actions of a microbatch read the same."""
    read: dict[tuple[int, int, int], Action] = {}
    for index, worker in enumerate(program.workers):
        for a in worker.actions:
            if a.kind == FORWARD:
                low, high = promised_versions(program, a)
                if not low <= a.version <= high:
                    wanted = str(low) if low == high else f"{low} to {high}"
                    yield f"{a} reads version {a.version}; version '{program.plan.version}' promises {wanted}"
                read[index, a.piece, a.microbatch] = a
    for index, worker in enumerate(program.workers):
        for a in worker.actions:
            if a.kind not in _AFTER_FORWARD:
                continue
            forward = read.get((index, a.piece, a.microbatch), a)
            if program.plan.version.correction == "discrepancy":
                if a.version != a.microbatch // program.update_size:
                    yield f"{a} reads version {a.version}, and the newest is {a.microbatch // program.update_size}"
            elif a.version != forward.version:
                yield f"{a} reads version {a.version}, its forward read {forward.version}"
            if a.replica != forward.replica:
                yield f"{a} belongs to replica {a.replica}, its forward to {forward.replica}"


_AFTER_FORWARD = COMPUTE_KINDS - {FORWARD}


def promised_versions(program: Program, a: Action) -> tuple[int, int]:
    """Returns the first and last weight version that a forward may read."""
    plan, update = program.plan, a.microbatch // program.update_size
    last_stage = program.pieces[-1].stage
    if plan.version.kind == "stash":
        oldest = program.oldest_read(update, last_stage - program.pieces[a.piece].stage)
        is_one = not plan.place.stage_replicas and plan.feed.microbatches == 1
        return oldest, oldest if is_one else update
    version = {
        "sync": update,
        "local": update,
        "vertical": program.oldest_read(update, last_stage),
        "double-buffer": program.oldest_read(update, 1),
        "late": max(0, update - program.delay_of(a.replica)),
        "torn": -1,
    }[plan.version.kind]
    return version, version


def _update_faults(program: Program) -> Iterator[str]:
    """Checks that every piece is updated once per update, after one reduction if it has a group."""
    plan = program.plan
    steps = range(plan.steps)
    updates: dict[PieceReplica, list[int]] = defaultdict(list)
    reductions: Counter[tuple[int, int, int, int]] = Counter()
    for index, worker in enumerate(program.workers):
        for a in worker.actions:
            if a.kind == UPDATE:
                is_on_server = a.update_place == UpdatePlace.SERVER
                if is_on_server == bool(program.held(index)):
                    yield f"worker {index}: {a} does not belong there; servers update '~server', workers what they hold"
                if not is_on_server or plan.keep.kind == "server":
                    updates[a.piece, a.replica].append(a.version - 1)
            elif a.kind == REDUCE and a.what == WEIGHT_GRADIENT and _is_over_stage(program, a):
                reductions[index, a.piece, a.replica, a.version] += 1
    for index in range(len(program.workers)):
        for piece, replica in program.held(index):
            owner = (piece, 0 if plan.reduce.combiner == "score-trim" else replica)
            numbers = updates.get(owner, [])
            shards = plan.tensor_shards if program.copies == 1 else 1
            if sorted(numbers) != sorted([*steps] * shards):
                yield (
                    f"worker {index}: piece {piece} of replica {replica} gets updates {sorted(numbers)},"
                    f" not each of 0 to {plan.steps - 1} once"
                )
            group = stage_group(program.pieces[piece].stage, program.shard_of(index))
            if plan.reduce.combiner == "sum" and group in program.groups:
                for t in steps:
                    if reductions[index, piece, replica, t] != 1:
                        count = reductions[index, piece, replica, t]
                        yield f"worker {index}: d{piece}/{replica}@{t} is reduced {count} times, not 1"


def _is_over_stage(program: Program, a: Action) -> bool:
    group = program.groups.get(a.group)
    return group is not None and group.role is GroupRole.STAGE


def _server_faults(program: Program) -> Iterator[str]:
    """Checks that a server with an elastic centre or waves updates it once per push, or once per barrier."""
    plan = program.plan
    if plan.reduce.wire != "server" or plan.keep.kind == "server" or program.copies > 1:
        return
    center, turns = program.num_replicas, plan.steps
    if plan.reduce.gate == "bound":
        turns = -(-turns // plan.place.workers)
    if plan.reduce.gate != "barrier":
        turns *= center
    moves: dict[int, list[int]] = defaultdict(list)
    for worker in program.workers:
        for a in worker.actions:
            if a.update_place == UpdatePlace.SERVER:
                moves[a.piece].append(a.version if a.replica == center else -1)
    for piece in range(len(program.pieces)):
        if sorted(moves[piece]) != [*range(1, turns + 1)]:
            yield f"the server moves piece {piece} to versions {sorted(moves[piece])}, not to each of 1 to {turns} once"


def _rest_faults(program: Program) -> Iterator[str]:
    """Checks that each worker ends with its newest weights and state in their resting places, and with no others.

    The run repeats the program, so it must end as it began.
    """
    plan = program.plan
    if plan.version.kind == "torn":
        return
    table = Table(program)
    for index in range(len(program.workers)):
        rests = {key: resting(program, key[0]) for key in program.held(index)}
        first, last = (
            {Value(kind, *key, version, place) for key, pairs in rests.items() for kind, place in pairs}
            for version in (0, plan.steps)
        )
        at_end = _held_at_end(program, table, index, first)
        for value in sorted(at_end - last):
            yield f"worker {index} still holds {value} at the end; drop it after its last reader"
        for value in sorted(last - at_end):
            yield f"worker {index} does not hold {value} at the end"


def _held_at_end(program: Program, table: Table, index: int, there: set[Value]) -> set[Value]:
    """Returns the weights and state that a worker holds at the end, given those at the beginning.

    An update, a reply or a gathered whole reuses the memory of the version before it, unless that is read again.
    """
    plan, held = program.plan, {*program.held(index)}
    actions = program.workers[index].actions
    last_read = _last_weight_reads(program, table, index)
    for position, a in enumerate(actions):
        if a.kind in TAKING and (taken := table.taken(a)) is not None:
            there.discard(taken)
        if a.kind != UPDATE and not (a.what in _STATE and a.kind in _ARRIVALS):
            continue
        for value in table(a, index)[1]:
            if value.kind not in _STATE or (value.piece, value.replica) not in held:
                continue
            older = value.at(value.number - 1)
            is_kept = a.kind == GATHER and plan.zero_of(program.pieces[value.piece].stage) == 3
            reuses = a.kind in (UPDATE, RECV, GATHER) and not is_kept
            if reuses and last_read.get(older, -1) < position:
                there.discard(older)
            there.add(value)
    return there


def _last_weight_reads(program: Program, table: Table, index: int) -> dict[Value, int]:
    """Returns the positions of the last readers of weights that a newer version may not overwrite at once."""
    plan, actions = program.plan, program.workers[index].actions
    if plan.compensates_shares:
        reads = ((k, value) for k, a in enumerate(actions) if a.kind == REDUCE for value in table(a, index)[0])
        return {value: k for k, value in reads if value.kind == WEIGHTS}
    if not plan.is_flush_free:
        return {}
    kinds = _WEIGHT_READERS - {BACKWARD} if plan.version.correction == "weight-prediction" else _WEIGHT_READERS
    readers = ((k, a) for k, a in enumerate(actions) if a[0] in kinds)
    return {Value.weights(a.piece, a.replica, a.version): k for k, a in readers}


_STATE = frozenset((WEIGHTS, OPTIMIZER_STATE))
_ARRIVALS = frozenset((RECV, GATHER, FETCH, OFFLOAD))
_WEIGHT_READERS = frozenset((FORWARD, RECOMPUTE, BACKWARD, INPUT_BACKWARD))


def _cycle_faults(graph: Graph) -> list[str]:
    """Checks that the graph has no cycle, and reports one if it has."""
    left = graph.num_before.copy()
    ready = [op for op, count in enumerate(left) if count == 0]
    done = 0
    while ready:
        done += 1
        for after in graph.successors[ready.pop()]:
            left[after] -= 1
            if left[after] == 0:
                ready.append(after)
    if done == len(left):
        return []
    before: dict[int, int] = {}
    for op, count in enumerate(left):
        if count:
            for after in graph.successors[op]:
                if left[after]:
                    before[after] = op
    op, seen = next(op for op, count in enumerate(left) if count), []
    while op not in seen:
        seen.append(op)
        op = before[op]
    circle = [*reversed(seen[seen.index(op) :])]
    texts = [f"worker {graph.members[o][0]}'s {graph.action(o)}" for o in [*circle, circle[0]]]
    return ["actions wait for each other in a circle: " + " → ".join(texts)]


def _memory_faults(program: Program) -> Iterator[str]:
    """Checks the peak of each memory, in the order of the sequences, against its capacity."""
    machine, liveness = program.machine, Liveness(program)
    used: dict[str, float] = defaultdict(float)
    for index, worker in enumerate(program.workers):
        count = len(worker.actions)
        stays = liveness.stays(index, range(count), range(1, count + 1), count)
        versions = count_versions(stays, program.held(index))
        limit = _most_versions(program, index)
        if versions > limit and program.held(index):
            yield f"worker {index} holds {versions} weight versions of a piece, the plan promises {limit}"
        peaks = peak_bytes(stays, liveness.fixed(index))
        for copy in range(program.copies):
            device = machine.device(program.devices[index + copy * len(program.workers)])
            used[device.name] += peaks["device"]
            if peaks["host"]:
                used[machine.cpu_of(device).name] += peaks["host"]
    capacity = {name: machine.device(name).memory_bytes - machine.device(name).reserved_bytes for name in used}
    short = [name for name in used if used[name] > capacity[name]]
    if short:
        worst = max(short, key=lambda name: used[name] / max(capacity[name], 1))
        others = f" (and {len(short) - 1} more devices have too little)" if len(short) > 1 else ""
        yield (
            f"device '{worst}' would need {format_bytes(used[worst])} and has {format_bytes(capacity[worst])}{others};"
            " use more workers, smaller microbatches, recompute, or keep state on the host"
        )


def peak_bytes(stays: list[Stay], fixed: dict[tuple[str, str], float]) -> dict[str, float]:
    """Returns the peak bytes of each memory, 'device' and 'host'."""
    peaks = {}
    for memory in ("device", "host"):
        base = sum(size for (where, _), size in fixed.items() if where == memory)
        changes = []
        for birth, death, value, size in stays:
            if (value.place == HOST) == (memory == "host"):
                changes += [(birth, size), (death, -size)]
        total = most = base
        for _, change in sorted(changes):
            total += change
            most = max(most, total)
        peaks[memory] = most
    return peaks


def _most_versions(program: Program, worker: int) -> int:
    """Returns the most versions of one piece's weights that a worker may hold under the plan."""
    plan, stages = program.plan, program.pieces[-1].stage + 1
    pieces = [piece for piece, _ in program.held(worker)]
    # The version that gradients are of stays until the update has compared it with the newest.
    compared = plan.version.correction == "delay-compensation" and any(program.late_by(piece) for piece in pieces)
    if plan.version.kind == "late":
        return 1 + compared * max((program.delay_of(replica) for _, replica in program.held(worker)), default=0)
    if plan.keep.versions:
        return plan.keep.versions + compared
    if plan.version.kind == "stash":
        return compared + max((stages - program.pieces[piece].stage for piece in pieces), default=1)
    return compared + {"vertical": stages, "double-buffer": 2}.get(plan.version.kind, 1)
