"""A genetic search for the Pareto front of two costs over vectors of shares (NSGA-II).

Parents and children compete together: vectors that no other one beats in both costs come first, those in sparse parts
of the front before those in crowded ones. Knows nothing of what a vector means.
"""

import random
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

Vector = tuple[float, ...]
_STEP = 1 / 64
"""Shares are multiples of it."""
MOST = 61 * _STEP
"""The largest share of a vector."""
_MUTATION = 0.15
"""Deviation of a mutated share."""


class CostedVector(NamedTuple):
    """A vector and its two costs; less is better."""

    vector: Vector
    costs: tuple[float, float]


def dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether costs are nowhere higher than others, and somewhere lower."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def pareto_front(scored: Sequence[CostedVector]) -> list[CostedVector]:
    """Returns what nothing else dominates, by the first cost; equal costs once."""
    front, least = list[CostedVector](), inf
    for entry in sorted(scored, key=lambda entry: (entry.costs, entry.vector)):
        if entry.costs[1] < least:
            front.append(entry)
            least = entry.costs[1]
    return front


def ranks(scored: Sequence[CostedVector]) -> list[tuple[int, float]]:
    """Returns the front that each entry is in, and its crowding: less is better in both."""
    left, result, front = set(range(len(scored))), [(0, 0.0)] * len(scored), 0
    while left:
        first = [n for n in left if not any(dominates(scored[m].costs, scored[n].costs) for m in left)]
        for n, crowding in zip(first, _crowding([scored[n].costs for n in first]), strict=True):
            result[n] = front, crowding
        left -= {*first}
        front += 1
    return result


def _crowding(costs: Sequence[tuple[float, float]]) -> list[float]:
    """Returns minus the distance between the neighbours of each of a front's entries; minus infinity at its ends."""
    crowding = [0.0] * len(costs)
    for axis in range(2):
        order = sorted(range(len(costs)), key=lambda n: costs[n][axis])
        width = costs[order[-1]][axis] - costs[order[0]][axis] or 1.0
        crowding[order[0]] = crowding[order[-1]] = -inf
        for before, n, after in zip(order, order[1:], order[2:], strict=False):
            crowding[n] -= (costs[after][axis] - costs[before][axis]) / width
    return crowding


def evolve(
    size: int,
    evaluate: Callable[[Vector], tuple[float, float]],
    *,
    population: int,
    generations: int,
    seed: int = 0,
    goes_on: Callable[[float], bool] = lambda _: True,
) -> list[CostedVector]:
    """Returns the Pareto front of vectors of `size` shares that a search finds; each is evaluated once.

    Begins with vectors of equal shares. `goes_on` is called with the share that is done, and may end the search after
    the first generation.
    """
    chance, known = random.Random(seed), dict[Vector, CostedVector]()

    def scored(vector: Vector) -> CostedVector:
        if vector not in known:
            known[vector] = CostedVector(vector, evaluate(vector))
        return known[vector]

    levels = [_STEP * round(MOST / _STEP * n / (population - 1)) for n in range(population)]
    adults = []
    for level in levels:
        adults.append(scored((level,) * size))
        goes_on(len(adults) / population / (generations + 1))
    for generation in range(generations):
        fitness = dict(zip((adult.vector for adult in adults), ranks(adults), strict=True))
        children = list[CostedVector]()
        for number in range(population):
            if not goes_on((generation + 1 + number / population) / (generations + 1)):
                return pareto_front([*known.values()])
            pairs = (chance.sample(adults, 2) for _ in range(2))
            parents = [min(pair, key=lambda adult: fitness[adult.vector]).vector for pair in pairs]
            children.append(scored(_child(chance, *parents)))
        everyone = list({entry.vector: entry for entry in (*adults, *children)}.values())
        order = ranks(everyone)
        adults = [everyone[n] for n in sorted(range(len(everyone)), key=lambda n: order[n])[:population]]
    return pareto_front([*known.values()])


def _child(chance: random.Random, one: Vector, other: Vector) -> Vector:
    """Returns a vector between two parents in each share, some of them mutated."""
    shares = []
    for a, b in zip(one, other, strict=True):
        share = a + (b - a) * chance.random()
        if chance.random() < 1 / len(one):
            share += chance.gauss(0.0, _MUTATION)
        shares.append(_STEP * round(min(MOST, max(0.0, share)) / _STEP))
    return tuple(shares)
