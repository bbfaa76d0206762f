"""The clock: when each operation of a graph starts and ends.

`sweep` serves graphs in which nothing shares anything: one pass, no queue of events. `run_events` serves the
rest: transfers that share a wire split it, compute and transfers of one worker slow each other, and workers
that take what is ready first. Where both apply they agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from pipedejavu.analysis import Graph
from pipedejavu.facts import InputError, Overlap
from pipedejavu.program.action import FORWARD, GRADIENT_KINDS
from pipedejavu.simulate.action_cost import ActionWork, shared_wires

Times = tuple[list[float], list[float]]


def run_clock(graph: Graph, works: Sequence[ActionWork]) -> Times:
    """Returns start and end of each operation, by the quicker way where it applies."""
    program = graph.program
    shared, overlap = shared_wires(program, graph, works), program.machine.overlap
    contended = shared or overlap.compute > 1 or overlap.transfer > 1
    if contended or any(w.picks_ready for w in program.workers):
        return run_events(graph, works, shared, overlap)
    return sweep(graph, [w.latency_s + w.time_s for w in works], Issuing.of(graph, works))


class Issuing:
    """The hosts that issue compute to GPUs: each that of one worker, in order, and ahead of it where it may."""

    def __init__(self, graph: Graph, works: Sequence[ActionWork]):
        self.graph, self.works = graph, works
        self.free = [0.0] * len(graph.program.workers)
        """When each host is through with what it has issued."""
        self.last = [0.0] * len(graph.program.workers)
        """When the newest compute of each worker ends."""

    @classmethod
    def of(cls, graph: Graph, works: Sequence[ActionWork]) -> "Issuing | None":
        """Returns the hosts, where any takes time to issue something."""
        return cls(graph, works) if any(work.issue_s for work in works) else None

    def issue(self, op: int, start_s: float) -> float:
        """Issues an operation that starts then, and returns when it is issued: it ends no sooner."""
        worker, work = self.graph.members[op][0], self.works[op]
        if not work.issue_s and not work.waits:
            return 0.0
        if work.waits or start_s > self.last[worker]:  # what came from elsewhere, the host has waited for
            self.free[worker] = max(self.free[worker], start_s)
        self.free[worker] += work.issue_s
        return self.free[worker] if work.issue_s else 0.0

    def end(self, op: int, end_s: float) -> None:
        """Notes when an operation ends."""
        if self.graph.action(op).lane == "compute":
            worker = self.graph.members[op][0]
            self.last[worker] = max(self.last[worker], end_s)


def sweep(graph: Graph, durations: Sequence[float], issuing: Issuing | None = None) -> Times:
    """Returns start and end of each operation: the latest end before it, and its duration later."""
    left, successors = graph.num_before.copy(), graph.successors
    start = [0.0] * len(left)
    end = [0.0] * len(left)
    ready = [op for op, count in enumerate(left) if count == 0]
    done = 0
    while ready:
        op = ready.pop()
        done += 1
        ends = start[op] + durations[op]
        if issuing is not None:
            ends = max(ends, issuing.issue(op, start[op]))
            issuing.end(op, ends)
        end[op] = ends
        for after in successors[op]:
            if ends > start[after]:
                start[after] = ends
            count = left[after] = left[after] - 1
            if not count:
                ready.append(after)
    _check_all_ran(done, graph)
    return start, end


def _check_all_ran(done: int, graph: Graph) -> None:
    if done < len(graph.members):
        raise InputError(
            f"{len(graph.members) - done} of {len(graph.members)} operations can never start; verify the program"
        )


@dataclass(slots=True)
class _Running:
    """An operation under way that others may slow down."""

    left_s: float
    rate: float
    since_s: float


def run_events(graph: Graph, works: Sequence[ActionWork], shared: frozenset[str], overlap: Overlap) -> Times:
    """Returns start and end of each operation, event by event."""
    return _Events(graph, works, shared, overlap).run()


class _Events:
    def __init__(self, graph: Graph, works: Sequence[ActionWork], shared: frozenset[str], overlap: Overlap):
        self.graph, self.works, self.overlap = graph, works, overlap
        count = len(graph.members)
        self.start, self.end = [0.0] * count, [0.0] * count
        self.left = graph.num_before.copy()
        self.heap: list[tuple[float, int, int, int]] = []  # time, ticket, operation, what happens
        self.ticket = 0
        self.valid = [0] * count  # the ticket of each operation's next event; older ones are void
        self.running: dict[int, _Running] = {}
        wires = {work: tuple(w for w in work.wires if w in shared) for work in set(works)}
        loads = {work: dict(zip(work.wires, work.loads, strict=True)) for work in wires}
        self.wires, self.loads = [wires[work] for work in works], [loads[work] for work in works]
        self.on_wire: dict[str, set[int]] = {wire: set() for wire in shared}
        self.slows = overlap.compute > 1 or overlap.transfer > 1
        self.computing: dict[int, set[int]] = {w: set() for w in range(len(graph.program.workers))}
        self.moving: dict[int, set[int]] = {w: set() for w in range(len(graph.program.workers))}
        self.queues = _ReadyQueues(graph)
        self.issuing = Issuing.of(graph, works)
        self.issued = [0.0] * count  # when each operation is issued

    def run(self) -> Times:
        for op, count in enumerate(self.left):
            if count == 0:
                self.available(op, 0.0)
        done = 0
        while self.heap:
            now, ticket, op, event = heappop(self.heap)
            if self.valid[op] != ticket:
                continue
            if event == _JOIN:
                self.join(op, now)
            elif now < self.issued[op]:
                self.push(self.issued[op], op, _FINISH)
            else:
                self.finish(op, now)
                done += 1
        _check_all_ran(done, self.graph)
        return self.start, self.end

    def available(self, op: int, now: float) -> None:
        """An operation has all that it waits for."""
        if self.queues.holds(op):
            self.queues.add(op)
            self.feed(self.graph.members[op][0], now)
        else:
            self.begin(op, now)

    def feed(self, worker: int, now: float) -> None:
        """Starts the next ready action of a worker that takes what comes first."""
        op = self.queues.take(worker)
        if op is not None:
            self.begin(op, now)

    def begin(self, op: int, now: float) -> None:
        self.start[op] = now
        if self.issuing is not None:
            self.issued[op] = self.issuing.issue(op, now)
        latency, time = self.works[op][:2]
        if time and (self.wires[op] or self.slows):
            if latency:
                self.push(now + latency, op, _JOIN)
            else:
                self.join(op, now)
        else:
            self.push(now + latency + time, op, _FINISH)

    def push(self, time: float, op: int, event: int) -> None:
        self.ticket += 1
        self.valid[op] = self.ticket
        heappush(self.heap, (time, self.ticket, op, event))

    def join(self, op: int, now: float) -> None:
        """The operation starts to load its wires and workers."""
        self.running[op] = _Running(self.works[op].time_s, 0.0, now)
        for others in self.places(op):
            others.add(op)
        self.reprice(op, now)

    def finish(self, op: int, now: float) -> None:
        self.end[op] = now
        if self.issuing is not None:
            self.issuing.end(op, now)
        self.valid[op] = 0
        if self.running.pop(op, None) is not None:
            for others in self.places(op):
                others.discard(op)
            self.reprice(op, now)
        if self.queues.holds(op):
            self.feed(self.queues.release(op), now)
        for after in self.graph.successors[op]:
            self.left[after] -= 1
            if self.left[after] == 0:
                self.available(after, now)

    def places(self, op: int) -> list[set[int]]:
        """The sets of running operations that this one belongs to."""
        found = [self.on_wire[wire] for wire in self.wires[op]]
        if self.slows:
            kind = self.computing if self.computes(op) else self.moving
            found += [kind[worker] for worker in self.workers(op)]
        return found

    def computes(self, op: int) -> bool:
        return self.graph.action(op).lane == "compute"

    def workers(self, op: int) -> list[int]:
        return [w for w, _ in self.graph.joint.get(op, (self.graph.members[op],))]

    def reprice(self, op: int, now: float) -> None:
        """Gives every operation that shares something with `op` its new rate and finish."""
        touched = {op} if op in self.running else set()
        for wire in self.wires[op]:
            touched |= self.on_wire[wire]
        if self.slows:
            for worker in self.workers(op):
                touched |= self.computing[worker] | self.moving[worker]
        for other in sorted(touched):
            state, rate = self.running[other], self.rate(other)
            if rate != state.rate:
                state.left_s = max(0.0, state.left_s - (now - state.since_s) * state.rate)
                state.rate, state.since_s = rate, now
                self.push(now + state.left_s / rate, other, _FINISH)

    def rate(self, op: int) -> float:
        """The operation's speed, as a share of what it has alone."""
        rate, own = 1.0, self.loads[op]
        for wire in self.wires[op]:
            split = sum(self.loads[other][wire] for other in self.on_wire[wire])
            rate = min(rate, max(own.values()) / split)
        if self.slows:
            others, factor = self.moving, self.overlap.transfer
            if self.computes(op):
                factor = self.overlap.compute
            else:
                others = self.computing
            if any(others[worker] for worker in self.workers(op)):
                rate /= factor
        return rate


_FINISH, _JOIN = 0, 1


class _ReadyQueues:
    """Compute lanes of workers that take whatever is ready, first come, first served."""

    def __init__(self, graph: Graph):
        workers = graph.program.workers
        self.graph = graph
        self.limits = {i: w.live_limit for i, w in enumerate(workers) if w.picks_ready}
        self.waiting: dict[int, list[int]] = {i: [] for i in self.limits}
        self.busy = dict.fromkeys(self.limits, False)
        self.live = dict.fromkeys(self.limits, 0)

    def holds(self, op: int) -> bool:
        """Whether the operation goes through one of these queues."""
        return (
            bool(self.limits) and self.graph.members[op][0] in self.limits and self.graph.action(op).lane == "compute"
        )

    def add(self, op: int) -> None:
        self.waiting[self.graph.members[op][0]].append(op)

    def take(self, worker: int) -> int | None:
        """Returns the operation to run next, if the worker is free and may run one."""
        if self.busy[worker]:
            return None
        limit = self.limits[worker]
        for op in self.waiting[worker]:
            is_forward = self.graph.action(op).kind == FORWARD
            if is_forward and limit and self.live[worker] >= limit:
                continue
            self.waiting[worker].remove(op)
            self.busy[worker] = True
            self.live[worker] += is_forward
            return op
        return None

    def release(self, op: int) -> int:
        """Marks the worker of a finished operation as free and returns it."""
        worker = self.graph.members[op][0]
        self.busy[worker] = False
        self.live[worker] -= self.graph.action(op).kind in GRADIENT_KINDS
        return worker
