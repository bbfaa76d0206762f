"""The graph of a program: its operations, and which must end before which can start.

An operation is one action, or the actions of several workers that happen together: a SEND and its RECV, or
the members of a collective. The n-th send of a channel meets the n-th receive, the n-th REDUCE of a group's
member the n-th of the others. Edges come from the lanes and from the table of values; those that a lane's
own order implies are left out.
"""

from dataclasses import dataclass, field

from pipedejavu.facts import paused_collector
from pipedejavu.program.action import COMPUTE_KINDS, Action
from pipedejavu.program.program import Program
from pipedejavu.program.value import Table, Value, name_of, resting, value_of

_JOINT = frozenset(("SEND", "RECV", "REDUCE", "GATHER"))

Initial = list[tuple[tuple[str, str], ...]]
"""For each piece, what is where from the beginning."""


@dataclass
class Graph:
    """Operations by number; the fields are columns over them."""

    program: Program
    members: list[tuple[int, int]] = field(default_factory=list)
    """The (worker, position) of an operation's first action."""
    successors: list[list[int]] = field(default_factory=list)
    num_before: list[int] = field(default_factory=list)
    """How many edges end at each operation."""
    of_action: list[list[int]] = field(default_factory=list)
    """For each worker, the operation of each of its actions."""
    joint: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """The (worker, position) of all actions of an operation that has several members."""
    faults: list[str] = field(default_factory=list)
    """What is wrong with the reads and writes."""

    def action(self, op: int) -> Action:
        """Returns an operation's first action."""
        worker, position = self.members[op]
        return self.program.workers[worker].actions[position]

    def edge(self, before: int, after: int) -> None:
        """Adds an edge."""
        self.successors[before].append(after)
        self.num_before[after] += 1


def build_graph(program: Program) -> Graph:
    """Returns the graph of a program, whether or not it is legal; `verify` says what is wrong with it."""
    graph = Graph(program)
    with paused_collector():
        _number(graph)
        table, initial = Table(program), [resting(program, piece) for piece in range(len(program.pieces))]
        for worker in range(len(program.workers)):
            _connect(graph, worker, table, initial)
    return graph


def _number(graph: Graph) -> None:
    """Gives every action its operation; partners of a transfer or collective share one."""
    queues: dict[object, list[int]] = {}  # the operations of each channel and group, in their order
    members, joint = graph.members, graph.joint
    for index, worker in enumerate(graph.program.workers):
        at: dict[str, tuple[list[int], list[int]]] = {}  # via -> its queue, and where this worker stands in it
        ops = []
        for position, a in enumerate(worker.actions):
            if a[0] not in _JOINT:
                ops.append(len(members))
                members.append((index, position))
                continue
            via = a[6]
            if via not in at:
                at[via] = (queues.setdefault(_channel(index, via), []), [0])
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


def _channel(worker: int, via: str) -> object:
    """Names what both ends of a transfer, or all members of a collective, have in common."""
    if via[0] == ">":
        return worker, int(via[1:])
    return (int(via[1:]), worker) if via[0] == "<" else via


def _connect(graph: Graph, index: int, table: Table, initial: Initial) -> None:
    """Adds the edges of one worker's lanes and values."""
    worker = graph.program.workers[index]
    successors, num_before, ops = graph.successors, graph.num_before, graph.of_action[index]
    present = _Present(graph, index, initial)
    writers = present.writers
    readers: dict[Value, list[int]] = {}  # of weights, from other lanes than compute; of checkpoints that may leave
    leaves = graph.program.plan.keep.activations == "host"
    tails: dict[str, int] = {}
    in_order: set[int] = set()  # operations of a compute lane that keeps its order
    last_drop = last_update = -1
    last_freed = -1  # a backward, or a visitor that leaves: the next one comes into its memory
    for position, a in enumerate(worker.actions):
        kind, op = a[0], ops[position]
        lane = "compute" if kind in COMPUTE_KINDS else a[6] if kind in _JOINT else a.queue
        on_compute = lane == "compute" and not worker.picks_ready
        if on_compute:
            in_order.add(op)
        if on_compute or lane != "compute":
            tail = tails.get(lane, -1)
            if tail >= 0 and graph.members[op][0] == index:
                successors[tail].append(op)
                num_before[op] += 1
            tails[lane] = op
        reads, writes, adds = table(a, index)
        for value in reads:
            if (value[0] == "w" and not on_compute) or (value[0] == "x" and leaves):
                readers.setdefault(value, []).append(op)
            found = writers.get(value)
            if found is None:
                present.check_initial(a, value)
                continue
            for writer in found:
                if not (on_compute and writer in in_order):
                    successors[writer].append(op)
                    num_before[op] += 1
        if kind == "DROP":
            dropped = value_of(a)
            for reader in readers.pop(dropped, ()):
                graph.edge(reader, op)
            present.remove(a, dropped)
            last_drop = op
        elif kind == "OFFLOAD" and a.what == "x":
            for reader in readers.pop(value_of(a), ()):
                if reader != op:
                    graph.edge(reader, op)
        elif kind == "FETCH" and a.what == "o":
            if last_freed >= 0:
                graph.edge(last_freed, op)
        elif last_drop >= 0 and (kind == "FETCH" or (kind == "GATHER" and a.what == "w")):
            graph.edge(last_drop, op)
        elif kind in ("B", "W") or (kind == "OFFLOAD" and a.what == "o"):
            last_freed = op
        elif kind == "OFFLOAD" and a.what == "w" and last_update >= 0:  # into room that an update has left
            graph.edge(last_update, op)
        elif kind == "UPDATE" and lane == "host":
            last_update = op
        for value in writes:
            if (value in writers and value not in reads) or present.is_initial(value):
                present.fault(a, value, "writes {} a second time")
            writers[value] = [op]
        for value in adds:
            before = writers.get(value)
            if before is None or (on_compute and len(before) == 1 and before[0] in in_order):
                writers[value] = [op]  # the lane's order implies the earlier ones
            else:
                before.append(op)
            if value in present.read:
                present.fault(a, value, "adds to {} after it was read")
        if kind in _COLLECTS and reads[0][0] in SUMS:
            present.read.update(reads)
        if kind in ("OFFLOAD", "FETCH") and (taken := table.taken(a)) is not None:
            present.remove(a, taken)


_COLLECTS = frozenset(("REDUCE", "UPDATE", "OFFLOAD", "SEND"))
"""Kinds that take a sum as it is: nothing may be added to it later."""
SUMS = frozenset("dpc")
"""Whats that are added to."""


class _Present:
    """What is there as a worker's sequence goes on, and what is wrong with what it reads and writes."""

    def __init__(self, graph: Graph, worker: int, initial: Initial):
        self.graph, self.worker, self.initial = graph, worker, initial
        self.held = frozenset(graph.program.held(worker))
        self.is_elastic = graph.program.plan.reduce.combiner == "elastic"
        self.writers: dict[Value, list[int]] = {}
        self.gone: set[Value] = set()
        self.read: set[Value] = set()

    def check_initial(self, a: Action, value: Value) -> None:
        """Records a fault unless `value` is there from the beginning."""
        what, piece, replica, _, place = value
        if value in self.gone:
            self.fault(a, value, "reads {}, which is gone by then")
        elif self.is_initial(value):
            # A server has its own copy, and everyone knows where the elastic centre begins.
            is_center = replica == self.graph.program.num_replicas and self.is_elastic
            if self.held and (piece, replica) not in self.held and not is_center:
                self.fault(a, value, "reads {}, which its worker does not hold")
            self.writers[value] = []  # there, and nobody wrote it
        elif what != "b" or place != "host":
            self.fault(a, value, "reads {}, which nothing before it wrote")

    def is_initial(self, value: Value) -> bool:
        """Whether weights or state rest in their place from the beginning."""
        what, piece, _, version, place = value
        return what in "wo" and version <= 0 and (what, place) in self.initial[piece] and value not in self.gone

    def remove(self, a: Action, value: Value) -> None:
        if value not in self.writers:
            self.check_initial(a, value)
        self.writers.pop(value, None)
        self.gone.add(value)

    def fault(self, a: Action, value: Value, text: str) -> None:
        self.graph.faults.append(f"worker {self.worker}: {a} " + text.format(name_of(value)))
