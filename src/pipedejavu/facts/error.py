"""Errors that a user can act on, and suggestions for misspelled names."""

from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_MOST_NAMES = 60
_MOST_CHARACTERS = 80


class InputError(ValueError):
    """The user's input cannot be used; the text says what to change."""


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
    """Returns '; did you mean …?' with the known name nearest to `name`, or a list of the known names; ignores case."""
    names = {str(k).lower(): str(k) for k in known}
    close = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{names[close[0]]}'?"
    rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"; known: {', '.join(list(names.values())[:_MOST_NAMES])}{rest}" if names else ""


def brief(value: object) -> str:
    """Returns `repr(value)`, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def repeated(names: Iterable[str]) -> list[str]:
    """Returns the names that occur more than once, each once."""
    return [name for name, count in Counter(names).items() if count > 1]
