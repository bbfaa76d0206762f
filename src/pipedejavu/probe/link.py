"""Trials of the links between a host and its GPUs, and between GPUs, within this process.

Without a GPU, a CPU takes its place: the same trials then copy between two host tensors.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from pipedejavu.facts import format_bytes
from pipedejavu.probe.compute import ComputeDevice, timed
from pipedejavu.probe.series import TimedTrial

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
LARGEST = SIZES[-1]
OUTLASTS = 3
"""Background work lasts this many times as long as the work that is timed."""
BESIDE = {"cpu": 512, "cuda": 4096}
"""Side of the square matrices multiplied during copies."""

Work = Callable[[], object]


def copy_trials(probed: ComputeDevice) -> list[TimedTrial]:
    """Returns the trials of copies between the host and one GPU, in both directions."""
    inwards, outwards = f"cpu>{probed.name}", f"{probed.name}>cpu"
    trials = []
    for memory in ("pinned", "pageable"):
        for size in SIZES:
            for subject in (inwards, outwards):
                work = _copy(probed, memory, size, is_inwards=subject == inwards)
                trials.append(_trial(subject, "copy", f"{memory} {format_bytes(size)}", size, probed, work))
    both = f"cpu<>{probed.name}"
    copy, compute = _copy(probed, "pinned", LARGEST, is_inwards=True), _compute(probed)
    return [
        *trials,
        TimedTrial(both, "copy", "both ways", 2.0 * LARGEST, "B/s", _both_ways(probed)),
        TimedTrial(both, "compute", "alone", 1, "s", lambda count: timed(probed.device, compute, count)),
        TimedTrial(both, "compute", "beside copies", 1, "s", _beside(probed, compute, copy)),
        TimedTrial(both, "copy", "beside compute", float(LARGEST), "B/s", _beside(probed, copy, compute)),
    ]


def peer_trials(devices: list[ComputeDevice]) -> list[TimedTrial]:
    """Returns the trials of copies from each GPU to the next."""
    trials = []
    for source, target in zip(devices, devices[1:] + devices[:1], strict=True):
        if source is target:
            continue

        def work(source: ComputeDevice = source, target: ComputeDevice = target) -> None:
            sent = source.made("peer", lambda: torch.ones(LARGEST, dtype=torch.uint8, device=source.device))
            received = target.made("peer in", lambda: torch.empty(LARGEST, dtype=torch.uint8, device=target.device))
            received.copy_(sent, non_blocking=True)

        subject = f"{source.name}>{target.name}"
        trials.append(_trial(subject, "peer copy", format_bytes(LARGEST), LARGEST, source, work))
    return trials


def _trial(subject: str, what: str, setting: str, size: int, probed: ComputeDevice, work: Work) -> TimedTrial:
    return TimedTrial(subject, what, setting, float(size), "B/s", lambda count: timed(probed.device, work, count))


def _host(probed: ComputeDevice, key: str) -> Tensor:
    """Returns a host buffer, pinned if the key says so and there is a GPU."""
    pinned = key.startswith("pinned") and probed.device.type == "cuda"
    return probed.made(key, lambda: torch.ones(LARGEST, dtype=torch.uint8, pin_memory=pinned))


def _remote(probed: ComputeDevice, key: str) -> Tensor:
    return probed.made(key, lambda: torch.ones(LARGEST, dtype=torch.uint8, device=probed.device))


def _copy(probed: ComputeDevice, memory: str, size: int, *, is_inwards: bool) -> Work:
    def work() -> None:
        ends = _remote(probed, "copied")[:size], _host(probed, memory)[:size]
        target, source = ends if is_inwards else reversed(ends)
        target.copy_(source, non_blocking=memory == "pinned")

    return work


def _compute(probed: ComputeDevice) -> Work:
    side = BESIDE[probed.device.type]
    real = torch.float16 if probed.device.type == "cuda" else torch.float32

    def work() -> None:
        x = probed.made("beside", lambda: torch.ones(side, side, device=probed.device, dtype=real))
        torch.mm(x, x, out=probed.made("beside out", lambda: torch.empty_like(x)))

    return work


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """Returns a GPU's second stream, shared by all trials: cuBLAS keeps a workspace of 32 MiB per stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _both_ways(probed: ComputeDevice) -> Callable[[int], float]:
    """Copies one buffer in and another out at the same time."""

    def inwards() -> None:
        _remote(probed, "both in").copy_(_host(probed, "pinned in"), non_blocking=True)

    def outwards() -> None:
        _host(probed, "pinned out").copy_(_remote(probed, "both out"), non_blocking=True)

    def time_s(count: int) -> float:
        for copy in (inwards, outwards):  # makes the buffers
            copy()
        if probed.device.type != "cuda":
            return timed(probed.device, lambda: _together(inwards, outwards), count)
        side = _side(probed.device)

        def work() -> None:
            for _ in range(count):
                inwards()
                with torch.cuda.stream(side):
                    outwards()
            torch.cuda.current_stream(probed.device).wait_stream(side)

        torch.cuda.synchronize(probed.device)
        return timed(probed.device, work, 1)

    return time_s


def _together(one: Work, other: Work) -> None:
    thread = threading.Thread(target=other)
    thread.start()
    one()
    thread.join()


def _beside(probed: ComputeDevice, work: Work, other: Work) -> Callable[[int], float]:
    """Times `work` while `other` runs in the background."""
    once: list[float] = []

    def time_s(count: int) -> float:
        if not once:
            for each in (work, other):
                each()
                once.append(timed(probed.device, each, 3) / 3)
        with _under_way(probed, other, OUTLASTS * count * once[0], once[1]):
            return timed(probed.device, work, count, waits=False)

    return time_s


@contextmanager
def _under_way(probed: ComputeDevice, other: Work, least_s: float, once_s: float) -> Iterator[None]:
    """Runs `other` on a second stream for about `least_s`, or on a CPU in a thread until the block ends."""
    if probed.device.type == "cuda":
        side = _side(probed.device)
        torch.cuda.synchronize(probed.device)
        with torch.cuda.stream(side):
            for _ in range(1 + min(1000, math.ceil(least_s / max(once_s, 1e-6)))):
                other()
        yield
        torch.cuda.synchronize(probed.device)
        return
    done = threading.Event()

    def repeat() -> None:
        while not done.is_set():
            other()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
