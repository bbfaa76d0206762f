"""The program: for every worker, the sequence of actions that it runs, and who the workers are.

A worker's sequence has the meaning of a plain sequential program: an action reads what the nearest action
before it wrote. The actions of one lane run in that order; lanes run side by side, held together only by the
values that they read and write (`value`). Where `copies` is above 1 the program holds one pipeline of
several that behave alike: worker w stands for w, w + n, w + 2n, … for n workers in the program.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from pipedejavu.facts import InputError, Machine, Profile
from pipedejavu.plan import Plan
from pipedejavu.program.action import Action, parse_action


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of units that actions name; a stage, or a part of one where updates go piece by piece."""

    stage: int
    units: range
    opens_stage: bool
    closes_stage: bool


@dataclass(frozen=True, kw_only=True)
class Group:
    """Workers that take part in a collective together."""

    workers: tuple[int, ...]
    helpers: tuple[int, ...] = ()
    """Servers that only sum."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker's sequence, and how its compute lane picks the next action."""

    actions: tuple[Action, ...]
    picks_ready: bool = False
    """Whether the compute lane takes any action that is ready, first come first served, rather than the
    next one in order."""
    live_limit: int = 0
    """Of a worker that picks what is ready: microbatches it may hold before it must finish one; 0 for any."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What `compile` yields and what is verified, simulated and run."""

    plan: Plan
    profile: Profile
    machine: Machine
    pieces: tuple[Piece, ...]
    inputs: tuple[tuple[int, ...], ...]
    """For each piece, the pieces whose outputs it reads."""
    workers: tuple[Worker, ...]
    groups: dict[str, Group]
    devices: tuple[str, ...]
    """Of every worker, copies included."""
    parts: tuple[tuple[int, ...], ...]
    """For each replica, the samples of each of its microbatches of an update."""
    num_replicas: int
    copies: int = 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each microbatch of an update, over all replicas."""
        return tuple(size for part in self.parts for size in part)

    @cached_property
    def update_size(self) -> int:
        """Microbatches, over all replicas, that carry one update's number."""
        return len(self.sizes)

    @cached_property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """For each piece, the pieces that read its output."""
        found: list[list[int]] = [[] for _ in self.pieces]
        for target, sources in enumerate(self.inputs):
            for source in sources:
                found[source].append(target)
        return tuple(map(tuple, found))

    @cached_property
    def num_actions(self) -> int:
        """Actions of the workers that the program holds."""
        return sum(len(w.actions) for w in self.workers)

    @cached_property
    def tied_pieces(self) -> tuple[tuple[int, ...], ...]:
        """For each tie of the profile, the pieces that share its parameters."""
        home = {unit: index for index, piece in enumerate(self.pieces) for unit in piece.units}
        position = self.profile.position
        return tuple(tuple(sorted({home[position[u]] for u in tie.units})) for tie in self.profile.ties)

    @cached_property
    def _held(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        return tuple(
            tuple(sorted({(a.piece, a.replica) for a in w.actions if a.kind in ("B", "W")})) for w in self.workers
        )

    def held(self, worker: int) -> tuple[tuple[int, int], ...]:
        """Returns the (piece, replica) pairs whose gradients a worker makes."""
        return self._held[worker]

    @cached_property
    def pieces_on(self) -> tuple[frozenset[int], ...]:
        """For each worker, the pieces that it runs."""
        return tuple(frozenset(a.piece for a in w.actions if a.kind == "F") for w in self.workers)

    @cached_property
    def recomputed(self) -> tuple[tuple[int, ...], ...]:
        """For each piece, the units that run forward again: those that the plan names, or the first of each stage.

        Of a share as many as hold it. What the first unit of a stage reads waits there anyway.
        """
        order = self.plan.order
        again = {*(order.recompute_units or ())}
        for stage in {piece.stage for piece in self.pieces} if order.recompute else ():
            units = [unit for piece in self.pieces if piece.stage == stage for unit in piece.units]
            again.update(units[: ceil(round(order.recompute * len(units), 9))])
        return tuple(tuple(unit for unit in piece.units if unit in again) for piece in self.pieces)

    def keeps_saved(self, piece: int) -> bool:
        """Whether the forward of a piece leaves something for its backward: not where all of its units run again."""
        return len(self.recomputed[piece]) < len(self.pieces[piece].units)

    def fed_by(self, replica: int, update: int) -> tuple[int, ...]:
        """Returns the microbatches of an update that one replica trains."""
        first = update * self.update_size + sum(map(len, self.parts[:replica]))
        return tuple(range(first, first + len(self.parts[replica])))

    def shard_of(self, worker: int) -> int:
        """Returns which part of divided operators a worker has; 0 where none are."""
        return worker // self.plan.pipeline_size % self.plan.place.shards

    def to_text(self) -> str:
        """Prints the sequences, a line for each worker; `with_text` reads them back."""
        return "".join(f"w{index}: {' '.join(map(str, worker.actions))}\n" for index, worker in enumerate(self.workers))

    def with_text(self, text: str) -> "Program":
        """Returns this program with the sequences of `text`, as `to_text` prints them."""
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) != len(self.workers):
            raise InputError(f"the text has {len(lines)} workers, the program {len(self.workers)}")
        sequences = []
        for index, line in enumerate(lines):
            head, colon, body = line.partition(":")
            if head.strip() != f"w{index}" or not colon:
                raise InputError(f"line {index + 1} must begin with 'w{index}:', not '{line[:20]}'")
            sequences.append(tuple(parse_action(word) for word in body.split()))
        return self.with_actions(sequences)

    def with_actions(self, sequences: list[tuple[Action, ...]]) -> "Program":
        """Returns this program with other sequences, one for each worker."""
        workers = tuple(
            Worker(actions=a, picks_ready=w.picks_ready, live_limit=w.live_limit)
            for a, w in zip(sequences, self.workers, strict=True)
        )
        return self.with_workers(workers)

    def with_workers(self, workers: tuple[Worker, ...]) -> "Program":
        """Returns this program with other workers."""
        return replace(self, workers=workers)
