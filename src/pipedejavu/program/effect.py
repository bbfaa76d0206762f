"""The effects of actions: which values each kind of action reads, writes and adds to.

Verifier, simulator and engine take all dependencies between actions from this table.

| kind    | reads                                | writes              | adds to |
|---------|--------------------------------------|---------------------|---------|
| F       | x of the pieces before, w (and c)    | x, s                |         |
| R       | x of the pieces before, w (and g, s) |                     | s       |
| B       | s, g of the pieces after, w          | g                   | d       |
| I       | s, g of the pieces after, w          | g                   |         |
| W       | s, g of the pieces after             |                     | d       |
| SEND    | the value                            |                     |         |
| RECV    |                                      | the value           |         |
| REDUCE  | the value (n: all d; late d: and w)  | the value           |         |
| SUM     |                                      |                     |         |
| GATHER  | the value (w: its shard)             | the value           |         |
| OFFLOAD | the value                            | it on the host      |         |
| FETCH   | the value on the host                | the value           |         |
| UPDATE  | d, w (and o) of the version before, n | w (and o)          | p, c    |
| DROP    |                                      |                     |         |
| EVAL    | d, w                                 | e                   |         |

OFFLOAD moves a value. FETCH moves it too, unless the value stays in host memory. DROP frees a value on the device. A
value that is added to has several writers, and a reader waits for all writers before it in the sequence.
"""

from collections.abc import Callable

from pipedejavu.plan.axis import Rest
from pipedejavu.program.action import (
    DROP,
    FETCH,
    FORWARD,
    OFFLOAD,
    Action,
    ActionKind,
    UpdatePlace,
    value_of,
)
from pipedejavu.program.program import GroupRole, Program, stage_group
from pipedejavu.program.value import (
    ACTIVATION,
    BATCH,
    DEVICE,
    GRADIENT,
    HOST,
    NORM,
    OPTIMIZER_STATE,
    SAVED,
    SHARD,
    WEIGHT_GRADIENT,
    WEIGHTS,
    Value,
    ValueKind,
    ValuePlace,
)

TAKING = frozenset((DROP, OFFLOAD, FETCH))
"""Kinds that may remove a value from its place."""

Effects = tuple[tuple[Value, ...], tuple[Value, ...], tuple[Value, ...]]
"""What an action reads, writes and adds to; a plain tuple, since one is made for every action of a program."""

_new = tuple.__new__  # forwards and backwards make most values of a program, so their rows skip the constructors


class Table:
    """The table of effects for one program."""

    def __init__(self, program: Program):
        plan, pieces = program.plan, range(len(program.pieces))
        self.inputs, self.outputs = program.inputs, program.outputs
        self.update_size = program.update_size
        self.keeps_saved = [program.keeps_saved(piece) for piece in pieces]
        self.rereads = [program.recomputed[p][:1] == (*program.pieces[p].units[:1],) for p in pieces]
        """Whether recomputing a piece reads the piece's input."""
        self.recompute_waits = not plan.order.recomputes_early
        self.prefetches_data = plan.prefetches_data
        self.clip_delay = {"none": None, "global": 0, "delayed": 1}[plan.reduce.clip]
        self.scatters_gradient = [
            plan.zero_of(piece.stage) >= 2 and stage_group(piece.stage) in program.groups for piece in program.pieces
        ]
        self.waves = _Waves(program) if plan.reduce.gate == "bound" else None
        self.elastic = plan.reduce.combiner == "elastic"
        self.in_turn = plan.reduce.gate == "round-robin"
        self.scores = plan.reduce.combiner == "score-trim"
        self.forgets_weights = plan.version.correction == "weight-prediction"
        """Whether a backward reads only the weights that its forward made."""
        self.num_replicas = program.num_replicas
        self.program = program
        self.compared = compared_versions(program)
        self.compensates_shares = plan.compensates_shares
        self.rests = [rest_of(program, piece) for piece in pieces]
        self.update_places = [update_place(program, piece) for piece in pieces]
        self.rows: dict[ActionKind, Callable[[Action, int], Effects]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.RECOMPUTE: self._recompute,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUT_BACKWARD: self._input_backward,
            ActionKind.WEIGHT_BACKWARD: self._weight_backward,
            ActionKind.SEND: lambda a, _: ((value_of(a),), (), ()),
            ActionKind.RECV: lambda a, _: ((), (value_of(a),), ()),
            ActionKind.REDUCE: self._reduce,
            ActionKind.SUM: lambda *_: ((), (), ()),
            ActionKind.GATHER: self._gather,
            ActionKind.OFFLOAD: lambda a, _: ((value_of(a),), (value_of(a, HOST),), ()),
            ActionKind.FETCH: lambda a, _: ((value_of(a, HOST),), (value_of(a),), ()),
            ActionKind.UPDATE: self._update,
            ActionKind.DROP: lambda *_: ((), (), ()),
            ActionKind.EVAL: self._eval,
        }
        """The row of each kind, for loops over many actions: `rows[action.kind](action, worker)`."""

    def __call__(self, action: Action, worker: int) -> Effects:
        """Returns what `action` of `worker` reads, writes and adds to."""
        return self.rows[action[0]](action, worker)

    def taken(self, a: Action) -> Value | None:
        """Returns the value that an action removes from its place, or None."""
        if a.kind in (DROP, OFFLOAD):
            return value_of(a)
        is_moved = a.what == OPTIMIZER_STATE or (a.what == WEIGHTS and self.rests[a.piece] == "lean")
        return value_of(a, HOST) if a.kind == FETCH and is_moved else None

    def _forward(self, a: Action, _worker: int) -> Effects:
        _, piece, replica, i, version, _, _ = a
        x = _new(Value, (ACTIVATION, piece, 0, i, DEVICE))
        weights = _new(Value, (WEIGHTS, piece, replica, version, DEVICE))
        inputs = self.inputs[piece]
        if len(inputs) == 1 and not self.waves:
            reads: tuple[Value, ...] = (_new(Value, (ACTIVATION, inputs[0], 0, i, DEVICE)), weights)
        elif inputs or self.waves or not self.prefetches_data:
            pulled = self.waves.pull(piece, i // self.update_size) if self.waves else ()
            reads = (*(Value.activation(before, i) for before in inputs), weights, *pulled)
        else:
            reads = (_new(Value, (BATCH, piece, 0, i, DEVICE)), weights)
        return reads, ((x, _new(Value, (SAVED, piece, 0, i, DEVICE))) if self.keeps_saved[piece] else (x,)), ()

    def _recompute(self, a: Action, _worker: int) -> Effects:
        _, piece, replica, i, version, _, _ = a
        saved, weights = Value.saved(piece, i), Value.weights(piece, replica, version)
        befores = self.inputs[piece] if self.rereads[piece] else ()
        reads = (*(Value.activation(before, i) for before in befores), *(saved,) * self.keeps_saved[piece], weights)
        if self.recompute_waits:
            reads += tuple(Value.gradient(after, i) for after in self.outputs[piece])
        return reads, (), (saved,)

    def _backward(self, a: Action, worker: int) -> Effects:
        reads, writes, _ = self._input_backward(a, worker)
        return reads, writes, (_new(Value, (WEIGHT_GRADIENT, a[1], a[2], a[3] // self.update_size, DEVICE)),)

    def _input_backward(self, a: Action, _worker: int) -> Effects:
        _, piece, replica, i, version, _, _ = a
        saved = _new(Value, (SAVED, piece, 0, i, DEVICE))
        weights = _new(Value, (WEIGHTS, piece, replica, version, DEVICE))
        outputs = self.outputs[piece]
        if len(outputs) == 1:
            reads: tuple[Value, ...] = (saved, _new(Value, (GRADIENT, outputs[0], 0, i, DEVICE)), weights)
        else:
            reads = (saved, *(Value.gradient(after, i) for after in outputs), weights)
        if self.forgets_weights:
            reads = reads[:-1]
        return reads, ((_new(Value, (GRADIENT, piece, 0, i, DEVICE)),) if self.inputs[piece] else ()), ()

    def _weight_backward(self, a: Action, _worker: int) -> Effects:
        _, piece, replica, i, _, _, _ = a
        reads = (Value.saved(piece, i), *(Value.gradient(after, i) for after in self.outputs[piece]))
        return reads, (), (Value.weight_gradient(piece, replica, i // self.update_size),)

    def _reduce(self, a: Action, worker: int) -> Effects:
        value = value_of(a)
        if a.what == NORM:
            held = self.program.held(worker)
            return tuple(self._gradient(p, q, a.version) for p, q in held), (value,), ()
        group = self.program.groups.get(a.group)
        if group is not None and group.role is GroupRole.TIE:
            tied = self.program.tied_pieces[group.number]
            held = self.program.held(worker)
            values = tuple(self._summed(p, q, a.version) for p, q in held if p in tied and q == a.replica)
            return values, values, ()
        if a.what == WEIGHT_GRADIENT and self.scatters_gradient[a.piece]:
            return (value,), (value_of(a, SHARD),), ()
        return (value, *self._compared_weights(a)), (value,), ()

    def _compared_weights(self, a: Action) -> tuple[Value, ...]:
        """Returns the newest weights, and older ones that a gradient is of, if its sum compares them."""
        if not self.compensates_shares or a.what != WEIGHT_GRADIENT or not a.version:
            return ()
        delay, newest = self.program.delay_of(a.replica), Value.weights(a.piece, a.replica, a.version)
        return (newest, newest.at(max(0, a.version - delay))) if delay else ()

    def _gather(self, a: Action, _worker: int) -> Effects:
        return (value_of(a, SHARD if a.what == WEIGHTS else DEVICE),), (value_of(a),), ()

    def _summed(self, piece: int, replica: int, update: int) -> Value:
        """Returns the gradient in the place where the sum over replicas leaves it."""
        place = SHARD if self.scatters_gradient[piece] else DEVICE
        return Value.weight_gradient(piece, replica, update, place)

    def _gradient(self, piece: int, replica: int, update: int) -> Value:
        """Returns the gradient in the place that the piece's update reads it from."""
        if self.update_places[piece] == HOST:
            return Value.weight_gradient(piece, replica, update, HOST)
        return self._summed(piece, replica, update)

    def _update(self, a: Action, _worker: int) -> Effects:
        _, piece, replica, _, version, _, _ = a
        update, center = version - 1, self.num_replicas
        at = a.update_place
        if at == UpdatePlace.SHARED:
            return (Value.weight_gradient(piece, replica, update),), (), ()
        if at == UpdatePlace.SERVER:
            return self._server_update(piece, replica, version)
        place = _PLACES[at]
        weights, base = Value.weights(piece, replica, version, place), Value.weights(piece, replica, update, place)
        reads: tuple[Value, ...] = (self._gradient(piece, replica, update), base)
        if self.clip_delay is not None and update >= self.clip_delay:
            reads += (Value.norm(update - self.clip_delay),)
        if (version_read := self.compared.get((piece, replica, update), update)) != update:
            reads += (Value.weights(piece, replica, version_read),)
        if self.elastic:
            turn = update * self.num_replicas + replica if self.in_turn else update
            reads += (Value.weights(piece, center, turn),)
        if self.waves:
            return reads, (weights,), (Value.push(piece, replica, self.waves.of(update)),)
        if self.rests[piece] == "visit":
            state = Value.optimizer_state(piece, replica, update)
            return (*reads, state), (weights, state.at(version)), ()
        return reads, (weights,), ()

    def _server_update(self, piece: int, replica: int, version: int) -> Effects:
        """Returns the effects of a server's update: of one push, of all pushes, of the elastic centre or of a wave."""
        update, center, replicas = version - 1, self.num_replicas, range(self.num_replicas)
        weights = Value.weights(piece, replica, version)
        if self.elastic:
            base = Value.weights(piece, center, update)
            if self.in_turn:
                pulls: tuple[Value, ...] = (Value.weights(piece, update % center, update // center),)
            else:
                pulls = tuple(Value.weights(piece, q, update) for q in replicas)
            return (base, *pulls), (weights,), ()
        if self.waves:
            push = Value.push(piece, update % center, update // center)
            return (push,), (), (Value.consensus(piece, update // center),)
        if self.scores:
            makers = (Value.weight_gradient, Value.score)
            reads = tuple(make(piece, q, update) for q in replicas for make in makers)
            return (
                (*reads, Value.weights(piece, 0, update)),
                tuple(Value.weights(piece, q, version) for q in replicas),
                (),
            )
        return (Value.weight_gradient(piece, replica, update),), (weights,), ()

    def _eval(self, a: Action, _worker: int) -> Effects:
        _, piece, replica, _, version, _, _ = a
        reads = (Value.weight_gradient(piece, replica, version), Value.weights(piece, 0, version))
        return reads, (Value.score(piece, replica, version),), ()


_PLACES = {UpdatePlace.DEVICE: DEVICE, UpdatePlace.HOST: HOST, UpdatePlace.SHARD: SHARD, None: DEVICE}


def compared_versions(program: Program) -> dict[tuple[int, int, int], int]:
    """Returns, by piece, replica and update, the version that its forwards read, if the update compares with it."""
    plan = program.plan
    if plan.version.correction != "delay-compensation" or not plan.is_flush_free:
        return {}
    forwards = [a for worker in program.workers for a in worker.actions if a.kind == FORWARD]
    return {(a.piece, a.replica, a.microbatch // program.update_size): a.version for a in forwards}


class _Waves:
    """HetPipe's waves: a replica makes one local update per minibatch and pushes those of a wave together.

    A wave has as many minibatches n as the pipeline has workers. Counted from 1, minibatch (c + 2)·n may only start
    with weights that contain every replica's waves up to c − D for the bound D: its forward pulls the consensus, and
    the next local version contains it too.
    """

    def __init__(self, program: Program):
        self.size = program.plan.place.workers
        self.bound = program.plan.reduce.bound

    def of(self, update: int) -> int:
        return update // self.size

    def pull(self, piece: int, minibatch: int) -> tuple[Value, ...]:
        wave = (minibatch + 1) // self.size - 2 - self.bound
        return (Value.consensus(piece, wave),) if (minibatch + 1) % self.size == 0 and wave >= 0 else ()


def rest_of(program: Program, piece: int) -> Rest:
    """Returns where the state of a piece that is not sharded rests between its uses."""
    keep = program.plan.keep
    if keep.kind == "host":
        return "window"
    if keep.kind != "split":
        return "device"
    stage = program.pieces[piece].stage
    index = piece - next(i for i, p in enumerate(program.pieces) if p.stage == stage)
    if keep.places is not None:
        return keep.places[index]
    return "device" if index < keep.num_on_device else "host"


def resting(program: Program, piece: int) -> tuple[tuple[ValueKind, ValuePlace], ...]:
    """Returns a piece's values that exist before the first action and after the last, with their places."""
    place, rest = update_place(program, piece), rest_of(program, piece)
    if rest == "window" or program.plan.zero_of(program.pieces[piece].stage) == 3:
        return ((WEIGHTS, place),)
    if rest == "visit":
        return (WEIGHTS, DEVICE), (OPTIMIZER_STATE, HOST)
    return ((WEIGHTS, DEVICE), (WEIGHTS, place)) if place and rest != "lean" else ((WEIGHTS, DEVICE),)


def update_place(program: Program, piece: int) -> ValuePlace:
    """Returns the place of the weights that a piece's update writes."""
    if rest_of(program, piece) in ("host", "lean", "window"):
        return HOST
    stage = program.pieces[piece].stage
    return SHARD if program.plan.zero_of(stage) and stage_group(stage) in program.groups else DEVICE
