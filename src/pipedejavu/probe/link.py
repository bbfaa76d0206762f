"""Trials of the links between a host and its GPUs, and between GPUs, of this process.

A CPU stands in for a GPU where there is none: the same trials copy between two of its tensors.
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
"""What runs beside something else is made to last this much longer."""
BESIDE = {"cpu": 512, "cuda": 4096}
"""Side of the square matrices that are multiplied while copies are under way."""

Work = Callable[[], object]


def copy_trials(place: ComputeDevice) -> list[TimedTrial]:
    """Returns the trials of the links between a host and one GPU, in both directions."""
    inwards, outwards = f"cpu>{place.name}", f"{place.name}>cpu"
    trials = []
    for memory in ("pinned", "pageable"):
        for size in SIZES:
            for subject in (inwards, outwards):
                work = _copy(place, memory, size, is_inwards=subject == inwards)
                trials.append(_trial(subject, "copy", f"{memory} {format_bytes(size)}", size, place, work))
    both = f"cpu<>{place.name}"
    copy, compute = _copy(place, "pinned", LARGEST, is_inwards=True), _compute(place)
    return [
        *trials,
        TimedTrial(both, "copy", "both ways", 2.0 * LARGEST, "B/s", _both_ways(place)),
        TimedTrial(both, "compute", "alone", 1, "s", lambda count: timed(place.device, compute, count)),
        TimedTrial(both, "compute", "beside copies", 1, "s", _beside(place, compute, copy)),
        TimedTrial(both, "copy", "beside compute", float(LARGEST), "B/s", _beside(place, copy, compute)),
    ]


def peer_trials(places: list[ComputeDevice]) -> list[TimedTrial]:
    """Returns the trials of copies from each GPU to the next."""
    trials = []
    for source, target in zip(places, places[1:] + places[:1], strict=True):
        if source is target:
            continue

        def work(source: ComputeDevice = source, target: ComputeDevice = target) -> None:
            given = source.made("peer", lambda: torch.ones(LARGEST, dtype=torch.uint8, device=source.device))
            taken = target.made("peer in", lambda: torch.empty(LARGEST, dtype=torch.uint8, device=target.device))
            taken.copy_(given, non_blocking=True)

        subject = f"{source.name}>{target.name}"
        trials.append(_trial(subject, "peer copy", format_bytes(LARGEST), LARGEST, source, work))
    return trials


def _trial(subject: str, what: str, setting: str, size: int, place: ComputeDevice, work: Work) -> TimedTrial:
    return TimedTrial(subject, what, setting, float(size), "B/s", lambda count: timed(place.device, work, count))


def _host(place: ComputeDevice, key: str) -> Tensor:
    """Returns a buffer of the host; pinned memory needs a GPU."""
    pinned = key.startswith("pinned") and place.device.type == "cuda"
    return place.made(key, lambda: torch.ones(LARGEST, dtype=torch.uint8, pin_memory=pinned))


def _remote(place: ComputeDevice, key: str) -> Tensor:
    return place.made(key, lambda: torch.ones(LARGEST, dtype=torch.uint8, device=place.device))


def _copy(place: ComputeDevice, memory: str, size: int, *, is_inwards: bool) -> Work:
    def work() -> None:
        ends = _remote(place, "copied")[:size], _host(place, memory)[:size]
        target, source = ends if is_inwards else reversed(ends)
        target.copy_(source, non_blocking=memory == "pinned")

    return work


def _compute(place: ComputeDevice) -> Work:
    side = BESIDE[place.device.type]
    real = torch.float16 if place.device.type == "cuda" else torch.float32

    def work() -> None:
        x = place.made("beside", lambda: torch.ones(side, side, device=place.device, dtype=real))
        torch.mm(x, x, out=place.made("beside out", lambda: torch.empty_like(x)))

    return work


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """Returns a second stream of a GPU, one for all measurements: cuBLAS keeps 32 MiB for each that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _both_ways(place: ComputeDevice) -> Callable[[int], float]:
    """Copies one buffer in and another out at the same time."""

    def inwards() -> None:
        _remote(place, "both in").copy_(_host(place, "pinned in"), non_blocking=True)

    def outwards() -> None:
        _host(place, "pinned out").copy_(_remote(place, "both out"), non_blocking=True)

    def time_s(count: int) -> float:
        for way in (inwards, outwards):  # makes the buffers
            way()
        if place.device.type != "cuda":
            return timed(place.device, lambda: _together(inwards, outwards), count)
        side = _side(place.device)

        def work() -> None:
            for _ in range(count):
                inwards()
                with torch.cuda.stream(side):
                    outwards()
            torch.cuda.current_stream(place.device).wait_stream(side)

        torch.cuda.synchronize(place.device)
        return timed(place.device, work, 1)

    return time_s


def _together(one: Work, other: Work) -> None:
    thread = threading.Thread(target=other)
    thread.start()
    one()
    thread.join()


def _beside(place: ComputeDevice, work: Work, other: Work) -> Callable[[int], float]:
    """Times `work` while `other` is under way all the time."""
    once: list[float] = []

    def time_s(count: int) -> float:
        if not once:
            for each in (work, other):
                each()
                once.append(timed(place.device, each, 3) / 3)
        with _under_way(place, other, OUTLASTS * count * once[0], once[1]):
            return timed(place.device, work, count, waits=False)

    return time_s


@contextmanager
def _under_way(place: ComputeDevice, other: Work, least_s: float, once_s: float) -> Iterator[None]:
    """Runs `other` on a stream of its own for about `least_s`, or on a CPU in a thread until the body is through."""
    if place.device.type == "cuda":
        side = _side(place.device)
        torch.cuda.synchronize(place.device)
        with torch.cuda.stream(side):
            for _ in range(1 + min(1000, math.ceil(least_s / max(once_s, 1e-6)))):
                other()
        yield
        torch.cuda.synchronize(place.device)
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
