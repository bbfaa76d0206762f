"""Actions: what a worker does, one record each. An action prints as short text and parses back.

    F2.5@0          forward of piece 2, microbatch 5, with weights of version 0
    B2/1.5@0        backward of replica 1's piece 2
    SEND:x2.5>3     sends the activation of piece 2, microbatch 5, to worker 3
    REDUCE:d2@0*dp2 sums the gradients of update 0 of piece 2 over the group dp2
    UPDATE2@1~host  writes version 1 of piece 2's weights, in host memory

An action knows nothing of time, of tensors or of how it is carried out.
"""

import re
from typing import NamedTuple

from pipedejavu.facts import InputError

KINDS = {
    "F": "forward of a piece for a microbatch",
    "B": "backward of a piece for a microbatch, both halves",
    "I": "the half of a backward that makes the gradient of the piece's input",
    "W": "the half of a backward that makes the gradient of the piece's weights",
    "R": "forward again, for the sake of what the backward needs",
    "SEND": "hands a value to another worker",
    "RECV": "takes a value from another worker",
    "REDUCE": "sums or averages a value over a group, in place",
    "GATHER": "makes a value whole from the parts that a group holds, in place",
    "OFFLOAD": "moves a value from the device to its host's memory",
    "FETCH": "brings a value from the host's memory to the device",
    "UPDATE": "applies gradients: writes the next version of a piece's weights",
    "DROP": "frees a value that would be kept otherwise",
    "EVAL": "scores a contribution on samples of the server's own",
}

WHATS = {
    "x": "activation: the output of a piece for a microbatch",
    "g": "gradient: what the backward of a piece hands to the pieces before it",
    "s": "saved: what a forward keeps for its backward",
    "w": "weights of a piece, in one version",
    "d": "weight gradient of a piece, summed for one update",
    "o": "optimizer state of a piece that rests in host memory and visits the device",
    "n": "norm of an update's gradients over all pieces",
    "b": "batch: the samples of a microbatch",
    "p": "push: the updates of a wave, summed for the server",
    "c": "consensus: the server's weights once all members' waves are in",
    "e": "evaluation: a contribution's score",
}


class Action(NamedTuple):
    """One entry of a worker's program; -1 stands for 'none' in the number fields."""

    kind: str
    piece: int
    replica: int = 0
    microbatch: int = -1
    version: int = -1
    what: str = ""
    via: str = ""
    """'>3' and '<3' name a peer, '*name' a group, '~host' and '~shard' the place of an update."""

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
        if kind in _NET:
            return "net" + self.via
        if kind == "UPDATE" and self.via == "~host":
            return "host"
        return _LANES.get(kind, "compute")

    @property
    def queue(self) -> str:
        """Whom it waits for in its lane: state that visits has a line of its own, and others go in between."""
        return f"{self.lane} of visitors" if self.what == "o" else self.lane

    @property
    def peer(self) -> int:
        """The other worker of a SEND or RECV."""
        return int(self.via[1:])


COMPUTE_KINDS = frozenset("FBIWR")
"""Kinds that always run on the compute lane."""

_NET = frozenset(("SEND", "RECV", "REDUCE", "GATHER"))
_LANES = {"FETCH": "copy-in", "OFFLOAD": "copy-out"}

_TEXT = re.compile(
    rf"({'|'.join(sorted(KINDS, key=len, reverse=True))})(?::([{''.join(WHATS)}]))?"
    r"(\d{1,18})(?:/(\d{1,18}))?(?:\.(\d{1,18}))?(?:@(\d{1,18}))?([><]\d{1,18}|\*[\w.-]+|~[a-z]+)?",
    re.ASCII,
)


def parse_action(text: str) -> Action:
    """Parses what `str(action)` printed; raises InputError otherwise."""
    match = _TEXT.fullmatch(text.strip())
    if not match:
        raise InputError(f"'{text}' is not an action; it looks like F2.5@0 or SEND:x2.5>3")
    kind, what, piece, replica, microbatch, version, via = match.groups()
    return Action(
        kind,
        int(piece),
        int(replica or 0),
        -1 if microbatch is None else int(microbatch),
        -1 if version is None else int(version),
        what or "",
        via or "",
    )
