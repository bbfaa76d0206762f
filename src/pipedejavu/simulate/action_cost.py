"""Costs of a program's operations: seconds of work, latency, and the wires that they load."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pipedejavu.analysis import Graph
from pipedejavu.analysis.size import Sizes
from pipedejavu.facts import TRAFFIC, Cost, Device, Route, UnitTime, joint_spread
from pipedejavu.program import Action, ActionKind, GroupRole, Program, UpdatePlace, ValueKind
from pipedejavu.program.action import COMPUTE_KINDS, GRADIENT_KINDS, RECV
from pipedejavu.program.passes import COLLECTIVES
from pipedejavu.program.program import shard_group
from pipedejavu.program.summation import interface_share
from pipedejavu.simulate.correction_cost import added_updates
from pipedejavu.simulate.unit_traffic import unit_collectives


class ActionWork(NamedTuple):
    """An operation's cost when nothing else runs."""

    latency_s: float
    time_s: float
    """Time after the latency; longer if wires or devices are shared."""
    wires: tuple[str, ...] = ()
    """Wires of a transfer, or the CPU that updates for several devices: operations on one wire share its rate."""
    loads: tuple[int, ...] = ()
    """Transfers per wire that the operation stands for: its copies in a folded program, and the hops of a ring.
    `time_s` includes the highest of them."""
    issue_s: float = 0.0
    """Time for the host to issue the operation to a GPU."""
    waits: bool = False
    """Whether the host waits for the GPU's earlier work before it issues the operation."""
    core_share: float = 0.0
    """Share of a core that a transfer takes from the compute of its workers, which leave no core to it."""


NOTHING = ActionWork(0.0, 0.0)
INSTANT_S = 1e-9
"""Waits up to this long count as none: links at unit costs take next to no time, but not zero."""

_HALVES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.WEIGHT_BACKWARD: "weight_backward",
    ActionKind.RECOMPUTE: "recompute",
    ActionKind.EVAL: "forward",
}
_MEASURED = {**_HALVES, ActionKind.INPUT_BACKWARD: "backward"}
"""The measured pass whose spread an action has."""


class ActionCosts:
    """Costs of one program's operations; equal actions of a worker are computed once."""

    def __init__(self, program: Program):
        self.program, self.machine, self.sizes = program, program.machine, Sizes(program)
        self.plan = program.plan
        self._known: dict[tuple[object, ...], ActionWork] = {}

    def of(self, graph: Graph) -> list[ActionWork]:
        """Returns the work of every operation."""
        known, joint, workers = self._known, graph.joint, self.program.workers
        has_budgets = self.plan.feed.budgets is not None
        works = []
        for op, (worker, position) in enumerate(graph.members):
            a = workers[worker].actions[position]
            if a[0] == RECV:  # the cost is that of the SEND
                worker, position = next(m for m in joint[op] if m[0] != worker)
                a = workers[worker].actions[position]
            key = (
                worker,
                a[0],
                a[1],
                a[2],
                a[5],
                a[6],
                self.sizes.samples(a[3]),
                self._budget(a) if has_budgets else 1.0,
            )
            work = known.get(key)
            if work is None:
                work = known[key] = self._work(a, worker)
            works.append(work)
        for worker in range(len(workers)):
            if self._device(worker).type == "cpu":
                self._delay_compute(graph, worker, works)
            elif self.plan.reduce.clip == "global":
                self._wait_for_norms(graph, worker, works)
        return works

    def _delay_compute(self, graph: Graph, worker: int, works: list[ActionWork]) -> None:
        """Delays the compute of a CPU worker: its thread also sends its outputs and wakes up for its inputs."""
        waits_s = 0.0
        for op, a in zip(graph.of_action[worker], self.program.workers[worker].actions, strict=True):
            work = works[op]
            if a.kind == ActionKind.SEND:
                waits_s += work.latency_s + work.time_s
            elif a.kind == ActionKind.RECV:
                waits_s += work.latency_s
            elif waits_s > INSTANT_S and a.lane == "compute":
                works[op], waits_s = work._replace(latency_s=work.latency_s + waits_s), 0.0

    def _wait_for_norms(self, graph: Graph, worker: int, works: list[ActionWork]) -> None:
        """Makes the host of a GPU wait for the gradient norm, which it reads before it issues updates."""
        is_new = reads = False
        for op, a in zip(graph.of_action[worker], self.program.workers[worker].actions, strict=True):
            if a.kind == ActionKind.UPDATE:
                is_new, reads = False, reads or is_new
            if a.lane == "compute":
                is_new = is_new or a.kind in GRADIENT_KINDS
                if reads:
                    works[op], reads = works[op]._replace(waits=True), False

    def spreads(self, graph: Graph) -> list[float]:
        """Returns the relative spread of each operation's time, as measured."""
        workers, known = self.program.workers, dict[tuple[object, ...], float]()
        spreads = []
        for worker, position in graph.members:
            a = workers[worker].actions[position]
            key = (worker, a.kind, a.piece, self.sizes.samples(a.microbatch))
            if key not in known:
                known[key] = self._spread(a, worker) if a.kind in _MEASURED else 0.0
            spreads.append(known[key])
        return spreads

    def _spread(self, a: Action, worker: int) -> float:
        samples = self.sizes.samples(a.microbatch)
        times = self._times(a, self._device(worker).kind)
        return joint_spread([getattr(time, _MEASURED[a.kind]) for time in times], samples)

    def _work(self, a: Action, worker: int) -> ActionWork:
        if a.kind in COMPUTE_KINDS or a.kind == ActionKind.EVAL:
            return self._compute(a, worker)
        if a.kind == ActionKind.UPDATE:
            return self._update(a, worker)
        if a.kind == ActionKind.SEND:
            return self._send(a, worker)
        if a.kind in (ActionKind.FETCH, ActionKind.OFFLOAD):
            return self._copy(a, worker)
        if a.kind in (ActionKind.REDUCE, ActionKind.GATHER):
            return self._collective(a)
        return NOTHING

    def _device(self, worker: int) -> Device:
        return self.machine.device(self.program.devices[worker])

    def _times(self, a: Action, kind: str) -> list[UnitTime]:
        """Returns the times of an action's units; those of an R are only the recomputed ones."""
        profile = self.program.profile
        units = (
            self.program.recomputed[a.piece] if a.kind == ActionKind.RECOMPUTE else self.program.pieces[a.piece].units
        )
        if a.kind == ActionKind.EVAL:  # a stage is scored with the whole model
            units = tuple(range(len(profile.units)))
        return [profile.time(profile.units[u], kind) for u in units]

    def _compute(self, a: Action, worker: int) -> ActionWork:
        times, samples = self._times(a, self._device(worker).kind), self.sizes.samples(a.microbatch)
        is_input_half = a.kind == ActionKind.INPUT_BACKWARD
        costs: list[Cost] = [_input_half(t, samples) if is_input_half else getattr(t, _HALVES[a.kind]) for t in times]
        time, issue = sum(cost.work_s(samples) for cost in costs), sum(cost.issue_s for cost in costs)
        if a.kind == ActionKind.FORWARD and self._makes_targets(a.piece, worker):
            loading = self.program.profile.batch.get(self._device(worker).kind)
            time += loading.at(samples) if loading else 0.0
        time *= self._budget(a)
        time = time / self.plan.tensor_shards + self._sums(a, samples)
        if more := added_updates(self.program, a):
            time += more * sum(t.update_s for t in times)
        return ActionWork(0.0, time, issue_s=issue)

    def _budget(self, a: Action) -> float:
        """Returns the share of the computation that an action's replica can afford in its update."""
        if not self.plan.feed.budgets or a.microbatch < 0:
            return 1.0
        update = a.microbatch // self.program.update_size
        return self.plan.feed.budgets_at(update // self.plan.reduce.period)[a.replica]

    def _sums(self, a: Action, samples: float) -> float:
        """Returns the time of the collectives inside a piece's divided units."""
        if self.plan.tensor_shards == 1 or a.kind == ActionKind.WEIGHT_BACKWARD:
            return 0.0
        group = self.program.groups.get(shard_group(self.program.pieces[a.piece].stage, a.replica))
        routes = self._ring(group.workers) if group is not None else []
        if group is None or not routes:
            return 0.0
        units = [self.program.profile.units[u] for u in self.program.pieces[a.piece].units]
        is_backward = a.kind in (ActionKind.BACKWARD, ActionKind.INPUT_BACKWARD)
        times = []
        for name, size in (row for u in units for row in unit_collectives(self.plan, u, samples, is_backward)):
            latency_s, bytes_s, _ = _collective_times(name, len(group.workers), routes, size, is_sum=True)
            times.append(latency_s + bytes_s)
        return math.fsum(times)

    def _makes_targets(self, piece: int, worker: int) -> bool:
        """Whether a worker loads samples only for their targets: it has the last piece but not the first."""
        inputs, outputs = self.program.inputs, self.program.outputs
        return not outputs[piece] and all(inputs[held] for held, _ in self.program.held(worker))

    def _update(self, a: Action, worker: int) -> ActionWork:
        trainer = self._device(worker)
        device = self.machine.cpu_of(trainer) if a.update_place == UpdatePlace.HOST else trainer
        parts = self.sizes.group_size(a.piece) if a.update_place == UpdatePlace.SHARD else 1
        units = [self.program.profile.units[u] for u in self.program.pieces[a.piece].units]
        shares = [self.sizes.held_share(unit) for unit in units]
        times = self._times(a, device.kind)
        time = sum(t.update_s * share for t, share in zip(times, shares, strict=True)) / parts
        time *= 1 + added_updates(self.program, a)
        if device.type == trainer.type:
            return ActionWork(0.0, time)
        users = sum(self.machine.cpu_of(self._device(w)).name == device.name for w in self._copies(worker))
        return ActionWork(0.0, time * users, (f"update:{device.name}",), (users,))

    def _send(self, a: Action, worker: int) -> ActionWork:
        size = self.sizes.moved(a)
        return self._move(worker, a.peer, size)

    def _move(self, source: int, target: int, size_bytes: float) -> ActionWork:
        """Returns the work of a transfer between workers."""
        devices = self.program.devices
        if devices[source] == devices[target]:
            return NOTHING
        ends = zip(self._copies(source), self._copies(target), strict=True)
        return _transfer([self.machine.route(devices[s], devices[t]) for s, t in ends], size_bytes)

    def _copy(self, a: Action, worker: int) -> ActionWork:
        """Returns the work of a transfer between a worker's device and its host."""
        if self._device(worker).type == "cpu":
            return NOTHING
        devices = [self._device(w) for w in self._copies(worker)]
        ends = [(self.machine.cpu_of(device).name, device.name) for device in devices]
        routes = [self.machine.route(h, d) if a.kind == ActionKind.FETCH else self.machine.route(d, h) for h, d in ends]
        work = _transfer(routes, self.sizes.moved(a))
        if a.what == ValueKind.BATCH:
            return self._with_loading(work, a, devices[0])
        measured = [t.copy_s.get(f"{a.kind}:{a.what}") for t in self._times(a, devices[0].kind)]
        known = [time for time in measured if time is not None]
        if len(known) < len(measured):
            return work
        return work._replace(latency_s=0.0, time_s=sum(known) * max(work.loads, default=1))

    def _with_loading(self, copy: ActionWork, a: Action, device: Device) -> ActionWork:
        """Returns the work of the two stages that bring samples: while one batch is copied, the host makes the next."""
        loading = self.program.profile.batch.get(self.machine.cpu_of(device).kind)
        loading_s = loading.at(self.sizes.samples(a.microbatch)) if loading else 0.0
        return copy._replace(time_s=max(copy.time_s, loading_s))

    def _copies(self, worker: int) -> range:
        """Returns the workers that a worker of a folded program stands for."""
        return range(worker, worker + self.program.copies * len(self.program.workers), len(self.program.workers))

    def _collective(self, a: Action) -> ActionWork:
        size = self.sizes.moved(a)
        group = self.program.groups[a.group]
        n = len(group.workers)
        if n == 1:
            return NOTHING
        routes = self._ring(group.workers)
        if not routes:
            return NOTHING
        rings = [routes]
        if max(group.workers) < len(self.program.workers):  # a group within one copy: every copy has its own ring
            rings = [self._ring(ws) for ws in zip(*map(self._copies, group.workers), strict=True)]
        hops = Counter(wire for ring in rings for r in ring for wire in r.wires)
        wires = tuple(sorted({w for r in routes for w in r.wires}))
        loads = tuple(hops[wire] for wire in wires)
        if group.helpers and a.kind == ActionKind.REDUCE:
            round_s, byte_s = _ring_line(self._ring((*group.workers, *group.helpers)), is_sum=True)
            latency_s, time_s = 2 * round_s, interface_share(n, len(group.helpers)) * size * byte_s
            share = 0.0
        else:
            latency_s, time_s, share = self._add_times(a, group.workers, routes, size)
        return ActionWork(latency_s, time_s * max(loads, default=1), wires, loads, core_share=share)

    def _add_times(
        self, a: Action, workers: tuple[int, ...], routes: list[Route], size: float
    ) -> tuple[float, float, float]:
        """Returns latency and time of an action's collectives over a ring, and the share of a core that they take."""
        n, latency_s, time_s, core_s = len(workers), 0.0, 0.0, 0.0
        for kind in self._collectives(a):
            is_sum = a.kind == ActionKind.REDUCE
            added_s, bytes_s, share = _collective_times(kind, n, routes, size, is_sum=is_sum)
            latency_s, time_s, core_s = latency_s + added_s, time_s + bytes_s, core_s + share * bytes_s
        share = core_s / time_s if time_s else 0.0
        devices = [self._device(w) for w in workers]
        if not share or all(self.machine.leaves_core(device, self.program.devices) for device in devices):
            return latency_s, time_s, 0.0
        return 0.0, latency_s + time_s, share  # to start a collective takes the core, too

    def _ring(self, workers: tuple[int, ...]) -> list[Route]:
        """Returns the routes around a ring of workers, without those within one device."""
        ring = [self.program.devices[w] for w in workers]
        return [self.machine.route(s, t) for s, t in zip(ring, ring[1:] + ring[:1], strict=True) if s != t]

    def _collectives(self, a: Action) -> list[str]:
        """Returns the kinds of the collectives that an action consists of."""
        if a.what in (ValueKind.ACTIVATION, ValueKind.GRADIENT):
            rows = [COLLECTIVES[layout] for layout in self.plan.cut.layouts]
            column = (0 if a.kind == ActionKind.GATHER else 1) + (2 if a.what == ValueKind.GRADIENT else 0)
            return [row[column] for row in rows if row[column]]
        if a.kind == ActionKind.GATHER:
            return ["all-gather"]
        is_over_stage = self.program.groups[a.group].role is GroupRole.STAGE
        divides = is_over_stage and self.plan.zero_of(self.program.pieces[a.piece].stage) > 0
        return ["reduce-scatter" if divides else "all-reduce"]


def _collective_times(
    kind: str, n: int, routes: list[Route], size_bytes: float, *, is_sum: bool
) -> tuple[float, float, float]:
    """Returns latency, time and share of a core of a collective over a ring of routes among n workers.

    Without a measurement it takes the rounds and the traffic of a ring.
    """
    known = [route.collective(kind, n) for route in routes]
    if None not in known:
        times = [(time.latency_s, size_bytes / time.bytes_per_s, time.core_share) for time in known if time]
        return max(times, key=lambda parts: parts[0] + parts[1])
    (rounds, volume), (round_s, byte_s) = TRAFFIC[kind](n), _ring_line(routes, is_sum=is_sum)
    return rounds * round_s, volume * size_bytes * byte_s, 0.0


def _ring_line(routes: list[Route], *, is_sum: bool) -> tuple[float, float]:
    """Returns the time of a round of a ring, and of each byte that it carries."""
    if is_sum:
        return max(r.sum_latency_s for r in routes), 1 / min(r.sum_bytes_per_s for r in routes)
    return max(r.latency_s for r in routes), 1 / min(r.bytes_per_s for r in routes)


def _input_half(time: UnitTime, samples: float) -> Cost:
    """Returns the cost of the input half of a backward, at this number of samples."""
    if time.input_backward is not None:
        return time.input_backward
    return Cost(fixed_s=time.backward.work_s(samples) - time.weight_backward.work_s(samples))


def _transfer(routes: list[Route], size_bytes: float) -> ActionWork:
    """Returns the work of a transfer along the first of `routes`, while its copies use the others."""
    route, users = routes[0], Counter(wire for other in routes for wire in other.wires)
    loads = tuple(users[wire] for wire in route.wires)
    return ActionWork(route.latency_s, size_bytes * max(loads, default=1) / route.bytes_per_s, route.wires, loads)


def shared_wires(program: Program, graph: Graph, works: Sequence[ActionWork]) -> frozenset[str]:
    """Returns the wires that more than one lane uses: only these can be contended."""
    users: dict[str, tuple[int, str]] = {}
    shared = set()
    for op, work in enumerate(works):
        if work.wires and work.time_s:
            worker, position = graph.members[op]
            a = program.workers[worker].actions[position]
            lane = (a.peer, f"net>{worker}") if a.kind == ActionKind.RECV else (worker, a.queue)
            for wire in work.wires:
                if users.setdefault(wire, lane) != lane:
                    shared.add(wire)
    return frozenset(shared)
