"""The lock of a run folder, and the record of why a run ended early.

A run takes the lock before it reads, cleans or writes anything in its folder, and keeps it until it ends; the operating
system releases it however the process ends. An unlocked folder without a result therefore holds a run that failed or
was stopped.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipedejavu.facts import InputError
from pipedejavu.run.run_folder import RunFolder
from pipedejavu.run.stop_signal import StoppedError

LOCK = "lock"
"""A separate file, because network file systems cannot lock folders."""
_PATIENCE_S = 1.0
"""How long to retry: `is_locked` in another process takes the lock for a moment."""
_LOOK_S = 0.02

_HOLDERS: dict[str, tuple[int, int]] = {}
"""The (process, thread) that holds each folder, by real path."""


def is_locked(path: Path) -> bool:
    """Whether a run is in progress in a folder; always False on a file system without locks."""
    try:
        file = os.open(path / LOCK, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not _takes(file, fcntl.LOCK_SH)
    finally:
        os.close(file)


@contextmanager
def lock_run(path: str | Path) -> Iterator[None]:
    """Locks a run folder, creating it if needed; raises InputError if another process or thread holds the lock.

    The thread that holds the lock may enter again. A created folder that stays empty is removed.
    """
    folder, owner = Path(path), (os.getpid(), threading.get_ident())
    key = os.path.realpath(folder)
    if _HOLDERS.get(key) == owner:
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    file = _take(folder)
    _HOLDERS[key] = owner
    try:
        yield
    finally:
        del _HOLDERS[key]
        with suppress(OSError):
            if [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                for path in made:
                    path.rmdir()
        os.close(file)


def _take(folder: Path) -> int:
    """Returns the open, locked lock file of a folder."""
    last_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except FileNotFoundError:  # the previous holder has just removed the folder
            continue
        except OSError as error:
            raise InputError(f"cannot make the run folder {folder}: {error.strerror}") from None
        if _takes(file, fcntl.LOCK_EX) and _is_there(file, folder / LOCK):
            return file
        os.close(file)
        if time.monotonic() > last_s:
            raise InputError(f"another process trains in {folder} now; wait for it, or choose another --run-dir")
        time.sleep(_LOOK_S)


def _takes(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _is_there(file: int, path: Path) -> bool:
    """Whether an open lock file is still the one at its path; the previous holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False


@contextmanager
def noted(folder: RunFolder) -> Iterator[None]:
    """Records in a run's metrics that it was stopped, or why it failed."""
    try:
        yield
    except (StoppedError, KeyboardInterrupt):
        folder.add_metrics({"stopped": max(folder.checkpoint_dir.steps(), default=0)})
        raise
    except BaseException as error:
        folder.add_metrics({"failed": str(error).rpartition("\n")[2] or type(error).__name__})
        raise
