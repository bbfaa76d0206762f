"""Output to the terminal: text is printed literally, without markup, emoji codes or control characters.

Names, paths and messages come from outside, so brackets in them are not markup, and control characters are shown as
text. Only `styled` gives text a style.
"""

from typing import Any

from rich.console import Console
from rich.text import Text

from pipedejavu.facts import to_json_text
from pipedejavu.facts.printable import json_safe, printable


class Terminal(Console):
    """A console that prints text literally."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns a text as it is; rich calls it for everything it prints, including table cells."""
        return super().render_str(printable(text), **options)


def terminal(**options: Any) -> Terminal:
    """Returns a terminal; takes the options of rich's Console."""
    return Terminal(markup=False, emoji=False, highlight=False, **options)


def styled(text: object, style: str) -> Text:
    """Returns a text in a style."""
    return Text(printable(text), style)


def print_json(form: Any) -> None:
    """Prints an object as one line of JSON, with null for NaN and infinity."""
    print(json_safe(to_json_text(form, is_ascii=False)))
