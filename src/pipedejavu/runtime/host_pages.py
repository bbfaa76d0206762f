"""Host memory that is mapped in the background, before it is known what will take it.

The operating system maps a page when it is first written, and for the state of a large model that takes longer than
anything else before the first update. A program that knows how much it will need starts early:

    main thread   warm_host_memory(90 GB)   import torch   build the model   HybridAdamW   first step
    its threads   write 1st, 2nd, 3rd ... stretch of 64 MiB                  | the optimizer takes what is ready

Knows nothing of torch, so that the first line of a program can call it. The stretches are written in the order in which
they are taken.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable

from pipedejavu.facts import InputError, format_bytes

STRETCH_BYTES = 1 << 26
"""What a thread writes at a time."""
_HUGE_BYTES = 1 << 21
"""What is taken begins at a multiple of this, so that no page, and no huge one, has two owners."""
_RESERVED_CORES = 2


class WarmMemory:
    """One stretch of memory of this process, written with zeros by threads of its own."""

    def __init__(self, size_bytes: int, num_threads: int):
        self.pages = map_pages(size_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self._size, self._taken, self._begun = size_bytes, 0, 0
        self._changed = threading.Condition()
        self._ready: set[int] = set()
        """The stretches that are written."""
        self._threads = [threading.Thread(target=self._write, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def free_bytes(self) -> int:
        """What can still be taken."""
        return max(0, self._size - self._taken)

    def take(self, size_bytes: int, progress: Callable[[int], None]) -> int | None:
        """Returns where zeroed memory of this size begins, once it is mapped; None if less is left."""
        with self._changed:
            start = -(-self._taken // _HUGE_BYTES) * _HUGE_BYTES
            end = start + size_bytes
            if end > self._size:
                return None
            self._taken = end
        for number in range(start // STRETCH_BYTES, -(-end // STRETCH_BYTES)):
            with self._changed:
                while number not in self._ready:
                    self._changed.wait()
            progress(min(end, (number + 1) * STRETCH_BYTES) - max(start, number * STRETCH_BYTES))
        return start

    def end(self) -> None:
        """Gives back what was not taken."""
        with self._changed:
            self._begun = -(-self._size // STRETCH_BYTES)
        for thread in self._threads:
            thread.join()
        first = -(-self._taken // _HUGE_BYTES) * _HUGE_BYTES
        if first < self._size and hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED, first, self._size - first)
        self._size = self._taken

    def _write(self) -> None:
        while True:
            with self._changed:
                number, self._begun = self._begun, self._begun + 1
            start = number * STRETCH_BYTES
            if start >= self._size:
                return
            ctypes.memset(self._address + start, 0, min(STRETCH_BYTES, self._size - start))  # lets other threads run
            with self._changed:
                self._ready.add(number)
                self._changed.notify_all()


_warm: WarmMemory | None = None


def warm_host_memory(size_bytes: int, num_threads: int | None = None) -> None:
    """Starts to map host memory that optimizer state will take; returns at once, and does nothing if one is under way.

    Call it first of all, before torch is imported and the model is built. `HybridAdamW` takes the memory when it places
    state, and gives back what it does not need. All cores but two write, unless `num_threads` says otherwise.
    """
    global _warm
    if size_bytes < 1:
        raise InputError(f"warm_host_memory maps {size_bytes} bytes; give a number of bytes above 0")
    if _warm is not None:
        return
    try:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        _warm = WarmMemory(size_bytes, num_threads or max(1, cores - _RESERVED_CORES))
    except OSError as error:
        raise InputError(
            f"the host refused {format_bytes(size_bytes)} of memory to warm_host_memory: {error.strerror}; give less"
        ) from None


def take_warm(size_bytes: int, progress: Callable[[int], None]) -> tuple[mmap.mmap, int] | None:
    """Returns mapped memory and where in it a range of this size begins; None if not so much was warmed."""
    start = _warm.take(size_bytes, progress) if _warm is not None else None
    return None if _warm is None or start is None else (_warm.pages, start)


def warm_bytes() -> int:
    """Returns the bytes that were warmed and not taken; they count as used, and can be given back."""
    return _warm.free_bytes if _warm is not None else 0


def end_warming() -> None:
    """Gives back warmed memory that was not taken."""
    global _warm
    if _warm is not None:
        _warm.end()
        _warm = None


def _forget() -> None:
    """Forgets warmed memory in a forked process, which does not get it."""
    global _warm
    _warm = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def map_pages(size_bytes: int) -> mmap.mmap:
    """Maps memory of this process alone, in huge pages if the system has them."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size_bytes)
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            pages.madvise(getattr(mmap, advice))
    return pages
