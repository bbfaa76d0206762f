"""Actions: what a worker does, one record each. An action prints as short text and parses back.

    F2.5@0          forward of piece 2, microbatch 5, with weights of version 0
    B2/1.5@0        backward of replica 1's piece 2
    SEND:x2.5>3     sends the activation of piece 2, microbatch 5, to worker 3
    REDUCE:d2@0*dp2 sums the gradients of update 0 of piece 2 over the group dp2
    UPDATE2@1~host  writes version 1 of piece 2's weights, in host memory

An action knows nothing of time, of tensors or of how it is carried out.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from pipedejavu.facts import InputError
from pipedejavu.program.value import BY_MICROBATCH, DEVICE, VALUE_KINDS, Value, ValueKind, ValuePlace


class ActionKind(StrEnum):
    """What an action does; the text is its printed form."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_BACKWARD = "I"
    WEIGHT_BACKWARD = "W"
    RECOMPUTE = "R"
    SEND = "SEND"
    RECV = "RECV"
    REDUCE = "REDUCE"
    SUM = "SUM"
    GATHER = "GATHER"
    OFFLOAD = "OFFLOAD"
    FETCH = "FETCH"
    UPDATE = "UPDATE"
    DROP = "DROP"
    EVAL = "EVAL"


# Plain names for the loops that run once per action: attribute access on an enum class is slow.
FORWARD, BACKWARD, RECOMPUTE = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.RECOMPUTE
INPUT_BACKWARD, WEIGHT_BACKWARD = ActionKind.INPUT_BACKWARD, ActionKind.WEIGHT_BACKWARD
SEND, RECV, REDUCE, GATHER = ActionKind.SEND, ActionKind.RECV, ActionKind.REDUCE, ActionKind.GATHER
SUM = ActionKind.SUM
OFFLOAD, FETCH, DROP = ActionKind.OFFLOAD, ActionKind.FETCH, ActionKind.DROP
UPDATE, EVAL = ActionKind.UPDATE, ActionKind.EVAL

ACTION_KINDS = {
    FORWARD: "forward of a piece for a microbatch",
    BACKWARD: "backward of a piece for a microbatch, both halves",
    INPUT_BACKWARD: "the half of a backward that computes the gradient of the piece's input",
    WEIGHT_BACKWARD: "the half of a backward that computes the gradient of the piece's weights",
    RECOMPUTE: "runs a forward again to restore the tensors that its backward needs",
    SEND: "sends a value to another worker",
    RECV: "receives a value from another worker",
    REDUCE: "sums or averages a value over a group, in place",
    SUM: "sums what the members of a group push in their REDUCE, on a server that helps them",
    GATHER: "assembles a whole value from the shards of a group, in place",
    OFFLOAD: "moves a value from the device to its host's memory",
    FETCH: "copies a value from the host's memory to the device",
    UPDATE: "applies gradients: writes the next version of a piece's weights",
    DROP: "frees a value that would be kept otherwise",
    EVAL: "scores a replica's gradient on samples of the server's own",
}

COMPUTE_KINDS = frozenset((FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, RECOMPUTE))
"""Kinds that always run on the compute lane."""
GRADIENT_KINDS = frozenset((BACKWARD, WEIGHT_BACKWARD))
"""Kinds that add to a weight gradient, and end a microbatch on their piece."""
OUTPUT_KINDS = frozenset((BACKWARD, INPUT_BACKWARD))
"""Kinds of backward that compute the gradient of the piece's input."""
NET_KINDS = frozenset((SEND, RECV, REDUCE, SUM, GATHER))
"""Kinds that several workers carry out together."""


class UpdatePlace(StrEnum):
    """Where an UPDATE runs and which weights it writes; the text is its printed form."""

    DEVICE = ""
    HOST = "~host"
    SHARD = "~shard"
    SERVER = "~server"
    SHARED = "~shared"


class Via(str):
    """The worker or group that an action communicates with, in its printed form: '>3', '<3' or '*s2'."""

    __slots__ = ()

    @classmethod
    def to_worker(cls, worker: int) -> "Via":
        """Returns the receiver of a SEND."""
        return cls(f">{worker}")

    @classmethod
    def from_worker(cls, worker: int) -> "Via":
        """Returns the sender of a RECV."""
        return cls(f"<{worker}")

    @classmethod
    def among(cls, group: str) -> "Via":
        """Returns the group of a collective, by its name."""
        return cls(f"*{group}")


class Action(NamedTuple):
    """One entry of a worker's program; -1 stands for 'none' in the number fields."""

    kind: ActionKind
    piece: int
    replica: int = 0
    microbatch: int = -1
    version: int = -1
    what: ValueKind | None = None
    """The kind of the value that the action moves, reduces or frees."""
    via: Via | UpdatePlace = UpdatePlace.DEVICE
    """Read it through `peer`, `group` and `update_place`."""

    @classmethod
    def on(cls, kind: ActionKind, value: Value, via: Via | UpdatePlace = UpdatePlace.DEVICE) -> "Action":
        """Returns the action that moves, reduces or frees a value."""
        what, piece, replica, index, _ = value
        if what in BY_MICROBATCH:
            return cls(kind, piece, 0, index, -1, what, via)
        return cls(kind, piece, replica, -1, index, what, via)

    @classmethod
    def update(cls, piece: int, replica: int, version: int, place: UpdatePlace = UpdatePlace.DEVICE) -> "Action":
        """Returns the UPDATE that writes a version of a piece's weights."""
        return cls(UPDATE, piece, replica, -1, version, None, place)

    def __str__(self) -> str:
        kind, piece, replica, microbatch, version, what, via = self
        text = f"{kind}:{what}{piece}" if what else f"{kind}{piece}"
        if replica:
            text += f"/{replica}"
        if microbatch >= 0:
            text += f".{microbatch}"
        if version >= 0:
            text += f"@{version}"
        return text + via

    @property
    def lane(self) -> str:
        """The queue of its worker that the action waits in."""
        kind = self.kind
        if kind in NET_KINDS:
            return "net" + self.via
        if kind == UPDATE and self.via == UpdatePlace.HOST:
            return "host"
        return _LANES.get(kind, "compute")

    @property
    def queue(self) -> str:
        """The lane, or for streamed optimizer state a queue of its own that other copies of the lane may overtake."""
        return f"{self.lane} for streamed state" if self.what == ValueKind.OPTIMIZER_STATE else self.lane

    @property
    def peer(self) -> int:
        """The other worker of a SEND or RECV."""
        return int(self.via[1:])

    @property
    def group(self) -> str:
        """The name of a collective's group; '' for other actions."""
        return self.via[1:] if self.via[:1] == "*" else ""

    @property
    def update_place(self) -> UpdatePlace | None:
        """Where an UPDATE runs; None for other actions."""
        return _UPDATE_PLACES.get(self.via) if self.kind == UPDATE else None


_UPDATE_PLACES: dict[str, UpdatePlace] = {place.value: place for place in UpdatePlace}
_LANES = {FETCH: "copy-in", OFFLOAD: "copy-out"}

_TEXT = re.compile(
    rf"({'|'.join(sorted(ACTION_KINDS, key=len, reverse=True))})(?::([{''.join(VALUE_KINDS)}]))?"
    r"(\d{1,18})(?:/(\d{1,18}))?(?:\.(\d{1,18}))?(?:@(\d{1,18}))?([><]\d{1,18}|\*[\w.-]+|~[a-z]+)?",
    re.ASCII,
)


def parse_action(text: str) -> Action:
    """Parses what `str(action)` printed; raises InputError for other text."""
    match = _TEXT.fullmatch(text.strip())
    if not match:
        raise InputError(f"'{text}' is not an action; it looks like F2.5@0 or SEND:x2.5>3")
    kind, what, piece, replica, microbatch, version, via = match.groups()
    return Action(
        ActionKind(kind),
        int(piece),
        int(replica or 0),
        -1 if microbatch is None else int(microbatch),
        -1 if version is None else int(version),
        ValueKind(what) if what else None,
        _UPDATE_PLACES.get(via or "", Via(via or "")),
    )


def value_of(a: Action, place: ValuePlace = DEVICE) -> Value:
    """Returns the value that a transfer, collective or DROP names."""
    _, piece, replica, microbatch, version, what, _ = a
    assert what is not None
    if what in BY_MICROBATCH:
        return _new(Value, (what, piece, 0, microbatch, place))
    return _new(Value, (what, piece, replica, version, place))


_new = tuple.__new__
