"""The searchers that do not look at everything, against those that do."""

import numpy as np
import pytest

from pipedejavu.facts import Machine
from pipedejavu.search import SearchOptions, dp, gradient_descent, mcmc, search
from pipedejavu.search.gradient_descent import _descend, _loss_tables, _Ordinal
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.planning_problem import problems_of
from pipedejavu.search.subspace import subspaces
from tests.search.case import machine, profile

KINDS = {"fast": 1.0, "half": 0.5, "tenth": 0.1}
TIMES = [1e-3 * (1 + n * 7 % 5) for n in range(12)]
PLACES = {
    "equal": machine(["fast"] * 3, within=1e8),
    "unequal": machine(["fast", "half", "tenth"], within=1e8),
    "tight": machine(["fast"] * 3, within=1e8, room=1_900_000),
}


def bests(place: Machine, run) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    model = profile(TIMES, KINDS, weights=10**5, saved=5000.0, boundary=2000.0)
    options = SearchOptions(batch=32, samples=2, is_runnable=True)
    problems = [*problems_of(model, place, options)]
    exact, other = Pool(options), Pool(options)
    dp.run(exact, problems, options)
    run(other, problems, options)
    return exact.best, other.best


@pytest.mark.parametrize("place", PLACES)
def test_gradients_come_within_two_percent_of_the_best_cut_of_each_pipeline(place: str) -> None:
    model = profile(TIMES, KINDS, weights=10**5, saved=5000.0, boundary=2000.0)
    options = SearchOptions(batch=32, samples=2, is_runnable=True)
    (problem,) = problems_of(model, PLACES[place], options)
    compared = 0
    for subspace in subspaces(problem, options):
        if subspace.sizes != (1,) or len(subspace.order) < 2:
            continue
        pool = Pool(options)
        costs = pool.costs(problem, subspace.samples)
        exact = dp.solve(subspace, costs)
        if exact is not None:
            candidate = gradient_descent.descend(subspace, costs, np.random.default_rng(0))
            assert candidate is not None
            assert pool.offer(candidate) <= 1.02 * pool.estimate(exact).time_s
            compared += 1
    assert compared > 1


@pytest.mark.parametrize("place", PLACES)
def test_a_random_walk_is_never_better_than_the_best_and_often_as_good(place: str) -> None:
    exact, ours = bests(PLACES[place], mcmc.run)
    assert exact <= ours * (1 + 1e-9)
    assert ours <= 1.1 * exact


def test_a_random_walk_depends_on_its_seed_alone() -> None:
    model, place = profile(TIMES, KINDS), PLACES["unequal"]
    options = SearchOptions(batch=8, searcher="mcmc", seed=3, is_runnable=True, candidates=1)
    assert search(model, place, options).candidates == search(model, place, options).candidates


def test_closed_form_gradients_are_those_of_differences() -> None:
    random = np.random.default_rng(1)
    shape = _Ordinal(9, np.ones(4), random)
    weights = random.standard_normal((16, 9, 4))

    def loss() -> np.ndarray:
        return np.asarray((weights * shape.parts(1.3)).sum(axis=(1, 2)))

    loss()
    slope, step = shape.gradient(weights), 1e-6
    for k in range(3):
        shape.parameters[:, k] += step
        above = loss()
        shape.parameters[:, k] -= 2 * step
        below = loss()
        shape.parameters[:, k] += step
        # Central differences err by step² and by the rounding of a sum of 36 terms, divided by the step.
        assert np.allclose((above - below) / (2 * step), slope[:, k], rtol=1e-6, atol=1e-6)


def test_shares_of_a_unit_add_up_to_one_and_stages_stay_in_order() -> None:
    model, place = profile(TIMES, KINDS), PLACES["unequal"]
    options = SearchOptions(batch=8, is_runnable=True)
    (problem,) = problems_of(model, place, options)
    subspace = next(f for f in subspaces(problem, options) if f.sizes == (1,) and len(f.order) == 3)
    costs = Pool(options).costs(problem, subspace.samples)
    parts = _descend(
        _loss_tables(subspace, costs), _Ordinal(len(TIMES), np.ones(3), np.random.default_rng(0)), subspace
    )
    assert np.allclose(parts.sum(axis=2), 1.0)
    places = (parts * np.arange(3)).sum(axis=2)
    assert (np.diff(places, axis=1) >= -1e-9).all()


def test_auto_says_why_it_chose() -> None:
    few = search(profile([1e-3] * 2), machine(["fast"]), SearchOptions(batch=1))
    assert few.searcher == "exhaustive"
    assert few.reason == f"there are {few.num_estimated} drafts in all, few enough to look at each"
    many = search(profile([1e-3] * 40), machine(["fast"] * 8), SearchOptions(batch=8, candidates=1))
    assert many.searcher == "dp"
    assert "dynamic programming finds the best cut of a chain exactly" in many.reason
