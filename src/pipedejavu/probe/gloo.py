"""Measures how fast workers of this host send and sum tensors, with Gloo over loopback."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from pipedejavu.facts import Link

MESSAGE_BYTES, SUM_BYTES = 2 * 2**20, 16 * 2**20
LEAST_SHARE = 0.1
"""The share of a large message's time that its bytes take at least."""
_REPEATS, _MANY = 5, 20
"""Number of repeats of a long measurement, and of a short one."""
_SIDE = 512
"""Side of the square matrices multiplied between two repeats."""


def measure_link() -> Link:
    """Returns the link between workers of this host, fitted to a measured message and a measured all-reduce of two.

    Both ends are in this process. The all-reduce includes packing tensors into one vector; with a GPU, both include
    copies to the host and back.
    """
    groups, small = _make_groups(), torch.ones(2)
    latency_s, sum_latency_s = _message_s(groups, small, _MANY), _sum_s(groups, small, _MANY)
    large, vector = torch.ones(MESSAGE_BYTES // 4), torch.ones(SUM_BYTES // 4)
    time_s = time_of_bytes(latency_s, _message_s(groups, large, _MANY))
    sum_s = time_of_bytes(sum_latency_s, _sum_s(groups, vector, _REPEATS))
    if torch.cuda.is_available():
        time_s, sum_s = time_s + copies_s(large), sum_s + copies_s(vector)
    return fitted_link(latency_s, time_s, sum_latency_s, sum_s)


def fitted_link(latency_s: float, time_s: float, sum_latency_s: float, sum_s: float) -> Link:
    """Returns a link from what small messages and sums take, and what large ones take in addition."""
    return Link(
        scope="same-host",
        latency_s=latency_s,
        bytes_per_s=MESSAGE_BYTES / time_s,
        sum_latency_s=sum_latency_s / 2,  # a ring over two has two rounds
        sum_bytes_per_s=SUM_BYTES / sum_s,
    )


def time_of_bytes(small_s: float, large_s: float) -> float:
    """Returns what the bytes of a large message take: the difference to a small one, if scatter leaves one."""
    return max(large_s - small_s, LEAST_SHARE * large_s, 1e-9)


def _make_groups() -> list[Any]:
    store, groups = HashStore(), dict[int, Any]()
    gloo: Any = ProcessGroupGloo  # not in torch's stubs

    def join(rank: int) -> None:
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=60)
        groups[rank] = gloo(store, rank, 2, options)

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    return [groups[0], groups[1]]


def _message_s(groups: list[Any], vector: torch.Tensor, repeats: int) -> float:
    into = torch.empty_like(vector)

    def send() -> None:
        coming = groups[1].recv([into], 0, 0)
        groups[0].send([vector], 1, 0).wait()
        coming.wait()

    return _median_s(send, repeats)


def _sum_s(groups: list[Any], vector: torch.Tensor, repeats: int) -> float:
    pieces, vectors = vector.chunk(2), [vector.clone() for _ in groups]

    def add_up() -> None:
        torch.cat(pieces, out=vectors[0])
        for work in [group.allreduce([tensor]) for group, tensor in zip(groups, vectors, strict=True)]:
            work.wait()

    return _median_s(add_up, repeats)


def copies_s(vector: torch.Tensor) -> float:
    """Returns the median time of a copy from a GPU to pinned host memory and back."""
    host, device = vector.pin_memory(), vector.cuda()

    def copy() -> None:
        host.copy_(device)
        device.copy_(host)
        torch.cuda.synchronize()

    return _median_s(copy, _REPEATS)


def _median_s(act: Callable[[], None], repeats: int) -> float:
    """Returns the median time of an action that follows compute, when the communication threads sleep."""
    act()  # opens connections and touches memory
    factor, times = torch.ones(_SIDE, _SIDE), []
    for _ in range(repeats):
        factor @ factor
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return median(times)
