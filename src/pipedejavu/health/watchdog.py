"""The vigil over a worker: what each of its lanes is at, and whether one hangs.

An action that takes far longer than an update should is told by its own worker, with where it is in the code. A process
that was stopped, or that lets none of its threads run, cannot tell: whoever started it hears it no more, and reads what
it was at from memory that both share. Times are of the monotonic clock, which all processes of a host have in common.
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
FLOOR_S = 60.0
"""How long any action may take."""
FACTOR = 10
"""How many times the longest action so far, or an update's forecast, an action may take; and how many times that one
that waits for others, who should tell first."""
SILENT_S = 30.0
"""How long a process may say nothing; its vigil has a thread of its own, so that only what stops a process stops it."""
BEGIN_S = 300.0
"""How long a process may take to say its first word."""
LANES = 15
"""Of a worker, that a slate has room for."""
_LANE = struct.Struct("<d56s")
"""Since when a lane is at something, or 0; its name and the action."""
_ROOM_BYTES = (LANES + 1) * _LANE.size


class LaneActivity(NamedTuple):
    """What a lane is at, and since when."""

    lane: str
    action: str
    since_s: float

    @property
    def waits_for_others(self) -> bool:
        """Whether it may take long because another worker does."""
        return self.lane.startswith("net")

    def __str__(self) -> str:
        return f"{self.action} (lane {self.lane})"


class HangWatchdog:
    """One worker's vigil over its own lanes; `end` is given where the code is, and a sentence, and should not return.

    It writes on a slate, if there is one, what another process may read. `option` is how the user allows more time.
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
        """Says how long an action may take: as long as was asked, 0 for ever, or by the forecast of an update."""
        self.is_fixed = asked_s is not None
        self.limit_s = max(FLOOR_S, FACTOR * forecast_s) if asked_s is None else asked_s or math.inf

    def notice(self, lane: str, action: str) -> None:
        """Takes what a lane begins, or that it has ended what it was at, which is no action; called by its thread."""
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
        """Returns what takes too long, if anything does."""
        now_s = time.monotonic()
        late = [doing for doing in self.doing.copy().values() if now_s - doing.since_s > self.allowed_s(doing)]
        return min(late, key=lambda doing: doing.waits_for_others, default=None)

    def allowed_s(self, doing: LaneActivity) -> float:
        """Returns how long it may take."""
        return self.limit_s * (FACTOR if doing.waits_for_others else 1)

    def describe(self) -> str:
        """Says what the worker is at."""
        return describe(self.doing.copy().values())

    def stop(self) -> None:
        """Ends the vigil."""
        self._ended.set()

    def _go(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            if self.heartbeat_page:
                self.heartbeat_page.beat(self.rank)
            if found := self.hung():
                lasts = f"{found} has lasted {time.monotonic() - found.since_s:.0f} s"
                allowed = f"{self.allowed_s(found):.0f} s were allowed; {self.option} allows more"
                waits = ", in which it waits for others" if found.waits_for_others else ""
                self.end(self._trace(found.lane), f"worker {self.rank} hangs: {lasts}{waits}, and {allowed}")
                return

    def _trace(self, lane: str) -> str:
        """Returns where a lane's thread is in the code."""
        frame = sys._current_frames().get(self.threads[lane])
        return "".join(traceback.format_stack(frame)) if frame else ""


class HeartbeatPage:
    """What every worker of a host is at, in a file that its processes have in their memory.

    A worker's room begins with how often it has looked after itself; then its lanes come, as they are first written.
    """

    def __init__(self, path: Path, size: int):
        """Makes the file where it is not there; the disk has room for it from then on."""
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(file, 0, size * _ROOM_BYTES)
            self.memory = mmap.mmap(file, size * _ROOM_BYTES)
        finally:
            os.close(file)
        self._places: dict[str, int] = {}
        self._beats = 0

    def beat(self, rank: int) -> None:
        """Shows that a worker is alive."""
        self._beats += 1
        _LANE.pack_into(self.memory, rank * _ROOM_BYTES, self._beats, b"")

    def write(self, rank: int, doing: LaneActivity) -> None:
        """Writes what a lane begins; lanes that there is no room for are left out."""
        place = self._places.setdefault(doing.lane, len(self._places) + 1)
        if place <= LANES:
            text = f"{doing.lane}\t{doing.action}".encode()
            _LANE.pack_into(self.memory, rank * _ROOM_BYTES + place * _LANE.size, doing.since_s, text)

    def wipe(self, rank: int, lane: str) -> None:
        """Writes that a lane is at nothing."""
        if (place := self._places[lane]) <= LANES:
            _LANE.pack_into(self.memory, rank * _ROOM_BYTES + place * _LANE.size, 0.0, b"")

    def read(self, rank: int) -> bytes:
        """Returns a worker's room as it is now, which it may be writing to."""
        return self.memory[rank * _ROOM_BYTES : (rank + 1) * _ROOM_BYTES]


class HeartbeatMonitor:
    """Hears the workers of a slate, each of which may be silent for a time; 0 is for ever."""

    def __init__(self, heartbeat_page: HeartbeatPage, size: int, silent_s: float | None):
        self.heartbeat_page = heartbeat_page
        self.silent_s = SILENT_S if silent_s is None else silent_s or math.inf
        self.heard = {rank: (bytes(_ROOM_BYTES), time.monotonic() + BEGIN_S) for rank in range(size)}

    def missed(self, alive: Iterable[int]) -> str:
        """Returns a sentence on a worker that is there and was not heard in time, or nothing."""
        now_s = time.monotonic()
        for rank in alive:
            room, until_s = self.heard[rank]
            if (found := self.heartbeat_page.read(rank)) != room:
                self.heard[rank] = found, now_s + self.silent_s
            elif now_s > until_s:
                silent_s = self.silent_s if any(room) else BEGIN_S
                return f"worker {rank} was not heard for {silent_s:.0f} s{STUCK}; it was at {describe(_parsed(room))}"
        return ""


STUCK = ": its process is stopped, or one of its threads keeps all others from running"


def describe(doing: Iterable[LaneActivity]) -> str:
    """Says what a worker is at: what it does itself before what it waits for, the oldest first."""
    found = sorted(doing, key=lambda d: (d.waits_for_others, d.since_s))
    return str(found[0]) if found else "nothing, between two actions"


def _parsed(room: bytes) -> list[LaneActivity]:
    found = []
    for since_s, text in list(_LANE.iter_unpack(room))[1:]:
        lane, _, action = text.rstrip(b"\0").decode(errors="replace").partition("\t")
        if since_s and action:
            found.append(LaneActivity(lane, action, since_s))
    return found
