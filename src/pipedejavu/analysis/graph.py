"""The graph of a program: its operations, and which must end before which can start.

An operation is one action, or the actions of several workers that run together: a SEND and its RECV, or one action per
member of a collective. The n-th SEND of a channel pairs with its n-th RECV, and the n-th collective of a group's member
with the n-th of the others. Edges come from three sources: the order of each lane, the values that actions read and
write, and memory that one action frees for another. Edges that the order of the compute lane implies are left out.
"""

from dataclasses import dataclass, field

from pipedejavu.facts import paused_collector
from pipedejavu.program.action import (
    COMPUTE_KINDS,
    DROP,
    FETCH,
    FORWARD,
    GATHER,
    GRADIENT_KINDS,
    NET_KINDS,
    OFFLOAD,
    REDUCE,
    SEND,
    UPDATE,
    Action,
    UpdatePlace,
    value_of,
)
from pipedejavu.program.effect import TAKING, Effects, Table, resting
from pipedejavu.program.offload_time import BUCKETS
from pipedejavu.program.program import GroupRole, Program
from pipedejavu.program.value import (
    ACTIVATION,
    BATCH,
    CONSENSUS,
    HOST,
    OPTIMIZER_STATE,
    PUSH,
    SAVED,
    WEIGHT_GRADIENT,
    WEIGHTS,
    Value,
    ValueKind,
    ValuePlace,
)

Initial = list[tuple[tuple[ValueKind, ValuePlace], ...]]
"""For each piece, the kinds and places of the values that exist from the beginning."""


@dataclass
class Graph:
    """Operations by number; the fields are columns over them."""

    program: Program
    members: list[tuple[int, int]] = field(default_factory=list)
    """The (worker, position) of each operation's first action."""
    successors: list[list[int]] = field(default_factory=list)
    num_before: list[int] = field(default_factory=list)
    """The number of edges that end at each operation."""
    of_action: list[list[int]] = field(default_factory=list)
    """For each worker, the operation of each of its actions."""
    joint: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """The (worker, position) of every action, for operations of several workers."""
    faults: list[str] = field(default_factory=list)
    """Faults in the reads and writes, one sentence each."""

    def action(self, op: int) -> Action:
        """Returns an operation's first action."""
        worker, position = self.members[op]
        return self.program.workers[worker].actions[position]

    def edge(self, before: int, after: int) -> None:
        """Adds an edge."""
        self.successors[before].append(after)
        self.num_before[after] += 1


def build_graph(program: Program) -> Graph:
    """Returns the graph of a program, legal or not; `verify` raises what is wrong with it."""
    graph = Graph(program)
    with paused_collector():
        _number(graph)
        table, initial = Table(program), [resting(program, piece) for piece in range(len(program.pieces))]
        for worker in range(len(program.workers)):
            _connect(graph, worker, table, initial)
    return graph


def _number(graph: Graph) -> None:
    """Numbers the operations; both ends of a transfer, or all members of a collective, share a number."""
    queues: dict[object, list[int]] = {}  # the operations of each channel and group, in order
    members, joint = graph.members, graph.joint
    for index, worker in enumerate(graph.program.workers):
        at: dict[str, tuple[list[int], list[int]]] = {}  # via -> its queue, and this worker's position in it
        ops = []
        for position, a in enumerate(worker.actions):
            if a[0] not in NET_KINDS:
                ops.append(len(members))
                members.append((index, position))
                continue
            via = a[6]
            if via not in at:
                at[via] = (queues.setdefault(_channel(index, a), []), [0])
            queue, standing = at[via]
            n = standing[0]
            standing[0] = n + 1
            if n == len(queue):
                queue.append(len(members))
                members.append((index, position))
                joint[queue[n]] = [(index, position)]
            else:
                joint[queue[n]].append((index, position))
            ops.append(queue[n])
        graph.of_action.append(ops)
    graph.successors = [[] for _ in members]
    graph.num_before = [0] * len(members)


def _channel(worker: int, a: Action) -> object:
    """Returns a key that both ends of a transfer, or all members of a collective, have in common."""
    if a.group:
        return a.group
    return (worker, a.peer) if a.kind == SEND else (a.peer, worker)


def _connect(graph: Graph, index: int, table: Table, initial: Initial) -> None:
    """Adds the edges of one worker, action by action."""
    worker, ops, members = graph.program.workers[index], graph.of_action[index], graph.members
    tails: dict[str, int] = {}  # the last operation of each lane
    in_order: set[int] = set()  # operations of a compute lane that keeps its order
    rows, reuse = table.rows, _ReuseEdges(graph, table)
    data = _DataEdges(graph, index, initial, in_order, reuse)
    for position, a in enumerate(worker.actions):
        kind, op = a[0], ops[position]
        lane = "compute" if kind in COMPUTE_KINDS else a[6] if kind in NET_KINDS else a.queue
        is_in_order = lane == "compute" and not worker.picks_ready
        if is_in_order:
            in_order.add(op)
        if is_in_order or lane != "compute":
            tail = tails.get(lane)
            if tail is not None and members[op][0] == index:
                graph.successors[tail].append(op)
                graph.num_before[op] += 1
            tails[lane] = op
        data.add(a, op, rows[kind](a, index), is_in_order)
        if kind in _REUSING:
            reuse.add(a, op)
        if kind in TAKING and (taken := table.taken(a)) is not None:
            data.remove(a, taken)


_REUSING = frozenset((FORWARD, DROP, OFFLOAD, FETCH, GATHER, UPDATE, REDUCE, *GRADIENT_KINDS))
"""Kinds that free memory on the device, or wait for it."""


class _ReuseEdges:
    """Edges from an action that frees memory, or reads it last, to the next action that needs it."""

    def __init__(self, graph: Graph, table: Table):
        self.graph, self.scattered = graph, table.scatters_gradient
        self.leaves = [rest == "window" for rest in table.rests]
        """By piece, whether its gradients leave the device, whose memory must not grow with the number of pieces."""
        offloads_activations = graph.program.plan.keep.activations == "host"
        self.stashes: list[int] | None = [] if offloads_activations and any(self.leaves) else None
        """The operations that copy activations to the host, if forwards wait for the memory that they free."""
        in_order = frozenset((ACTIVATION,)) if offloads_activations else frozenset[ValueKind]()
        self.tracked = {True: in_order, False: in_order | {WEIGHTS}}
        """Kinds of values whose readers count, for actions in the order of compute and for others."""
        self.readers: dict[Value, list[int]] = {}
        self.last_drop = self.last_host_update = -1
        self.last_freed = -1
        """The last backward or OFFLOAD of optimizer state: the next state is fetched into the memory that it frees."""
        self.begun: set[Value] = set()
        """Gradients that are divided once they are summed, or leave the device, and have begun."""
        self.departures: list[int] = []
        """The operations that sum and divide them, or copy them to the host."""

    def add(self, a: Action, op: int) -> None:
        kind, what = a[0], a[5]
        if kind == FORWARD:
            size = self.graph.program.update_size
            if self.stashes is not None and len(self.stashes) > size:  # a layer's activations, and one more
                self._after(self.stashes[-size - 1], op)
        elif kind in GRADIENT_KINDS:
            self.last_freed = op
            if self.scattered[a.piece] or self.leaves[a.piece]:
                self._begin_gradient(a, op)
        elif kind == REDUCE:
            # Tied parameters are summed over pieces after that, in the shards.
            if what == WEIGHT_GRADIENT and self.scattered[a.piece] and self._is_over_stage(a):
                self.departures.append(op)
        elif kind == DROP:
            self._after_readers(a, op)
            self.last_drop = op
        elif kind == UPDATE:
            if a.update_place == UpdatePlace.HOST:
                self.last_host_update = op
        elif kind == OFFLOAD:
            self._offload(a, op)
        elif kind == FETCH and what == OPTIMIZER_STATE:
            self._after(self.last_freed, op)
        elif kind == FETCH or what == WEIGHTS:
            self._after(self.last_drop, op)

    def _begin_gradient(self, a: Action, op: int) -> None:
        gradient = Value.weight_gradient(a.piece, a.replica, a.microbatch // self.graph.program.update_size)
        if gradient not in self.begun:
            self.begun.add(gradient)
            if len(self.departures) >= BUCKETS:
                self._after(self.departures[-BUCKETS], op)

    def _is_over_stage(self, a: Action) -> bool:
        group = self.graph.program.groups.get(a.group)
        return group is not None and group.role is GroupRole.STAGE

    def _offload(self, a: Action, op: int) -> None:
        if a.what == ACTIVATION:
            self._after_readers(a, op)
        if a.what in (ACTIVATION, SAVED) and self.stashes is not None:
            self.stashes.append(op)
        elif a.what == WEIGHT_GRADIENT and self.leaves[a.piece]:
            self.departures.append(op)
        elif a.what == OPTIMIZER_STATE:
            self.last_freed = op
        elif a.what == WEIGHTS:  # into host memory that an update has freed
            self._after(self.last_host_update, op)

    def _after(self, before: int, op: int) -> None:
        if before >= 0:
            self.graph.edge(before, op)

    def _after_readers(self, a: Action, op: int) -> None:
        for reader in self.readers.pop(value_of(a), ()):
            if reader != op:
                self.graph.edge(reader, op)


_COLLECTS = frozenset((REDUCE, UPDATE, OFFLOAD, SEND))
"""Kinds that read a finished sum: no action may add to it later."""
SUMS = frozenset((WEIGHT_GRADIENT, PUSH, CONSENSUS))
"""Kinds of values that are added to."""


class _DataEdges:
    """Edges from the writers of a value to its readers, and faults in the reads and writes of one worker."""

    def __init__(self, graph: Graph, worker: int, initial: Initial, in_order: set[int], reuse: _ReuseEdges):
        self.graph, self.worker, self.initial = graph, worker, initial
        self.in_order, self.reuse = in_order, reuse
        self.held = frozenset(graph.program.held(worker))
        self.is_elastic = graph.program.plan.reduce.combiner == "elastic"
        self.writers: dict[Value, list[int]] = {}
        self.removed: set[Value] = set()
        self.collected: set[Value] = set()
        """Sums that were read as finished."""

    def add(self, a: Action, op: int, effects: Effects, is_in_order: bool) -> None:
        """Adds an edge from each writer of what an action reads, and notes what it writes and adds to."""
        reads, writes, adds = effects
        graph, writers, in_order = self.graph, self.writers, self.in_order
        tracked, readers = self.reuse.tracked[is_in_order], self.reuse.readers
        for value in reads:
            if value[0] in tracked:
                readers.setdefault(value, []).append(op)
            before = writers.get(value)
            if before is None:
                self._check_initial(a, value)
                continue
            for writer in before:
                if not (is_in_order and writer in in_order):
                    graph.successors[writer].append(op)
                    graph.num_before[op] += 1
        for value in writes:
            if (value in writers and value not in reads) or self._is_initial(value):
                self._fault(a, value, "writes {} a second time")
            writers[value] = [op]
        for value in adds:
            before = writers.get(value)
            if before is None or (is_in_order and len(before) == 1 and before[0] in in_order):
                writers[value] = [op]  # the lane's order implies the earlier ones
            else:
                before.append(op)
            if value in self.collected:
                self._fault(a, value, "adds to {} after it was read")
        if a[0] in _COLLECTS and reads[0][0] in SUMS:
            self.collected.update(reads)

    def remove(self, a: Action, value: Value) -> None:
        """Notes that a value is no longer in its place."""
        if value not in self.writers:
            self._check_initial(a, value)
        self.writers.pop(value, None)
        self.removed.add(value)

    def _check_initial(self, a: Action, value: Value) -> None:
        """Records a fault unless `value` exists from the beginning."""
        kind, piece, replica, _, place = value
        if value in self.removed:
            self._fault(a, value, "reads {}, which is gone by then")
        elif self._is_initial(value):
            # A server has its own copy, and every worker knows the initial weights of the elastic centre.
            is_center = replica == self.graph.program.num_replicas and self.is_elastic
            if self.held and (piece, replica) not in self.held and not is_center:
                self._fault(a, value, "reads {}, which its worker does not hold")
            self.writers[value] = []  # it exists, and no action wrote it
        elif kind != BATCH or place != HOST:
            self._fault(a, value, "reads {}, which nothing before it wrote")

    def _is_initial(self, value: Value) -> bool:
        """Whether weights or optimizer state are in their place from the beginning."""
        kind, piece, _, version, place = value
        if kind not in _INITIAL_KINDS or version > 0 or value in self.removed:
            return False
        return (kind, place) in self.initial[piece]

    def _fault(self, a: Action, value: Value, text: str) -> None:
        self.graph.faults.append(f"worker {self.worker}: {a} " + text.format(value))


_INITIAL_KINDS = frozenset((WEIGHTS, OPTIMIZER_STATE))
