"""The table of what each kind of action reads and writes.

A value is (what, piece, replica, index, place): index is the microbatch of x, g, s and b and the version or
update of the rest; place is '' for the worker's device, 'host' for its host's memory and 'shard' for the
part that a group's member keeps. Activations and their gradients carry replica 0: a microbatch belongs to
one replica, so its number says which. Verifier, simulator and engine all use this table and nothing else to
know what depends on what.

| kind    | reads                                | writes              | adds to |
|---------|--------------------------------------|---------------------|---------|
| F       | x of the pieces before, w (and c)    | x, s                |         |
| R       | x of the pieces before, w (and g, s) |                     | s       |
| B       | s, g of the pieces after, w          | g                   | d       |
| I       | s, g of the pieces after, w          | g                   |         |
| W       | s, g of the pieces after             |                     | d       |
| SEND    | the value                            |                     |         |
| RECV    |                                      | the value           |         |
| REDUCE  | the value (n: all d)                 | the value           |         |
| GATHER  | the value (w: its shard)             | the value           |         |
| OFFLOAD | the value                            | it on the host      |         |
| FETCH   | the value on the host                | the value           |         |
| UPDATE  | d, w (and o) of the version before, n | w (and o)          | p, c    |
| DROP    |                                      |                     |         |
| EVAL    | d, w                                 | e                   |         |

OFFLOAD moves, and so does FETCH of what does not rest on the host; a DROP ends a value on the device. What is added to
has many writers; a reader waits for all that stand before it.
"""

from collections.abc import Callable

from pipedejavu.plan.axis import Rest
from pipedejavu.program.action import Action
from pipedejavu.program.program import Program

Value = tuple[str, int, int, int, str]

OF_MICROBATCH = frozenset("xgsb")
"""Whats whose index is a microbatch."""


TAKING = frozenset(("DROP", "OFFLOAD", "FETCH"))
"""Kinds that may take a value away from its place."""

Effects = tuple[tuple[Value, ...], tuple[Value, ...], tuple[Value, ...]]
"""What an action reads, writes and adds to. A plain tuple: it is made for every action of a program."""


class Table:
    """The table, for one program."""

    def __init__(self, program: Program):
        plan = program.plan
        self.inputs, self.outputs = program.inputs, program.outputs
        self.update_size = program.update_size
        self.keeps_saved = [program.keeps_saved(piece) for piece in range(len(program.pieces))]
        self.rereads = [
            again[:1] == (*own.units[:1],) for again, own in zip(program.recomputed, program.pieces, strict=True)
        ]
        """Whether what a piece read is read again."""
        self.recompute_waits = not plan.order.recomputes_early
        self.prefetches_data = plan.prefetches_data
        self.clip_delay = {"none": None, "global": 0, "delayed": 1}[plan.reduce.clip]
        self.scatters_gradient = [plan.zero_of(piece.stage) >= 2 for piece in program.pieces]
        self.waves = _Waves(program) if plan.reduce.gate == "bound" else None
        self.elastic = plan.reduce.combiner == "elastic"
        self.in_turn = plan.reduce.gate == "round-robin"
        self.scores = plan.reduce.combiner == "score-trim"
        self.num_replicas = program.num_replicas
        self.program = program
        self.rests = [rest_of(program, piece) for piece in range(len(program.pieces))]
        self.update_places = [update_place(program, piece) for piece in range(len(program.pieces))]
        self._rows: dict[str, Callable[[Action, int], Effects]] = {
            "F": self._forward,
            "R": self._recompute,
            "B": self._backward,
            "I": self._input_half,
            "W": self._weight_half,
            "SEND": lambda a, _: ((value_of(a),), (), ()),
            "RECV": lambda a, _: ((), (value_of(a),), ()),
            "REDUCE": self._reduce,
            "GATHER": lambda a, _: ((value_of(a, "shard" if a.what == "w" else ""),), (value_of(a),), ()),
            "OFFLOAD": lambda a, _: ((value_of(a),), (value_of(a, "host"),), ()),
            "FETCH": lambda a, _: ((value_of(a, "host"),), (value_of(a),), ()),
            "UPDATE": self._update,
            "DROP": lambda *_: ((), (), ()),
            "EVAL": self._eval,
        }

    def __call__(self, action: Action, worker: int) -> Effects:
        """Returns what `action` of `worker` reads and writes."""
        return self._rows[action[0]](action, worker)

    def taken(self, a: Action) -> Value | None:
        """Returns the value that an action takes away from its place, if it does."""
        if a.kind in ("DROP", "OFFLOAD"):
            return value_of(a)
        is_moved = a.what == "o" or (a.what == "w" and self.rests[a.piece] == "lean")
        return value_of(a, "host") if a.kind == "FETCH" and is_moved else None

    def _forward(self, a: Action, _worker: int) -> Effects:
        _, piece, replica, i, version, _, _ = a
        x = ("x", piece, 0, i, "")
        weights = ("w", piece, replica, version, "")
        inputs = self.inputs[piece]
        if self.waves:
            befores = (("x", before, 0, i, "") for before in inputs)
            reads: tuple[Value, ...] = (*befores, weights, *self.waves.pull(piece, i // self.update_size))
        elif len(inputs) == 1:
            reads = (("x", inputs[0], 0, i, ""), weights)
        elif inputs or not self.prefetches_data:
            reads = (*(("x", before, 0, i, "") for before in inputs), weights)
        else:
            reads = (("b", piece, 0, i, ""), weights)
        return reads, ((x, ("s", piece, 0, i, "")) if self.keeps_saved[piece] else (x,)), ()

    def _recompute(self, a: Action, _worker: int) -> Effects:
        _, piece, replica, i, version, _, _ = a
        saved, weights = ("s", piece, 0, i, ""), ("w", piece, replica, version, "")
        befores = self.inputs[piece] if self.rereads[piece] else ()
        reads = (*(("x", before, 0, i, "") for before in befores), *(saved,) * self.keeps_saved[piece], weights)
        if self.recompute_waits:
            reads += tuple(("g", after, 0, i, "") for after in self.outputs[piece])
        return reads, (), (saved,)

    def _backward(self, a: Action, worker: int) -> Effects:
        reads, writes, _ = self._input_half(a, worker)
        return reads, writes, (("d", a[1], a[2], a[3] // self.update_size, ""),)

    def _input_half(self, a: Action, _worker: int) -> Effects:
        _, piece, replica, i, version, _, _ = a
        saved, weights = ("s", piece, 0, i, ""), ("w", piece, replica, version, "")
        outputs = self.outputs[piece]
        if len(outputs) == 1:
            reads: tuple[Value, ...] = (saved, ("g", outputs[0], 0, i, ""), weights)
        else:
            reads = (saved, *(("g", after, 0, i, "") for after in outputs), weights)
        return reads, ((("g", piece, 0, i, ""),) if self.inputs[piece] else ()), ()

    def _weight_half(self, a: Action, _worker: int) -> Effects:
        _, piece, replica, i, _, _, _ = a
        reads = (("s", piece, 0, i, ""), *(("g", after, 0, i, "") for after in self.outputs[piece]))
        return reads, (), (("d", piece, replica, i // self.update_size, ""),)

    def _reduce(self, a: Action, worker: int) -> Effects:
        value = value_of(a)
        if a.what == "n":
            held = self.program.held(worker)
            return tuple(self._gradient(p, q, a.version) for p, q in held), (value,), ()
        if a.via.startswith("*tie"):
            tied = self.program.tied_pieces[int(a.via[4:].partition(".")[0])]
            values = tuple(
                ("d", p, q, a.version, "") for p, q in self.program.held(worker) if p in tied and q == a.replica
            )
            return values, values, ()
        if a.what == "d" and self.scatters_gradient[a.piece]:
            return (value,), (value_of(a, "shard"),), ()
        return (value,), (value,), ()

    def _gradient(self, piece: int, replica: int, update: int) -> Value:
        """The gradient where the piece's update finds it."""
        place = self.update_places[piece]
        return ("d", piece, replica, update, place if place == "host" or self.scatters_gradient[piece] else "")

    def _update(self, a: Action, _worker: int) -> Effects:
        _, piece, replica, _, version, _, via = a
        update, center = version - 1, self.num_replicas
        place = "" if via in ("", "~server", "~shared") else via[1:]
        weights, base = ("w", piece, replica, version, place), ("w", piece, replica, update, place)
        if via == "~shared":
            return (("d", piece, replica, update, ""),), (), ()
        if via == "~server":
            return self._server_update(piece, replica, version)
        reads: tuple[Value, ...] = (self._gradient(piece, replica, update), base)
        if self.clip_delay is not None and update >= self.clip_delay:
            reads += (("n", 0, 0, update - self.clip_delay, ""),)
        if self.elastic:
            turn = update * self.num_replicas + replica if self.in_turn else update
            reads += (("w", piece, center, turn, ""),)
        if self.waves:
            return reads, (weights,), (("p", piece, replica, self.waves.of(update), ""),)
        if self.rests[piece] == "visit":
            return (*reads, ("o", piece, replica, update, "")), (weights, ("o", piece, replica, version, "")), ()
        return reads, (weights,), ()

    def _server_update(self, piece: int, replica: int, version: int) -> Effects:
        """An update on the server: of one push, of a barrier's pushes, of the elastic centre or of a wave."""
        update, center, members = version - 1, self.num_replicas, range(self.num_replicas)
        weights = ("w", piece, replica, version, "")
        if self.elastic:
            base = ("w", piece, center, update, "")
            if self.in_turn:
                pulls: tuple[Value, ...] = (("w", piece, update % center, update // center, ""),)
            else:
                pulls = tuple(("w", piece, q, update, "") for q in members)
            return (base, *pulls), (weights,), ()
        if self.waves:
            push = ("p", piece, update % center, update // center, "")
            return (push,), (), (("c", piece, 0, update // center, ""),)
        if self.scores:
            reads = tuple((what, piece, q, update, "") for q in members for what in "de")
            return (*reads, ("w", piece, 0, update, "")), tuple(("w", piece, q, version, "") for q in members), ()
        return (("d", piece, replica, update, ""),), (weights,), ()

    def _eval(self, a: Action, _worker: int) -> Effects:
        _, piece, replica, _, version, _, _ = a
        reads = (("d", piece, replica, version, ""), ("w", piece, 0, version, ""))
        return reads, (("e", piece, replica, version, ""),), ()


class _Waves:
    """HetPipe's waves: as many minibatches, each with a local update, as a pipeline has workers, pushed together.

    Counted from 1, minibatch (c + 2)·n, n in a wave, may only start with weights that hold every member's waves
    up to c − D: its forward takes the pull, and hands it on to the next local version.
    """

    def __init__(self, program: Program):
        self.size = program.plan.place.workers
        self.bound = program.plan.reduce.bound

    def of(self, update: int) -> int:
        return update // self.size

    def pull(self, piece: int, minibatch: int) -> tuple[Value, ...]:
        wave = (minibatch + 1) // self.size - 2 - self.bound
        return (("c", piece, 0, wave, ""),) if (minibatch + 1) % self.size == 0 and wave >= 0 else ()


def value_of(a: Action, place: str = "") -> Value:
    """Returns the value that a transfer, collective or drop names."""
    _, piece, replica, microbatch, version, what, _ = a
    return (what, piece, 0, microbatch, place) if what in OF_MICROBATCH else (what, piece, replica, version, place)


def name_of(value: Value) -> str:
    """Prints a value for people: 'x2.5', 'w2/1@0 on the host'."""
    what, piece, replica, index, place = value
    text = f"{what}{piece}" + (f"/{replica}" if replica else "")
    text += f".{index}" if what in OF_MICROBATCH else f"@{index}"
    return text + {"": "", "host": " on the host", "shard": " as a shard"}[place]


def rest_of(program: Program, piece: int) -> Rest:
    """Returns where a piece's state rests, where it is not divided."""
    keep = program.plan.keep
    if keep.kind == "host":
        return "window"
    if keep.kind != "split":
        return "device"
    stage = program.pieces[piece].stage
    index = piece - next(i for i, p in enumerate(program.pieces) if p.stage == stage)
    if keep.places is not None:
        return keep.places[index]
    return "device" if index < keep.device_pieces else "host"


def resting(program: Program, piece: int) -> tuple[tuple[str, str], ...]:
    """Returns what of a piece is where before the first action and after the last: weights, and state that visits."""
    place, rest = update_place(program, piece), rest_of(program, piece)
    if rest == "window" or program.plan.zero_of(program.pieces[piece].stage) == 3:
        return (("w", place),)
    if rest == "visit":
        return ("w", ""), ("o", "host")
    return (("w", ""), ("w", place)) if place and rest != "lean" else (("w", ""),)


def update_place(program: Program, piece: int) -> str:
    """Returns where a piece's update runs: '', 'host' or 'shard'."""
    if rest_of(program, piece) in ("host", "lean", "window"):
        return "host"
    stage = program.pieces[piece].stage
    return "shard" if program.plan.zero_of(stage) and f"s{stage}" in program.groups else ""
