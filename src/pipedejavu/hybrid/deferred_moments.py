"""How many units write their moments after all weights: arithmetic over the times of one step.

With clipping, every update of the host waits for the norm, and each forward waits for the weights of its unit. Only
the weights are urgent; moments may follow while the last forwards and the backward pass run, before the unit's next
gradient comes:

    compute   F0 F1 F2 ...      loss      B2 B1 B0 ...
    host      w0 w1 w2 ... m2 m1 m0                         w: from the gradient and the old moments; m: the new moments

Both parts read the gradient and the moments, so together they take longer than one update. That pays while the host is
idle in the backward pass, and not if the host's updates are what a step waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PART_SHARE = 0.7
"""The time of one part over that of a whole update: 18 of 26 bytes of memory traffic for a bf16 weight with a split
master, 20 of 28 for a float32 weight."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What a step took, without waits."""

    forward_s: Sequence[float]
    """By unit; 0 for the last one, which is part of the rest."""
    host_s: Sequence[float]
    """By unit: a whole update on the host."""
    rest_s: float
    """From the start of the last unit to the end of the backward pass."""


def count_deferred(on_host: Sequence[int], times: StepTimes) -> int:
    """Returns how many units on the host, from the first, should defer their moments for the shortest step."""
    return min(range(len(on_host) + 1), key=lambda count: (estimate_step(on_host, times, count), count))


def estimate_step(on_host: Sequence[int], times: StepTimes, num_deferred: int) -> float:
    """Returns the seconds of a step in which the first units on the host defer their moments."""
    deferred, is_held = set(on_host[:num_deferred]), set(on_host)
    compute_s = host_s = 0.0
    for unit, forward_s in enumerate(times.forward_s):
        if unit in is_held:
            host_s += times.host_s[unit] * (PART_SHARE if unit in deferred else 1.0)
            compute_s = max(compute_s, host_s)
        compute_s += forward_s
    moments_s = sum(times.host_s[unit] * PART_SHARE for unit in deferred)
    return max(compute_s + times.rest_s, host_s + moments_s)


def describe_deferred(count: int) -> str:
    """Returns the decision as a sentence."""
    return f"{count} units on the host write their weights first and their moments after those of all units"
