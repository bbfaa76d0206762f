"""Stops a run between two updates when SIGTERM or SIGHUP arrives: all ranks end after the same update.

Ranks do not synchronise between updates, and without a signal nothing is polled. After a signal, each rank announces
that it now polls at the end of every round. When all ranks do, the lead chooses an update two rounds ahead of its own;
no rank can have passed it, because every round needs the lead: rank 0, or a server that outlives its workers.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import Store

from pipedejavu.run.run_folder import RunFolder

GRACE_S = 30.0
"""How long a run may take to finish and save an update after a stop signal."""
STOPPED = 75
"""Exit code of a worker that a signal stopped (EX_TEMPFAIL)."""


class StoppedError(Exception):
    """Raised when a run was stopped by a signal; the text says what is saved."""

    def __init__(self, text: str, number: int = signal.SIGTERM):
        super().__init__(text)
        self.number = number
        """The signal that stopped the run."""


def stop_signals() -> tuple[int, ...]:
    """Returns the signals that stop a run; SIGHUP only if it is not ignored already, as under `nohup`."""
    return (signal.SIGTERM,) if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGTERM, signal.SIGHUP)


def stopped(folder: RunFolder, number: int) -> StoppedError:
    """Returns the error to raise for a run that a signal has stopped."""
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
    """Calls `call` with the number of a stop signal while the context is active; does nothing outside the main thread.

    Redirects output to /dev/null if the terminal was closed, because writing to it would fail.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: object) -> None:
        leave_terminal()
        call(number)

    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_terminal() -> None:
    """Redirects stdout and stderr to /dev/null if their terminal was closed."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


class StopSignal:
    """Agrees with all other ranks on whether and after which update to stop."""

    def __init__(
        self, store: Store, rank: int, size: int, lead: int = 0, is_dead: Callable[[int], bool] = lambda _: False
    ):
        """`is_dead` says whether another rank has ended for good; only the lead calls it."""
        self.store, self.rank, self.size, self.lead, self.is_dead = store, rank, size, lead, is_dead
        self.asked = threading.Event()
        self.number = 0
        """The signal that any rank received; 0 if none."""
        self.at: int | None = None
        """The update to stop after."""
        self._is_known = self._is_ready = False

    def obey(self) -> None:
        """Installs handlers, so that a signal to this process requests a stop."""

        def handle(number: int, _: object) -> None:
            leave_terminal()
            self.number = number
            self.asked.set()

        for number in stop_signals():
            signal.signal(number, handle)

    def listen(self) -> None:
        """Shares a stop request among ranks; called periodically by a background thread."""
        if self._is_known:
            return
        if self.asked.is_set():
            self.store.set("asked", str(self.number))
        elif self.store.check(["asked"]):
            self.number = int(self.store.get("asked"))
            self.asked.set()
        self._is_known = self.asked.is_set()

    def is_due(self, update: int, steps: int) -> bool:
        """Whether to stop now; called at the end of every round, after `update`; a round has `steps` updates."""
        if not self.asked.is_set():
            return False
        self.listen()
        if not self._is_ready:
            self._is_ready = True
            self.store.set(f"ready/{self.rank}", "")
        if self.at is None and self.rank == self.lead and all(map(self._has_agreed, range(self.size))):
            self.store.set("stop", str(update + 2 * steps))
        if self.at is None and self.store.check(["stop"]):
            self.at = int(self.store.get("stop"))
        return self.at is not None and update >= self.at

    def _has_agreed(self, rank: int) -> bool:
        """Whether a rank polls at the end of every round, or is dead and need not."""
        return self.store.check([f"ready/{rank}"]) or self.is_dead(rank)
