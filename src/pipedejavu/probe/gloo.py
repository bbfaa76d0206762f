"""Measures how fast two processes of this host can add up tensors, as workers do: with Gloo over loopback."""

import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from pipedejavu.facts import Link

SIZE_BYTES = 32 * 2**20
_REPEATS, _MANY = 3, 20
"""How often what takes long is measured, and what is over at once."""
_PATIENCE = timedelta(seconds=20)


def measure_link() -> Link:
    """Returns the link between workers of this host that makes a sum over two of them take as long as measured.

    The other end is a copy of this process, which spares the seconds that a new one would take; or a thread of this
    one where that is not possible, which is told of what it is given sooner than a process. Where there is a GPU, one
    end's copies to the host and back count too.
    """
    vector = torch.ones(SIZE_BYTES // 4)
    with tempfile.TemporaryDirectory(prefix="pipedejavu-") as folder:
        try:
            with _copy(lambda: _add_up(Path(folder, "copy"), 1, vector)):
                latency_s, time_s = _add_up(Path(folder, "copy"), 0, vector)
        except (OSError, RuntimeError):
            other = threading.Thread(target=_add_up, args=(Path(folder, "thread"), 1, vector), daemon=True)
            other.start()
            latency_s, time_s = _add_up(Path(folder, "thread"), 0, vector)
            other.join()
    if torch.cuda.is_available():
        time_s += _copies_s(vector)
    return Link(scope="same-host", latency_s=latency_s, bytes_per_s=SIZE_BYTES / max(time_s, 1e-9))


@contextmanager
def _copy(act: Callable[[], object]) -> Iterator[None]:
    """Lets a copy of this process do something; raises OSError where there can be none."""
    if sys.platform != "linux":
        raise OSError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of locks that other threads may hold: Gloo needs none
        child = os.fork()
    if not child:
        try:
            act()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _add_up(path: Path, rank: int, vector: torch.Tensor) -> tuple[float, float]:
    """Adds up with the other end; returns the latency, and what a large vector takes beyond it."""
    gloo: Any = ProcessGroupGloo  # torch's stubs leave out what is used here
    options = gloo._Options()
    options._devices = [gloo.create_device(interface="lo")]
    options._timeout = _PATIENCE
    group = gloo(FileStore(str(path), 2), rank, 2, options)

    def time_s(given: list[torch.Tensor], repeats: int) -> float:
        return _median_s(lambda: group.allreduce([torch.cat(given)]).wait(), repeats)

    latency_s = time_s([torch.ones(1)], _MANY) / 2  # a sum over two goes around in two rounds
    return latency_s, time_s(list(vector.chunk(2)), _REPEATS) - 2 * latency_s


def _copies_s(vector: torch.Tensor) -> float:
    host, device = vector.pin_memory(), vector.cuda()

    def copy() -> None:
        host.copy_(device)
        device.copy_(host)
        torch.cuda.synchronize()

    return _median_s(copy, _REPEATS)


def _median_s(act: Callable[[], None], repeats: int) -> float:
    act()  # the first pass opens connections and touches memory
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return median(times)
