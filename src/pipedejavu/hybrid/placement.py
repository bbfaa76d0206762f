"""Where the optimizer state of each unit rests, and what that costs in bytes: arithmetic, without a device.

The first units' gradients come last and their weights are needed first, so their state lies on the GPU as far as its
budget goes; the last units' state lies in host memory, whose update then hides behind the forward of the others. State
that visits the GPU is that of the very first ones, as far as it comes before the forward pass does: it has left again
when later forwards need its memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipedejavu.facts import InputError, format_bytes

STREAMED_SHARE = 0.58
"""Of the parameters that the GPU cannot hold. The way back of a visitor takes three quarters of the time in which the
host updates as many parameters while copies run beside it, so at about this share both end together."""

Place = Literal["gpu", "visit", "host", "lean"]
"""On the GPU; in host memory, visiting the GPU for its update; in host memory, updated there; and the same without a
copy of the weights, for which each update asks the GPU."""


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """The bytes of one unit in each place."""

    name: str
    num_parameters: int
    weight_bytes: int
    """On the GPU, wherever the state rests; none for a unit that comes and goes with the window."""
    gradient_bytes: int
    gpu_bytes: int
    """State on the GPU beside the weights."""
    host_bytes: int
    """State, weights and gradients in host memory."""
    no_copy_bytes: int
    """State and gradients in host memory."""
    streamed_bytes: int
    """State alone, in host memory or on the GPU."""
    shadow_bytes: int
    """A second copy of what an update writes in host memory."""
    is_bound_to_host: bool = False
    """Whether only host memory can hold it, because its weights come and go."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A part of a step that ends when a unit's gradients are final."""

    unit: int
    peak_bytes: int
    """The most GPU memory in it, without weights, state and the gradients of earlier stretches."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a placement may use, and how the optimizer works."""

    gpu_bytes: int
    host_bytes: int
    keeps_gradients: bool
    """Whether gradients wait for the end of the backward pass, as global-norm clipping needs."""
    num_first: int | None = None
    """How many of the first units must have their state on the GPU; None for as many as fit."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of each unit's state, with the forecast and the reasons."""

    places: tuple[Place, ...]
    has_shadow: tuple[bool, ...]
    """Whether a second copy of a unit's state is there to write a guess to."""
    gpu_bytes: int
    host_bytes: int
    reasons: tuple[str, ...]
    arrivals: Mapping[int, tuple[int, ...]]
    """By unit: the units whose state comes to the GPU when this one's gradients are final."""


def choose_placement(
    units: Sequence[UnitSize], stretches: Sequence[Stretch], limits: Limits, forward_bytes: int = 0
) -> Placement:
    """Returns the placement with the most state on the GPU; raises InputError where none fits.

    `forward_bytes` is what the begin of a forward pass takes of the GPU, when visitors are still there.
    """
    counts = range(len(units), -1, -1) if limits.num_first is None else [limits.num_first]
    least_gpu = least_host = 0
    for count in counts:
        places: list[Place] = ["gpu" if n < count and not u.is_bound_to_host else "host" for n, u in enumerate(units)]
        gpu = gpu_peak(units, stretches, places, limits.keeps_gradients)
        if gpu > limits.gpu_bytes:
            least_gpu = gpu
            continue
        ceiling = limits.gpu_bytes if limits.num_first is None else gpu
        arrivals: dict[int, tuple[int, ...]] = {}
        room = 0
        if limits.keeps_gradients:
            arrivals, room = _choose_streamed(units, stretches, places, ceiling - forward_bytes, ceiling)
            if limits.num_first is None:
                arrivals = _put_first(units, places, arrivals)
        usage = _usage(units, stretches, places, limits.keeps_gradients)
        gpu = max(*usage, usage[-1] + room + (forward_bytes if room else 0))
        host = _drop_weight_copies(units, places, limits.host_bytes)
        if host <= limits.host_bytes:
            return Placement(
                places=tuple(places), has_shadow=(False,) * len(units), gpu_bytes=gpu, host_bytes=host,
                reasons=_reasons(units, places, gpu, host, limits), arrivals=arrivals,
            )  # fmt: skip
        least_host = min(least_host or host, host)  # fewer units on the GPU may leave room for more visitors
    raise InputError(_refusal(units, stretches, limits, least_gpu, least_host))


def with_shadows(placement: Placement, units: Sequence[UnitSize], wanted: Sequence[bool], limit: int) -> Placement:
    """Returns the placement with spare copies for the wanted units, as far as host memory goes."""
    total, spare = placement.host_bytes, []
    for unit, place, is_wanted in zip(units, placement.places, wanted, strict=True):
        fits = is_wanted and place == "host" and not unit.is_bound_to_host and total + unit.shadow_bytes <= limit
        spare.append(fits)
        total += unit.shadow_bytes if fits else 0
    if not any(spare):
        return placement
    reason = (
        f"{sum(spare)} units have a spare copy of their state ({format_bytes(total - placement.host_bytes)}): their"
        " update is written there during the backward pass, and counts if no clipping turns out to be needed"
    )
    return replace(placement, has_shadow=tuple(spare), host_bytes=total, reasons=(*placement.reasons, reason))


def wants_shadows(places: Sequence[Place], host_s: Sequence[float], forward_s: Sequence[float]) -> list[bool]:
    """Returns which host-held units should be guessed: all but the last ones, which the forward pass hides.

    An update that waits for the norm starts at the end of the backward pass, and must end before the forward pass
    arrives at its unit; those that cannot are better begun during the backward pass.
    """
    arrives_s = [sum(forward_s[:n]) for n in range(len(places))]
    held = [n for n, place in enumerate(places) if place == "host"]
    hidden = 0
    for count in range(1, len(held) + 1):
        last = held[len(held) - count :]
        if any(sum(host_s[m] for m in last if m <= n) > arrives_s[n] for n in last):
            break
        hidden = count
    return [n in held[: len(held) - hidden] for n in range(len(places))]


def free_in_forward(units: Sequence[UnitSize], placement: Placement, forwards: Sequence[Stretch]) -> dict[int, int]:
    """Returns by unit what visitors may still take of the GPU during its forward, so that the peak stays."""
    held = list(zip(units, placement.places, strict=True))
    resting = sum(unit.weight_bytes + (unit.gpu_bytes if place == "gpu" else 0) for unit, place in held)
    kept = sum(unit.gradient_bytes for unit, place in held if place == "visit")
    room = {}
    for forward in forwards:
        room[forward.unit] = placement.gpu_bytes - resting - kept - forward.peak_bytes
        unit, place = held[forward.unit]
        kept -= unit.gradient_bytes if place == "visit" else 0
    return room


def free_for_leaving(
    units: Sequence[UnitSize], placement: Placement, stretches: Sequence[Stretch], keeps_gradients: bool
) -> dict[int, int]:
    """Returns by unit, when its gradients are final, what earlier ones that are leaving may still take of the GPU."""
    usage, room, visiting = _usage(units, stretches, placement.places, keeps_gradients), {}, 0
    for stretch, following in zip(stretches, usage[1:], strict=True):
        visiting += sum(units[n].streamed_bytes for n in placement.arrivals.get(stretch.unit, ()))
        room[stretch.unit] = placement.gpu_bytes - following - visiting
    return room


def gpu_peak(
    units: Sequence[UnitSize], stretches: Sequence[Stretch], places: Sequence[Place], keeps_gradients: bool
) -> int:
    """Returns the most GPU memory of a step; what visits comes only into memory that is free below this peak."""
    return max(_usage(units, stretches, places, keeps_gradients))


def _usage(
    units: Sequence[UnitSize], stretches: Sequence[Stretch], places: Sequence[Place], keeps_gradients: bool
) -> list[int]:
    """Returns the GPU memory of each stretch, and of the end of the backward pass.

    The gradients of the unit before may be on their way to the host still.
    """
    held = zip(units, places, strict=True)
    resting = sum(unit.weight_bytes + (unit.gpu_bytes if place == "gpu" else 0) for unit, place in held)
    usage, kept, leaving = [], 0, 0
    for stretch in stretches:
        usage.append(resting + kept + leaving + stretch.peak_bytes)
        unit, place = units[stretch.unit], places[stretch.unit]
        stays = place == "gpu" or (place == "visit" and keeps_gradients)
        kept += unit.gradient_bytes if stays else 0
        leaving = 0 if stays or unit.is_bound_to_host else unit.gradient_bytes
    return [*usage, resting + kept + leaving]


def _choose_streamed(
    units: Sequence[UnitSize], stretches: Sequence[Stretch], places: list[Place], last_ceiling: int, ceiling: int
) -> tuple[dict[int, tuple[int, ...]], int]:
    """Turns the first host-held units into visitors; returns when the first of them come, and their room in bytes.

    The gradients of visitors wait on the GPU. Below the ceiling of the end of the backward pass there must be room for
    the state of two beside them.
    """
    held = [n for n, place in enumerate(places) if place == "host" and not units[n].is_bound_to_host]
    total = sum(units[n].num_parameters for n in held)
    for count in range(len(held), 0, -1):
        chosen = held[:count]
        if sum(units[n].num_parameters for n in chosen) > STREAMED_SHARE * total:
            continue
        trial: list[Place] = ["visit" if n in chosen else place for n, place in enumerate(places)]
        usage = _usage(units, stretches, trial, True)
        room = min(last_ceiling - usage[-1], sum(units[n].streamed_bytes for n in chosen))
        if max(usage) > ceiling or room < min(2, count) * max(units[n].streamed_bytes for n in chosen):
            continue
        arrivals: dict[int, tuple[int, ...]] = {}
        used, waiting = 0, list(chosen)
        for position, stretch in enumerate(stretches):
            free, coming = min(room, ceiling - max(usage[position + 1 :])), []
            while waiting and used + units[waiting[0]].streamed_bytes <= free:
                used += units[waiting[0]].streamed_bytes
                coming.append(waiting.pop(0))
            if coming:
                arrivals[stretch.unit] = tuple(coming)
        places[:] = trial
        return arrivals, room
    return {}, 0


def _put_first(
    units: Sequence[UnitSize], places: list[Place], arrivals: Mapping[int, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    """Lets visitors that come during the backward pass change places with earlier units of the same size on the GPU."""

    def size(n: int) -> UnitSize:
        return replace(units[n], name="")

    instead = {n: n for coming in arrivals.values() for n in coming}
    for n in instead:
        first = next((m for m in range(n) if places[m] == "gpu" and size(m) == size(n)), None)
        if first is None:
            break  # so that they still come in the order of the forward pass
        places[first], places[n], instead[n] = "visit", "gpu", first
    return {unit: tuple(instead[n] for n in coming) for unit, coming in arrivals.items()}


def host_bytes(units: Sequence[UnitSize], places: Sequence[Place]) -> int:
    """Returns the host memory of a placement: all units in it, and room for the weights of two lean ones."""
    total = largest = 0
    for unit, place in zip(units, places, strict=True):
        total += {"gpu": 0, "visit": unit.streamed_bytes, "host": unit.host_bytes, "lean": unit.no_copy_bytes}[place]
        largest = max(largest, unit.gradient_bytes if place == "lean" else 0)
    return total + 2 * largest


def _drop_weight_copies(units: Sequence[UnitSize], places: list[Place], limit: int) -> int:
    """Turns as few host-held units as fit the host into lean ones, the last ones first; returns the fewest bytes."""
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
        f"the state of {first} of {len(units)} units ({count:,} of {total:,} parameters) lies on the GPU, {why}:"
        f" {format_bytes(gpu)} of {format_bytes(limits.gpu_bytes)}"
    ]
    if first < len(units):
        reasons.append(f"the others' lies in host memory: {format_bytes(host)} of {format_bytes(limits.host_bytes)}")
    if visitors := places.count("visit"):
        reasons.append(f"{visitors} units visit the GPU for their update, in memory that the backward pass has freed")
    if lean := places.count("lean"):
        reasons.append(f"{lean} units keep no copy of their weights on the host, which could not hold them")
    return tuple(reasons)


def _refusal(units: Sequence[UnitSize], stretches: Sequence[Stretch], limits: Limits, gpu: int, host: int) -> str:
    """Says what does not fit and the smallest budget of either kind that would do, to the byte."""
    if host == 0:
        what = f"the model needs {format_bytes(gpu)} of GPU memory and the budget is {format_bytes(limits.gpu_bytes)}"
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
    most = gpu_peak(units, stretches, ["gpu"] * len(units), limits.keeps_gradients)
    return f"{refusal}, or a gpu_budget of {most} bytes, which would hold all of it"
