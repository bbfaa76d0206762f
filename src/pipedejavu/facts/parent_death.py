"""Ends a `multiprocessing` child process when its parent ends."""

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Makes the system kill this process with SIGKILL when its parent ends, even while this process is stopped.

    A stopped process would receive any other signal only when it continues. Call this first in the child.
    """
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent.pid:  # the parent ended before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)
