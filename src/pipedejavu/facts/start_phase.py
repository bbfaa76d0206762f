"""Times the phases between a command and its first update: import, build, probe, cut, measure, search, and so on.

A process has one start at a time. Each second counts for the innermost phase; a phase in another thread is taken off
the phase of the main thread that waits for it.

    start     ├─ build ─┤├─ measure ───────────────┤├─ first update ──────┤
    inside                   ├─ compile ─┤              ├─ compile ─┤
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipedejavu.facts.quantity import format_seconds

PhaseName = Literal[
    "import", "build", "probe", "cut", "measure", "search", "check", "compile", "workers", "first update"
]


@dataclass(eq=False)
class _Open:
    """A phase that has not ended."""

    started_s: float
    inner_s: float = 0.0
    """Time of the phases inside."""


@dataclass
class StartPhases:
    """The phases of one start, with their seconds."""

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """How often each phase was entered."""
    is_over: bool = False
    """Whether the first update was made; later phases do not count."""
    _stacks: dict[int, list[_Open]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def restart(self) -> None:
        """Forgets what was timed; the next start begins."""
        with self._lock:
            self.seconds.clear()
            self.counts.clear()
            self._stacks.clear()
            self.is_over = False

    def add(self, name: PhaseName, time_s: float) -> None:
        """Counts time that was measured elsewhere."""
        with self._lock:
            if not self.is_over:
                self.seconds[name] = self.seconds.get(name, 0.0) + time_s
                self.counts[name] = self.counts.get(name, 0) + 1

    @contextmanager
    def phase(self, name: PhaseName) -> Iterator[None]:
        """Times the `with` block as a phase, without the phases inside it."""
        thread = threading.get_ident()
        here = _Open(time.perf_counter())
        with self._lock:
            self._stacks.setdefault(thread, []).append(here)
        try:
            yield
        finally:
            self._end(name, thread, here)

    def _end(self, name: PhaseName, thread: int, here: _Open) -> None:
        lasted_s = time.perf_counter() - here.started_s
        with self._lock:
            stack = self._stacks.get(thread, [])
            if here in stack:  # a new start may have begun inside
                del stack[stack.index(here) :]
            outer = stack or self._stacks.get(threading.main_thread().ident or 0, [])
            if outer:
                outer[-1].inner_s += lasted_s
        self.add(name, max(0.0, lasted_s - here.inner_s))

    def of_process(self) -> dict[str, float]:
        """Returns the seconds by phase, and since this process was started, in milliseconds' resolution."""
        return {name: round(time_s, 3) for name, time_s in (*self.seconds.items(), ("total", process_age_s()))}

    def __str__(self) -> str:
        """Returns the phases in the order in which they first ended, and their sum."""
        parts = (f"{name} {format_seconds(time_s)}" for name, time_s in self.seconds.items())
        return f"start: {', '.join(parts)}; together {format_seconds(sum(self.seconds.values()))}"


START = StartPhases()
"""The phases of this process's start."""


def process_age_s() -> float:
    """Returns the time since this process was started; 0 if the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
