"""The time of an update whose state or weights are on the host: lanes in arithmetic, before any action is compiled.

The forwards and backwards of a worker run in the order of its schedule; each waits for its weights. Weights of a window
are fetched one after another into the memory of a dropped piece; an update on the host waits for the copy of its
gradient, and the next forward of its piece for the update. So an update on the host is free if it ends, with its
copies, by the deadline that the next forward sets. The simulator, which also knows transfers that share wires, agrees
to the last digit where none do.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipedejavu.program.action import BACKWARD, FORWARD, GRADIENT_KINDS, INPUT_BACKWARD, WEIGHT_BACKWARD, Action
from pipedejavu.program.program import Program

_PASSES = frozenset((FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD))
PieceReplica = tuple[int, int]
BUCKETS = 2
"""Whole gradients which may wait for their sum, if pieces divide them (ZeRO-2 and 3), or for their copy to the host, if
weights come through a window: a backward that begins another waits for the memory of the first."""
ROUNDS = 3
"""Times that a sequence is repeated, so that the last has the waits of a long run."""


class _Pass(NamedTuple):
    """A forward or backward of a worker's sequence."""

    key: PieceReplica
    update: int
    work_s: float
    issue_s: float
    """The time for the host to issue it to a GPU."""
    reads: bool
    """Whether it reads weights."""
    begins: bool
    """Whether it makes the first part of its piece's gradient."""
    ends: bool
    """Whether it makes the last part of its piece's gradient."""
    is_last: bool
    """Whether it is the worker's last of the update."""


@dataclass(frozen=True)
class _PieceTimes:
    """What one piece takes beside its passes."""

    device_update_s: float
    host_update_s: float
    gradient_out_s: float
    weights_in_s: float


class OffloadTime:
    """Estimates the seconds per update of one program for any window, and any number of pieces on the device."""

    def __init__(self, program: Program):
        self.program, self.plan = program, program.plan
        first: dict[int, int] = {}
        for number, piece in enumerate(program.pieces):
            first.setdefault(piece.stage, number)
        self.position = [number - first[piece.stage] for number, piece in enumerate(program.pieces)]
        """The position of each piece in its stage."""
        self.workers = [worker for worker, held in enumerate(program.pieces_on) if held]
        self.times = {worker: self._times(worker) for worker in self.workers}
        """By worker, the times of each piece that it holds."""
        self.passes = {worker: self._passes(worker) for worker in self.workers}
        """By worker, the forwards and backwards of its sequence."""
        self._seconds: dict[tuple[int, int], float] = {}

    def seconds(self, window: int, device_pieces: int) -> float:
        """Returns the time of an update on the slowest worker."""
        key = (window, device_pieces)
        if key not in self._seconds:
            self._seconds[key] = max(self._of_worker(worker, *key) for worker in self.workers)
        return self._seconds[key]

    def _of_worker(self, worker: int, window: int, device_pieces: int) -> float:
        passes = self.passes[worker]
        lanes = _Lanes(self, worker, device_pieces)
        keep, updates = self.plan.keep, range(0, ROUNDS * self.plan.steps, self.plan.steps)
        line = [each._replace(update=each.update + first) for first in updates for each in passes]
        capacity = window + self.plan.order.prefetch
        moves = _WindowMoves(line, capacity, waits=lanes.waits) if keep.kind == "host" else None
        ends = lanes.run(line, moves)
        return (ends[len(line) - 1] - ends[len(line) - 1 - len(passes)]) / self.plan.steps

    def _times(self, worker: int) -> dict[int, _PieceTimes]:
        """Returns the times of each piece that a worker holds."""
        machine, profile = self.program.machine, self.program.profile
        device = machine.device(self.program.devices[worker])
        cpu = machine.cpu_of(device)
        users = sum(machine.cpu_of(machine.device(self.program.devices[w])).name == cpu.name for w in self.workers)
        times = {}
        for number in self.program.pieces_on[worker]:
            units = [profile.units[u] for u in self.program.pieces[number].units]
            weights, gradients = sum(u.parameter_bytes for u in units), sum(u.gradient_bytes for u in units)

            def moved(size_bytes: float, source: str, target: str) -> float:
                route = machine.route(source, target)
                return route.latency_s + size_bytes / route.bytes_per_s

            is_cpu = device.type == "cpu"
            times[number] = _PieceTimes(
                device_update_s=sum(profile.time(u, device.kind).update_s for u in units),
                host_update_s=sum(profile.time(u, cpu.kind).update_s for u in units) * (1 if is_cpu else users),
                gradient_out_s=0.0 if is_cpu else moved(gradients, device.name, cpu.name),
                weights_in_s=0.0 if is_cpu else moved(weights, cpu.name, device.name),
            )
        return times

    def _passes(self, worker: int) -> list[_Pass]:
        """Returns the forwards and backwards of a worker's sequence."""
        size, actions = self.program.update_size, [a for a in self.program.workers[worker].actions if a.kind in _PASSES]
        updates = [a.microbatch // size for a in actions]
        pairs = [*zip(actions, updates, strict=True)]
        ends = {(a.piece, a.replica, t): n for n, (a, t) in enumerate(pairs) if a.kind in GRADIENT_KINDS}
        begins = {(a.piece, a.replica, t): n for n, (a, t) in reversed([*enumerate(pairs)]) if a.kind in GRADIENT_KINDS}
        lasts = {t: n for n, t in enumerate(updates)}
        return [
            _Pass(
                (a.piece, a.replica), t, *self._time(a, worker), a.kind != WEIGHT_BACKWARD,
                begins.get((a.piece, a.replica, t)) == n,
                ends.get((a.piece, a.replica, t)) == n, lasts[t] == n,
            )
            for n, (a, t) in enumerate(pairs)
        ]  # fmt: skip

    def _time(self, a: Action, worker: int) -> tuple[float, float]:
        """Returns the time of a pass on the device, and the host's time to issue it."""
        program = self.program
        device, samples = (
            program.machine.device(program.devices[worker]),
            program.sizes[a.microbatch % program.update_size],
        )
        times = {u: program.profile.time(program.profile.units[u], device.kind) for u in program.pieces[a.piece].units}
        if a.kind == FORWARD:
            costs = [time.forward for time in times.values()]
        elif a.kind == WEIGHT_BACKWARD:
            costs = [time.weight_backward for time in times.values()]
        else:
            costs = [time.backward for time in times.values()]
            costs += [times[u].recompute for u in program.recomputed[a.piece]]
        work_s = sum(cost.work_s(samples) for cost in costs)
        if a.kind == INPUT_BACKWARD:
            work_s -= sum(time.weight_backward.work_s(samples) for time in times.values())
        return work_s, sum(cost.issue_s for cost in costs) if device.type == "gpu" else 0.0


class _WindowMoves:
    """Which passes bring weights into a window, and after which their memory is free, as the compiler places them."""

    def __init__(self, line: Sequence[_Pass], capacity: int, *, waits: bool):
        """Takes the passes in order; `waits` if all updates wait for the last gradient."""
        self.fetches: dict[int, list[tuple[bool, PieceReplica, int]]] = defaultdict(list)
        """By position: whether an update has just ended, what is fetched before the position, and which use."""
        self.drops: set[int] = set()
        """Positions after which weights are dropped."""
        self.use_of: dict[int, int] = {}
        """By position of a reader: its use."""
        uses: list[tuple[PieceReplica, int]] = []
        lasts: list[int] = []
        updated: dict[tuple[PieceReplica, int], int] = {}
        step_ends = {each.update: n for n, each in enumerate(line) if each.is_last}
        for position, each in enumerate(line):
            if each.ends:
                updated[each.key, each.update + 1] = step_ends[each.update] if waits else position
            if each.reads and uses[-1:] == [(each.key, each.update)]:
                lasts[-1] = position
            elif each.reads:
                uses.append((each.key, each.update))
                lasts.append(position)
            self.use_of[position] = len(uses) - 1
        stays: set[int] = set()
        latest: dict[tuple[PieceReplica, int], int] = {}
        for j, use in enumerate(uses):
            free = lasts[j - capacity] + 1 if j >= capacity else 0
            earlier, latest[use] = latest.get(use), j
            if earlier is not None and free <= lasts[earlier]:
                stays.add(earlier)
                continue
            follows = updated.get(use, -1) + 1
            self.fetches[max(free, follows)].append((follows >= free, use[0], j))
        for moves in self.fetches.values():
            moves.sort()  # those that follow an update of that moment come after it
        self.drops = {last for j, last in enumerate(lasts) if j not in stays}


class _Lanes:
    """The lanes of one worker: when each is free, and when weights are there."""

    def __init__(self, model: OffloadTime, worker: int, device_pieces: int):
        self.model, self.device_pieces, self.times = model, device_pieces, model.times[worker]
        self.is_windowed = model.plan.keep.kind == "host"
        self.waits = model.plan.reduce.clip != "none"
        """Whether updates wait for the norm of all gradients."""
        self.compute = self.issue = self.out = self.host = self.arrive = 0.0
        self.left: deque[float] = deque(maxlen=BUCKETS)
        """When the last gradients had left."""
        self.ready: dict[PieceReplica, float] = defaultdict(float)
        """When the newest weights are on the device or, with a window, in host memory."""

    def run(self, line: Sequence[_Pass], moves: _WindowMoves | None) -> list[float]:
        """Runs all passes; returns when each ends."""
        ends, dropped, waiting = [], 0.0, list[PieceReplica]()
        there: dict[int, float] = {}
        for position, each in enumerate(line):
            for _, key, use in moves.fetches.get(position, ()) if moves else ():
                self.arrive = max(self.arrive, dropped, self.ready[key]) + self.times[key[0]].weights_in_s
                there[use] = self.arrive
            if each.reads:
                self._wait(there.get(moves.use_of[position], 0.0) if moves else self.ready[each.key])
            if moves and each.begins and len(self.left) == BUCKETS:  # the memory of the gradient before the last
                self._wait(self.left[0])
            self.issue += each.issue_s
            self.compute = max(self.compute + each.work_s, self.issue)
            if moves and position in moves.drops:
                dropped = self.compute
            if each.ends:
                waiting.append(each.key)
                self._end_gradient(each.key)
            if each.is_last:
                self._end_update(waiting)
                waiting = []
            ends.append(self.compute)
        return ends

    def _wait(self, until_s: float) -> None:
        """Makes the compute lane wait; the host of a GPU issues ahead until it waits."""
        if until_s > self.compute:
            self.compute, self.issue = until_s, max(self.issue, until_s)

    def _is_on_host(self, key: PieceReplica) -> bool:
        return self.is_windowed or self.model.position[key[0]] >= self.device_pieces

    def _end_gradient(self, key: PieceReplica) -> None:
        """Copies a final gradient to the host, and updates its piece there unless it waits for the norm."""
        if self._is_on_host(key):
            self.out = max(self.out, self.compute) + self.times[key[0]].gradient_out_s
            self.left.append(self.out)
            if not self.waits:
                self._update_on_host(key, self.out)

    def _update_on_host(self, key: PieceReplica, from_s: float) -> None:
        self.host = max(self.host, from_s) + self.times[key[0]].host_update_s
        self.ready[key] = self.host
        if not self.is_windowed:
            self.arrive = max(self.arrive, self.host) + self.times[key[0]].weights_in_s
            self.ready[key] = self.arrive

    def _end_update(self, keys: list[PieceReplica]) -> None:
        """Runs the updates that wait for the last gradient."""
        on_host = sorted(key for key in keys if self._is_on_host(key))
        norm = 0.0
        if self.waits:
            norm = self.compute = max(self.compute, self.out)
            self.issue = max(self.issue, norm)  # the host reads the norm before it goes on
        self.compute += sum(self.times[key[0]].device_update_s for key in keys if key not in on_host)
        for key in on_host if self.waits else ():
            self._update_on_host(key, norm)
