"""Adjusts shares of a batch during a run: each replica gets samples in proportion to its measured speed."""

from collections.abc import Sequence

DEAD_BAND = 0.01
"""The least relative gain in the predicted time of the slowest replica for which shares change."""
LEAST, MOST = 0.05, 0.95


Bounds = Sequence[tuple[int, int]]
"""The least and the most samples that each replica can have."""


def adjusted_counts(counts: Sequence[int], times_s: Sequence[float], bounds: Bounds) -> tuple[int, ...]:
    """Returns the samples per replica for the next round, from those of this round and their times.

    Shares are proportional to the rates, clamped to 5 % to 95 % and to the bounds. Nothing changes if the gain is below
    the dead band. A replica without samples stays idle, as it has no rate; the others share what they have.
    """
    active = [n for n, count in enumerate(counts) if count]
    if len(active) < len(counts):
        parts = [counts[n] for n in active], [times_s[n] for n in active], [bounds[n] for n in active]
        following = dict(zip(active, _adjusted(*parts), strict=True))
        return tuple(following.get(n, 0) for n in range(len(counts)))
    return _adjusted(counts, times_s, bounds)


def _adjusted(counts: Sequence[int], times_s: Sequence[float], bounds: Bounds) -> tuple[int, ...]:
    """Returns the samples per replica for the next round; each has samples now."""
    total = sum(counts)
    rates = [count / time if time > 0 else 0.0 for count, time in zip(counts, times_s, strict=True)]
    if len(counts) < 2 or total < len(counts) or min(counts) < 1 or min(rates) <= 0:
        return tuple(counts)
    shares = [min(MOST, max(LEAST, rate / sum(rates))) for rate in rates]
    exact = [total * share / sum(shares) for share in shares]
    samples = [min(most, max(least, int(part))) for part, (least, most) in zip(exact, bounds, strict=True)]
    while sum(samples) != total:
        step = 1 if sum(samples) < total else -1
        # The replica whose count is furthest from its exact share gains or loses a sample.
        movable = [n for n, (least, most) in enumerate(bounds) if least <= samples[n] + step <= most]
        samples[max(movable, key=lambda n: step * (exact[n] - samples[n]))] += step
    slowest, before = (max(n / rate for n, rate in zip(c, rates, strict=True)) for c in (samples, counts))
    return tuple(samples) if slowest < before * (1 - DEAD_BAND) else tuple(counts)
