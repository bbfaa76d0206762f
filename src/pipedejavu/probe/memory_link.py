"""Measures how fast workers of this host send and sum tensors through memory that they share.

The channels and groups are those that runs use; two threads of this process stand for the two workers. Between GPUs the
frames are measured so, and the copies on the GPUs themselves: a process cannot map its own exported memory.
"""

import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from pipedejavu.facts import Link
from pipedejavu.probe.collective_time import measure_collectives
from pipedejavu.probe.gloo import MESSAGE_BYTES, SUM_BYTES, copies_s, fitted_link, measure_link, time_of_bytes
from pipedejavu.probe.machine_shape import num_cores
from pipedejavu.runtime.memory_channel import ReceiveEnd, SendEnd
from pipedejavu.runtime.memory_group import MemoryGroup
from pipedejavu.runtime.peer_socket import PeerSocket

_REPEATS, _MANY = 5, 20
"""Number of repeats of a long measurement, and of a short one."""
_SIDE = 512
"""Side of the square matrices multiplied between two repeats."""


def measure_worker_link(devices: Sequence[torch.device]) -> Link:
    """Returns the link between workers on these devices of this host, over the wire that they will use."""
    if sys.platform != "linux":
        return measure_link()
    if all(device.type == "cuda" for device in devices):
        return measure_gpu_link(devices[0], devices[1])
    return measure_memory_link(is_staged=any(device.type == "cuda" for device in devices))


def measure_memory_link(*, is_staged: bool = False) -> Link:
    """Returns the link between workers of this host, fitted to small and large messages and sums of two.

    With `is_staged` the tensors of one worker are on a GPU and pass through pinned memory.
    """
    small, large, vector = torch.ones(2), torch.ones(MESSAGE_BYTES // 4), torch.ones(SUM_BYTES // 4)
    latency_s, sum_latency_s = _message_s(small, _MANY), _sum_s(small, _MANY)
    time_s = time_of_bytes(latency_s, _message_s(large, _MANY))
    sum_s = time_of_bytes(sum_latency_s, _sum_s(vector, _REPEATS))
    if is_staged:
        time_s, sum_s = time_s + copies_s(large), sum_s + copies_s(vector)
        return fitted_link(latency_s, time_s, sum_latency_s, sum_s)
    link = fitted_link(latency_s, time_s, sum_latency_s, sum_s)
    return link.replace(collectives=measure_collectives(num_cores()))


def measure_gpu_link(source: torch.device, target: torch.device) -> Link:
    """Returns the link between workers on two GPUs, or on one, that map each other's memory."""
    frame_s, meeting_s = _message_s(torch.ones(2), _MANY), _sum_s(torch.ones(2), _MANY)
    small_s, large_s = (_gpu_copies_s(count, source, target) for count in (2, MESSAGE_BYTES // 4))
    sum_small_s, sum_s = (_gpu_sum_s(count, source, target) for count in (4, SUM_BYTES // 4))
    time_s, adding_s = time_of_bytes(small_s, large_s), time_of_bytes(sum_small_s, sum_s)
    return fitted_link(frame_s + small_s, time_s, meeting_s + sum_small_s, adding_s)


def _message_s(tensor: Tensor, repeats: int) -> float:
    """Returns the time of a message: half of that of one out and one back."""
    out, back = _channel(), _channel()
    count = repeats + 1

    def answer() -> None:
        for _ in range(count):
            back[0].send(out[1].receive())

    def ask() -> None:
        out[0].send((tensor,))
        back[1].receive()

    return _median_s(ask, answer, repeats) / 2


def _sum_s(vector: Tensor, repeats: int) -> float:
    """Returns the time of a sum of two, with the packing of tensors into one vector."""
    one, other = map(PeerSocket, socket.socketpair())
    groups = MemoryGroup(0, {1: one}), MemoryGroup(1, {0: other})
    pieces, vectors = vector.chunk(2), [vector.clone() for _ in groups]

    def join() -> None:
        for _ in range(repeats + 1):
            groups[1].add_up(vectors[1])

    def add_up() -> None:
        torch.cat(pieces, out=vectors[0])
        groups[0].add_up(vectors[0])

    return _median_s(add_up, join, repeats)


def _channel() -> tuple[SendEnd, ReceiveEnd]:
    one, other = map(PeerSocket, socket.socketpair())
    return SendEnd(one), ReceiveEnd(other)


def _gpu_copies_s(count: int, source: torch.device, target: torch.device) -> float:
    """Returns the time of a copy into a slot and of one out of it."""
    sent, slot = (torch.ones(count, device=source) for _ in range(2))
    received = torch.empty(count, device=target)

    def copy() -> None:
        slot.copy_(sent)
        received.copy_(slot)
        _wait(source, target)

    return _median_s(copy, lambda: None, _REPEATS)


def _gpu_sum_s(count: int, source: torch.device, target: torch.device) -> float:
    """Returns the time of one worker of two for a sum: it copies in, adds its half and copies the other half out."""
    here, there, region = (torch.ones(count, device=device) for device in (target, source, target))
    half = count // 2

    def add_up() -> None:
        region.copy_(here)
        region[:half].add_(there[:half].to(target))
        here[:half].copy_(region[:half])
        here[half:].copy_(there[half:])
        _wait(source, target)

    return _median_s(add_up, lambda: None, _REPEATS)


def _wait(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _median_s(act: Callable[[], None], beside: Callable[[], None], repeats: int) -> float:
    """Returns the median time of an action that follows compute, while `beside` runs in a second thread."""
    thread = threading.Thread(target=beside, daemon=True)
    thread.start()
    act()  # allocates slots and touches memory
    factor, times = torch.ones(_SIDE, _SIDE), []
    for _ in range(repeats):
        factor @ factor
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    thread.join()
    return median(times)
