"""Heartbeats between torchrun ranks, sent through the store; a rank without a recent heartbeat counts as lost.

A process that ends closes its connections, which its peers notice at once. A host that loses power or network closes
nothing, and without heartbeats its peers would wait for ever.
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
"""Seconds between two heartbeats."""


class HeartbeatMessage(NamedTuple):
    """The content of a heartbeat: the rank's process and its current action."""

    host: str
    pid: int
    doing: str


class RankHeartbeat:
    """Sends one rank's heartbeats and monitors others: rank 0 monitors all ranks, and each of them monitors rank 0.

    `message` returns the content of this rank's next heartbeat. `end` is called when a rank is lost, with the rank, the
    timeout in seconds and its last message, if any; it should end the process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        end: Callable[[int, float, HeartbeatMessage | None], None],
        message: Callable[[], HeartbeatMessage],
    ):
        self.rank, self.end, self.message = rank, end, message
        self.silent_s = SILENT_S
        """Timeout for the heartbeats of other ranks."""
        # A blocking `get()` holds the shared connection, so heartbeats have their own.
        self.store: Store = store.clone()  # type: ignore[attr-defined]
        others = range(1, size) if rank == 0 else range(1)
        self.heard_s = dict.fromkeys(others, time.monotonic())
        self.last: dict[int, bytes] = {}
        self._ended = threading.Event()
        for task in (self._beat, self._judge):
            threading.Thread(target=task, daemon=True).start()

    def allow(self, silent_s: float | None) -> None:
        """Sets the timeout; 0 for none, None for the default."""
        self.silent_s = SILENT_S if silent_s is None else silent_s or math.inf

    def stop(self) -> None:
        """Stops heartbeats and monitoring; other ranks must have stopped theirs, or they report this one as lost."""
        self._ended.set()

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store is gone; `_judge` reports the timeout
            for number in count():
                self.store.set(str(self.rank), json.dumps([number, *self.message()]))
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
