"""Values: what actions read and write, by kind, piece, replica, number and place.

The number is the microbatch of an activation, its gradient, saved tensors or a batch. For all other kinds it is the
version, update or wave. Activations and their gradients carry replica 0: a microbatch belongs to one replica, so its
number says which. A value names a tensor or a set of tensors and holds none.
"""

from enum import StrEnum
from typing import NamedTuple


class ValueKind(StrEnum):
    """What a value is; the letter is its printed form."""

    ACTIVATION = "x"
    GRADIENT = "g"
    SAVED = "s"
    WEIGHTS = "w"
    WEIGHT_GRADIENT = "d"
    OPTIMIZER_STATE = "o"
    NORM = "n"
    BATCH = "b"
    PUSH = "p"
    CONSENSUS = "c"
    SCORE = "e"
    WORKSPACE = "t"


# Plain names for the loops that run once per action: attribute access on an enum class is slow.
ACTIVATION, GRADIENT, SAVED, BATCH = ValueKind.ACTIVATION, ValueKind.GRADIENT, ValueKind.SAVED, ValueKind.BATCH
WEIGHTS, WEIGHT_GRADIENT, OPTIMIZER_STATE = ValueKind.WEIGHTS, ValueKind.WEIGHT_GRADIENT, ValueKind.OPTIMIZER_STATE
NORM, PUSH, CONSENSUS, SCORE = ValueKind.NORM, ValueKind.PUSH, ValueKind.CONSENSUS, ValueKind.SCORE
WORKSPACE = ValueKind.WORKSPACE

VALUE_KINDS = {
    ACTIVATION: "activation: the output of a piece for a microbatch",
    GRADIENT: "gradient: what the backward of a piece passes to the pieces before it",
    SAVED: "saved tensors: what a forward keeps for its backward",
    WEIGHTS: "weights of a piece, in one version",
    WEIGHT_GRADIENT: "weight gradient of a piece, summed for one update",
    OPTIMIZER_STATE: "streamed optimizer state of a piece: kept in host memory, copied to the device for each update",
    NORM: "norm of an update's gradients over all pieces",
    BATCH: "batch: the samples of a microbatch",
    PUSH: "push: the updates of a wave, summed for the server",
    CONSENSUS: "consensus: the server's sum of a wave's pushes from all replicas",
    SCORE: "score of a replica's gradient, evaluated by the server",
}
"""The kinds that an action can name, with what each is."""

BY_MICROBATCH = frozenset((ACTIVATION, GRADIENT, SAVED, BATCH))
"""Kinds whose number is a microbatch."""


class ValuePlace(StrEnum):
    """The memory that holds a value, relative to its worker."""

    DEVICE = ""
    HOST = "host"
    SHARD = "shard"


DEVICE, HOST, SHARD = ValuePlace.DEVICE, ValuePlace.HOST, ValuePlace.SHARD

_new = tuple.__new__  # the generated constructor of a NamedTuple takes twice as long


class Value(NamedTuple):
    """One value of a program; made by the constructor of its kind and used as a key."""

    kind: ValueKind
    piece: int
    replica: int
    number: int
    """The microbatch, version, update or wave."""
    place: ValuePlace

    @classmethod
    def activation(cls, piece: int, microbatch: int) -> "Value":
        """Returns the output of a piece."""
        return _new(cls, (ACTIVATION, piece, 0, microbatch, DEVICE))

    @classmethod
    def gradient(cls, piece: int, microbatch: int) -> "Value":
        """Returns the gradient of a piece's input."""
        return _new(cls, (GRADIENT, piece, 0, microbatch, DEVICE))

    @classmethod
    def saved(cls, piece: int, microbatch: int) -> "Value":
        """Returns what a forward keeps for its backward."""
        return _new(cls, (SAVED, piece, 0, microbatch, DEVICE))

    @classmethod
    def batch(cls, piece: int, microbatch: int) -> "Value":
        """Returns the samples that a first piece reads."""
        return _new(cls, (BATCH, piece, 0, microbatch, DEVICE))

    @classmethod
    def weights(cls, piece: int, replica: int, version: int, place: ValuePlace = DEVICE) -> "Value":
        """Returns one version of a piece's weights."""
        return _new(cls, (WEIGHTS, piece, replica, version, place))

    @classmethod
    def weight_gradient(cls, piece: int, replica: int, update: int, place: ValuePlace = DEVICE) -> "Value":
        """Returns the gradient of a piece's weights, summed for one update."""
        return _new(cls, (WEIGHT_GRADIENT, piece, replica, update, place))

    @classmethod
    def optimizer_state(cls, piece: int, replica: int, version: int) -> "Value":
        """Returns the streamed optimizer state of a piece, on the device."""
        return _new(cls, (OPTIMIZER_STATE, piece, replica, version, DEVICE))

    @classmethod
    def norm(cls, update: int) -> "Value":
        """Returns the norm of an update's gradients over all pieces."""
        return _new(cls, (NORM, 0, 0, update, DEVICE))

    @classmethod
    def push(cls, piece: int, replica: int, wave: int) -> "Value":
        """Returns the updates of one replica's wave, summed for the server."""
        return _new(cls, (PUSH, piece, replica, wave, DEVICE))

    @classmethod
    def consensus(cls, piece: int, wave: int) -> "Value":
        """Returns the server's sum of a wave's pushes."""
        return _new(cls, (CONSENSUS, piece, 0, wave, DEVICE))

    @classmethod
    def score(cls, piece: int, replica: int, update: int) -> "Value":
        """Returns the server's score of one replica's gradient."""
        return _new(cls, (SCORE, piece, replica, update, DEVICE))

    @classmethod
    def workspace(cls, piece: int, replica: int, place: ValuePlace) -> "Value":
        """Returns the memory that an action needs only while it runs."""
        return _new(cls, (WORKSPACE, piece, replica, -1, place))

    def at(self, number: int) -> "Value":
        """Returns the same value at another microbatch, version or update."""
        return _new(Value, (self[0], self[1], self[2], number, self[4]))

    def __str__(self) -> str:
        kind, piece, replica, number, place = self
        text = f"{kind}{piece}" + (f"/{replica}" if replica else "")
        text += f".{number}" if kind in BY_MICROBATCH else f"@{number}"
        return text + {DEVICE: "", HOST: " on the host", SHARD: " as a shard"}[place]
