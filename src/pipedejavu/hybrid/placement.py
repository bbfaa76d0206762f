"""Where the optimizer state of each unit rests, and how many bytes that takes: arithmetic, without a device.

Gradients of the first units are made last and their weights are needed first, so their state rests on the GPU as far
as its budget allows. The state of the last units rests in host memory; their updates overlap with the forward of the
others. Among the units on the host, the state of the first is streamed to the GPU for its update: state that is
fetched before the forward pass has been returned when later forwards need its memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from typing import Literal

from pipedejavu.facts import InputError, format_bytes
from pipedejavu.hybrid.step_time import StepTimes, assumed_times, estimate_step

FEWER = 6
"""Numbers of units on the GPU below the most that fit which are compared, once the times of a step are measured."""

Place = Literal["gpu", "visit", "host", "lean"]
"""Where the state of a unit rests and is updated:

    gpu     on the GPU
    visit   in host memory; streamed to the GPU for its update
    host    in host memory, with a copy of the weights; updated on the host
    lean    as host, without the copy: each update first copies the weights from the GPU
"""


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """The bytes of one unit in each place."""

    name: str
    num_parameters: int
    weight_bytes: int
    """Weights on the GPU; 0 for a windowed unit."""
    gradient_bytes: int
    gpu_bytes: int
    """State on the GPU, without the weights."""
    host_bytes: int
    """State, weights and gradients in host memory."""
    no_copy_bytes: int
    """State and gradients in host memory, without a copy of the weights."""
    streamed_bytes: int
    """State without weights and gradients: what is streamed."""
    shadow_bytes: int
    """Shadow state: a second copy of what an update writes in host memory."""
    is_bound_to_host: bool = False
    """Whether its state must be in host memory, because its weights are windowed or it was put there."""
    host_place: Place = "host"
    """Where it is in host memory if it is bound to it: with a copy of its weights, or without one."""


@dataclass(frozen=True, kw_only=True)
class MemoryInterval:
    """A part of a step that belongs to one unit: in the backward pass it ends when the unit's gradients are final."""

    unit: int
    peak_bytes: int
    """Peak of GPU memory, without weights, state and the gradients of earlier intervals."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The memory that a placement may use, and what constrains it."""

    gpu_bytes: int
    host_bytes: int
    keeps_gradients: bool
    """Whether gradients wait for the end of the backward pass, as global-norm clipping needs."""
    num_first: int | None = None
    """Number of units, from the first, with their state on the GPU; None for as many as fit."""
    allocated_share: float = 1.0
    """Share of the GPU's budget that `gpu_bytes` is at most; the rest is for fragmentation."""
    fragmentation_bytes: int = 0
    """What fragmentation was measured to take."""

    def budget_for(self, gpu_bytes: int) -> int:
        """Returns the smallest budget of the GPU in which tensors may take this many bytes."""
        return max(gpu_bytes + self.fragmentation_bytes, ceil(gpu_bytes / self.allocated_share))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of each unit's state, with the predicted memory and the reasons."""

    places: tuple[Place, ...]
    has_shadow: tuple[bool, ...]
    """By unit: whether it has shadow state, to which speculative updates are written."""
    gpu_bytes: int
    host_bytes: int
    reasons: tuple[str, ...]
    arrivals: Mapping[int, tuple[int, ...]]
    """By unit: the units whose state is fetched when the gradients of this one are final."""
    reserved_bytes: int = 0
    """GPU memory that torch's allocator is predicted to reserve for `gpu_bytes`, with fragmentation."""


def choose_placement(
    units: Sequence[UnitSize],
    intervals: Sequence[MemoryInterval],
    limits: Limits,
    forward_bytes: int = 0,
    times: StepTimes | None = None,
) -> Placement:
    """Returns the placement with the shortest estimated step; raises InputError if none fits.

    Without the `times` of a step it has the most state on the GPU. `forward_bytes` is the GPU memory of the first
    forwards, which run while streamed state is still on the GPU.
    """
    counts = range(len(units), -1, -1) if limits.num_first is None else [limits.num_first]
    least_gpu = least_host = 0
    fitting: list[Placement] = []
    for count in counts:
        places: list[Place] = [
            u.host_place if u.is_bound_to_host else "gpu" if n < count else "host" for n, u in enumerate(units)
        ]
        gpu = gpu_peak(units, intervals, places, limits.keeps_gradients)
        if gpu > limits.gpu_bytes:
            least_gpu = gpu
            continue
        placement = _completed(units, intervals, limits, forward_bytes, places, times)
        if placement.host_bytes > limits.host_bytes:
            # With fewer units on the GPU, more state may be streamed.
            least_host = min(least_host or placement.host_bytes, placement.host_bytes)
            continue
        fitting.append(placement)
        if times is None or not limits.keeps_gradients or len(fitting) > FEWER:
            break
    if not fitting:
        raise InputError(_refusal(units, intervals, limits, least_gpu, least_host))
    return min(fitting, key=lambda placement: estimate_placement(placement, units, times))


def _completed(
    units: Sequence[UnitSize],
    intervals: Sequence[MemoryInterval],
    limits: Limits,
    forward_bytes: int,
    places: list[Place],
    times: StepTimes | None,
) -> Placement:
    """Returns the placement with these units on the GPU: with state that is streamed, and weight copies that fit."""
    limit = limits.gpu_bytes
    if limits.num_first is not None:
        limit = gpu_peak(units, intervals, places, limits.keeps_gradients)
    arrivals: dict[int, tuple[int, ...]] = {}
    buffer = 0
    if limits.keeps_gradients:
        arrivals, buffer = _choose_streamed(units, intervals, places, limit - forward_bytes, limit, times)
        if limits.num_first is None:
            arrivals = _put_first(units, places, arrivals)
    usage = _usage(units, intervals, places, limits.keeps_gradients)
    gpu = max(*usage, usage[-1] + buffer + (forward_bytes if buffer else 0))
    host = _drop_weight_copies(units, places, limits.host_bytes)
    return Placement(
        places=tuple(places), has_shadow=(False,) * len(units), gpu_bytes=gpu, host_bytes=host,
        reasons=_reasons(units, places, gpu, host, limits), arrivals=arrivals, reserved_bytes=limits.budget_for(gpu),
    )  # fmt: skip


def estimate_placement(placement: Placement, units: Sequence[UnitSize], times: StepTimes | None) -> float:
    """Returns the estimated seconds of a step with clipping; times that are not known are assumed."""
    num_fetched = sum(map(len, placement.arrivals.values()))
    return _estimate(units, placement.places, num_fetched, times)


def _estimate(units: Sequence[UnitSize], places: Sequence[Place], num_fetched: int, times: StepTimes | None) -> float:
    if times is None:
        times = assumed_times([u.num_parameters for u in units], [u.streamed_bytes for u in units])
    on_host = [n for n, place in enumerate(places) if place in ("host", "lean")]
    streamed = [n for n, place in enumerate(places) if place == "visit"]
    return estimate_step(on_host, times, 0, streamed, num_fetched)


def assigned_placement(
    units: Sequence[UnitSize],
    intervals: Sequence[MemoryInterval],
    limits: Limits,
    places: Sequence[Place],
    visitors: int,
    forward_bytes: int = 0,
) -> Placement:
    """Returns the placement with the given places, whether or not the limits hold it.

    The state of the first `visitors` streamed units is fetched during the backward pass, as soon as memory below the
    limit, or below the peak if that is higher, is free for it.
    """
    usage = _usage(units, intervals, places, limits.keeps_gradients)
    limit = max(limits.gpu_bytes, *usage)
    streamed = [n for n, place in enumerate(places) if place == "visit"][: visitors if limits.keeps_gradients else 0]
    buffer = max(0, min(limit - forward_bytes - usage[-1], sum(units[n].streamed_bytes for n in streamed)))
    host = host_bytes(units, places)
    return Placement(
        places=tuple(places), has_shadow=(False,) * len(units),
        gpu_bytes=max(*usage, usage[-1] + buffer + (forward_bytes if buffer else 0)), host_bytes=host,
        reasons=("the plan gives the place of each unit",),
        arrivals=_arrivals(units, intervals, usage, streamed, buffer, limit),
    )  # fmt: skip


def free_in_forward(
    units: Sequence[UnitSize], placement: Placement, forwards: Sequence[MemoryInterval]
) -> dict[int, int]:
    """Returns by unit the GPU memory that streamed state may take during its forward without raising the peak."""
    held = list(zip(units, placement.places, strict=True))
    resting = sum(unit.weight_bytes + (unit.gpu_bytes if place == "gpu" else 0) for unit, place in held)
    kept = sum(unit.gradient_bytes for unit, place in held if place == "visit")
    free = {}
    for forward in forwards:
        free[forward.unit] = placement.gpu_bytes - resting - kept - forward.peak_bytes
        unit, place = held[forward.unit]
        kept -= unit.gradient_bytes if place == "visit" else 0
    return free


def free_for_leaving(
    units: Sequence[UnitSize], placement: Placement, intervals: Sequence[MemoryInterval], keeps_gradients: bool
) -> dict[int, int]:
    """Returns by unit the GPU memory that leaving gradients of earlier units may take when its own are final."""
    usage, free, fetched = _usage(units, intervals, placement.places, keeps_gradients), {}, 0
    for interval, following in zip(intervals, usage[1:], strict=True):
        fetched += sum(units[n].streamed_bytes for n in placement.arrivals.get(interval.unit, ()))
        free[interval.unit] = placement.gpu_bytes - following - fetched
    return free


def gpu_peak(
    units: Sequence[UnitSize], intervals: Sequence[MemoryInterval], places: Sequence[Place], keeps_gradients: bool
) -> int:
    """Returns the peak of GPU memory of a step; streamed state uses only memory that is free below this peak."""
    return max(_usage(units, intervals, places, keeps_gradients))


def _usage(
    units: Sequence[UnitSize], intervals: Sequence[MemoryInterval], places: Sequence[Place], keeps_gradients: bool
) -> list[int]:
    """Returns the GPU memory of each interval, and of the end of the backward pass.

    Each includes the gradients of the unit before, which may still be on their way to the host.
    """
    held = zip(units, places, strict=True)
    resting = sum(unit.weight_bytes + (unit.gpu_bytes if place == "gpu" else 0) for unit, place in held)
    usage, kept, leaving = [], 0, 0
    for interval in intervals:
        usage.append(resting + kept + leaving + interval.peak_bytes)
        unit, place = units[interval.unit], places[interval.unit]
        stays = place == "gpu" or (place == "visit" and keeps_gradients)
        kept += unit.gradient_bytes if stays else 0
        leaving = 0 if stays or unit.is_bound_to_host else unit.gradient_bytes
    return [*usage, resting + kept + leaving]


def _choose_streamed(
    units: Sequence[UnitSize],
    intervals: Sequence[MemoryInterval],
    places: list[Place],
    last_limit: int,
    limit: int,
    times: StepTimes | None,
) -> tuple[dict[int, tuple[int, ...]], int]:
    """Sets the first units on the host to be streamed, as many as make the estimated step the shortest.

    Returns when each is fetched, and the size of their buffer. Gradients of streamed units stay on the GPU. Beside
    them, below the limit for the end of the backward pass, the state of two units must fit.
    """
    held = [n for n, place in enumerate(places) if place == "host" and not units[n].is_bound_to_host]
    best_s, best_places = _estimate(units, places, 0, times), [*places]
    best: tuple[dict[int, tuple[int, ...]], int] = ({}, 0)
    for count in range(1, len(held) + 1):
        chosen = held[:count]
        trial: list[Place] = ["visit" if n in chosen else place for n, place in enumerate(places)]
        usage = _usage(units, intervals, trial, True)
        buffer = min(last_limit - usage[-1], sum(units[n].streamed_bytes for n in chosen))
        if max(usage) > limit or buffer < min(2, count) * max(units[n].streamed_bytes for n in chosen):
            continue
        arrivals = _arrivals(units, intervals, usage, chosen, buffer, limit)
        step_s = _estimate(units, trial, sum(map(len, arrivals.values())), times)
        if step_s < best_s:
            best_s, best_places, best = step_s, trial, (arrivals, buffer)
    places[:] = best_places
    return best


def _arrivals(
    units: Sequence[UnitSize],
    intervals: Sequence[MemoryInterval],
    usage: Sequence[int],
    streamed: Sequence[int],
    buffer: int,
    limit: int,
) -> dict[int, tuple[int, ...]]:
    """Returns by unit the streamed units whose state is fetched after its backward, within a buffer and a limit."""
    arrivals: dict[int, tuple[int, ...]] = {}
    used, waiting = 0, list(streamed)
    later = [*accumulate(reversed(usage), max)][::-1]
    for position, interval in enumerate(intervals):
        free, due = min(buffer, limit - later[position + 1]), []
        while waiting and used + units[waiting[0]].streamed_bytes <= free:
            used += units[waiting[0]].streamed_bytes
            due.append(waiting.pop(0))
        if due:
            arrivals[interval.unit] = tuple(due)
    return arrivals


def _put_first(
    units: Sequence[UnitSize], places: list[Place], arrivals: Mapping[int, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    """Swaps units fetched in the backward pass with earlier units of the same size on the GPU; returns the arrivals."""

    def size(n: int) -> UnitSize:
        return replace(units[n], name="")

    instead = {n: n for due in arrivals.values() for n in due}
    for n in instead:
        first = next((m for m in range(n) if places[m] == "gpu" and size(m) == size(n)), None)
        if first is None:
            break  # keeps the order of the forward pass
        places[first], places[n], instead[n] = "visit", "gpu", first
    return {unit: tuple(instead[n] for n in due) for unit, due in arrivals.items()}


def host_bytes(units: Sequence[UnitSize], places: Sequence[Place]) -> int:
    """Returns the host memory of a placement: all units in it, and staging memory if units have no weight copy."""
    total = largest = 0
    for unit, place in zip(units, places, strict=True):
        total += {"gpu": 0, "visit": unit.streamed_bytes, "host": unit.host_bytes, "lean": unit.no_copy_bytes}[place]
        largest = max(largest, unit.gradient_bytes if place == "lean" else 0)
    return total + 2 * largest


def _drop_weight_copies(units: Sequence[UnitSize], places: list[Place], limit: int) -> int:
    """Drops the weight copies of as few units as needed, the last first; returns the bytes of host memory."""
    fewest = host_bytes(units, places)
    for n in reversed(range(len(units))):
        if fewest <= limit:
            break
        if places[n] == "host" and not units[n].is_bound_to_host:
            places[n] = "lean"
            fewest = min(fewest, host_bytes(units, places))
    return fewest


def _reasons(
    units: Sequence[UnitSize], places: Sequence[Place], gpu: int, host: int, limits: Limits
) -> tuple[str, ...]:
    first = sum(place == "gpu" for place in places)
    count = sum(unit.num_parameters for unit, place in zip(units, places, strict=True) if place == "gpu")
    total = sum(unit.num_parameters for unit in units)
    why = "as asked" if limits.num_first is not None else "as many as the GPU's budget holds"
    reasons = [
        f"the state of {first} of {len(units)} units ({count:,} of {total:,} parameters) rests on the GPU, {why}:"
        f" {format_bytes(gpu)} of {format_bytes(limits.gpu_bytes)}"
    ]
    if (reserved := limits.budget_for(gpu)) > gpu:
        budget = format_bytes(limits.budget_for(limits.gpu_bytes))
        reasons.append(f"with fragmentation torch reserves up to {format_bytes(reserved)} of the budget of {budget}")
    if first < len(units):
        reasons.append(f"the rest is in host memory: {format_bytes(host)} of {format_bytes(limits.host_bytes)}")
    if streamed := places.count("visit"):
        reasons.append(
            f"the state of {streamed} units is streamed to the GPU for its update, into memory that the backward pass"
            " has freed"
        )
    if without_copy := places.count("lean"):
        reasons.append(f"{without_copy} units keep no copy of their weights on the host, which could not hold them")
    return tuple(reasons)


def _refusal(
    units: Sequence[UnitSize], intervals: Sequence[MemoryInterval], limits: Limits, gpu: int, host: int
) -> str:
    """Returns the error text: what does not fit, and the smallest budget of either kind that would do."""
    gpu = limits.budget_for(gpu)
    if host == 0:
        what = f"the model needs {format_bytes(gpu)} of GPU memory and the budget is"
        what = f"{what} {format_bytes(limits.budget_for(limits.gpu_bytes))}"
        if limits.num_first is None:
            remedy = f"the smallest gpu_budget that would do is {gpu} bytes; or give a window"
        else:
            remedy = f"{gpu} bytes would do, or fewer units on the GPU"
        return f"{what}; {remedy}"
    refusal = (
        f"the state that the GPU cannot hold needs {format_bytes(host)} of host memory and the budget is"
        f" {format_bytes(limits.host_bytes)}; a host_budget of {host} bytes would do"
    )
    if limits.num_first is not None or any(unit.is_bound_to_host for unit in units):
        return refusal
    most = limits.budget_for(gpu_peak(units, intervals, ["gpu"] * len(units), limits.keeps_gradients))
    return f"{refusal}, or a gpu_budget of {most} bytes, which would hold all of it"
