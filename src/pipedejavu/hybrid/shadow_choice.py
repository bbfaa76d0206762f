"""Which units get shadow state, to which speculative updates are written: arithmetic, without a device."""

from collections.abc import Sequence
from dataclasses import replace

from pipedejavu.facts import format_bytes
from pipedejavu.hybrid.placement import Place, Placement, UnitSize


def with_shadows(placement: Placement, units: Sequence[UnitSize], wanted: Sequence[bool], limit: int) -> Placement:
    """Returns the placement with shadow state for the wanted units, as far as host memory allows."""
    total, has_shadow = placement.host_bytes, []
    for unit, place, is_wanted in zip(units, placement.places, wanted, strict=True):
        fits = is_wanted and place == "host" and not unit.is_bound_to_host and total + unit.shadow_bytes <= limit
        has_shadow.append(fits)
        total += unit.shadow_bytes if fits else 0
    if not any(has_shadow):
        return placement
    reason = (
        f"{sum(has_shadow)} units have a shadow copy of their state ({format_bytes(total - placement.host_bytes)}):"
        " their update is written there during the backward pass, and counts if no clipping turns out to be needed"
    )
    return replace(placement, has_shadow=tuple(has_shadow), host_bytes=total, reasons=(*placement.reasons, reason))


def wants_shadows(places: Sequence[Place], host_s: Sequence[float], forward_s: Sequence[float]) -> list[bool]:
    """Returns which units on the host should be updated speculatively: all but the last, which the forward pass hides.

    An update that waits for the norm starts after the backward pass and is hidden if it ends before the forward of its
    unit. Updates that cannot end in time should begin during the backward pass.
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
