"""Text for a terminal, with control characters escaped."""

import re
import sys

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Control characters except tab and newline, characters that change the writing direction, and lone surrogates."""


def printable(text: object) -> str:
    """Returns text with each control character, and each character that cannot be encoded, escaped as in Python."""
    return _OBEYED.sub(lambda match: _escaped(match[0]), str(text))


def tell(text: object) -> None:
    """Prints a message of this program on stderr."""
    print_error(f"pipedejavu: {text}")


def print_error(text: object) -> None:
    """Prints any text on stderr and flushes."""
    print(printable(text), file=sys.stderr, flush=True)


def json_safe(text: str) -> str:
    """Returns JSON with the same characters escaped as in JSON; they occur only inside strings."""
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escaped(character: str) -> str:
    number = ord(character)
    if character == "\r":
        return "\\r"
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
