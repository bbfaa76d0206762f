"""How a run is stopped between two updates, on all ranks alike: SIGTERM or SIGHUP asks, and all end with one update.

Ranks do not meet between updates, and nothing is looked up while nobody asks. Once asked, each rank says that it looks
for the word at the end of every round; when all do, the first rank names an update two rounds ahead of its own, which
nobody can have ended: every update needs the first rank.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import Store

from pipedejavu.run.run_folder import RunFolder

GRACE_S = 30.0
"""How long a run that was asked to stop may take to end an update and save it."""
STOPPED = 75
"""The exit code of a worker that was stopped so; what a system calls a temporary failure."""


class StoppedError(Exception):
    """A run was asked to stop, and did; its text says what is saved."""

    def __init__(self, text: str, number: int = signal.SIGTERM):
        super().__init__(text)
        self.number = number
        """The signal that asked."""


def stop_signals() -> tuple[int, ...]:
    """Returns the signals that stop a run; a run under `nohup` ignores SIGHUP from its start, and goes on doing so."""
    return (signal.SIGTERM,) if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGTERM, signal.SIGHUP)


def stopped(folder: RunFolder, number: int) -> StoppedError:
    """Returns what to raise for a run that a signal has stopped; it says what is saved."""
    by, steps, moved = (
        f"stopped by {signal.Signals(number).name}",
        folder.checkpoint_dir.steps(),
        folder.fallback.describe(),
    )
    if moved:
        return StoppedError(f"{by}; {moved}, and --resume goes on from there", number)
    if not steps:
        return StoppedError(f"{by}; nothing is saved yet", number)
    return StoppedError(f"{by}; the run is saved up to step {steps[-1]}, and --resume goes on from there", number)


@contextmanager
def on_stop(call: Callable[[int], None]) -> Iterator[None]:
    """Calls a function when a signal asks to stop; only the main thread can, and a signal interrupts what it waits for.

    A terminal that is gone gets no more output, which would fail.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def take(number: int, _: object) -> None:
        leave_terminal()
        call(number)

    before = {number: signal.signal(number, take) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_terminal() -> None:
    """Sends the output of this process nowhere if its terminal was closed."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


class StopSignal:
    """One rank's view of whether and when to stop."""

    def __init__(self, store: Store, rank: int, size: int):
        self.store, self.rank, self.size = store, rank, size
        self.asked = threading.Event()
        self.number = 0
        """The signal that asked, of any rank; 0 if none did."""
        self.at: int | None = None
        """The update to stop behind."""
        self._is_known = self._is_ready = False

    def obey(self) -> None:
        """Lets a signal to this process ask for the end."""

        def take(number: int, _: object) -> None:
            leave_terminal()
            self.number = number
            self.asked.set()

        for number in stop_signals():
            signal.signal(number, take)

    def listen(self) -> None:
        """Tells all ranks what one was asked; called now and then by a thread beside training."""
        if self._is_known:
            return
        if self.asked.is_set():
            self.store.set("asked", str(self.number))
        elif self.store.check(["asked"]):
            self.number = int(self.store.get("asked"))
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
