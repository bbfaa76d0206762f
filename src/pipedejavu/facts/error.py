"""Errors that a user can act on, and the search for the name they meant."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class InputError(ValueError):
    """Something the user gave cannot be used; its text says what to change."""


class FaultsError(InputError):
    """Several faults of one input, reported together."""

    def __init__(self, subject: str, faults: Sequence[str]):
        self.subject = subject
        self.faults = tuple(faults)
        if len(faults) == 1:
            text = f"{subject}: {faults[0]}"
        else:
            text = f"{subject} has {len(faults)} faults:" + "".join(f"\n  - {f}" for f in faults)
        super().__init__(text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns '; did you mean …?' for the known name closest to `name`, else the list of all."""
    names = [str(k) for k in known]
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(names)}" if names else ""
