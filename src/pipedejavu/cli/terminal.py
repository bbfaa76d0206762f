"""The one way to the terminal: text is printed as it is, and only what is styled here is styled.

Names, paths and messages come from others: brackets in them are no markup, ':x:' is no emoji, and a control character
is shown and not obeyed.
"""

from typing import Any

from rich.console import Console
from rich.text import Text

from pipedejavu.facts import to_json_text
from pipedejavu.facts.printable import json_safe, printable


class Terminal(Console):
    """A console that knows no markup and obeys no control character of a text."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns a text as it is; all that is printed, cells of tables included, comes by here."""
        return super().render_str(printable(text), **options)


def terminal(**options: Any) -> Terminal:
    """Returns a terminal; takes the options of rich's Console."""
    return Terminal(markup=False, emoji=False, highlight=False, **options)


def styled(text: object, style: str) -> Text:
    """Returns a text of any origin in a style."""
    return Text(printable(text), style)


def print_json(form: Any) -> None:
    """Prints an object as one line of JSON, with null for NaN and infinity."""
    print(json_safe(to_json_text(form, is_ascii=False)))
