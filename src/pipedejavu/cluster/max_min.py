"""Heterogeneity-aware max-min fairness: the shares of time on each kind of device that make the worst-off job fastest.

A claim's speed is its updates per second over those on its best kind. One linear program maximises the least speed;
a second gives out what is left of the devices, so that the sum of speeds grows most.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_EPSILON = 1e-9


class Claim(NamedTuple):
    """Jobs that are alike: their rates by kind, the size of each, and how many there are."""

    rates: Mapping[str, float]
    gpu_milli: int
    num_jobs: int = 1


def max_min_shares(claims: Sequence[Claim], capacity: Mapping[str, int]) -> list[dict[str, float]]:
    """Returns each claim's share of its time on each kind."""
    pairs = [(n, k) for n, claim in enumerate(claims) for k in sorted(claim.rates) if capacity.get(k, 0) > 0]
    if not pairs:
        return [{} for _ in claims]
    speeds = [claims[n].rates[k] / max(claims[n].rates.values()) for n, k in pairs]
    used = sorted({n for n, _ in pairs})
    kinds = sorted({k for _, k in pairs})
    limits = np.zeros((len(used) + len(kinds), len(pairs) + 1))
    bounds = np.array([1.0] * len(used) + [capacity[k] / 1000 for k in kinds])
    for column, (n, k) in enumerate(pairs):
        limits[used.index(n), column] = 1
        limits[len(used) + kinds.index(k), column] = claims[n].gpu_milli / 1000 * claims[n].num_jobs
    least = np.zeros((len(used), len(pairs) + 1))  # least speed − speed of the claim ≤ 0
    least[:, -1] = 1
    for column, ((n, _), speed) in enumerate(zip(pairs, speeds, strict=True)):
        least[used.index(n), column] = -speed
    aim = np.zeros(len(pairs) + 1)
    aim[-1] = 1
    first = maximise(aim, np.vstack([limits, least]), np.concatenate([bounds, np.zeros(len(used))]))
    kept = first[:-1]
    left = np.maximum(bounds - limits[:, :-1] @ kept, 0)
    more = maximise(_sums(pairs, speeds, claims), limits[:, :-1], left)
    shares: list[dict[str, float]] = [{} for _ in claims]
    for (n, k), share in zip(pairs, kept + more, strict=True):
        if share > _EPSILON:
            shares[n][k] = float(share)
    return shares


def _sums(pairs: Sequence[tuple[int, str]], speeds: Sequence[float], claims: Sequence[Claim]) -> NDArray[np.float64]:
    return np.array([speed * claims[n].num_jobs for (n, _), speed in zip(pairs, speeds, strict=True)])


def maximise(aim: NDArray[np.float64], limits: NDArray[np.float64], bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the x ≥ 0 with limits·x ≤ bounds that maximises aim·x, by the simplex method; bounds are 0 or more.

    Bland's rule picks the columns, so that it ends. The program must be bounded.
    """
    rows, columns = limits.shape
    table = np.zeros((rows + 1, columns + rows + 1))
    table[:rows, :columns], table[:rows, columns : columns + rows], table[:rows, -1] = limits, np.eye(rows), bounds
    table[-1, :columns] = -aim
    basis = list(range(columns, columns + rows))
    while True:
        entering = np.flatnonzero(table[-1, :-1] < -_EPSILON)
        if not len(entering):
            break
        column = int(entering[0])
        positive = np.flatnonzero(table[:rows, column] > _EPSILON)
        assert len(positive), "the program is not bounded"
        ratios = table[positive, -1] / table[positive, column]
        tied = positive[ratios <= ratios.min() + _EPSILON]
        row = int(min(tied, key=lambda r: basis[r]))
        table[row] /= table[row, column]
        factors = table[:, column].copy()
        factors[row] = 0
        table -= np.outer(factors, table[row])
        basis[row] = column
    x = np.zeros(columns + rows)
    x[basis] = table[:rows, -1]
    return np.asarray(x[:columns])
