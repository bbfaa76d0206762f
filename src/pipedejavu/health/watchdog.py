"""The watchdog of a worker: tracks the current action of each lane and reports a lane that hangs.

A worker reports its own action that takes far too long, with a stack trace. A process that is stopped, or whose threads
are all blocked, cannot report: the process that started it notices missing heartbeats and reads the worker's current
actions from shared memory. Times are from the monotonic clock, which all processes of a host share.
"""

import math
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

INTERVAL_S = 0.25
"""Seconds between two checks, each with a heartbeat."""
LEAST_LIMIT_S = 60.0
"""Smallest automatic limit on the time of one action."""
FACTOR = 10
"""The automatic limit is this multiple of the longest action so far or of an update's forecast. Actions that wait for
other workers have this multiple of the limit, so that the worker that hangs reports first."""
SILENT_S = 30.0
"""Heartbeat timeout; heartbeats have their own thread, so only a stopped or blocked process misses them."""
BEGIN_S = 300.0
"""Timeout for the first heartbeat of a process."""
LANES = 15
"""Lanes per worker on a heartbeat page."""
_SLOT = struct.Struct("<d56s")
"""One slot: the start time of a lane's action (0 if idle), then the names of lane and action."""
_SECTION_BYTES = (LANES + 1) * _SLOT.size


class LaneActivity(NamedTuple):
    """The current action of a lane and its start time."""

    lane: str
    action: str
    since_s: float

    @property
    def waits_for_others(self) -> bool:
        """Whether the action depends on another worker, as receives do."""
        return self.lane.startswith("net")

    def __str__(self) -> str:
        return f"{self.action} (lane {self.lane})"


class HangWatchdog:
    """Watches the lanes of one worker; calls `end` with a stack trace and a message if one hangs.

    Also writes heartbeats and current actions to `heartbeat_page`, if given, for another process to read. `option` is
    the option named in the message that raises the limit.
    """

    def __init__(
        self,
        rank: int,
        end: Callable[[str, str], None],
        heartbeat_page: "HeartbeatPage | None" = None,
        option: str = "--hang-after",
    ):
        self.rank, self.end, self.heartbeat_page, self.option = rank, end, heartbeat_page, option
        self.doing: dict[str, LaneActivity] = {}
        self.threads: dict[str, int] = {}
        self.limit_s, self.is_fixed = math.inf, True
        self._ended = threading.Event()
        threading.Thread(target=self._go, daemon=True).start()

    def allow(self, forecast_s: float, asked_s: float | None) -> None:
        """Sets the limit on an action's time: `asked_s` (0 for none), or if None, from the forecast of an update."""
        self.is_fixed = asked_s is not None
        self.limit_s = max(LEAST_LIMIT_S, FACTOR * forecast_s) if asked_s is None else asked_s or math.inf

    def notice(self, lane: str, action: str) -> None:
        """Records that a lane starts an action, or with an empty name, ends one; called from the lane's thread."""
        now_s = time.monotonic()
        if action:
            self.threads[lane] = threading.get_ident()
            self.doing[lane] = doing = LaneActivity(lane, action, now_s)
            if self.heartbeat_page:
                self.heartbeat_page.write(self.rank, doing)
            return
        ended = self.doing.pop(lane)
        if not self.is_fixed and FACTOR * (now_s - ended.since_s) > self.limit_s and not ended.waits_for_others:
            self.limit_s = FACTOR * (now_s - ended.since_s)
        if self.heartbeat_page:
            self.heartbeat_page.wipe(self.rank, lane)

    def hung(self) -> LaneActivity | None:
        """Returns an action that exceeds its limit, if any; those that do not wait for other workers first."""
        now_s = time.monotonic()
        late = [doing for doing in self.doing.copy().values() if now_s - doing.since_s > self.allowed_s(doing)]
        return min(late, key=lambda doing: doing.waits_for_others, default=None)

    def allowed_s(self, doing: LaneActivity) -> float:
        """Returns the limit for an action."""
        return self.limit_s * (FACTOR if doing.waits_for_others else 1)

    def describe(self) -> str:
        """Returns the current action of the worker as text."""
        return describe(self.doing.copy().values())

    def stop(self) -> None:
        """Stops the watchdog."""
        self._ended.set()

    def _go(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            if self.heartbeat_page:
                self.heartbeat_page.beat(self.rank)
            if hung := self.hung():
                lasts = f"{hung} has lasted {time.monotonic() - hung.since_s:.0f} s"
                allowed = f"{self.allowed_s(hung):.0f} s were allowed; {self.option} allows more"
                waits = ", in which it waits for others" if hung.waits_for_others else ""
                self.end(self._trace(hung.lane), f"worker {self.rank} hangs: {lasts}{waits}, and {allowed}")
                return

    def _trace(self, lane: str) -> str:
        """Returns the stack trace of a lane's thread."""
        frame = sys._current_frames().get(self.threads[lane])
        return "".join(traceback.format_stack(frame)) if frame else ""


class HeartbeatPage:
    """The heartbeats and current actions of all workers of a host, in a memory-mapped file.

    Each worker has a section: its number of heartbeats, then one slot per lane in the order of first use.
    """

    def __init__(self, path: Path, size: int):
        """Creates the file if needed, and allocates its space on disk."""
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(file, 0, size * _SECTION_BYTES)
            self.memory = mmap.mmap(file, size * _SECTION_BYTES)
        finally:
            os.close(file)
        self._slots: dict[str, int] = {}
        self._beats = 0

    def beat(self, rank: int) -> None:
        """Writes a heartbeat."""
        self._beats += 1
        _SLOT.pack_into(self.memory, rank * _SECTION_BYTES, self._beats, b"")

    def write(self, rank: int, doing: LaneActivity) -> None:
        """Writes the action that a lane starts; lanes beyond `LANES` are ignored."""
        slot = self._slots.setdefault(doing.lane, len(self._slots) + 1)
        if slot <= LANES:
            text = f"{doing.lane}\t{doing.action}".encode()
            _SLOT.pack_into(self.memory, rank * _SECTION_BYTES + slot * _SLOT.size, doing.since_s, text)

    def wipe(self, rank: int, lane: str) -> None:
        """Marks a lane as idle."""
        if (slot := self._slots[lane]) <= LANES:
            _SLOT.pack_into(self.memory, rank * _SECTION_BYTES + slot * _SLOT.size, 0.0, b"")

    def read(self, rank: int) -> bytes:
        """Returns the bytes of a worker's section, which it may be writing at the same time."""
        return self.memory[rank * _SECTION_BYTES : (rank + 1) * _SECTION_BYTES]


class HeartbeatMonitor:
    """Checks the heartbeats of all workers on a page; `silent_s` is the timeout, 0 for none, None for the default."""

    def __init__(self, heartbeat_page: HeartbeatPage, size: int, silent_s: float | None):
        self.heartbeat_page = heartbeat_page
        self.silent_s = SILENT_S if silent_s is None else silent_s or math.inf
        self.heard = {rank: (bytes(_SECTION_BYTES), time.monotonic() + BEGIN_S) for rank in range(size)}

    def missed(self, alive: Iterable[int]) -> str:
        """Returns a message about the first running worker whose heartbeat timed out; empty if there is none."""
        now_s = time.monotonic()
        for rank in alive:
            section, until_s = self.heard[rank]
            if (current := self.heartbeat_page.read(rank)) != section:
                self.heard[rank] = current, now_s + self.silent_s
            elif now_s > until_s:
                silent_s = self.silent_s if any(section) else BEGIN_S
                return f"worker {rank} was not heard for {silent_s:.0f} s{STUCK}; it was at {describe(_parse(section))}"
        return ""


STUCK = ": its process is stopped, or one of its threads keeps all others from running"


def describe(doing: Iterable[LaneActivity]) -> str:
    """Returns the oldest action of a worker as text, preferring those that do not wait for other workers."""
    ordered = sorted(doing, key=lambda d: (d.waits_for_others, d.since_s))
    return str(ordered[0]) if ordered else "nothing, between two actions"


def _parse(section: bytes) -> list[LaneActivity]:
    activities = []
    for since_s, text in list(_SLOT.iter_unpack(section))[1:]:
        lane, _, action = text.rstrip(b"\0").decode(errors="replace").partition("\t")
        if since_s and action:
            activities.append(LaneActivity(lane, action, since_s))
    return activities
