"""Text for a terminal: what it would obey rather than show is replaced by what it is."""

import re
import sys

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Control characters but tab and newline, what changes the direction of writing, and halves of characters."""


def printable(text: object) -> str:
    """Returns text with each character that a terminal obeys, or cannot encode, as Python writes it."""
    return _OBEYED.sub(lambda found: _escaped(found[0]), str(text))


def tell(text: object) -> None:
    """Prints a sentence of this program for the user, on stderr."""
    print_error(f"pipedejavu: {text}")


def print_error(text: object) -> None:
    """Prints text of any origin on stderr, at once."""
    print(printable(text), file=sys.stderr, flush=True)


def json_safe(text: str) -> str:
    """Returns JSON with the same characters as JSON writes them; they are inside its strings."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escaped(character: str) -> str:
    number = ord(character)
    if character == "\r":
        return "\\r"
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
