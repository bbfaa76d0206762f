"""The searchers that do not look at everything, against those that do."""

from math import factorial, prod

import numpy as np
import pytest

from pipedejavu.facts import Machine
from pipedejavu.search import SearchOptions, dp, gradient_descent, mcmc, search
from pipedejavu.search.candidate_plan import PlanningProblem
from pipedejavu.search.gradient_descent import _descend, _loss_tables, _Ordinal
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.planning_problem import problems_of
from pipedejavu.search.subspace import device_orders, subspaces
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


def test_a_random_walk_begins_with_a_cut_that_fits() -> None:
    # Data parallelism fits nowhere, and of the cuts only those that recompute most of the first units.
    model = profile([1e-3] * 12, weights=10, saved=[1000.0] * 6 + [100.0] * 6, boundary=10.0)
    place = machine(["fast"] * 3, within=1e8, room=3200)
    options = SearchOptions(batch=8, samples=1, is_runnable=True)
    problems, pool = [*problems_of(model, place, options)], Pool(options)
    mcmc.run(pool, problems, options, steps=1)
    assert pool.plans


def test_a_walk_over_everything_that_runs_out_of_time_has_the_best_that_is_known() -> None:
    model = profile([1e-3 * (1 + n % 3) for n in range(24)], weights=10**5, saved=5000.0, boundary=2000.0)
    place = machine(["fast"] * 6, within=1e7)
    options = SearchOptions(batch=32, is_runnable=True, candidates=1, time_budget_s=3.0, searcher="exhaustive")
    result = search(model, place, options)
    best = search(model, place, options.replace(searcher="dp", time_budget_s=60.0)).best
    assert not result.is_complete
    assert result.best is not None
    assert best is not None
    assert result.best.estimated_s == pytest.approx(best.estimated_s)


def orders(kinds: list[str]) -> list[tuple[str, ...]]:
    place = machine(kinds)
    problem = PlanningProblem(profile([1e-3], KINDS), place, tuple(d.name for d in place.devices))
    kind_of = {device.name: device.kind for device in place.devices}
    full = [order for order in device_orders(problem) if len(order) == len(kinds)]
    return [tuple(kind_of[name] for name in order) for order in full]


@pytest.mark.parametrize("kinds", [["fast"] * 8 + ["half"], ["half"] * 2 + ["fast"] * 10, ["fast", "half", "tenth"]])
def test_all_orders_of_few_unequal_devices_are_tried_once(kinds: list[str]) -> None:
    tried = orders(kinds)
    counts = [factorial(kinds.count(kind)) for kind in {*kinds}]
    assert len(tried) == len({*tried}) == factorial(len(kinds)) // prod(counts)
    assert {*tried} == {*orders(kinds[::-1])}


def test_of_many_unequal_devices_some_divide_others() -> None:
    tried = {"".join(kind[0] for kind in order) for order in orders(["fast"] * 8 + ["half"] * 8)}
    assert {"f" * 8 + "h" * 8, "h" * 8 + "f" * 8, "ffhhhhhhhhffffff", "ffffhhhhhhhhffff", "hhffffffffhhhhhh"} <= tried


def test_the_place_of_a_slow_device_in_the_list_changes_nothing() -> None:
    model = profile([1e-3 * (1 + n % 3) for n in range(12)], KINDS, weights=10**6, boundary=2000.0)
    options = SearchOptions(batch=16, is_runnable=True, candidates=1)
    first, last = (
        search(model, machine(kinds, within=1e9), options).best
        for kinds in (["tenth"] + ["fast"] * 8, ["fast"] * 8 + ["tenth"])
    )
    assert first is not None
    assert last is not None
    assert first.time_s == pytest.approx(last.time_s)
