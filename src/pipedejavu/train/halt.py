"""How a run is stopped between two updates, on all ranks alike: SIGTERM asks, and everyone ends with the same update.

Ranks do not meet between updates, and nothing is looked up while nobody asks. Once asked, each rank says that it looks
for the word at the end of every round; when all do, the first rank names an update two rounds ahead of its own, which
nobody can have ended: every update needs the first rank.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import Store

from pipedejavu.train.folder import RunFolder

GRACE_S = 30.0
"""How long a run that was asked to stop may take to end an update and save it."""
STOPPED = 75
"""The exit code of a worker that was stopped so; what a system calls a temporary failure."""


class StoppedError(Exception):
    """A run was asked to stop, and did; its text says what is saved."""


def describe_stop(folder: RunFolder) -> str:
    """Returns what a run that was stopped has left."""
    steps = folder.shelf.steps()
    if not steps:
        return "stopped by SIGTERM; nothing is saved yet"
    return f"stopped by SIGTERM; the run is saved up to step {steps[-1]}, and --resume goes on from there"


@contextmanager
def on_signal(number: int, call: Callable[..., None]) -> Iterator[None]:
    """Calls a function when a signal comes; only the main thread can, and a signal interrupts what it waits for."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, call)
    try:
        yield
    finally:
        signal.signal(number, before)


class Halt:
    """One rank's view of whether and when to stop."""

    def __init__(self, store: Store, rank: int, size: int):
        self.store, self.rank, self.size = store, rank, size
        self.asked = threading.Event()
        self.is_signalled = False
        """Whether it was a signal to this process that asked."""
        self.at: int | None = None
        """The update to stop behind."""
        self._is_known = self._is_ready = False

    def obey(self, number: int = signal.SIGTERM) -> None:
        """Lets a signal to this process ask for the end."""

        def take(*_: object) -> None:
            self.is_signalled = True
            self.asked.set()

        signal.signal(number, take)

    def listen(self) -> None:
        """Tells all ranks what one was asked; called now and then by a thread beside training."""
        if self._is_known:
            return
        if self.asked.is_set():
            self.store.set("asked", "")
        elif self.store.check(["asked"]):
            self.asked.set()
        self._is_known = self.asked.is_set()

    def is_due(self, update: int, steps: int) -> bool:
        """Whether to stop now; called at the end of every round, after an update, by programs of so many `steps`."""
        if not self.asked.is_set():
            return False
        self.listen()
        if not self._is_ready:
            self._is_ready = True
            self.store.add("ready", 1)
        if self.at is None and self.rank == 0 and self.store.add("ready", 0) == self.size:
            self.store.set("stop", str(update + 2 * steps))
        if self.at is None and self.store.check(["stop"]):
            self.at = int(self.store.get("stop"))
        return self.at is not None and update >= self.at
