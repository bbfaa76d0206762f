"""Who works in a run folder, and how a run ended that did not reach its end.

A run holds its folder while it goes on; the system lets go of it whatever ends the process. So a folder that nobody
holds and that has no result is one of a run that failed or was stopped.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipedejavu.facts import InputError
from pipedejavu.train.folder import RunFolder
from pipedejavu.train.halt import StoppedError

_PATIENCE_S = 1.0
"""Whoever only looks holds a folder for a moment."""


def is_held(path: Path) -> bool:
    """Whether a run goes on in a folder now; where the file system has no locks, nobody seems to be there."""
    if not path.is_dir():
        return False
    seat = os.open(path, os.O_RDONLY)
    try:
        return not _takes(seat, fcntl.LOCK_SH)
    finally:
        os.close(seat)


def check_free(path: Path) -> None:
    """Raises InputError where a run goes on in a folder."""
    if is_held(path):
        raise InputError(f"another process trains in {path} now; wait for it, or choose another --run-dir")


@contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Holds a run's folder while it trains; notes in its metrics that it was stopped, or why it failed."""
    seat = os.open(folder.path, os.O_RDONLY)
    try:
        last_s = time.monotonic() + _PATIENCE_S
        while not _takes(seat, fcntl.LOCK_EX):
            if time.monotonic() > last_s:
                check_free(folder.path)
            time.sleep(0.02)
        with _noted(folder):
            yield
    finally:
        os.close(seat)


def _takes(seat: int, kind: int) -> bool:
    try:
        fcntl.flock(seat, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


@contextmanager
def _noted(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except (StoppedError, KeyboardInterrupt):
        folder.add_metrics({"stopped": max(folder.shelf.steps(), default=0)})
        raise
    except BaseException as error:
        folder.add_metrics({"failed": str(error).rpartition("\n")[2] or type(error).__name__})
        raise
