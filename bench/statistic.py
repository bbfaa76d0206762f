"""Figures of a forecast beside what was measured: errors, rank correlation, regret."""

from collections.abc import Sequence
from statistics import median


def errors(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Returns by how much each forecast is off, as a part of what was measured."""
    return [forecast / measured - 1 for forecast, measured in pairs]


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Returns the median and the worst error of (forecast, measured), without their signs, and the median with."""
    found = errors(pairs)
    sizes = [abs(error) for error in found]
    return {"count": len(found), "median": median(sizes), "worst": max(sizes), "bias": median(found)}


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Returns the correlation of ranks, where equal values share theirs; None of fewer than three pairs."""
    if len(pairs) < 3:
        return None
    ours, theirs = (_ranks(column) for column in zip(*pairs, strict=True))
    middle = (len(pairs) + 1) / 2
    both = sum((a - middle) * (b - middle) for a, b in zip(ours, theirs, strict=True))
    squares = [sum((a - middle) ** 2 for a in ranks) for ranks in (ours, theirs)]
    return both / (squares[0] * squares[1]) ** 0.5 if all(squares) else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [(order.index(v) + len(order) - order[::-1].index(v) + 1) / 2 for v in values]


def regret(pairs: Sequence[tuple[float, float]], tries: int = 1) -> float:
    """Returns how much longer the forecast's favourite takes than the true best, as a part of it.

    With several tries it is the best of so many favourites.
    """
    favourites = sorted(pairs, key=lambda pair: pair[0])[:tries]
    return min(measured for _, measured in favourites) / min(measured for _, measured in pairs) - 1
