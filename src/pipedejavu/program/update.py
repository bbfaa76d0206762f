"""The compiler pass that turns a schedule into training: weight versions, reductions and updates."""

from collections import defaultdict
from collections.abc import Iterator

from pipedejavu.program.action import (
    DROP,
    EVAL,
    FETCH,
    FORWARD,
    GATHER,
    GRADIENT_KINDS,
    OFFLOAD,
    REDUCE,
    SUM,
    Action,
    UpdatePlace,
    Via,
)
from pipedejavu.program.effect import rest_of, update_place
from pipedejavu.program.program import NORM_GROUP, Program, expert_group, stage_group, tie_group
from pipedejavu.program.value import HOST, SHARD, WEIGHT_GRADIENT, Value

PieceReplica = tuple[int, int]
"""A (piece, replica) pair."""


def add_updates(program: Program) -> Program:
    """Numbers the weight versions and adds the reductions and updates after each piece's last gradient."""
    sequences = [
        tuple(_UpdatePass(program, w.actions, program.shard_of(index)).run()) for index, w in enumerate(program.workers)
    ]
    return program.with_actions(sequences)


class _UpdatePass:
    """The pass over one worker's forwards and backwards."""

    def __init__(self, program: Program, actions: tuple[Action, ...], shard: int):
        self.program, self.plan, self.actions, self.shard = program, program.plan, actions, shard
        self.newest: dict[PieceReplica, int] = defaultdict(int)
        self.read: dict[tuple[int, int], int] = {}
        """The weight version that each (piece, microbatch) in flight reads."""
        self.delay = program.delay_of(actions[0].replica) if actions else 0
        """Updates that are made later than their gradients, so that the next forwards do not wait for them."""
        self.last_gradient: dict[tuple[PieceReplica, int], int] = {}
        self.last_action: dict[int, int] = {}
        keys = {(a.piece, a.replica) for a in actions}
        self.streamed = sorted(key for key in keys if rest_of(program, key[0]) == "visit")
        """Pieces whose optimizer state is streamed from host memory."""
        self.streamed_update = -1
        """The update that state is streamed for."""
        self.due: list[PieceReplica] = []
        """Pieces whose state is still on the host, in the order of the forward pass."""
        self.on_device: list[PieceReplica] = []
        """Pieces whose state is on the device."""
        for position, a in enumerate(actions):
            update = a.microbatch // program.update_size
            self.last_action[update] = position
            if a.kind in GRADIENT_KINDS:
                self.last_gradient[(a.piece, a.replica), update] = position
        self.last_update = max(self.last_action, default=0)

    def run(self) -> Iterator[Action]:
        waiting: dict[int, list[PieceReplica]] = defaultdict(list)  # by update, pieces with a final gradient
        for position, a in enumerate(self.actions):
            update, key = a.microbatch // self.program.update_size, (a.piece, a.replica)
            if a.kind == FORWARD and update > self.streamed_update and key in (*self.on_device, *self.due):
                yield from self._streamed_update(key)
            yield a._replace(version=self._version(a, update, key))
            if a.kind in GRADIENT_KINDS and self.last_gradient[key, update] == position:
                if not self._waits_for_newest(update):
                    yield from self._after_gradient(key, update)
                waiting[update].append(key)
            for due in self._due(update) if self._updates_at(update, position) else ():
                yield from self._after_step(waiting.pop(due), due)
                for piece in waiting[due + 1] if self._waits_for_newest(due + 1) else ():
                    yield from self._after_gradient(piece, due + 1)
        for key in (*self.on_device, *self.due):
            yield from self._streamed_update(key)

    def _due(self, update: int) -> range:
        """Returns the updates that follow an update's last gradient: it, or a late one; after the last one, all."""
        last = update if update == self.last_update else update - self.delay
        return range(max(0, update - self.delay), last + 1)

    def _waits_for_newest(self, update: int) -> bool:
        """Whether a gradient is reduced only once the newest weights are known, with which it is compensated."""
        return self.delay > 0 and update > 0 and self.plan.compensates_shares

    def _updates_at(self, update: int, position: int) -> bool:
        if self.plan.is_flush_free and self.plan.reduce.clip == "none":  # a norm is that of all pieces of the worker
            a = self.actions[position]
            return a.kind in GRADIENT_KINDS and self.last_gradient[(a.piece, a.replica), update] == position
        return self.last_action[update] == position

    def _version(self, a: Action, update: int, key: PieceReplica) -> int:
        """Returns the weight version that an action reads: a forward decides, its backward reads the same.

        Without a stash (correction 'discrepancy'), the backward reads the newest.
        """
        if a.kind == FORWARD:
            self.read[a.piece, a.microbatch] = {
                "sync": update,
                "local": update,
                "stash": self.newest[key],
                "vertical": self.program.oldest_read(update, self.program.pieces[-1].stage),
                "double-buffer": self.program.oldest_read(update, 1),
                "late": max(0, update - self.delay),
                "torn": -1,
            }[self.plan.version.kind]
        elif self.plan.version.correction == "discrepancy":
            return self.newest[key]
        return self.read[a.piece, a.microbatch]

    def _after_gradient(self, key: PieceReplica, update: int) -> Iterator[Action]:
        """Yields what can start as soon as a piece's gradient is final."""
        (piece, replica), plan = key, self.plan
        stage, gradient = self.program.pieces[piece].stage, Value.weight_gradient(piece, replica, update)
        group = stage_group(stage, self.shard)
        if group in self.program.groups and plan.reduce.combiner == "sum":
            yield Action.on(REDUCE, gradient, Via.among(group))
        same_experts = expert_group(stage, self.program.mesh_of(replica)[1])
        if same_experts in self.program.groups and self.program.has_experts(piece):
            yield Action.on(REDUCE, gradient, Via.among(same_experts))
        final = [piece]  # pieces of this worker whose gradient is complete now
        for name, tied in self._ties(replica):
            lasts = {
                p: self.last_gradient[(p, replica), update]
                for p in tied
                if ((p, replica), update) in self.last_gradient
            }
            if piece in tied and lasts[piece] == max(lasts.values()):
                yield Action.on(REDUCE, gradient, Via.among(name))
                final = sorted({*final, *lasts}, reverse=True)
            elif piece in tied:
                final = []  # it waits for the pieces that it shares parameters with
        for each in final:
            if update_place(self.program, each) == HOST:
                yield Action.on(OFFLOAD, Value.weight_gradient(each, replica, update))
                if plan.reduce.clip == "none":
                    yield from self._offload_weights([(each, replica)], update)
                    yield from self._host_update((each, replica), update)
        if update > self.streamed_update:
            self.streamed_update, self.due = update, [*self.streamed]
        yield from self._fetch_next()

    def _after_step(self, keys: list[PieceReplica], update: int) -> Iterator[Action]:
        """Yields what follows once all gradients of the worker for an update are final."""
        plan = self.plan
        if plan.reduce.clip != "none":
            yield Action.on(REDUCE, Value.norm(update), Via.among(NORM_GROUP))
        for key in keys:
            if key not in self.streamed and update_place(self.program, key[0]) != HOST:
                yield from self._device_update(key, update)
        for _ in self.streamed:
            yield from self._fetch_next()
        for key in [*self.on_device]:  # the others follow before their next forward
            yield from self._streamed_update(key)
        if plan.reduce.clip != "none":
            # The next forward needs the first pieces first.
            on_host = [key for key in sorted(keys) if update_place(self.program, key[0]) == HOST]
            without_copy = [key for key in on_host if rest_of(self.program, key[0]) == "lean"]
            yield from self._offload_weights(without_copy[:1], update)
            for key in on_host:
                if key in without_copy:  # the next piece's weights arrive while this one is updated
                    yield from self._offload_weights(without_copy[without_copy.index(key) + 1 :][:1], update)
                yield from self._host_update(key, update)

    def _fetch_next(self) -> Iterator[Action]:
        """Yields the FETCH of the next streamed state if the device has memory for it."""
        if self.due and len(self.on_device) < self.plan.keep.visitors:
            self.on_device.append(self.due.pop(0))
            yield self._fetch_state(self.on_device[-1])

    def _fetch_state(self, key: PieceReplica) -> Action:
        return Action.on(FETCH, Value.optimizer_state(*key, self.streamed_update))

    def _streamed_update(self, key: PieceReplica) -> Iterator[Action]:
        """Updates a piece whose state is streamed, writes the state back and fetches the next."""
        update = self.streamed_update
        if key in self.due:
            self.due.remove(key)
            yield self._fetch_state(key)
        else:
            self.on_device.remove(key)
        yield from self._device_update(key, update)
        yield Action.on(OFFLOAD, Value.optimizer_state(*key, update + 1))
        yield from self._fetch_next()

    def _offload_weights(self, keys: list[PieceReplica], update: int) -> Iterator[Action]:
        """Yields the OFFLOAD of weights that the host updates without keeping a copy."""
        for piece, replica in keys:
            if rest_of(self.program, piece) == "lean":
                yield Action.on(OFFLOAD, Value.weights(piece, replica, update))

    def _device_update(self, key: PieceReplica, update: int) -> Iterator[Action]:
        (piece, replica), plan = key, self.plan
        group = stage_group(self.program.pieces[piece].stage, self.shard)
        if plan.reduce.wire == "server" and plan.reduce.combiner != "elastic" and plan.reduce.gate != "bound":
            return  # the server updates
        self.newest[key] = update + 1
        if plan.version.kind == "torn":
            yield Action.update(piece, replica, update + 1, UpdatePlace.SHARED)
            return
        is_sharded = update_place(self.program, piece) == SHARD
        yield Action.update(piece, replica, update + 1, UpdatePlace.SHARD if is_sharded else UpdatePlace.DEVICE)
        weights = Value.weights(piece, replica, update + 1)
        if is_sharded and plan.zero_of(self.program.pieces[piece].stage) < 3:
            yield Action.on(GATHER, weights, Via.among(group))
        averages = plan.reduce.combiner == "average" and group in self.program.groups
        if averages and (update + 1) % plan.reduce.period == 0:
            yield Action.on(REDUCE, weights, Via.among(group))

    def _host_update(self, key: PieceReplica, update: int) -> Iterator[Action]:
        piece, replica = key
        self.newest[key] = update + 1
        yield Action.update(piece, replica, update + 1, UpdatePlace.HOST)
        rest = rest_of(self.program, piece)
        if rest == "host":
            yield Action.on(DROP, Value.weights(piece, replica, update))
        if rest != "window":
            yield Action.on(FETCH, Value.weights(piece, replica, update + 1))

    def _ties(self, replica: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for index, tied in enumerate(self.program.tied_pieces):
            name = tie_group(index, replica, self.shard)
            if name in self.program.groups:
                yield name, tied


def helper_actions(program: Program) -> Iterator[Action]:
    """Yields the sums of a server that helps: for each group, those of its first member, in their order."""
    for name, group in sorted(program.groups.items()):
        for a in program.workers[group.workers[0]].actions if group.helpers else ():
            if a.kind == REDUCE and a.group == name and a.what == WEIGHT_GRADIENT:
                yield a._replace(kind=SUM)


def server_actions(program: Program, pieces: list[int]) -> Iterator[Action]:
    """Yields the actions of a server: the updates of the pieces that it holds, and scores if the plan needs them."""
    reduce, replicas = program.plan.reduce, range(program.num_replicas)
    center = program.num_replicas
    steps = program.plan.steps
    if reduce.gate == "bound":
        steps = -(-steps // program.plan.place.workers)  # waves
    for t in range(steps):
        if reduce.combiner == "score-trim":
            yield from (Action(EVAL, p, q, -1, t) for p in pieces for q in replicas)
            yield from (Action.update(p, 0, t + 1, UpdatePlace.SERVER) for p in pieces)
        elif reduce.gate == "barrier":
            yield from (Action.update(p, center, t + 1, UpdatePlace.SERVER) for p in pieces)
        elif reduce.combiner == "elastic" or reduce.gate == "bound":
            for q in replicas:
                version = t * len(replicas) + q + 1
                yield from (Action.update(p, center, version, UpdatePlace.SERVER) for p in pieces)
        else:
            yield from (Action.update(p, q, t + 1, UpdatePlace.SERVER) for q in replicas for p in pieces)
