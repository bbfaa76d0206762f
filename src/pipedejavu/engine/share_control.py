"""Shares of a batch that follow measured rates: each replica gets samples in proportion to how fast it is."""

from collections.abc import Sequence

DEAD_BAND = 0.01
"""Shares change only where the slowest replica is predicted to end sooner by more than this."""
LEAST, MOST = 0.05, 0.95


Bounds = Sequence[tuple[int, int]]
"""The least and the most samples that each replica can have."""


def adjusted_counts(counts: Sequence[int], times_s: Sequence[float], bounds: Bounds) -> tuple[int, ...]:
    """Returns the next samples of each replica, from those of this round and the time that each took.

    Shares are in proportion to the rates, between 5 % and 95 %, within the bounds; what gains less than the dead band
    changes nothing.
    """
    total = sum(counts)
    rates = [count / time if time > 0 else 0.0 for count, time in zip(counts, times_s, strict=True)]
    if len(counts) < 2 or total < len(counts) or min(counts) < 1 or min(rates) <= 0:
        return tuple(counts)
    shares = [min(MOST, max(LEAST, rate / sum(rates))) for rate in rates]
    exact = [total * share / sum(shares) for share in shares]
    found = [min(most, max(least, int(part))) for part, (least, most) in zip(exact, bounds, strict=True)]
    while sum(found) != total:
        step = 1 if sum(found) < total else -1
        # The replica whose count is furthest from its exact part takes the next one, or gives one up.
        movable = [n for n, (least, most) in enumerate(bounds) if least <= found[n] + step <= most]
        found[max(movable, key=lambda n: step * (exact[n] - found[n]))] += step
    slowest, before = (max(n / rate for n, rate in zip(c, rates, strict=True)) for c in (found, counts))
    return tuple(found) if slowest < before * (1 - DEAD_BAND) else tuple(counts)
