"""Sizes: the bytes of each value of a program, and the bytes that each transfer moves."""

from functools import cached_property
from math import inf

from pipedejavu.facts import Unit
from pipedejavu.program.action import (
    BACKWARD,
    EVAL,
    FORWARD,
    GATHER,
    INPUT_BACKWARD,
    RECOMPUTE,
    REDUCE,
    SEND,
    UPDATE,
    WEIGHT_BACKWARD,
    Action,
)
from pipedejavu.program.program import Group, GroupRole, Program, stage_group
from pipedejavu.program.unit_traffic import parameter_share
from pipedejavu.program.value import (
    ACTIVATION,
    BATCH,
    CONSENSUS,
    DEVICE,
    GRADIENT,
    NORM,
    OPTIMIZER_STATE,
    PUSH,
    SAVED,
    SHARD,
    WEIGHT_GRADIENT,
    WEIGHTS,
    Value,
    ValueKind,
    ValuePlace,
)

_UPDATE_COPIES = 2
"""Temporary copies of a parameter while AdamW updates it: a square root and a denominator."""

_PER_SAMPLE = frozenset((SAVED, ACTIVATION, GRADIENT, BATCH))
"""Kinds whose size grows with the samples of the microbatch."""
_PER_PARAMETER = frozenset((WEIGHTS, WEIGHT_GRADIENT, PUSH, CONSENSUS, OPTIMIZER_STATE))
"""Kinds with one tensor per parameter."""


class Sizes:
    """The sizes of one program's values, computed once per piece."""

    def __init__(self, program: Program):
        self.program = program
        self.shards = program.plan.tensor_shards
        self._tp_size = self._tp_sizes()
        units = program.profile.units
        self.weights = self._per_worker([u.parameter_bytes for u in units])
        self.gradients = self._per_worker([u.gradient_bytes for u in units])
        self.optimizer = self._per_worker([u.optimizer_bytes for u in units])
        self._saved = [self._saved_by(piece) for piece in range(len(program.pieces))]
        """For each piece, the bytes per sample that each of its units saves."""
        self.kept = [self._kept(piece) / self.shards for piece in range(len(program.pieces))]
        """For each piece, the bytes per sample that its forward leaves in memory."""
        self.saved = [
            max(kept, sum(by_unit.values()) / self.shards) for kept, by_unit in zip(self.kept, self._saved, strict=True)
        ]
        """For each piece, the bytes per sample that its backward needs, recomputed ones included."""
        predicts = program.plan.version.correction == "weight-prediction"
        self.predicted = [
            self.weights[piece] if predicts and program.late_by(piece) else 0.0 for piece in range(len(program.pieces))
        ]
        """For each piece, the bytes of extrapolated weights that a microbatch in flight keeps."""
        self.first_late = next((i for i, delay in enumerate(program.delays) if delay), 0)
        """The first microbatch of an update that may keep extrapolated weights."""
        self.pending = [self._pending(piece) for piece in range(len(program.pieces))]
        """For each piece, the bytes per sample that it holds between the halves of a backward; None if not known."""
        self.is_detailed = any(u.parameter_parts for u in units)
        """Whether the profile also says what memory an action needs while it runs."""
        self._largest = [max((n for u in p.units for n in units[u].parameter_parts), default=0) for p in program.pieces]
        self._cache: dict[tuple[ValueKind, int, ValuePlace, int], float] = {}

    def _tp_sizes(self) -> list[int]:
        """Returns the size of the tensor-parallel group that holds each piece."""
        degrees, sizes = self.program.plan.degrees, [1] * len(self.program.pieces)
        for worker, pieces in enumerate(self.program.pieces_on):
            for piece in pieces:
                sizes[piece] = degrees[worker]
        return sizes

    def _per_worker(self, sizes: list[int]) -> list[float]:
        """Returns the bytes of state that one worker holds for each piece, from the bytes of each unit."""
        units = self.program.profile.units
        return [
            sum(sizes[u] * size * self.held_share(units[u], size) for u in piece.units)
            for piece, size in zip(self.program.pieces, self._tp_size, strict=True)
        ]

    def held_share(self, unit: Unit, size: int = 1) -> float:
        """Returns the share of a unit's parameters that one worker holds, or each of `size` devices that it stands for.

        That is its part of what the shards divide, and all else.
        """
        plan, size = self.program.plan, size * self.program.plan.place.shards
        divided = unit.expert_share if plan.divides_experts else parameter_share(plan.cut.layouts, size, unit)
        return 1 - divided + divided / size

    def _saved_by(self, piece: int) -> dict[int, float]:
        """Returns the bytes per sample that each unit of a piece saves and shares with no unit before it.

        A unit often saves its input, which the unit before it has saved as its output. A recomputed unit writes its
        output a second time, and that copy shares nothing with the one that the next unit has kept.
        """
        program, again = self.program, {*self.program.recomputed[piece]}
        is_recomputed = any(program.recomputed)
        others = 0 if program.plan.divides_sequence else self._tp_size[piece] * self.shards - 1
        saved = {}
        for index in program.pieces[piece].units:
            unit, before = program.profile.units[index], self._piece_of.get(index - 1)
            if before == piece:
                is_there = index - 1 not in again or index in again
            else:
                is_there = not is_recomputed and all(before in on for on in program.pieces_on if piece in on)
            shared = program.profile.units[index - 1].shared_bytes if before is not None and is_there else 0.0
            saved[index] = unit.activation_bytes - shared + others * unit.replicated_bytes
        return saved

    def _kept(self, piece: int) -> float:
        again = {*self.program.recomputed[piece]}
        kept = sum(size for index, size in self._saved[piece].items() if index not in again)
        return kept + sum(self._waiting(piece).values())

    def _pending(self, piece: int) -> float | None:
        """Returns what stands for the saved tensors once the first half of a backward has ended.

        The gradient of the piece's output is a value of its own. The first piece has no first half, and keeps all.
        """
        if not self.program.inputs[piece]:
            return None
        *others, last = (self.program.profile.units[u] for u in self.program.pieces[piece].units)
        sizes = [unit.pending_bytes for unit in (*others, last)]
        if any(size is None for size in sizes):
            return None
        return (sum(size or 0.0 for size in sizes) - last.pending_shared_bytes) / self.shards

    def _waiting(self, piece: int) -> dict[int, float]:
        """Returns, per unit, the bytes per sample of inputs that are kept only because the unit is recomputed.

        An input that the previous unit has saved for its own backward does not count.
        """
        units, again = self._saved[piece], {*self.program.recomputed[piece]}
        befores = {n: self.program.profile.units[n - 1] for n in again if n - 1 in units and n - 1 not in again}
        return {n: before.boundary_bytes - before.shared_bytes for n, before in befores.items()}

    @cached_property
    def _piece_of(self) -> dict[int, int]:
        """The piece of each unit."""
        return {unit: index for index, piece in enumerate(self.program.pieces) for unit in piece.units}

    @property
    def divides_experts(self) -> bool:
        """Whether the shards divide only the experts and each hold all other parameters."""
        return self.program.plan.divides_experts

    def dense_gradients(self, piece: int) -> float:
        """Returns the bytes of a piece's gradients outside its experts, which are summed over all replicas."""
        units = self.program.profile.units
        return sum(units[u].gradient_bytes * (1 - units[u].expert_share) for u in self.program.pieces[piece].units)

    def expert_rows(self, a: Action) -> float:
        """Returns the bytes of the rows that one all-to-all moves: a GATHER is for the pieces that read the value."""
        program = self.program
        pieces: tuple[int, ...] = (a.piece,)
        if a.kind == GATHER:
            pieces = program.outputs[a.piece] if a.what == ACTIVATION else program.inputs[a.piece]
        units = [program.profile.units[u] for piece in pieces for u in program.pieces[piece].units]
        return sum(unit.expert_row_bytes for unit in units) * self.samples(a.microbatch)

    @cached_property
    def _edges(self) -> dict[tuple[int, int], dict[int, float]]:
        """For each pair of pieces, the bytes per sample that each unit of the first sends to the second."""
        piece_of = self._piece_of
        edges: dict[tuple[int, int], dict[int, float]] = {}
        for source, target, size in self.program.profile.links:
            if piece_of[source] != piece_of[target]:
                between = edges.setdefault((piece_of[source], piece_of[target]), {})
                between[source] = max(size, between.get(source, 0.0))
        return edges

    def samples(self, microbatch: int) -> int:
        """Returns the samples of a microbatch."""
        return self.program.sizes[microbatch % self.program.update_size]

    def outgoing(self, piece: int, targets: tuple[int, ...]) -> float:
        """Returns the bytes per sample of a piece's output that the pieces `targets` read."""
        outputs: dict[int, float] = {}
        for target in targets:
            outputs |= self._edges.get((piece, target), {})
        return sum(outputs.values())

    def incoming(self, piece: int, sources: tuple[int, ...]) -> float:
        """Returns the bytes per sample of the gradient that a piece passes to the pieces `sources`."""
        return sum(self.outgoing(source, (piece,)) for source in sources)

    def of(self, value: Value) -> float:
        """Returns the bytes of a value on one worker."""
        samples = self.samples(value[3]) if value[0] in _PER_SAMPLE else 0
        key = (value[0], value[1], value[4], samples)
        if key not in self._cache:
            self._cache[key] = self._of(*key)
        if self.first_late and value[0] == SAVED and value[3] % self.program.update_size < self.first_late:
            return self._cache[key] - self.predicted[value[1]]
        return self._cache[key]

    def _of(self, kind: ValueKind, piece: int, place: ValuePlace, samples: int) -> float:
        parts = self.group_size(piece) if place == SHARD else 1
        if kind == WEIGHTS and place == SHARD and self.program.plan.zero_of(self.program.pieces[piece].stage) < 3:
            return 0.0  # a view of the whole weights
        if kind == WEIGHTS and self.program.plan.keep.kind == "shared":
            parts = self.program.num_replicas
        if kind in (WEIGHTS, PUSH, CONSENSUS):
            return self.weights[piece] / parts
        if kind == OPTIMIZER_STATE:
            return 0.0 if place else self.optimizer[piece]  # `Liveness.fixed` counts its memory on the host
        if kind == WEIGHT_GRADIENT:
            return self.gradients[piece] / parts
        if kind == SAVED:
            return self.saved[piece] * samples + self.predicted[piece]
        if kind == ACTIVATION:
            return self._tp_size[piece] * self.outgoing(piece, self.program.outputs[piece]) * samples
        if kind == GRADIENT:
            return self._tp_size[piece] * self.incoming(piece, self.program.inputs[piece]) * samples
        if kind == BATCH:
            return self.program.profile.batch_bytes * samples
        return 0.0

    def workspace(self, a: Action, *, is_first: bool) -> float:
        """Returns the bytes that an action needs only while it runs, beside the values that it reads and writes.

        Negative for a backward that begins a sum of gradients (`is_first`): they grow while activations shrink.
        """
        if not self.is_detailed:
            return 0.0
        if a.kind in (FORWARD, RECOMPUTE, EVAL):
            stepped = self.weights[a.piece] if a.kind == EVAL else 0.0  # a copy of the weights, one step later
            pieces = range(len(self.program.pieces)) if a.kind == EVAL else (a.piece,)  # a score runs the whole model
            return stepped + max(self._in_forward(a._replace(piece=p)) for p in pieces) * self.samples(a.microbatch)
        if a.kind in (BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD):
            is_split = self.pending[a.piece] is not None
            if a.kind == INPUT_BACKWARD and is_split:
                return max(0.0, self._in_backward(a.piece, self.samples(a.microbatch), keeps=True))
            more = 0.0 if is_first else self._largest[a.piece] / self.shards
            if a.kind == WEIGHT_BACKWARD and is_split:
                return more + (self._in_second_half(a.piece, self.samples(a.microbatch)) if is_first else 0.0)
            return more + self._in_backward(a.piece, self.samples(a.microbatch), grows=is_first)
        if a.kind == UPDATE:
            return _UPDATE_COPIES * self._largest[a.piece] / self.shards
        if a.kind == REDUCE and a.what == WEIGHT_GRADIENT and self._role(a) is not GroupRole.TIE:
            return self.gradients[a.piece]  # they are summed as one vector
        return 0.0

    def _in_forward(self, a: Action) -> float:
        """Returns the bytes per sample by which the peak inside a forward exceeds what the forward leaves.

        In memory are the saved tensors so far, a unit's output and its temporaries. In a forward, the saved tensors of
        consecutive recomputed units are freed after the last one. In a recompute, those of the other units are there.
        """
        program, saved_by, again = self.program, self._saved[a.piece], {*self.program.recomputed[a.piece]}
        waiting = self._waiting(a.piece)
        most = freed = 0.0
        saved = sum(size for index, size in saved_by.items() if index not in again) if a.kind == RECOMPUTE else 0.0
        for index in program.recomputed[a.piece] if a.kind == RECOMPUTE else saved_by:
            if index not in again:
                saved, freed = saved - freed, 0.0
            elif a.kind == FORWARD:
                freed += saved_by[index] - waiting.get(index, 0.0)
            saved += saved_by[index]
            unit = program.profile.units[index]
            most = max(most, saved + unit.boundary_bytes + unit.forward_work_bytes)
        stays = self.kept[a.piece] if a.kind == FORWARD else self.saved[a.piece]
        return max(0.0, most / self.shards - stays - self.outgoing(a.piece, program.outputs[a.piece]))

    def _in_second_half(self, piece: int, samples: int) -> float:
        """Returns the peak inside the second half of a backward that begins a sum of gradients, below both together.

        What was kept goes, product by product, as the gradients come.
        """
        units = [self.program.profile.units[u] for u in self.program.pieces[piece].units]
        kept = [(unit.pending_bytes or 0.0) * samples for unit in units]
        total = sum(kept) + sum(unit.gradient_bytes for unit in units)
        most, left, summed = 0.0, sum(kept), 0.0
        for unit, size in zip(reversed(units), reversed(kept), strict=True):
            summed += unit.gradient_bytes
            most = max(most, left + summed)
            left -= size
        return (most - total) / self.shards

    def _in_backward(self, piece: int, samples: int, *, grows: bool = False, keeps: bool = False) -> float:
        """Returns the peak inside a backward, beside the values of the table, unit by unit from the last.

        At each unit are in memory: what the units up to it saved, the gradient of its output, its temporaries and, if
        the sum of weight gradients `grows`, those of the units after it. The first half of a backward `keeps` what the
        second needs.
        """
        units = [self.program.profile.units[u] for u in self.program.pieces[piece].units]
        before = self.incoming(piece, self.program.inputs[piece]) * self.shards
        after = self.outgoing(piece, self.program.outputs[piece]) * self.shards
        kept = [*self._saved[piece].values()]
        total = sum(kept) + before + after
        weights = sum(u.gradient_bytes for u in units)
        most, saved, passed, summed, pending = -inf, sum(kept), after, 0 if grows else weights, 0.0
        for unit, size, previous in zip(reversed(units), reversed(kept), [*reversed(units[:-1]), None], strict=True):
            summed += unit.gradient_bytes if grows else 0
            work = unit.input_work_bytes if keeps else unit.backward_work_bytes
            most = max(most, (saved + pending + passed + work) * samples + summed)
            saved -= size
            pending += (unit.pending_bytes or 0.0) if keeps else 0.0
            passed = previous.boundary_bytes if previous else 0.0
        return (most - total * samples - weights) / self.shards

    def parts(self, value: Value) -> list[float]:
        """Returns the bytes of each tensor of a value, or of the whole value if the profile does not list tensors."""
        units = [self.program.profile.units[u] for u in self.program.pieces[value[1]].units]
        size = self.of(value)
        if value.kind in _PER_PARAMETER:
            tensors: list[float] = [n for unit in units for n in unit.parameter_parts]
        else:
            tensors = [n for unit in units for n in unit.activation_parts] if value.kind == SAVED else []
        total = sum(tensors)
        return [n * size / total for n in tensors] if total else [size]

    def largest_output(self, piece: int) -> float:
        """Returns the bytes of the largest output of a unit in a piece, for one microbatch."""
        units = [self.program.profile.units[u] for u in self.program.pieces[piece].units]
        return max(unit.boundary_bytes for unit in units) * self.samples(0) / self.shards

    def group_size(self, piece: int) -> int:
        """Returns the number of workers that shard a piece's state under ZeRO."""
        group = self.program.groups.get(stage_group(self.program.pieces[piece].stage))
        return len(group.workers) if group else 1

    def moved(self, a: Action) -> float:
        """Returns the bytes that a SEND, FETCH, OFFLOAD or collective moves."""
        if a.kind == SEND and a.what in (ACTIVATION, GRADIENT):
            # Only what the pieces of the other worker read.
            there, samples = self.program.pieces_on[a.peer], self.samples(a.microbatch)
            if a.what == ACTIVATION:
                targets = tuple(p for p in self.program.outputs[a.piece] if p in there)
                return self.outgoing(a.piece, targets) * samples
            return self.incoming(a.piece, tuple(p for p in self.program.inputs[a.piece] if p in there)) * samples
        group = self.program.groups.get(a.group)
        if group is not None and group.role is GroupRole.TIE:
            return self.program.profile.ties[group.number].size_bytes
        if a.what == NORM:
            return 4.0
        if group is not None and self.divides_experts:
            if group.role is GroupRole.SHARDS:
                return self.expert_rows(a)
            if a.what == WEIGHT_GRADIENT and group.role is GroupRole.STAGE:
                return self.dense_gradients(a.piece)
            if group.role is GroupRole.EXPERTS:
                return self.gradients[a.piece] - self.dense_gradients(a.piece)
        assert a.what is not None
        return self.of(Value(a.what, a.piece, a.replica, a.microbatch, DEVICE))

    def _role(self, a: Action) -> GroupRole | None:
        group: Group | None = self.program.groups.get(a.group)
        return group.role if group else None
