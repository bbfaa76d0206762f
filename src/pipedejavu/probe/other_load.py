"""The load of other processes: the cores that they kept busy while this process and its children measured."""

import os
import time
from pathlib import Path

_FIELDS = 8
"""The times of the first line of /proc/stat that add up to all time; guests are counted in two of them already."""
_IDLE = (3, 4)


class OtherLoad:
    """Counts from its creation on what processes other than this one and its ended children take of the cores."""

    def __init__(self, cores: int, proc: Path = Path("/proc")):
        self.cores, self._stat = cores, proc / "stat"
        self._began_s, self._busy_s, self._own_s = time.perf_counter(), self._read_s(), _own_s()

    def busy_cores(self) -> float | None:
        """Returns the cores that others kept busy on average; None if the system does not say.

        In a container with some of a host's cores, the host's figures say nothing about these, and the average number
        of processes that wanted a core in the last minute stands in.
        """
        took_s, busy_s = time.perf_counter() - self._began_s, self._read_s()
        if busy_s is None or self._busy_s is None or took_s <= 0:
            return max(0.0, os.getloadavg()[0] - self.cores) if hasattr(os, "getloadavg") else None
        return max(0.0, busy_s - self._busy_s - (_own_s() - self._own_s)) / took_s

    def _read_s(self) -> float | None:
        """Returns the time that all cores were busy since the start; None if they are not the cores that are used."""
        try:
            name, *texts = self._stat.read_text("ascii").splitlines()[0].split()
        except (OSError, IndexError):
            return None
        if name != "cpu" or os.cpu_count() != self.cores:
            return None
        times = [int(text) for text in texts[:_FIELDS]]
        return sum(time for n, time in enumerate(times) if n not in _IDLE) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
