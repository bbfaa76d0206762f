"""A hand: a thread that lasts from call to call, and goes with whoever holds it."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Call = Callable[[], None]


class WorkerThread:
    """Carries out calls, which must not raise, one by one; a call that never returns keeps no process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        threading.Thread(target=_go, args=(self._calls,), daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def do(self, call: Call) -> None:
        """Hands a call over; does not wait for it."""
        self._calls.put(call)


def _go(calls: "SimpleQueue[Call | None]") -> None:
    while call := calls.get():
        call()
        del call  # and what it holds
