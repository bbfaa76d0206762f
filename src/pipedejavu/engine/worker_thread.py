"""A worker thread: runs calls one by one, and ends when its object is garbage-collected."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Call = Callable[[], None]


class WorkerThread:
    """Runs calls, which must not raise, one by one on a daemon thread."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        threading.Thread(target=_go, args=(self._calls,), daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def do(self, call: Call) -> None:
        """Queues a call and returns at once."""
        self._calls.put(call)


def _go(calls: "SimpleQueue[Call | None]") -> None:
    while call := calls.get():
        call()
        del call  # frees what it references
