"""A whole step of a model on one device, unit by unit: when each tensor comes and goes.

Every unit's forward and backward is a moment. Gradients stay until the update, which follows the last backward.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from pipedejavu.facts import Profile, Unit

Stay = tuple[float, float, list[float]]
"""When tensors come, when they go, and their bytes."""


class Numbers(NamedTuple):
    """Bytes of each number: in weights and activations, in gradients, and in each tensor of the optimizer's state."""

    weight_bytes: float
    gradient_bytes: float
    state_bytes: tuple[float, ...]
    weight_share: float = 1.0
    """Of the weights, what is there where units hold some in common."""


def walk_step(profile: Profile, numbers: Numbers, number_bytes: float, samples: int, recomputes: bool) -> list[Stay]:
    """Returns all tensors of a step; `number_bytes` is what a number takes in the profile."""
    units = profile.units
    scale = samples * numbers.weight_bytes / number_bytes
    counts = [[size / number_bytes for size in unit.parameter_parts or (unit.parameter_bytes,)] for unit in units]
    everyone = [count for own in counts for count in own]
    found: list[Stay] = [(0.0, inf, [count * size for count in everyone]) for size in numbers.state_bytes]
    found.append((0.0, inf, [count * numbers.weight_bytes * numbers.weight_share for count in everyone]))
    last = 2 * len(units)
    for n, unit in enumerate(units):
        forward, backward = float(n), float(last - 1 - n)
        found += _activations(units, n, forward, backward, scale, recomputes)
        found.append((forward, forward + 1, [unit.forward_work_bytes * scale]))
        given = [unit.boundary_bytes * scale] if n < len(units) - 1 else []
        found.append((backward, backward + 1, [*given, unit.backward_work_bytes * scale]))
        found.append((backward, last + 1.0, [count * numbers.gradient_bytes for count in counts[n]]))
    return found


def _activations(
    units: Sequence[Unit], n: int, forward: float, backward: float, scale: float, recomputes: bool
) -> list[Stay]:
    """Returns what a unit's forward leaves: all that autograd saves and its output, or its output alone."""
    unit, output = units[n], [units[n].boundary_bytes * scale]
    # What the unit before has is there already: what it saves of its output, or its output, which waits.
    known = (units[n - 1].boundary_bytes if recomputes else units[n - 1].shared_bytes) if n else 0.0
    share = max(0.0, 1 - known / unit.activation_bytes) if unit.activation_bytes else 0.0
    saved = [size * share * scale for size in unit.activation_parts or (unit.activation_bytes,)]
    if not recomputes:
        return [(forward, backward + 1, saved), (forward, forward + 1, output)]
    found: list[Stay] = [(backward, backward + 1, saved)]
    if n < len(units) - 1:
        found.append((forward, backward, output))
    return found


def live_peak(stays: Sequence[Stay]) -> float:
    """Returns the most bytes that are there at once."""
    changes = [(at, sign * sum(sizes)) for birth, death, sizes in stays for at, sign in ((birth, 1), (death, -1))]
    total = most = 0.0
    for _, change in sorted(changes):
        total += change
        most = max(most, total)
    return most
