"""Liveness: how long each value is in memory, from the start of its first writer to the end of its last reader.

The same walk serves the verifier, which uses positions in the sequence as time, and the simulator, which uses predicted
times.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pipedejavu.analysis.size import Sizes
from pipedejavu.plan.correction_rule import keeps_velocity
from pipedejavu.program.action import FETCH, INPUT_BACKWARD, RECOMPUTE, UPDATE, Action, UpdatePlace
from pipedejavu.program.effect import TAKING, Effects, Table, rest_of, resting, update_place
from pipedejavu.program.program import Program
from pipedejavu.program.value import (
    ACTIVATION,
    BATCH,
    CONSENSUS,
    DEVICE,
    GRADIENT,
    HOST,
    OPTIMIZER_STATE,
    PUSH,
    SAVED,
    SHARD,
    WEIGHT_GRADIENT,
    WEIGHTS,
    WORKSPACE,
    Value,
    ValuePlace,
)

CLASSES = {
    WEIGHTS: "weights",
    OPTIMIZER_STATE: "optimizer",
    WEIGHT_GRADIENT: "gradients",
    SAVED: "activations",
    ACTIVATION: "activations",
    GRADIENT: "buffers",
    BATCH: "buffers",
    PUSH: "buffers",
    CONSENSUS: "buffers",
    WORKSPACE: "buffers",
}
"""The class of memory that a kind of value is reported under."""


class Stay(NamedTuple):
    """The time that one value spends in memory."""

    birth: float
    death: float
    value: Value
    size_bytes: float


class Liveness:
    """The stays of all values of one program."""

    def __init__(self, program: Program):
        self.program, self.table, self.sizes = program, Table(program), Sizes(program)
        self.initial = [resting(program, piece) for piece in range(len(program.pieces))]
        self.is_partial = [bool(again) and program.keeps_saved(piece) for piece, again in enumerate(program.recomputed)]
        """For each piece, whether some of its units are recomputed and others keep what they saved."""

    def stays(self, worker: int, start: Sequence[float], end: Sequence[float], last: float) -> list[Stay]:
        """Returns all stays on a worker whose k-th action runs from start[k] to end[k].

        The newest weights stay until `last`. A value that is written, moved away and written again has several stays.
        """
        walk, table, rows = _Walk(self, worker), self.table, self.table.rows
        for k, a in enumerate(self.program.workers[worker].actions):
            begins, ends = start[k], end[k]
            effects = rows[a[0]](a, worker)
            walk.run(a, begins, ends, effects)
            walk.read(a, begins, ends, effects[0])
            walk.write(begins, ends, effects[1] + effects[2])
            if a[0] == RECOMPUTE:
                walk.live[effects[2][0]][2] = begins
            elif a[0] in TAKING and (gone := table.taken(a)) is not None:
                walk.take(a, gone, ends)
        walk.finish_all(last)
        return walk.done

    def fixed(self, worker: int) -> dict[tuple[str, str], float]:
        """Returns the bytes in use throughout by (memory, class): optimizer state, velocities, a server's weights."""
        sizes, keep = self.sizes, self.program.plan.keep.kind
        fixed = {("device", "optimizer"): 0.0, ("host", "optimizer"): 0.0, ("device", "weights"): 0.0}
        if keep != "server":
            for piece, _ in self.program.held(worker):
                place = update_place(self.program, piece)
                parts = sizes.group_size(piece) if place == SHARD else 1
                memory = "host" if place == HOST or rest_of(self.program, piece) == "visit" else "device"
                fixed[memory, "optimizer"] += sizes.optimizer[piece] / parts
                if keeps_velocity(self.program.plan) and self.program.late_by(piece):
                    fixed[memory, "optimizer"] += sizes.weights[piece]
        actions = self.program.workers[worker].actions
        for piece in {a.piece for a in actions if a.kind == UPDATE and a.update_place == UpdatePlace.SERVER}:
            fixed["device", "weights"] += sizes.weights[piece]
            fixed["device", "optimizer"] += sizes.optimizer[piece] if keep == "server" else 0.0
            if self.program.plan.version.correction == "delay-compensation":  # what each replica has pulled
                fixed["device", "weights"] += self.program.num_replicas * sizes.weights[piece]
        return fixed


class _Walk:
    """The walk over one worker's actions."""

    def __init__(self, liveness: Liveness, worker: int):
        program = liveness.program
        self.sizes, self.is_partial, self.held = liveness.sizes, liveness.is_partial, program.held(worker)
        self.done: list[Stay] = []
        self.live: dict[Value, list[float]] = {}
        """Birth and death so far of each live value, and when its recomputed part was written."""
        self.late: dict[Value, tuple[float, float]] = {}
        """For gradients that grow while activations shrink: the end of the first backward, and the bytes that are only
        there from then on."""
        self.halved: dict[Value, float] = {}
        """For saved tensors of split backwards: the end of the first half, which keeps a part and adds gradients."""
        version = -1 if program.plan.version.kind == "torn" else 0
        for piece, replica in self.held:
            for kind, place in liveness.initial[piece]:
                self.live[Value(kind, piece, replica, version, place)] = [0.0, 0.0, 0.0]

    def run(self, a: Action, begins: float, ends: float, effects: Effects) -> None:
        """Adds the workspace of an action, and notes which of the gradients that it begins arrive only at its end."""
        if not self.sizes.is_detailed:
            return
        new = [v for v in effects[1] + effects[2] if v[0] == WEIGHT_GRADIENT and v not in self.live]
        size = self.sizes.workspace(a, is_first=bool(new))
        if size < 0 and new:
            self.late[new[0]] = ends, min(-size, self.sizes.of(new[0]))
        if size > 0:
            place = HOST if a.update_place == UpdatePlace.HOST else DEVICE
            self.done.append(Stay(begins, ends, Value.workspace(a.piece, a.replica, place), size))

    def read(self, a: Action, begins: float, ends: float, reads: Sequence[Value]) -> None:
        """Extends the stays of what an action reads."""
        is_update, live = a[0] == UPDATE, self.live
        if a[0] == INPUT_BACKWARD and self.sizes.pending[a[1]] is not None:
            self.halved[next(value for value in reads if value[0] == SAVED)] = ends
        for value in reads:
            stay = live.get(value)
            if stay is not None:
                # An update in place reuses the memory of the version that it reads.
                until = begins if is_update and value[0] in _UPDATED and value.number == a.version - 1 else ends
                if until > stay[1]:
                    stay[1] = until

    def write(self, begins: float, ends: float, writes: Sequence[Value]) -> None:
        """Begins or extends the stays of what an action writes or adds to."""
        live = self.live
        for value in writes:
            stay = live.get(value)
            if stay is None:
                live[value] = [begins, ends, begins]
                if value[0] == WEIGHTS and value[1:3] in self.held:
                    # The new version reuses the memory of the one before it, which was there until now.
                    older = live.get(value.at(value.number - 1))
                    if older is not None:
                        older[1] = max(older[1], begins)
            elif ends > stay[1]:
                stay[1] = ends

    def take(self, a: Action, gone: Value, ends: float) -> None:
        """Ends the stay of a value that an action removes from its place."""
        stay = self.live.pop(gone, None)
        if stay is not None:
            self._finish(gone, (stay[0], max(stay[1], ends), stay[2]))
        before = gone.at(gone.number - 1)
        if a[0] == FETCH and (stay := self.live.pop(before, None)) is not None:
            self._finish(before, stay)  # the update reused its memory

    def finish_all(self, last: float) -> None:
        """Ends all stays; those of the newest weights at `last`."""
        newest: dict[tuple[int, int, ValuePlace], int] = {}
        for kind, piece, replica, number, place in self.live:
            if kind == WEIGHTS:
                newest[piece, replica, place] = max(number, newest.get((piece, replica, place), -1))
        for value, (birth, death, recomputed) in self.live.items():
            kind, piece, replica, number, place = value
            if kind == WEIGHTS and number == newest[piece, replica, place]:
                death = last
            self._finish(value, (birth, death, recomputed))

    def _finish(self, value: Value, times: Sequence[float]) -> None:
        """Ends a stay; `times` are its birth, its death and when its recomputed part was written."""
        (birth, death, recomputed), size, done = times, self.sizes.of(value), self.done
        if value in self.late and self.late[value][0] < death:
            arrival, part = self.late[value]
            done.append(Stay(arrival, death, value, part))
            size -= part
        if value in self.halved:
            pending = (self.sizes.pending[value.piece] or 0.0) * self.sizes.samples(value.number)
            done.append(Stay(self.halved[value], death, value, pending))
            death = self.halved[value]
        if value.kind == SAVED and self.is_partial[value.piece]:
            kept = self.sizes.kept[value.piece] * self.sizes.samples(value.number)
            done.append(Stay(birth, death, value, kept))
            done.append(Stay(recomputed, death, value, size - kept))
        elif size:
            done.append(Stay(birth, death, value, size))


_UPDATED = frozenset((WEIGHTS, OPTIMIZER_STATE))


def count_versions(stays: list[Stay], held: Collection[tuple[int, int]]) -> int:
    """Returns the most versions of one held piece's weights that are on the device at once."""
    events: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for birth, death, (kind, piece, replica, _, place), _ in stays:
        if kind == WEIGHTS and place == DEVICE and death > birth and (piece, replica) in held:
            events.setdefault((piece, replica), []).extend(((birth, 1), (death, -1)))
    most = 0
    for changes in events.values():
        count = 0
        for _, change in sorted(changes):
            count += change
            most = max(most, count)
    return most
