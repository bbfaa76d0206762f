"""How a process that `multiprocessing` started ends when the one that started it is gone."""

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Lets the system end this process with SIGKILL when its parent ends, also if this process is stopped then.

    Any other signal would wait until a stopped process is continued. To be called before anything else.
    """
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent.pid:  # it ended before the system was asked
        os.kill(os.getpid(), signal.SIGKILL)
