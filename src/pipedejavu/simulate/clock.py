"""The clock: start and end of each operation of a graph.

`sweep` is for graphs without contention: one pass, no event queue. `run_events` is for the rest: transfers split a
shared wire, compute and transfers of one worker slow each other down, and some workers run whatever is ready first.
The two agree on graphs that both can run.
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
    """Returns start and end of each operation, by `sweep` if nothing is contended."""
    program = graph.program
    shared, overlap = shared_wires(program, graph, works), program.machine.overlap
    contended = shared or overlap.compute > 1 or overlap.transfer > 1 or any(work.core_share for work in works)
    if contended or any(w.picks_ready for w in program.workers):
        return run_events(graph, works, shared, overlap)
    return sweep(graph, [w.latency_s + w.time_s for w in works], HostIssue.of(graph, works))


class HostIssue:
    """When the host of each GPU issues work: in order, and ahead of the GPU unless it has to wait for an input."""

    def __init__(self, graph: Graph, works: Sequence[ActionWork]):
        self.graph, self.works = graph, works
        self.free = [0.0] * len(graph.program.workers)
        """Time at which each host has issued all its work so far."""
        self.last = [0.0] * len(graph.program.workers)
        """Latest end of compute on each worker."""

    @classmethod
    def of(cls, graph: Graph, works: Sequence[ActionWork]) -> "HostIssue | None":
        """Returns the hosts, or None if issuing takes no time."""
        return cls(graph, works) if any(work.issue_s for work in works) else None

    def issue(self, op: int, start_s: float) -> float:
        """Returns the time at which an operation that starts at `start_s` is issued; it cannot end before."""
        worker, work = self.graph.members[op][0], self.works[op]
        if not work.issue_s and not work.waits:
            return 0.0
        if work.waits or start_s > self.last[worker]:  # the host waits for inputs from other workers
            self.free[worker] = max(self.free[worker], start_s)
        self.free[worker] += work.issue_s
        return self.free[worker] if work.issue_s else 0.0

    def end(self, op: int, end_s: float) -> None:
        """Records the end of an operation."""
        if self.graph.action(op).lane == "compute":
            worker = self.graph.members[op][0]
            self.last[worker] = max(self.last[worker], end_s)


def sweep(graph: Graph, durations: Sequence[float], issuing: HostIssue | None = None) -> Times:
    """Returns start and end of each operation: it starts when all its predecessors have ended."""
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
    """A running operation that others may slow down."""

    left_s: float
    rate: float
    since_s: float


def run_events(graph: Graph, works: Sequence[ActionWork], shared: frozenset[str], overlap: Overlap) -> Times:
    """Returns start and end of each operation by a discrete-event simulation."""
    return _Events(graph, works, shared, overlap).run()


class _Events:
    """The state of the event simulation."""

    def __init__(self, graph: Graph, works: Sequence[ActionWork], shared: frozenset[str], overlap: Overlap):
        self.graph, self.works, self.overlap = graph, works, overlap
        count = len(graph.members)
        self.start, self.end = [0.0] * count, [0.0] * count
        self.left = graph.num_before.copy()
        self.heap: list[tuple[float, int, int, int]] = []  # time, ticket, operation, what happens
        self.ticket = 0
        self.valid = [0] * count  # the ticket of each operation's next event; events with older tickets are void
        self.running: dict[int, _Running] = {}
        wires = {work: tuple(w for w in work.wires if w in shared) for work in set(works)}
        loads = {work: dict(zip(work.wires, work.loads, strict=True)) for work in wires}
        self.wires, self.loads = [wires[work] for work in works], [loads[work] for work in works]
        self.on_wire: dict[str, set[int]] = {wire: set() for wire in shared}
        self.slows = overlap.compute > 1 or overlap.transfer > 1 or any(work.core_share for work in works)
        self.computing: dict[int, set[int]] = {w: set() for w in range(len(graph.program.workers))}
        self.moving: dict[int, set[int]] = {w: set() for w in range(len(graph.program.workers))}
        self.queues = _ReadyQueues(graph)
        self.issuing = HostIssue.of(graph, works)
        self.issued = [0.0] * count  # when each operation is issued

    def run(self) -> Times:
        """Handles all events; returns start and end of each operation."""
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
        """Starts an operation whose predecessors have ended, or queues it on a worker that picks what is ready."""
        if self.queues.holds(op):
            self.queues.add(op)
            self.feed(self.graph.members[op][0], now)
        else:
            self.begin(op, now)

    def feed(self, worker: int, now: float) -> None:
        """Starts the next operation in the queue of a worker that picks what is ready."""
        op = self.queues.take(worker)
        if op is not None:
            self.begin(op, now)

    def begin(self, op: int, now: float) -> None:
        """Starts an operation: its latency first, then its work."""
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
        """Schedules an operation's next event, which replaces the one before."""
        self.ticket += 1
        self.valid[op] = self.ticket
        heappush(self.heap, (time, self.ticket, op, event))

    def join(self, op: int, now: float) -> None:
        """Adds an operation to the load of its wires and workers."""
        self.running[op] = _Running(self.works[op].time_s, 0.0, now)
        for others in self.sharers(op):
            others.add(op)
        self.reprice(op, now)

    def finish(self, op: int, now: float) -> None:
        """Ends an operation and starts what waited for it."""
        self.end[op] = now
        if self.issuing is not None:
            self.issuing.end(op, now)
        self.valid[op] = 0
        if self.running.pop(op, None) is not None:
            for others in self.sharers(op):
                others.discard(op)
            self.reprice(op, now)
        if self.queues.holds(op):
            self.feed(self.queues.release(op), now)
        for after in self.graph.successors[op]:
            self.left[after] -= 1
            if self.left[after] == 0:
                self.available(after, now)

    def sharers(self, op: int) -> list[set[int]]:
        """Returns the sets of running operations, one per shared wire and worker, that an operation belongs to."""
        sets = [self.on_wire[wire] for wire in self.wires[op]]
        if self.slows:
            kind = self.computing if self.computes(op) else self.moving
            sets += [kind[worker] for worker in self.workers(op)]
        return sets

    def computes(self, op: int) -> bool:
        """Whether an operation runs on a compute lane."""
        return self.graph.action(op).lane == "compute"

    def workers(self, op: int) -> list[int]:
        """Returns the workers that take part in an operation."""
        return [w for w, _ in self.graph.joint.get(op, (self.graph.members[op],))]

    def reprice(self, op: int, now: float) -> None:
        """Updates the rate and the end of every operation that shares a wire or a worker with `op`."""
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
        """Returns the operation's speed relative to its speed without contention."""
        rate, loads = 1.0, self.loads[op]
        for wire in self.wires[op]:
            split = sum(self.loads[other][wire] for other in self.on_wire[wire])
            rate = min(rate, max(loads.values()) / split)
        if self.slows:
            others, factor = self.moving, self.overlap.transfer
            if self.computes(op):
                factor = self.overlap.compute
            else:
                others = self.computing
            if any(others[worker] for worker in self.workers(op)):
                rate /= max(factor, self.core_demand(op))
        return rate

    def core_demand(self, op: int) -> float:
        """Returns how many cores the compute and transfers of a worker of an operation would keep busy; it has one."""
        if not self.computes(op) and not self.works[op].core_share:
            return 1.0
        shares = (sum(self.works[other].core_share for other in self.moving[w]) for w in self.workers(op))
        return 1.0 + max(shares)


_FINISH, _JOIN = 0, 1


class _ReadyQueues:
    """First-in, first-out queues of workers that run whatever compute is ready."""

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
        """Queues a ready operation."""
        self.waiting[self.graph.members[op][0]].append(op)

    def take(self, worker: int) -> int | None:
        """Returns the next operation if the worker is free; forwards wait while too many microbatches are live."""
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
