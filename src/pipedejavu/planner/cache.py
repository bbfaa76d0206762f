"""What is kept between runs: records that took a while to measure, each for what it was measured on, for some days."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pipedejavu.facts import InputError, Record

R = TypeVar("R", bound=Record)

AGE_S = 7 * 24 * 3600
"""After which a record is made again: machines are used for other things, too."""


def store_folder() -> Path:
    """Returns where records are kept: the user's cache, by XDG_CACHE_HOME where that is set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipedejavu"


def find(form: type[R], key: Mapping[str, object]) -> R | None:
    """Returns the record that is kept for a key; None where there is none, or it is too old or cannot be read."""
    path = _path(form, key)
    with suppress(OSError, InputError):
        if time.time() - path.stat().st_mtime < AGE_S:
            return form.load(path)
    return None


def keep(record: Record, key: Mapping[str, object]) -> None:
    """Keeps a record; where the cache cannot be written, nothing is kept."""
    path = _path(type(record), key)
    with suppress(OSError, InputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        record.save(path)


def find_or_make(form: type[R], key: Mapping[str, object], make: Callable[[], R], *, renews: bool) -> R:
    """Returns the record that is kept for a key, or makes and keeps it."""
    found = None if renews else find(form, key)
    if found is None:
        found = make()
        keep(found, key)
    return found


def _path(form: type[Record], key: Mapping[str, object]) -> Path:
    text = json.dumps(key, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return store_folder() / f"{form.__name__.lower()}-{digest}.json"
