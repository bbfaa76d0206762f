"""How many bytes each value of a program has, and how many a transfer moves."""

from functools import cached_property
from math import inf

from pipedejavu.program.action import Action
from pipedejavu.program.program import Program
from pipedejavu.program.value import Value

_UPDATE_COPIES = 2
"""Of a parameter, while AdamW works on it: a root, and what it divides by."""


class Sizes:
    """Sizes of one program's values, worked out once for each piece."""

    def __init__(self, program: Program):
        self.program = program
        self.shards = program.plan.place.shards
        units = program.profile.units
        self.weights = self._per_worker([u.parameter_bytes for u in units])
        self.gradients = self._per_worker([u.gradient_bytes for u in units])
        self.optimizer = self._per_worker([u.optimizer_bytes for u in units])
        self._saved = [self._saved_by(piece) for piece in range(len(program.pieces))]
        """Of each piece, what its units save, for each sample."""
        self.kept = [self._kept(piece) / self.shards for piece in range(len(program.pieces))]
        """What stays of each piece from its forward on, for each sample."""
        self.saved = [
            max(kept, sum(own.values()) / self.shards) for kept, own in zip(self.kept, self._saved, strict=True)
        ]
        """All that its backward needs."""
        self.is_detailed = any(u.parameter_parts for u in units)
        """Whether the profile says what is in memory inside of an action too."""
        self._largest = [max((n for u in p.units for n in units[u].parameter_parts), default=0) for p in program.pieces]
        self._cache: dict[tuple[str, int, str, int], float] = {}

    def _per_worker(self, sizes: list[int]) -> list[float]:
        """Sums sizes of state over each piece, as one of the workers that divide it holds them."""
        units, parts = self.program.profile.units, self.shards
        divided = [u.expert_share if self.divides_experts else 1.0 for u in units]
        return [sum(sizes[u] * (1 - divided[u] + divided[u] / parts) for u in p.units) for p in self.program.pieces]

    def _saved_by(self, piece: int) -> dict[int, float]:
        """What each unit of a piece saves, for each sample, beside what the unit before has saved in the same place.

        A unit that runs again makes another output than the one that the unit behind it has kept.
        """
        program, again = self.program, {*self.program.recomputed[piece]}
        is_recomputed = any(program.recomputed)
        found = {}
        for index in program.pieces[piece].units:
            unit, before = program.profile.units[index], self._home.get(index - 1)
            if before == piece:
                is_there = index - 1 not in again or index in again
            else:
                is_there = not is_recomputed and all(before in on for on in program.pieces_on if piece in on)
            shared = program.profile.units[index - 1].shared_bytes if before is not None and is_there else 0.0
            found[index] = unit.activation_bytes - shared
        return found

    def _kept(self, piece: int) -> float:
        again = {*self.program.recomputed[piece]}
        kept = sum(size for index, size in self._saved[piece].items() if index not in again)
        return kept + sum(self._waiting(piece).values())

    def _waiting(self, piece: int) -> dict[int, float]:
        """What waits for units that run again behind others that do not: of their inputs what these have not saved."""
        own, again = self._saved[piece], {*self.program.recomputed[piece]}
        befores = {n: self.program.profile.units[n - 1] for n in again if n - 1 in own and n - 1 not in again}
        return {n: before.boundary_bytes - before.shared_bytes for n, before in befores.items()}

    @cached_property
    def _home(self) -> dict[int, int]:
        """The piece of each unit."""
        return {unit: index for index, piece in enumerate(self.program.pieces) for unit in piece.units}

    @property
    def divides_experts(self) -> bool:
        """Whether only experts are divided over the shards, and the rest is there on each."""
        return "expert" in self.program.plan.cut.layouts

    def dense_gradients(self, piece: int) -> float:
        """Bytes of a piece's gradients that every shard has a part of: those of all but the experts."""
        units = self.program.profile.units
        return sum(units[u].gradient_bytes * (1 - units[u].expert_share) for u in self.program.pieces[piece].units)

    @cached_property
    def _edges(self) -> dict[tuple[int, int], dict[int, float]]:
        """For each pair of pieces, the bytes of every unit's output that goes from one to the other."""
        home = self._home
        edges: dict[tuple[int, int], dict[int, float]] = {}
        for source, target, size in self.program.profile.links:
            if home[source] != home[target]:
                between = edges.setdefault((home[source], home[target]), {})
                between[source] = max(size, between.get(source, 0.0))
        return edges

    def samples(self, microbatch: int) -> int:
        """Returns how many samples a microbatch has."""
        return self.program.sizes[microbatch % self.program.update_size]

    def outgoing(self, piece: int, targets: tuple[int, ...]) -> float:
        """Bytes of a piece's output that the pieces `targets` read, for each sample."""
        outputs: dict[int, float] = {}
        for target in targets:
            outputs |= self._edges.get((piece, target), {})
        return sum(outputs.values())

    def incoming(self, piece: int, sources: tuple[int, ...]) -> float:
        """Bytes of the gradient that a piece hands to the pieces `sources`, for each sample."""
        return sum(self.outgoing(source, (piece,)) for source in sources)

    def of(self, value: Value) -> float:
        """Bytes that a value takes on one worker."""
        samples = self.samples(value[3]) if value[0] in "sxg" else 0
        key = (value[0], value[1], value[4], samples)
        if key not in self._cache:
            self._cache[key] = self._of(*key)
        return self._cache[key]

    def _of(self, what: str, piece: int, place: str, samples: int) -> float:
        parts = self.group_size(piece) if place == "shard" else 1
        if what == "w" and place == "shard" and self.program.plan.zero_of(self.program.pieces[piece].stage) < 3:
            return 0.0  # a view of the whole weights
        if what == "w" and self.program.plan.keep.kind == "shared":
            parts = self.program.num_replicas
        if what in "wpc":
            return self.weights[piece] / parts
        if what == "o":
            return 0.0 if place else self.optimizer[piece]  # its memory on the host is kept for it
        if what == "d":
            return self.gradients[piece] / parts
        if what == "s":
            return self.saved[piece] * samples
        if what == "x":
            return self.outgoing(piece, self.program.outputs[piece]) * samples
        if what == "g":
            return self.incoming(piece, self.program.inputs[piece]) * samples
        return 0.0

    def passing(self, a: Action, *, is_first: bool) -> float:
        """Bytes that are there only while an action runs, beside the values of the table.

        Less than nothing for a backward that begins a sum of gradients (`is_first`): they come as activations go.
        """
        if not self.is_detailed:
            return 0.0
        if a.kind in ("F", "R", "EVAL"):
            stepped = self.weights[a.piece] if a.kind == "EVAL" else 0.0  # a copy, one step on
            return stepped + self._in_forward(a) * self.samples(a.microbatch)
        if a.kind in ("B", "I", "W"):
            more = 0.0 if is_first else self._largest[a.piece] / self.shards
            return more + self._in_backward(a.piece, self.samples(a.microbatch), grows=is_first)
        if a.kind == "UPDATE":
            return _UPDATE_COPIES * self._largest[a.piece] / self.shards
        if a.kind == "REDUCE" and a.what == "d" and not a.via.startswith("*tie"):
            return self.gradients[a.piece]  # they are added up in one vector
        return 0.0

    def _in_forward(self, a: Action) -> float:
        """Walks through a forward: what the units up to each have saved, its output, and what it works with.

        What units that will run again save goes with the last of them in a row; when they do, that of others is there.
        """
        program, own, again = self.program, self._saved[a.piece], {*self.program.recomputed[a.piece]}
        waiting = self._waiting(a.piece)
        most = goes = 0.0
        saved = sum(size for index, size in own.items() if index not in again) if a.kind == "R" else 0.0
        for index in program.recomputed[a.piece] if a.kind == "R" else own:
            if index not in again:
                saved, goes = saved - goes, 0.0
            elif a.kind == "F":
                goes += own[index] - waiting.get(index, 0.0)
            saved += own[index]
            unit = program.profile.units[index]
            most = max(most, saved + unit.boundary_bytes + unit.forward_work_bytes)
        stays = self.kept[a.piece] if a.kind == "F" else self.saved[a.piece]
        return max(0.0, most / self.shards - stays - self.outgoing(a.piece, program.outputs[a.piece]))

    def _in_backward(self, piece: int, samples: int, *, grows: bool) -> float:
        """Walks back: what units up to each have saved, the gradient behind it, and what it adds, its input's too."""
        units = [self.program.profile.units[u] for u in self.program.pieces[piece].units]
        before = self.incoming(piece, self.program.inputs[piece]) * self.shards
        behind = self.outgoing(piece, self.program.outputs[piece]) * self.shards
        kept = [*self._saved[piece].values()]
        total = sum(kept) + before + behind
        weights = sum(u.gradient_bytes for u in units)
        most, saved, given, made = -inf, sum(kept), behind, 0 if grows else weights
        for unit, own, ahead in zip(reversed(units), reversed(kept), [*reversed(units[:-1]), None], strict=True):
            made += unit.gradient_bytes if grows else 0
            most = max(most, (saved + given + unit.backward_work_bytes) * samples + made)
            saved -= own
            given = ahead.boundary_bytes if ahead else 0.0
        return (most - total * samples - weights) / self.shards

    def parts(self, value: Value) -> list[float]:
        """The tensors that a value is made of, as far as the profile knows them."""
        units = [self.program.profile.units[u] for u in self.program.pieces[value[1]].units]
        size = self.of(value)
        if value[0] in "wdpco":
            found: list[float] = [n for unit in units for n in unit.parameter_parts]
        else:
            found = [n for unit in units for n in unit.activation_parts] if value[0] == "s" else []
        total = sum(found)
        return [n * size / total for n in found] if total else [size]

    def largest_output(self, piece: int) -> float:
        """Bytes of the largest output of a unit in a piece, for a microbatch."""
        units = [self.program.profile.units[u] for u in self.program.pieces[piece].units]
        return max(unit.boundary_bytes for unit in units) * self.samples(0) / self.shards

    def group_size(self, piece: int) -> int:
        """How many workers divide a piece's state under a zero keep."""
        group = self.program.groups.get(f"s{self.program.pieces[piece].stage}")
        return len(group.workers) if group else 1

    def moved(self, a: Action) -> float:
        """Bytes that a SEND, FETCH, OFFLOAD or collective moves."""
        if a.kind == "SEND" and a.what in "xg":
            # Only what the other worker's pieces read of it.
            there, samples = self.program.pieces_on[a.peer], self.samples(a.microbatch)
            if a.what == "x":
                targets = tuple(p for p in self.program.outputs[a.piece] if p in there)
                return self.outgoing(a.piece, targets) * samples
            return self.incoming(a.piece, tuple(p for p in self.program.inputs[a.piece] if p in there)) * samples
        if a.via.startswith("*tie"):
            return self.program.profile.ties[int(a.via[4:].partition(".")[0])].size_bytes
        if a.what == "n":
            return 4.0
        if a.via.startswith("*d"):
            return self.dense_gradients(a.piece)
        return self.of((a.what, a.piece, a.replica, a.microbatch, ""))
