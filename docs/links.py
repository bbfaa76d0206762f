"""Lets pages that link to files of the repository, which are no part of the site, name those files instead."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:src|examples|bench|tests)/[^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns a page's text with such links as the names of their files."""
    return _OUTSIDE.sub(lambda found: f"{found[1]} (`{found[2]}`)", markdown)
