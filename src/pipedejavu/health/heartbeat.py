"""The pulse of a rank that torchrun started: others hear it by way of the store, and a rank that falls silent is lost.

A process that ends closes its connections, which its peers see at once. A host that loses its power or its cable closes
nothing, and those who wait for it would wait for ever.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from pipedejavu.health.watchdog import SILENT_S

INTERVAL_S = 1.0


class HeartbeatMessage(NamedTuple):
    """What a rank says of itself with each beat: its process, and what it is at."""

    host: str
    pid: int
    doing: str


class RankHeartbeat:
    """One rank's pulse and its ear: the first rank hears all others, each of them hears the first.

    `end` is called with a rank that was not heard, for how many seconds, and its last word if it has said any; it
    should end the process. `word` is asked for this rank's own.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        end: Callable[[int, float, HeartbeatMessage | None], None],
        word: Callable[[], HeartbeatMessage],
    ):
        self.rank, self.end, self.word = rank, end, word
        self.silent_s = SILENT_S
        """How long a rank may say nothing."""
        # A connection of its own: whoever waits on the one that all share keeps the others off it.
        self.store: Store = store.clone()  # type: ignore[attr-defined]
        others = range(1, size) if rank == 0 else range(1)
        self.heard_s = dict.fromkeys(others, time.monotonic())
        self.last: dict[int, bytes] = {}
        self._ended = threading.Event()
        for task in (self._beat, self._judge):
            threading.Thread(target=task, daemon=True).start()

    def allow(self, silent_s: float | None) -> None:
        """Says for how long a rank may say nothing; 0 is for ever."""
        self.silent_s = SILENT_S if silent_s is None else silent_s or math.inf

    def stop(self) -> None:
        """Ends pulse and ear; the others must have ended theirs, or they will miss this one."""
        self._ended.set()

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store is gone; then nobody is heard any more
            for number in count():
                self.store.set(str(self.rank), json.dumps([number, *self.word()]))
                for other in self.heard_s:
                    if self.store.check([str(other)]):
                        self._hear(other, self.store.get(str(other)))
                if self._ended.wait(INTERVAL_S):
                    return

    def _hear(self, other: int, heartbeat: bytes) -> None:
        if heartbeat != self.last.get(other):
            self.last[other], self.heard_s[other] = heartbeat, time.monotonic()

    def _judge(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            other = min(self.heard_s, key=lambda n: self.heard_s[n])
            if time.monotonic() - self.heard_s[other] > self.silent_s:
                last = self.last.get(other)
                self.end(other, self.silent_s, HeartbeatMessage(*json.loads(last)[1:]) if last else None)
                return
