"""Trials of the disk that runs write to."""

import os
import time
from pathlib import Path

from pipedejavu.facts import format_bytes
from pipedejavu.probe.series import TimedTrial

SIZE = 32 << 20
CHUNK = 4 << 20


def disk_trials(path: Path) -> list[TimedTrial]:
    """Returns trials that write and read the file at `path`, which the caller removes."""
    data = os.urandom(CHUNK)

    def write_s(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            with path.open("wb", buffering=0) as file:
                for _ in range(SIZE // CHUNK):
                    file.write(data)
                os.fsync(file.fileno())
        return time.perf_counter() - start

    def read_s(count: int) -> float:
        if not path.exists():
            write_s(1)
        took_s = 0.0
        for _ in range(count):
            with path.open("rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):  # otherwise the page cache would be read
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                while file.read(CHUNK):
                    pass
                took_s += time.perf_counter() - start
        return took_s

    size = format_bytes(SIZE)
    return [
        TimedTrial("disk", "write", size, float(SIZE), "B/s", write_s),
        TimedTrial("disk", "read", size, float(SIZE), "B/s", read_s),
    ]
