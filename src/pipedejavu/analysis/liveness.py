"""When each value is in memory: from the start of what writes it to the end of what reads it last.

The same walk serves the verifier, with positions in the sequence as its clock, and the simulator, with
predicted times.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pipedejavu.analysis.size import Sizes
from pipedejavu.program.action import Action
from pipedejavu.program.program import Program
from pipedejavu.program.value import TAKING, Table, Value, rest_of, resting, update_place

CLASSES = {
    "w": "weights",
    "o": "optimizer",
    "d": "gradients",
    "s": "activations",
    "x": "activations",
    "g": "buffers",
    "p": "buffers",
    "c": "buffers",
    "t": "buffers",
}
"""By what a value is; "t" is what an action works with."""


class Stay(NamedTuple):
    """One value's stay in a memory."""

    birth: float
    death: float
    value: Value
    size_bytes: float


_Late = dict[Value, tuple[float, float]]
"""Of gradients that come while activations go: when the first backward ends, and the bytes that have come only then."""


class Liveness:
    """The walk over one program."""

    def __init__(self, program: Program):
        self.program, self.table, self.sizes = program, Table(program), Sizes(program)
        self.initial = [resting(program, piece) for piece in range(len(program.pieces))]
        self.is_partial = [bool(again) and program.keeps_saved(piece) for piece, again in enumerate(program.recomputed)]

    def stays(self, worker: int, start: Sequence[float], end: Sequence[float], last: float) -> list[Stay]:
        """Returns all stays on a worker whose k-th action runs from start[k] to end[k]; `last` ends all."""
        live: dict[Value, list[float]] = {}  # birth, death, and when the recomputed part came
        done: list[Stay] = []
        late: _Late = {}
        index = -1 if self.program.plan.version.kind == "torn" else 0
        held = self.program.held(worker)
        for piece, replica in held:
            live |= {(what, piece, replica, index, at): [0.0, 0.0, 0.0] for what, at in self.initial[piece]}
        for k, a in enumerate(self.program.workers[worker].actions):
            kind, begins, ends = a[0], start[k], end[k]
            reads, writes, adds = self.table(a, worker)
            done += self._passing(a, begins, ends, late, [v for v in writes + adds if v[0] == "d" and v not in live])
            for value in reads:
                stay = live.get(value)
                if stay is not None:
                    # An update in place takes over the memory of the version that it read.
                    until = begins if kind == "UPDATE" and value[0] in "wo" else ends
                    if until > stay[1]:
                        stay[1] = until
            for value in writes + adds:
                stay = live.get(value)
                if stay is None:
                    live[value] = [begins, ends, begins]
                    if value[0] == "w" and value[1:3] in held:
                        # What a reply or a gathered whole takes over was there until then, read or not.
                        older = live.get((*value[:3], value[3] - 1, value[4]))
                        if older is not None:
                            older[1] = max(older[1], begins)
                elif ends > stay[1]:
                    stay[1] = ends
            if kind == "R":
                live[adds[0]][2] = begins
            elif kind in TAKING and (gone := self.table.taken(a)) is not None:
                stay = live.pop(gone, None)
                if stay is not None:
                    self._finish(done, gone, (stay[0], max(stay[1], ends), stay[2]), late)
                before = (*gone[:3], gone[3] - 1, gone[4])
                if kind == "FETCH" and (stay := live.pop(before, None)) is not None:
                    self._finish(done, before, stay, late)  # what the update took over does not outlive it
        newest: dict[tuple[int, int, str], int] = {}
        for what, piece, replica, index, place in live:
            if what == "w":
                newest[piece, replica, place] = max(index, newest.get((piece, replica, place), -1))
        for value, (birth, death, recomputed) in live.items():
            what, piece, replica, index, place = value
            if what == "w" and index == newest[piece, replica, place]:
                death = last
            self._finish(done, value, (birth, death, recomputed), late)
        return done

    def _passing(self, a: Action, start: float, end: float, late: _Late, begun: list[Value]) -> list[Stay]:
        """Returns what is there while an action runs; notes what of the gradients that it begins comes at its end."""
        size = self.sizes.passing(a, is_first=bool(begun))
        if size < 0 and begun:
            late[begun[0]] = end, min(-size, self.sizes.of(begun[0]))
        place = "host" if a.via == "~host" else ""
        return [Stay(start, end, ("t", a.piece, a.replica, -1, place), size)] if size > 0 else []

    def _finish(self, done: list[Stay], value: Value, times: Sequence[float], late: _Late) -> None:
        """Ends a stay; `times` are its birth, its death and when the recomputed part came."""
        (birth, death, recomputed), size = times, self.sizes.of(value)
        if value in late and late[value][0] < death:
            came, part = late[value]
            done.append(Stay(came, death, value, part))
            size -= part
        if value[0] == "s" and self.is_partial[value[1]]:
            kept = self.sizes.kept[value[1]] * self.sizes.samples(value[3])
            done.append(Stay(birth, death, value, kept))
            done.append(Stay(recomputed, death, value, size - kept))
        elif size:
            done.append(Stay(birth, death, value, size))

    def fixed(self, worker: int) -> dict[tuple[str, str], float]:
        """Returns the bytes that stay throughout, by (memory, class): optimizer state, a server's weights."""
        sizes, keep = self.sizes, self.program.plan.keep.kind
        found = {("device", "optimizer"): 0.0, ("host", "optimizer"): 0.0, ("device", "weights"): 0.0}
        if keep != "server":
            for piece, _ in self.program.held(worker):
                place = update_place(self.program, piece)
                parts = sizes.group_size(piece) if place == "shard" else 1
                memory = "host" if place == "host" or rest_of(self.program, piece) == "visit" else "device"
                found[memory, "optimizer"] += sizes.optimizer[piece] / parts
        for piece in {a.piece for a in self.program.workers[worker].actions if a.via == "~server"}:
            found["device", "weights"] += sizes.weights[piece]
            found["device", "optimizer"] += sizes.optimizer[piece] if keep == "server" else 0.0
        return found


def count_versions(stays: list[Stay], held: Collection[tuple[int, int]]) -> int:
    """Returns the most versions on the device at once of one piece's weights, of those that a worker holds."""
    events: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for birth, death, (what, piece, replica, _, place), _ in stays:
        if what == "w" and not place and death > birth and (piece, replica) in held:
            events.setdefault((piece, replica), []).extend(((birth, 1), (death, -1)))
    most = 0
    for changes in events.values():
        count = 0
        for _, change in sorted(changes):
            count += change
            most = max(most, count)
    return most
