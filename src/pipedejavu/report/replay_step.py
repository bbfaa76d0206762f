"""Lifetimes of all tensors in one training step of a model on one device, unit by unit.

Each unit's forward and backward is one point in time. Gradients live until the update, which follows the last backward.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from pipedejavu.facts import Profile, Unit

Lifetime = tuple[float, float, list[float]]
"""When tensors are allocated, when they are freed, and their sizes."""


class Numbers(NamedTuple):
    """Bytes per value: in weights and activations, in gradients, and in each tensor of the optimizer state."""

    weight_bytes: float
    gradient_bytes: float
    state_bytes: tuple[float, ...]
    weight_share: float = 1.0
    """Share of the weights that exists, if units share some."""


def step_lifetimes(
    profile: Profile, numbers: Numbers, number_bytes: float, samples: int, recomputes: bool
) -> list[Lifetime]:
    """Returns the lifetimes of a step's tensors; `number_bytes` is the size of a value in the profile."""
    units = profile.units
    scale = samples * numbers.weight_bytes / number_bytes
    counts = [[size / number_bytes for size in unit.parameter_parts or (unit.parameter_bytes,)] for unit in units]
    all_counts = [count for unit_counts in counts for count in unit_counts]
    lifetimes: list[Lifetime] = [(0.0, inf, [count * size for count in all_counts]) for size in numbers.state_bytes]
    lifetimes.append((0.0, inf, [count * numbers.weight_bytes * numbers.weight_share for count in all_counts]))
    last = 2 * len(units)
    for n, unit in enumerate(units):
        forward, backward = float(n), float(last - 1 - n)
        lifetimes += _activations(units, n, forward, backward, scale, recomputes)
        lifetimes.append((forward, forward + 1, [unit.forward_work_bytes * scale]))
        gradients = [unit.boundary_bytes * scale] if n < len(units) - 1 else []
        lifetimes.append((backward, backward + 1, [*gradients, unit.backward_work_bytes * scale]))
        lifetimes.append((backward, last + 1.0, [count * numbers.gradient_bytes for count in counts[n]]))
    return lifetimes


def _activations(
    units: Sequence[Unit], n: int, forward: float, backward: float, scale: float, recomputes: bool
) -> list[Lifetime]:
    """Returns the tensors that a unit's forward leaves: its output, and without recompute also saved tensors."""
    unit, output = units[n], [units[n].boundary_bytes * scale]
    # What the unit shares with the one before exists already: its saved output, or its output kept for recompute.
    known = (units[n - 1].boundary_bytes if recomputes else units[n - 1].shared_bytes) if n else 0.0
    share = max(0.0, 1 - known / unit.activation_bytes) if unit.activation_bytes else 0.0
    saved = [size * share * scale for size in unit.activation_parts or (unit.activation_bytes,)]
    if not recomputes:
        return [(forward, backward + 1, saved), (forward, forward + 1, output)]
    lifetimes: list[Lifetime] = [(backward, backward + 1, saved)]
    if n < len(units) - 1:
        lifetimes.append((forward, backward, output))
    return lifetimes


def live_peak(lifetimes: Sequence[Lifetime]) -> float:
    """Returns the peak of live bytes."""
    changes = [(at, sign * sum(sizes)) for birth, death, sizes in lifetimes for at, sign in ((birth, 1), (death, -1))]
    total = most = 0.0
    for _, change in sorted(changes):
        total += change
        most = max(most, total)
    return most
