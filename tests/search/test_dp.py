"""Dynamic programming against looking at everything."""

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.facts import Machine, Profile
from pipedejavu.search import SearchOptions, dp, exhaustive, search
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.planning_problem import problems_of
from pipedejavu.search.subspace import subspaces
from pipedejavu.search.subspace_bound import Bounds
from tests.search.case import machine, profile

MOST_FRAMES = 12
"""Of one case and scene that are compared."""
KINDS = {"fast": 1.0, "half": 0.5, "tenth": 0.1, "cpu": 0.05}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Profile, Machine, SearchOptions]:
    count = draw(st.integers(1, 4))
    sizes = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    times = draw(st.lists(st.floats(1e-4, 1e-2), min_size=count, max_size=count))
    model = profile(
        times, KINDS, weights=draw(sizes), saved=draw(sizes), boundary=draw(sizes), update_s=draw(st.floats(0, 1e-3))
    )
    if draw(st.booleans()):  # then ZeRO, which gathers weights, takes longer, and may save recomputing
        model = model.replace(units=tuple(u.replace(gradient_bytes=u.gradient_bytes // 4) for u in model.units))
    # On one kind of device some units take much longer beside others than on the other kinds.
    factors = draw(st.lists(st.sampled_from([1.0, 5.0]), min_size=count, max_size=count))
    units = [
        u.replace(times=u.times | {"half": u.times["half"].times(f)}) for u, f in zip(model.units, factors, strict=True)
    ]
    model = model.replace(units=tuple(units))
    unlike = st.lists(st.sampled_from(["fast", "half", "tenth"]), min_size=1, max_size=3)
    kinds = draw(st.one_of(unlike, st.integers(3, 4).map(lambda count: ["fast"] * count)))  # these can be teams
    whole = sum(4 * u.parameter_bytes + 8 * u.activation_bytes for u in model.units)
    room = draw(st.sampled_from([10**9, round(whole), round(whole / 2), round(whole / 4), round(whole / 8)]))
    hosts = draw(st.sampled_from([1, len(kinds)]))
    rates = st.sampled_from([1e3, 1e5, 1e9])
    place = machine(
        kinds,
        room=max(room, 1),
        hosts=hosts,
        within=draw(rates),
        between=draw(rates),
        host_room=draw(st.sampled_from([0, 10**9])) if hosts == 1 else 0,
        pcie=draw(rates),
    )
    options = SearchOptions(batch=draw(st.sampled_from([1, 4, 6])), staleness=draw(st.integers(0, 1)))
    return model, place, options


@given(cases())
@settings(max_examples=60, deadline=None)
def test_dynamic_programming_finds_what_looking_at_everything_finds(
    case: tuple[Profile, Machine, SearchOptions],
) -> None:
    model, place, options = case
    problems = [*problems_of(model, place, options)]
    for problem in problems:
        every = [*subspaces(problem, options)]
        for subspace in every[:: 1 + len(every) // MOST_FRAMES]:
            pool = Pool(options)
            truth = min((pool.offer(candidate) for candidate in exhaustive.candidate_plans(subspace)), default=inf)
            best = dp.solve(subspace, pool.costs(problem, subspace.samples))
            score = pool.offer(best) if best is not None else inf
            assert score == pytest.approx(truth, rel=1e-9)
            # Stages that a limit rules out are none of the best plan's.
            limited = dp.solve(subspace, pool.costs(problem, subspace.samples), truth * 1.01)
            assert (pool.offer(limited) if limited is not None else inf) == pytest.approx(truth, rel=1e-9)
            assert dp.solve(subspace, pool.costs(problem, subspace.samples), truth * 0.99) is None
            assert Bounds().least_s(subspace, pool.costs(problem, subspace.samples)) <= truth * (1 + 1e-9)


@pytest.mark.parametrize("rate", [1e4, 1e5])
@pytest.mark.parametrize("room", [850, 950, 1050])
def test_a_stage_may_divide_its_state_to_recompute_less_though_it_then_gathers_weights(room: int, rate: float) -> None:
    model = profile([1e-3] * 4, weights=[100, 200, 50, 100], saved=[60.0, 20.0, 50.0, 40.0])
    model = model.replace(units=tuple(u.replace(gradient_bytes=u.gradient_bytes // 4) for u in model.units))
    options = SearchOptions(batch=8, samples=1)
    problem = next(problems_of(model, machine(["fast"] * 4, room=room, within=rate), options))
    pipelines = [f for f in subspaces(problem, options) if f.sizes == (2,) and len(f.order) == 4]
    for subspace in (f for f in pipelines if f.mode.zero == 1 and f.mode.recomputes):
        pool = Pool(options)
        truth = min(pool.offer(candidate) for candidate in exhaustive.candidate_plans(subspace))
        best = dp.solve(subspace, pool.costs(problem, subspace.samples))
        assert best is not None
        assert pool.offer(best) == pytest.approx(truth, rel=1e-9)


def test_bounds_hold_where_each_kind_of_device_is_quick_at_other_units() -> None:
    quick, slow = profile([1e-3, 1e-2], {"fast": 1.0}).units, profile([1e-2, 1e-3], {"half": 1.0}).units
    model = profile([1.0, 1.0]).replace(
        units=tuple(a.replace(times=a.times | b.times) for a, b in zip(quick, slow, strict=True))
    )
    options = SearchOptions(batch=32, samples=1, is_runnable=True)
    (problem,) = problems_of(model, machine(["fast", "half"]), options)
    costs, bounds = Pool(options).costs(problem, 1), Bounds()
    times = []
    for subspace in subspaces(problem, options):
        candidate = dp.solve(subspace, costs)
        assert candidate is not None
        times.append(Pool(options).estimate(candidate).time_s)
        assert bounds.least_s(subspace, costs) <= times[-1] * (1 + 1e-9)
    assert min(times) == pytest.approx((2 + 31) * 3e-3)  # though either device takes 33 ms for a whole microbatch


def test_deep_models_are_cut_at_some_places_first_and_then_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model = profile([1e-3, 2e-3, 1e-3] * 8 + [7e-3], weights=100, saved=10.0, boundary=[1.0, 5.0, 2.0] * 8 + [0.0])
    options = SearchOptions(batch=16, is_runnable=True)
    problems = [*problems_of(model, machine(["fast"] * 4, within=1e4), options)]
    exact = Pool(options)
    dp.run(exact, problems, options)
    monkeypatch.setattr(dp, "MOST_CUTS", 10)
    pool = Pool(options)
    assert dp.run(pool, problems, options)
    assert pool.best == pytest.approx(exact.best, rel=1e-9)
    subspace = next(f for f in subspaces(problems[0], options) if f.sizes == (1,) and len(f.order) == 4)
    coarse = dp.solve(subspace, pool.costs(problems[0], subspace.samples), step=3)
    assert coarse is not None
    assert all(stage.start % 3 == 0 for stage in coarse.stages)
    # Where only stages fit that a third place does not make, they are found.
    units = [u.replace(parameter_bytes=4 * 10**6 if n == 10 else 1) for n, u in enumerate(model.units)]
    tight = machine(["fast"] * 4, within=1e4, room=round(1.001 * sum(4 * u.parameter_bytes for u in units) / 2))
    assert search(model.replace(units=tuple(units)), tight, options.replace(candidates=1)).best is not None


@given(cases())
@settings(max_examples=15, deadline=None)
def test_both_searchers_give_the_same_best_estimate(case: tuple[Profile, Machine, SearchOptions]) -> None:
    model, place, options = case
    bests = []
    for run in (dp.run, exhaustive.run):
        pool = Pool(options)
        run(pool, [*problems_of(model, place, options)], options)
        bests.append(pool.best)
    assert bests[0] == pytest.approx(bests[1], rel=1e-8)  # of one sort, those with nine digits in common are equal


@given(cases())
@settings(max_examples=10, deadline=None)
def test_a_plan_is_found_wherever_one_is_estimated_to_fit(case: tuple[Profile, Machine, SearchOptions]) -> None:
    model, place, options = case
    pool = Pool(options)
    exhaustive.run(pool, [*problems_of(model, place, options)], options)
    result = search(model, place, options.replace(candidates=1))
    assert bool(result.candidates) == bool(pool.plans)


def test_the_search_ends_where_slower_stages_make_up_for_shorter_sums_to_the_last_digit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every bound on the slowest stage has a path that takes the limit: differences of the two times are rounding."""
    limit, least, bounds = 0.4759553072523147, 2.6333333e-8, list[float]()

    def shortest(_subspace: object, _costs: object, _tables: object, bound: float) -> dp._Path:
        bounds.append(bound)
        assert len(bounds) < 1000, bounds[-4:]
        slowest = min(bound, 2.7e-8)
        return dp._Path((), limit - slowest, slowest)

    monkeypatch.setattr(dp, "_tables", lambda *_: [])
    monkeypatch.setattr(dp, "_least_slowest", lambda *_: least)
    monkeypatch.setattr(dp, "_shortest", shortest)
    anything: Any = None
    assert dp.solve(anything, anything, limit) is None
