"""The learning rate over a run, as a factor for each update."""

import math
from collections.abc import Callable

from pipedejavu.facts import InputError


def rate_schedule(kind: str, warmup: int, steps: int) -> Callable[[int], float] | None:
    """Returns the factor of the learning rate by update, counted from 0; None if it is always 1.

    It rises linearly over the warm-up, then stays, or falls so that it would be 0 one update after the last.
    """
    if warmup >= steps and warmup:
        raise InputError(f"--warmup is {warmup}, and the run has {steps} steps; give fewer, or more --steps")
    if kind == "constant" and not warmup:
        return None

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / (warmup + 1)
        done = min(1.0, (update - warmup) / (steps - warmup))
        if kind == "linear":
            return 1 - done
        return (1 + math.cos(math.pi * done)) / 2 if kind == "cosine" else 1.0

    return factor
