"""Floors of drafts, below which no simulation comes, and what they spare."""

from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.facts import Machine, Profile, Unit
from pipedejavu.search import SearchOptions, dp, search
from pipedejavu.search.lower_bound import lower_bound_s
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.plan_writer import write
from pipedejavu.search.planning_problem import problems_of
from pipedejavu.search.ranking import Timed, time_plan
from tests.search.case import machine, profile
from tests.search.test_dp import cases


@given(cases(), st.sampled_from([0.0, 1e-3, 5e-3]))
@settings(max_examples=25, deadline=None)
def test_no_plan_is_simulated_to_be_faster_than_its_lower_bound(
    case: tuple[Profile, Machine, SearchOptions], issue_s: float
) -> None:
    model, place, options = case
    model = model.replace(units=tuple(issued(unit, issue_s) for unit in model.units))
    pool = Pool(options)
    dp.run(pool, [*problems_of(model, place, options)], options)
    for pooled in pool.ranked()[:12]:
        costs = pool.costs(pooled.candidate.problem, pooled.candidate.samples)
        timed = time_plan(
            write(pooled.candidate, options, costs), pooled.candidate.problem.original, pooled.estimate.time_s
        )
        assert isinstance(timed, Timed)
        assert lower_bound_s(pooled.candidate, costs) <= timed.time_s


def issued(unit: Unit, forward_s: float) -> Unit:
    """Returns a unit whose forward takes its host so long to issue, and its backward a fifth of that."""
    times = {}
    for kind, time in unit.times.items():
        backward = time.backward.replace(issue_s=forward_s / 5)
        times[kind] = time.replace(forward=time.forward.replace(issue_s=forward_s), backward=backward)
    return unit.replace(times=times)


def test_of_a_pipeline_without_transfers_the_lower_bound_is_what_is_simulated() -> None:
    # Stages of 3 and 9 ms: the first microbatch comes after 1 ms, four take 36 ms, and 2 ms are the way back.
    model = profile([1e-3, 3e-3], weights=10**9, boundary=0.0)
    result = search(model, machine(["fast"] * 2, within=1e6), SearchOptions(batch=4, samples=1, is_runnable=True))
    ranked = next(c for c in result.candidates if c.plan.name == "2 stages")
    assert ranked.time_s == pytest.approx(39e-3)
    pool = Pool(SearchOptions(batch=4))
    (problem, *_) = problems_of(model, machine(["fast"] * 2, within=1e6), SearchOptions(batch=4, samples=1))
    dp.run(pool, [problem], SearchOptions(batch=4, samples=1, is_runnable=True))
    (candidate,) = [f.candidate for f in pool.ranked() if len(f.candidate.stages) == 2 and f.candidate.mode.is_plain]
    assert lower_bound_s(candidate, pool.costs(problem, 1)) == pytest.approx(39e-3)


@pytest.mark.parametrize("objective", ["time", "price"])
def test_plans_that_need_no_simulation_are_none_of_the_answer(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The slow device pays in none of the best plans, and in the others nearly all waits for it.
    model = profile([1e-3] * 5, {"fast": 1.0, "half": 0.5}, weights=10**3, boundary=1e3, saved=10.0)
    place = machine(["fast", "fast", "half"], within=1e9)
    prices = {"fast": 1.0, "half": 3.0}
    options = SearchOptions.model_validate(
        {"is_runnable": True, "batch": 32, "objective": objective, "prices": prices, "candidates": 3}
    )
    quick = search(model, place, options)
    monkeypatch.setattr(import_module("pipedejavu.search.simulation_queue"), "lower_bound_s", lambda *_: 0.0)
    whole = search(model, place, options)
    assert quick.candidates == whole.candidates
    assert quick.num_simulated < whole.num_simulated
