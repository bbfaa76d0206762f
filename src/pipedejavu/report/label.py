"""Parses the text of an action for display: its parts, and a description in words.

Unlike the program's own parser it is tolerant: a page or trace must open even if a timeline has an action that this
version does not know. It does not check whether an action is legal.
"""

import re
from typing import NamedTuple

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recompute",
    "UPDATE": "update",
    "EVAL": "evaluation",
    "REDUCE": "reduce",
    "SUM": "sum",
    "GATHER": "gather",
    "SEND": "send",
    "RECV": "receive",
    "OFFLOAD": "offload",
    "FETCH": "fetch",
    "DROP": "drop",
}
"""Name of each known kind of action, in the order of display."""

UNKNOWN = "?"
"""The kind of an action whose text cannot be parsed."""

_VERBS = {
    "F": "computes the forward",
    "B": "computes the backward",
    "I": "computes the input gradient",
    "W": "computes the weight gradient",
    "R": "recomputes the forward",
    "UPDATE": "updates the weights",
    "EVAL": "scores the contribution",
    "REDUCE": "reduces",
    "SUM": "sums",
    "GATHER": "gathers",
    "SEND": "sends",
    "RECV": "receives",
    "OFFLOAD": "copies to the host",
    "FETCH": "copies to the device",
    "DROP": "drops",
}

_VALUES = {
    "x": "activation",
    "g": "gradient of the activation",
    "s": "saved activations",
    "w": "weights",
    "d": "weight gradient",
    "o": "optimizer state",
    "n": "gradient norm",
    "p": "pushed update",
    "c": "consensus weights",
    "b": "batch",
    "e": "evaluation score",
}

_VIAS = {">": "to worker", "<": "from worker", "*": "among group", "~": "on the"}

_ACTION = re.compile(
    r"""(?P<kind>[A-Z]+)
        (?: : (?P<what>[a-z]+) )?
        (?P<piece>\d+)?
        (?: / (?P<replica>\d+) )?
        (?: \. (?P<microbatch>\d+) )?
        (?: @ (?P<version>\d+) )?
        (?P<via>[<>*~].*)?""",
    re.VERBOSE | re.ASCII,
)


class Label(NamedTuple):
    """The parts of an action's text; a missing or unreadable part is None or empty."""

    kind: str
    what: str = ""
    piece: int | None = None
    replica: int | None = None
    microbatch: int | None = None
    version: int | None = None
    via: str = ""


def parse_label(action: str) -> Label:
    """Splits an action's text into its parts; text that cannot be parsed has the kind UNKNOWN."""
    match = _ACTION.fullmatch(action)
    if not match:
        return Label(UNKNOWN)

    def number(part: str) -> int | None:
        return int(match[part]) if match[part] else None

    return Label(
        kind=match["kind"],
        what=match["what"] or "",
        piece=number("piece"),
        replica=number("replica"),
        microbatch=number("microbatch"),
        version=number("version"),
        via=match["via"] or "",
    )


def name_in_words(label: Label, piece: str = "stage") -> str:
    """Returns a short name: 'forward, microbatch 5, stage 2'; `piece` is what the pieces of the program are called."""
    parts = [" ".join(filter(None, (KINDS.get(label.kind, "action"), _VALUES.get(label.what, label.what))))]
    parts += [] if label.microbatch is None else [f"microbatch {label.microbatch}"]
    parts += [] if label.piece is None else [f"{piece} {label.piece}"]
    parts += [] if label.replica is None else [f"replica {label.replica}"]
    return ", ".join(parts)


def describe(label: Label) -> str:
    """Returns what an action does in words: 'computes the forward of piece 2, microbatch 5, …'."""
    if label.kind not in KINDS:
        return "an action that this version cannot describe"
    words = _VERBS[label.kind]
    if label.what:
        words += f" the {_VALUES.get(label.what, label.what)}"
    parts = [words if label.piece is None else f"{words} of piece {label.piece}"]
    if label.replica is not None:
        parts.append(f"replica {label.replica}")
    if label.microbatch is not None:
        parts.append(f"microbatch {label.microbatch}")
    if label.version is not None:
        parts.append(_describe_version(label))
    if label.via:
        parts.append(f"{_VIAS[label.via[0]]} {label.via[1:]}")
    return ", ".join(parts)


def _describe_version(label: Label) -> str:
    if label.kind == "UPDATE":
        return f"writing version {label.version}"
    return f"version {label.version}" if label.what else f"weights version {label.version}"
