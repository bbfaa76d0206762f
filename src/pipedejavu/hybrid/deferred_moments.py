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

from pipedejavu.hybrid.step_time import StepTimes, estimate_step


def count_deferred(on_host: Sequence[int], times: StepTimes) -> int:
    """Returns how many units on the host, from the first, should defer their moments for the shortest step."""
    return min(range(len(on_host) + 1), key=lambda count: (estimate_step(on_host, times, count), count))


def describe_deferred(count: int) -> str:
    """Returns the decision as a sentence."""
    return f"{count} units on the host write their weights first and their moments after those of all units"
