"""Shares of a batch that follow measured rates: each replica gets microbatches in proportion to how fast it is."""

from collections.abc import Sequence

DEAD_BAND = 0.01
"""Shares change only where the slowest replica is predicted to end sooner by more than this."""
LEAST, MOST = 0.05, 0.95


def adjusted_counts(counts: Sequence[int], times_s: Sequence[float]) -> tuple[int, ...]:
    """Returns the next microbatches of each replica, from those of this round and the time that each took.

    Shares are in proportion to the rates, between 5 % and 95 %, with one microbatch at least; what gains less than the
    dead band changes nothing.
    """
    total = sum(counts)
    rates = [count / time if time > 0 else 0.0 for count, time in zip(counts, times_s, strict=True)]
    if len(counts) < 2 or total < len(counts) or min(counts) < 1 or min(rates) <= 0:
        return tuple(counts)
    shares = [min(MOST, max(LEAST, rate / sum(rates))) for rate in rates]
    exact = [total * share / sum(shares) for share in shares]
    found = [max(1, int(part)) for part in exact]
    while sum(found) != total:
        step = 1 if sum(found) < total else -1
        # The replica whose count is furthest from its exact part takes the next one, or gives one up.
        movable = [n for n in range(len(found)) if step > 0 or found[n] > 1]
        found[max(movable, key=lambda n: step * (exact[n] - found[n]))] += step
    slowest, before = (max(n / rate for n, rate in zip(c, rates, strict=True)) for c in (found, counts))
    return tuple(found) if slowest < before * (1 - DEAD_BAND) else tuple(counts)
