"""The genetic search, against all vectors of small problems."""

from itertools import product

import pytest

from pipedejavu.search.genetic import MOST, CostedVector, dominates, evolve, pareto_front, ranks

LEVELS = [n / 64 for n in range(0, 61, 4)]


def costs(vector):
    """Layers of unequal size and of unequal use: to drop from the first is cheap in loss, and saves most."""
    sizes, uses = (4.0, 2.0, 1.0), (1.0, 3.0, 9.0)
    kept = [1 - share for share in vector]
    cost = sum(size * k for size, k in zip(sizes, kept, strict=True)) / sum(sizes)
    return cost, sum(use * share**2 for use, share in zip(uses, vector, strict=True))


def test_the_front_is_near_that_of_all_vectors_and_better_than_equal_shares():
    front = evolve(3, costs, population=24, generations=40, seed=1)
    every = [CostedVector(v, costs(v)) for v in product(LEVELS, repeat=3)]
    for point in pareto_front(every):
        # Some vector of the search is as good up to a few hundredths of either cost.
        assert any(f.costs[0] <= point.costs[0] + 0.03 and f.costs[1] <= point.costs[1] + 0.15 for f in front)
    half = costs((0.5, 0.5, 0.5))
    assert any(f.costs[0] <= half[0] and f.costs[1] < 0.7 * half[1] for f in front)


def test_no_vector_of_a_front_beats_another_and_all_that_was_tried_is_behind_it():
    tried = {}

    def noted(vector):
        assert vector not in tried, "each vector is evaluated once"
        assert all(0 <= share <= MOST for share in vector)
        tried[vector] = costs(vector)
        return tried[vector]

    front = evolve(3, noted, population=8, generations=6)
    assert [entry.costs[0] for entry in front] == sorted(entry.costs[0] for entry in front)
    assert not any(dominates(a.costs, b.costs) for a in front for b in front)
    for found in tried.values():
        assert any(entry.costs == found or dominates(entry.costs, found) for entry in front)


def test_a_seed_fixes_the_front_and_the_search_ends_when_it_is_told_to():
    again = [evolve(2, lambda v: costs((*v, 0.0)), population=6, generations=5, seed=seed) for seed in (3, 3, 4)]
    assert again[0] == again[1]
    assert again[0] != again[2]
    calls = []
    evolve(2, lambda v: (sum(v), calls.append(v) or -sum(v)), population=6, generations=50, goes_on=lambda _: False)
    assert len(calls) == 6


@pytest.mark.parametrize("count", [1, 2, 7])
def test_ranks_are_fronts_and_ends_of_a_front_come_first(count):
    scored = [CostedVector((n / 10,), (float(n), float(count - n))) for n in range(count)]
    behind = CostedVector((0.95,), (float(count), float(count)))
    found = ranks([*scored, behind])
    assert [front for front, _ in found] == [0] * count + [1]
    inner = [crowding for _, crowding in found[1 : count - 1]]
    assert all(found[0][1] < crowding for crowding in inner)
