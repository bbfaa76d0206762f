"""Settings of glibc's memory allocator for this process."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_heap() -> bool:
    """Makes glibc keep freed memory and serve large blocks from its heap; returns whether that succeeded.

    By default glibc maps new memory for each large tensor and unmaps it afterwards, and the system zeroes it page by
    page: a quarter of the time of a VGG19 step on a CPU. Peak memory is unchanged, but memory freed in between is not
    returned to the system. Call it only in a process of our own, before it starts threads.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
