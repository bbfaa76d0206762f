"""Measures how fast two processes of this host can add up tensors, as workers do: with Gloo over loopback."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from pipedejavu.facts import Link

SIZE_BYTES = 32 * 2**20
_REPEATS, _MANY = 3, 20
"""How often what takes long is measured, and what is over at once."""


def measure_link() -> Link:
    """Returns the link between workers of this host that makes a sum over two of them take as long as measured.

    Both ends are in this process. That one end gathers tensors in a vector counts, and where there is a GPU its copies
    to the host and back count too.
    """
    groups = _make_groups()
    latency_s = _sum_s(groups, torch.ones(2), _MANY) / 2  # a sum over two goes around in two rounds
    vector = torch.ones(SIZE_BYTES // 4)
    time_s = _sum_s(groups, vector, _REPEATS) - 2 * latency_s
    if torch.cuda.is_available():
        time_s += _copies_s(vector)
    return Link(scope="same-host", latency_s=latency_s, bytes_per_s=SIZE_BYTES / max(time_s, 1e-9))


def _make_groups() -> list[Any]:
    store, found = HashStore(), list[Any]()
    gloo: Any = ProcessGroupGloo  # torch's stubs leave out what is used here

    def join(rank: int) -> None:
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=60)
        found.append(gloo(store, rank, 2, options))

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    return found


def _sum_s(groups: list[Any], vector: torch.Tensor, repeats: int) -> float:
    parts, own = vector.chunk(2), [vector.clone() for _ in groups]

    def add_up() -> None:
        torch.cat(parts, out=own[0])
        for work in [group.allreduce([tensor]) for group, tensor in zip(groups, own, strict=True)]:
            work.wait()

    return _median_s(add_up, repeats)


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
