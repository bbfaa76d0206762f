"""The pass that turns a schedule into training: versions for every read, reductions and updates."""

from collections import defaultdict
from collections.abc import Iterator

from pipedejavu.program.action import Action
from pipedejavu.program.program import Program
from pipedejavu.program.value import rest_of, update_place

Home = tuple[int, int]
"""A (piece, replica) that a worker holds."""


def add_updates(program: Program) -> Program:
    """Numbers the weight versions and adds what follows each piece's last gradient of an update."""
    return program.with_actions([tuple(_Walk(program, w.actions).run()) for w in program.workers])


class _Walk:
    """One pass over a worker's forwards and backwards."""

    def __init__(self, program: Program, actions: tuple[Action, ...]):
        self.program, self.plan, self.actions = program, program.plan, actions
        self.newest: dict[Home, int] = defaultdict(int)
        self.read: dict[Home, int] = {}
        """The version that each (piece, microbatch) in flight reads."""
        self.last_gradient: dict[tuple[Home, int], int] = {}
        self.last_action: dict[int, int] = {}
        homes = {(a.piece, a.replica) for a in actions}
        self.visits = sorted(home for home in homes if rest_of(program, home[0]) == "visit")
        self.visit = -1
        """The update that state comes to the device for."""
        self.due: list[Home] = []
        """Whose state has not come yet, in the order of the forward pass."""
        self.here: list[Home] = []
        for position, a in enumerate(actions):
            update = a.microbatch // program.update_size
            self.last_action[update] = position
            if a.kind in "BW":
                self.last_gradient[(a.piece, a.replica), update] = position

    def run(self) -> Iterator[Action]:
        waiting: list[Home] = []  # pieces with a final gradient whose update comes at the end of the step
        for position, a in enumerate(self.actions):
            update, home = a.microbatch // self.program.update_size, (a.piece, a.replica)
            if a.kind == "F" and update > self.visit and home in (*self.here, *self.due):
                yield from self._visited(home)
            yield a._replace(version=self._version(a, update, home))
            if a.kind in "BW" and self.last_gradient[home, update] == position:
                yield from self._after_gradient(home, update)
                waiting.append(home)
            if self._updates_at(update, position):
                yield from self._after_step(waiting, update)
                waiting = []
        for home in (*self.here, *self.due):
            yield from self._visited(home)

    def _updates_at(self, update: int, position: int) -> bool:
        if self.plan.is_flush_free:
            a = self.actions[position]
            return a.kind in "BW" and self.last_gradient[(a.piece, a.replica), update] == position
        return self.last_action[update] == position

    def _version(self, a: Action, update: int, home: Home) -> int:
        key = (a.piece, a.microbatch)
        if a.kind == "F":
            self.read[key] = {
                "sync": update,
                "local": update,
                "stash": self.newest[home],
                "vertical": max(0, update - (self.program.pieces[-1].stage)),
                "double-buffer": max(0, update - 1),
                "torn": -1,
            }[self.plan.version.kind]
        return self.read[key]

    def _after_gradient(self, home: Home, update: int) -> Iterator[Action]:
        """What can start as soon as a piece's gradient is final."""
        (piece, replica), plan = home, self.plan
        group = f"s{self.program.pieces[piece].stage}"
        if group in self.program.groups and plan.reduce.combiner == "sum":
            yield Action("REDUCE", piece, replica, -1, update, "d", f"*{group}")
        dense = f"d{self.program.pieces[piece].stage}.{replica}"
        if dense in self.program.groups:
            yield Action("REDUCE", piece, replica, -1, update, "d", f"*{dense}")
        final = [piece]  # pieces of this worker whose gradient is complete now
        for name, tied in self._ties(replica):
            lasts = {
                p: self.last_gradient[(p, replica), update]
                for p in tied
                if ((p, replica), update) in self.last_gradient
            }
            if piece in tied and lasts[piece] == max(lasts.values()):
                yield Action("REDUCE", piece, replica, -1, update, "d", f"*{name}")
                final = sorted({*final, *lasts}, reverse=True)
            elif piece in tied:
                final = []  # it waits for the pieces that it shares parameters with
        for each in final:
            if update_place(self.program, each) == "host":
                yield Action("OFFLOAD", each, replica, -1, update, "d")
                if plan.reduce.clip == "none":
                    yield from self._asked([(each, replica)], update)
                    yield from self._host_update((each, replica), update)
        if update > self.visit:
            self.visit, self.due = update, [*self.visits]
        yield from self._comes()

    def _after_step(self, homes: list[Home], update: int) -> Iterator[Action]:
        """What comes once the worker's gradients of an update are final."""
        plan = self.plan
        if plan.reduce.clip != "none":
            yield Action("REDUCE", 0, 0, -1, update, "n", "*all")
        for home in homes:
            if home not in self.visits and update_place(self.program, home[0]) != "host":
                yield from self._device_update(home, update)
        for _ in self.visits:
            yield from self._comes()
        for home in [*self.here]:  # the others follow before their next forward
            yield from self._visited(home)
        if plan.reduce.clip != "none":
            # The next forward needs the first pieces first.
            on_host = [home for home in sorted(homes) if update_place(self.program, home[0]) == "host"]
            lean = [home for home in on_host if rest_of(self.program, home[0]) == "lean"]
            yield from self._asked(lean[:1], update)
            for home in on_host:
                if home in lean:  # the next one's weights come while it is updated
                    yield from self._asked(lean[lean.index(home) + 1 :][:1], update)
                yield from self._host_update(home, update)

    def _comes(self) -> Iterator[Action]:
        """Lets the next visitor come, if there is room for it."""
        if self.due and len(self.here) < self.plan.keep.visitors:
            self.here.append(self.due.pop(0))
            piece, replica = self.here[-1]
            yield Action("FETCH", piece, replica, -1, self.visit, "o")

    def _visited(self, home: Home) -> Iterator[Action]:
        """Updates a visitor, whose state then leaves and makes room for the next."""
        (piece, replica), update = home, self.visit
        if home in self.due:
            self.due.remove(home)
            yield Action("FETCH", piece, replica, -1, update, "o")
        else:
            self.here.remove(home)
        yield from self._device_update(home, update)
        yield Action("OFFLOAD", piece, replica, -1, update + 1, "o")
        yield from self._comes()

    def _asked(self, homes: list[Home], update: int) -> Iterator[Action]:
        """Asks the device for weights of which the host has no copy."""
        for piece, replica in homes:
            if rest_of(self.program, piece) == "lean":
                yield Action("OFFLOAD", piece, replica, -1, update, "w")

    def _device_update(self, home: Home, update: int) -> Iterator[Action]:
        (piece, replica), plan = home, self.plan
        group = f"s{self.program.pieces[piece].stage}"
        if plan.reduce.wire == "server" and plan.reduce.combiner != "elastic" and plan.reduce.gate != "bound":
            return  # the server updates
        self.newest[home] = update + 1
        if plan.version.kind == "torn":
            yield Action("UPDATE", piece, replica, -1, update + 1, "", "~shared")
            return
        shard = update_place(self.program, piece) == "shard"
        yield Action("UPDATE", piece, replica, -1, update + 1, "", "~shard" if shard else "")
        if shard and plan.zero_of(self.program.pieces[piece].stage) < 3:
            yield Action("GATHER", piece, replica, -1, update + 1, "w", f"*{group}")
        averages = plan.reduce.combiner == "average" and group in self.program.groups
        if averages and (update + 1) % plan.reduce.period == 0:
            yield Action("REDUCE", piece, replica, -1, update + 1, "w", f"*{group}")

    def _host_update(self, home: Home, update: int) -> Iterator[Action]:
        piece, replica = home
        self.newest[home] = update + 1
        yield Action("UPDATE", piece, replica, -1, update + 1, "", "~host")
        rest = rest_of(self.program, piece)
        if rest == "host":
            yield Action("DROP", piece, replica, -1, update, "w")
        if rest != "window":
            yield Action("FETCH", piece, replica, -1, update + 1, "w")

    def _ties(self, replica: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for index, tied in enumerate(self.program.tied_pieces):
            name = f"tie{index}.{replica}"
            if name in self.program.groups:
                yield name, tied


def server_actions(program: Program, pieces: list[int]) -> Iterator[Action]:
    """Yields the updates that a server makes of what the workers send it, for the pieces that it holds."""
    reduce, replicas = program.plan.reduce, range(program.num_replicas)
    center = program.num_replicas
    steps = program.plan.steps
    if reduce.gate == "bound":
        steps = -(-steps // program.plan.place.workers)  # waves
    for t in range(steps):
        if reduce.combiner == "score-trim":
            yield from (Action("EVAL", p, q, -1, t) for p in pieces for q in replicas)
            yield from (Action("UPDATE", p, 0, -1, t + 1, "", "~server") for p in pieces)
        elif reduce.gate == "barrier":
            yield from (Action("UPDATE", p, center, -1, t + 1, "", "~server") for p in pieces)
        elif reduce.combiner == "elastic" or reduce.gate == "bound":
            for q in replicas:
                version = t * len(replicas) + q + 1
                yield from (Action("UPDATE", p, center, -1, version, "", "~server") for p in pieces)
        else:
            yield from (Action("UPDATE", p, q, -1, t + 1, "", "~server") for q in replicas for p in pieces)
