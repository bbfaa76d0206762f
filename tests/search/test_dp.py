"""Dynamic programming against looking at everything."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.facts import Machine, Profile
from pipedejavu.search import Options, dp, exhaustive, search
from pipedejavu.search.pool import Pool
from pipedejavu.search.scene import scenes_of
from pipedejavu.search.space import Bounds, frames
from tests.search.case import machine, profile

MOST_FRAMES = 12
"""Of one case and scene that are compared."""
KINDS = {"fast": 1.0, "half": 0.5, "tenth": 0.1, "cpu": 0.05}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Profile, Machine, Options]:
    count = draw(st.integers(1, 4))
    sizes = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    times = draw(st.lists(st.floats(1e-4, 1e-2), min_size=count, max_size=count))
    model = profile(
        times, KINDS, weights=draw(sizes), saved=draw(sizes), boundary=draw(sizes), update_s=draw(st.floats(0, 1e-3))
    )
    if draw(st.booleans()):  # then ZeRO, which gathers weights, takes longer, and may save recomputing
        model = model.but(units=tuple(u.but(gradient_bytes=u.gradient_bytes // 4) for u in model.units))
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
    options = Options(batch=draw(st.sampled_from([1, 4, 6])), staleness=draw(st.integers(0, 1)))
    return model, place, options


@given(cases())
@settings(max_examples=60, deadline=None)
def test_dynamic_programming_finds_what_looking_at_everything_finds(case: tuple[Profile, Machine, Options]) -> None:
    model, place, options = case
    scenes = [*scenes_of(model, place, options)]
    for scene in scenes:
        every = [*frames(scene, options)]
        for frame in every[:: 1 + len(every) // MOST_FRAMES]:
            found = Pool(options)
            truth = min((found.offer(draft) for draft in exhaustive.drafts(frame)), default=inf)
            best = dp.solve(frame, found.costs(scene, frame.samples))
            score = found.offer(best) if best is not None else inf
            assert score == pytest.approx(truth, rel=1e-9)
            # Stages that a limit rules out are none of the best plan's.
            limited = dp.solve(frame, found.costs(scene, frame.samples), truth * 1.01)
            assert (found.offer(limited) if limited is not None else inf) == pytest.approx(truth, rel=1e-9)
            assert dp.solve(frame, found.costs(scene, frame.samples), truth * 0.99) is None
            assert Bounds().least_s(frame, found.costs(scene, frame.samples)) <= truth * (1 + 1e-9)


@pytest.mark.parametrize("rate", [1e4, 1e5])
@pytest.mark.parametrize("room", [850, 950, 1050])
def test_a_stage_may_divide_its_state_to_recompute_less_though_it_then_gathers_weights(room: int, rate: float) -> None:
    model = profile([1e-3] * 4, weights=[100, 200, 50, 100], saved=[60.0, 20.0, 50.0, 40.0])
    model = model.but(units=tuple(u.but(gradient_bytes=u.gradient_bytes // 4) for u in model.units))
    options = Options(batch=8, samples=1)
    scene = next(scenes_of(model, machine(["fast"] * 4, room=room, within=rate), options))
    pipelines = [f for f in frames(scene, options) if f.sizes == (2,) and len(f.order) == 4]
    for frame in (f for f in pipelines if f.mode.zero == 1 and f.mode.recomputes):
        pool = Pool(options)
        truth = min(pool.offer(draft) for draft in exhaustive.drafts(frame))
        best = dp.solve(frame, pool.costs(scene, frame.samples))
        assert best is not None
        assert pool.offer(best) == pytest.approx(truth, rel=1e-9)


@given(cases())
@settings(max_examples=15, deadline=None)
def test_both_searchers_give_the_same_best_estimate(case: tuple[Profile, Machine, Options]) -> None:
    model, place, options = case
    bests = []
    for run in (dp.run, exhaustive.run):
        pool = Pool(options)
        run(pool, [*scenes_of(model, place, options)], options)
        bests.append(pool.best)
    assert bests[0] == pytest.approx(bests[1], rel=1e-8)  # of one sort, those with nine digits in common are equal


@given(cases())
@settings(max_examples=10, deadline=None)
def test_a_plan_is_found_wherever_one_is_estimated_to_fit(case: tuple[Profile, Machine, Options]) -> None:
    model, place, options = case
    pool = Pool(options)
    exhaustive.run(pool, [*scenes_of(model, place, options)], options)
    result = search(model, place, options.but(candidates=1))
    assert bool(result.candidates) == bool(pool.found)
