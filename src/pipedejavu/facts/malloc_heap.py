"""How this process asks the system for memory."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_heap() -> bool:
    """Lets glibc keep what it has got from the system, and take large blocks from it too; tells whether it does.

    By default the memory of a large tensor is new for each operation and goes back after it, and the system fills it
    with zeros, page by page, in between: a quarter of a step of VGG19 on a CPU. The peak stays as it is; what is free
    in between does not go back. To be called by a process that is ours, before it has threads of its own.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
