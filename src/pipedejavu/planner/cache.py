"""A cache of measured records in the user's cache folder; a record is valid for some days."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pipedejavu.facts import InputError, Record, remove

R = TypeVar("R", bound=Record)

AGE_S = 7 * 24 * 3600
"""Age after which a record is measured again, since the load of a machine changes."""


def store_folder() -> Path:
    """Returns the folder of the cache: in XDG_CACHE_HOME if that is set, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipedejavu"


def find(form: type[R], key: Mapping[str, object]) -> R | None:
    """Returns the cached record of a key; None if it is missing, too old or unreadable."""
    path = _path(form, key)
    with suppress(OSError, InputError):
        if time.time() - path.stat().st_mtime < AGE_S:
            return form.load(path)
    return None


def keep(record: Record, key: Mapping[str, object]) -> None:
    """Writes a record to the cache; does nothing if the cache cannot be written."""
    path = _path(type(record), key)
    with suppress(OSError, InputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        record.save(path)


def find_or_make(form: type[R], key: Mapping[str, object], make: Callable[[], R], *, renews: bool) -> R:
    """Returns the cached record of a key, or makes it and writes it to the cache; `renews` always makes it."""
    record = None if renews else find(form, key)
    if record is None:
        record = make()
        keep(record, key)
    return record


def newest(form: type[R], most: int) -> list[R]:
    """Returns up to `most` records of a kind, of any age, the oldest first; removes older ones from the cache."""
    dated = []
    for path in store_folder().glob(f"{form.__name__.lower()}-*.json"):
        with suppress(OSError):
            dated.append((path.stat().st_mtime, path))
    dated.sort()
    records = []
    for _, path in dated[-most:]:
        with suppress(OSError, InputError):
            records.append(form.load(path))
    for _, path in dated[:-most]:
        remove(path)
    return records


def _path(form: type[Record], key: Mapping[str, object]) -> Path:
    text = json.dumps(key, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return store_folder() / f"{form.__name__.lower()}-{digest}.json"
