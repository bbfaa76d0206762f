"""The program: the workers, the sequence of actions of each, and the groups of their collectives.

A worker's sequence has the meaning of a plain sequential program: an action reads what the nearest action before it
wrote. The actions of one lane run in that order. Lanes run concurrently and wait for each other only through the values
that they read and write (`effect`). With `copies` above 1 the program holds one of several identical pipelines: of n
workers, worker w stands for the workers w, w + n, w + 2n, ….
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import ceil

from pipedejavu.facts import InputError, Machine, Profile
from pipedejavu.plan import Plan
from pipedejavu.program.action import FORWARD, GRADIENT_KINDS, Action, parse_action


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of units that actions name: a stage, or a part of one if pieces are updated separately."""

    stage: int
    units: range
    opens_stage: bool
    """Whether it is the first piece of its stage."""


class GroupRole(StrEnum):
    """What a group's collectives are for."""

    STAGE = "stage"
    """Replicas of a stage: reduces gradients, gathers sharded weights."""
    SHARDS = "shards"
    """Shards of one replica's stage: the collectives inside divided operators."""
    EXPERTS = "experts"
    """Replicas that hold the same experts of a stage: reduces their gradients; all else is reduced over the stage."""
    TIE = "tie"
    """Workers of one replica whose pieces share parameters."""
    NORM = "norm"
    """All workers that hold gradients."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Workers that take part in a collective together."""

    workers: tuple[int, ...]
    role: GroupRole
    number: int = 0
    """The stage, or for a tie its index in the profile."""
    helpers: tuple[int, ...] = ()
    """Servers that only sum."""


NORM_GROUP = "all"


def stage_group(stage: int, shard: int = 0) -> str:
    """Returns the name of the group of a stage's replicas; each shard of divided operators has its own."""
    return f"s{stage}.{shard}" if shard else f"s{stage}"


def shard_group(stage: int, replica: int) -> str:
    """Returns the name of the group of the shards of a stage; `replica` is the first, if shards are replicas."""
    return f"t{stage}.{replica}"


def expert_group(stage: int, shard: int) -> str:
    """Returns the name of the group of the replicas that hold the same experts of a stage."""
    return f"e{stage}.{shard}"


def tie_group(tie: int, replica: int, shard: int = 0) -> str:
    """Returns the name of the group of one replica's workers, of one shard, that share a tie's parameters."""
    return f"tie{tie}.{replica}.{shard}" if shard else f"tie{tie}.{replica}"


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker's sequence, and how its compute lane picks the next action."""

    actions: tuple[Action, ...]
    picks_ready: bool = False
    """Whether the compute lane runs any action that is ready, first come first served, instead of the next in order."""
    live_limit: int = 0
    """Microbatches that a worker with `picks_ready` may have in flight; 0 for no limit."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The result of `compile`; the verifier, the simulator and the engine read it."""

    plan: Plan
    profile: Profile
    machine: Machine
    pieces: tuple[Piece, ...]
    inputs: tuple[tuple[int, ...], ...]
    """For each piece, the pieces whose outputs it reads."""
    workers: tuple[Worker, ...]
    groups: dict[str, Group]
    devices: tuple[str, ...]
    """The device of every worker, copies included."""
    parts: tuple[tuple[int, ...], ...]
    """For each replica, the samples of each of its microbatches in one update."""
    num_replicas: int
    copies: int = 1
    """Identical pipelines that the workers of this program stand for."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples per microbatch, for all microbatches of an update over all replicas."""
        return tuple(size for part in self.parts for size in part)

    @cached_property
    def update_size(self) -> int:
        """Microbatches per update, over all replicas."""
        return len(self.sizes)

    @cached_property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """For each piece, the pieces that read its output."""
        readers: list[list[int]] = [[] for _ in self.pieces]
        for target, sources in enumerate(self.inputs):
            for source in sources:
                readers[source].append(target)
        return tuple(map(tuple, readers))

    @cached_property
    def num_actions(self) -> int:
        """The number of actions over all workers of the program."""
        return sum(len(w.actions) for w in self.workers)

    @cached_property
    def tied_pieces(self) -> tuple[tuple[int, ...], ...]:
        """For each tie of the profile, the pieces that share its parameters."""
        piece_of = {unit: index for index, piece in enumerate(self.pieces) for unit in piece.units}
        position = self.profile.position
        return tuple(tuple(sorted({piece_of[position[u]] for u in tie.units})) for tie in self.profile.ties)

    @cached_property
    def _held(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        return tuple(
            tuple(sorted({(a.piece, a.replica) for a in w.actions if a.kind in GRADIENT_KINDS})) for w in self.workers
        )

    def held(self, worker: int) -> tuple[tuple[int, int], ...]:
        """Returns the (piece, replica) pairs that a worker trains: it computes their weight gradients."""
        return self._held[worker]

    @cached_property
    def pieces_on(self) -> tuple[frozenset[int], ...]:
        """For each worker, the pieces that it runs."""
        return tuple(frozenset(a.piece for a in w.actions if a.kind == FORWARD) for w in self.workers)

    @cached_property
    def recomputed(self) -> tuple[tuple[int, ...], ...]:
        """For each piece, the units that are recomputed: those that the plan names, or the first share of each stage.

        A share is rounded up to whole units. The first units are chosen because a stage's input is kept anyway.
        """
        order = self.plan.order
        again = {*(order.recompute_units or ())}
        for stage in {piece.stage for piece in self.pieces} if order.recompute else ():
            units = [unit for piece in self.pieces if piece.stage == stage for unit in piece.units]
            again.update(units[: ceil(round(order.recompute * len(units), 9))])
        return tuple(tuple(unit for unit in piece.units if unit in again) for piece in self.pieces)

    def has_experts(self, piece: int) -> bool:
        """Whether a piece has experts, which its plan divides."""
        return self.plan.divides_experts and any(self.profile.units[u].expert_share for u in self.pieces[piece].units)

    def mesh_of(self, replica: int) -> tuple[int, int]:
        """Returns the first replica of those that divide experts with a replica, and its own number among them."""
        number = replica % self.plan.place.shards if self.plan.divides_experts else 0
        return replica - number, number

    def keeps_saved(self, piece: int) -> bool:
        """Whether the forward of a piece saves tensors for its backward: not if all its units are recomputed."""
        return len(self.recomputed[piece]) < len(self.pieces[piece].units)

    def delay_of(self, replica: int) -> int:
        """Returns by how many updates the weights that a replica reads are older than the newest, under `late`.

        CPU replicas come last. They are not late if they are the only ones with samples.
        """
        first, version = self.num_replicas - self.plan.place.cpu_replicas, self.plan.version
        if version.kind != "late" or replica < first or not any(self.parts[:first]):
            return 0
        return version.delay

    @cached_property
    def delays(self) -> tuple[int, ...]:
        """By microbatch of an update, the delay of its replica."""
        return tuple(self.delay_of(replica) for replica, part in enumerate(self.parts) for _ in part)

    def late_by(self, piece: int) -> int:
        """Returns by how many updates a gradient of a piece is late, at most, on any replica."""
        plan, last = self.plan, self.pieces[-1].stage
        if not plan.is_flush_free:
            return self.delay_of(self.num_replicas - 1)
        if plan.version.kind == "stash":
            return -(-(last - self.pieces[piece].stage) // plan.feed.microbatches)
        return last if plan.version.kind == "vertical" else 1

    def oldest_read(self, update: int, late: int) -> int:
        """Returns the version that is `late` updates old at an update, or the last one that a flush left behind."""
        return max(update - late, min(update, self.plan.num_flushed))

    def fed_by(self, replica: int, update: int) -> tuple[int, ...]:
        """Returns the microbatches of an update that one replica trains on."""
        first = update * self.update_size + sum(map(len, self.parts[:replica]))
        return tuple(range(first, first + len(self.parts[replica])))

    def shard_of(self, worker: int) -> int:
        """Returns the index of a worker's shard of divided operators; 0 if no operators are divided."""
        return worker % self.plan.tensor_shards

    def part_of(self, worker: int) -> int:
        """Returns the index of a worker's part of what the shards divide, operators or experts."""
        return worker % self.plan.place.shards

    def to_text(self) -> str:
        """Prints the sequences, one line per worker; `with_text` reads them back."""
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
        """Returns this program with other sequences, one per worker."""
        workers = tuple(
            Worker(actions=a, picks_ready=w.picks_ready, live_limit=w.live_limit)
            for a, w in zip(sequences, self.workers, strict=True)
        )
        return self.with_workers(workers)

    def with_workers(self, workers: tuple[Worker, ...]) -> "Program":
        """Returns this program with other workers."""
        return replace(self, workers=workers)
