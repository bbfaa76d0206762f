"""Degrees and ZeRO stages of each stage: where only one of them needs it, only that one gets it."""

from functools import partial
from math import inf

import pytest

from pipedejavu.analysis import verify
from pipedejavu.facts import Machine, Profile
from pipedejavu.plan import Plan
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import RankedPlan, SearchOptions, dp, exhaustive, mcmc, search
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.planning_problem import problems_of
from pipedejavu.simulate import simulate
from tests.search.case import machine, profile

GIB = 2**30


def costed(model: Profile, place: Machine, **options: object) -> RankedPlan:
    ranked = search(model, place, SearchOptions.model_validate({"batch": 32, **options})).best
    assert ranked is not None
    return ranked


def embedding(rest: int = GIB // 40) -> Profile:
    """A unit with 4 GiB of state, 1 of them weights and 1 gradients, and eight others with little."""
    return profile([1e-3] * 9, weights=[GIB] + [rest] * 8, saved=GIB / 1000, boundary=1e6)


def four(room: float, **options: object) -> Machine:
    return machine(["fast"] * 4, room=round(room * GIB), within=1e10, **options)


def test_a_unit_too_large_for_a_gpu_is_divided_and_the_others_are_not() -> None:
    # ZeRO would need 3 GiB at least; halves of the unit take 2. All-reduces make eight divided units slower than whole.
    ranked = costed(embedding(), four(2.6))
    place, bounds = ranked.plan.place, ranked.plan.cut.bounds
    assert (place.stage_replicas, place.stage_shards) == ((1, 2), (2, 1))
    assert bounds is not None
    assert ranked.plan.keep.zeros is None
    assert not ranked.is_runnable
    assert (
        ranked.only_costed
        == "the engine does not divide operators with tensor-parallel groups of different sizes (2-1)"
    )
    assert "place: units 0 to" in " ".join(ranked.reasons)
    # The team's memory is told of one of its devices.
    assert {need.device: need.room_bytes for need in ranked.memory}["gpu0"] == round(2.6 * GIB)
    alike = [c for c in search(embedding(), four(2.6), SearchOptions(batch=32)).candidates if c.plan.place.stage_shards]
    assert all(ranked.time_s < c.time_s for c in alike if len({*(c.plan.place.stage_shards or ())}) == 1)


def test_a_stage_that_does_not_fit_whole_divides_its_state_and_the_others_do_not() -> None:
    # One GPU a host, so no teams. The first unit fits with half of its optimizer state: 3 GiB. The others have 3.1 in
    # all, and dividing it would save nothing: a reduction and a gathering take as long as an all-reduce.
    ranked = costed(embedding(GIB // 10), four(3.5, hosts=4, between=1e11))
    assert (ranked.plan.num_stages, ranked.plan.place.replicas) == (2, 2)
    assert (ranked.plan.keep.kind, ranked.plan.keep.zeros) in (("zero-1", (1, 0)), ("zero-3", (3, 0)))
    assert ranked.is_runnable
    assert "ZeRO-" in ranked.plan.name
    assert "in stage 0" in ranked.plan.name


def test_equal_units_give_one_degree_everywhere() -> None:
    model = profile([1e-3] * 4, weights=GIB, saved=GIB / 1000, boundary=1e3)
    result = search(model, machine(["fast"] * 8, room=round(2.6 * GIB), within=1e10), SearchOptions(batch=32))
    assert result.best is not None
    assert len({*(result.best.plan.place.stage_shards or ())}) == 1
    assert (result.best.plan.place.stage_shards or (1,))[0] > 1


def test_what_runs_is_neither_divided_nor_costed_only() -> None:
    assert not search(embedding(), four(2.6), SearchOptions(batch=32, is_runnable=True)).candidates
    candidates = search(embedding(), four(5.0), SearchOptions(batch=32, is_runnable=True)).candidates
    assert candidates
    assert all(c.is_runnable and c.plan.place.stage_shards is None and c.plan.keep.zeros is None for c in candidates)


def test_the_plan_says_all_that_its_forecast_needs() -> None:
    ranked = costed(embedding(), four(2.6))
    assert ranked.machine == four(2.6)
    assert ranked.profile == embedding()
    plan = Plan.from_json(ranked.plan.to_json())
    program = compile_plan(plan, embedding(), four(2.6))
    verify(program)
    assert simulate(program).makespan_s == ranked.time_s


def test_a_team_costs_what_its_devices_cost() -> None:
    ranked = costed(embedding(), four(2.6), objective="price", prices={"fast": 3600.0})
    assert ranked.price == pytest.approx(sum(ranked.plan.degrees) * ranked.time_s)


def test_ties_allow_a_degree_for_each_stage_but_no_replicas() -> None:
    model = embedding()
    tied = Profile.model_validate(
        {**model.model_dump(), "ties": [{"units": ("u1", "u8"), "size_bytes": 10}]}, strict=False
    )
    candidates = search(tied, four(2.6), SearchOptions(batch=32)).candidates
    assert all(ranked.plan.place.stage_replicas is None for ranked in candidates)
    places = {ranked.plan.place.stage_shards: ranked for ranked in reversed(candidates)}
    fastest = min(candidates, key=lambda ranked: ranked.time_s)
    assert fastest is places[2, 1, 1]
    assert not fastest.is_runnable
    assert places[2, 2].is_runnable


@pytest.mark.parametrize("place", [four(2.6), four(3.5, hosts=4, between=1e11)])
def test_a_random_walk_finds_what_fits_and_nothing_better(place: Machine) -> None:
    options, bests = SearchOptions(batch=8), []
    for run in (dp.run, partial(mcmc.run, steps=500)):
        pool = Pool(options)
        run(pool, [*problems_of(embedding(GIB // 10), place, options)], options)
        bests.append(pool.best)
    assert bests[0] * (1 - 1e-9) <= bests[1] < inf


def test_every_degree_and_division_is_looked_at_one_by_one() -> None:
    model, options = profile([1e-3] * 2), SearchOptions(batch=4, samples=1)
    (problem,) = (s for s in problems_of(model, machine(["fast"] * 3), options) if len(s.degrees) > 1)
    (subspace,) = (f for f in exhaustive.subspaces(problem, options) if f.mode.zero and not f.mode.recomputes)
    candidate_plans = [*exhaustive.candidate_plans(subspace)]
    choices = {(d.sizes, d.degrees, tuple(s.zero for s in d.stages)) for d in candidate_plans}
    assert len(choices) == len(candidate_plans)
    assert choices == {
        ((1, 1), (1, 2), (0, 0)),
        ((1, 1), (2, 1), (0, 0)),
        ((1, 2), (1, 1), (0, 0)),
        ((1, 2), (1, 1), (0, 1)),
        ((2, 1), (1, 1), (0, 0)),
        ((2, 1), (1, 1), (1, 0)),
    }


def test_only_degrees_that_divide_operators_of_the_model_are_tried() -> None:
    model, place = profile([1e-3] * 4), machine(["fast"] * 8)
    place = place.replace(devices=tuple(device.replace(type="gpu") for device in place.devices))

    def degrees(known: tuple[int, ...] | None) -> set[int]:
        problems = problems_of(model.replace(tp_sizes=known), place, SearchOptions(batch=8))
        return {degree for problem in problems for degree in (problem.tp_size, *problem.degrees)}

    assert degrees(None) == {1, 2, 4, 8}
    assert degrees((2, 8)) == {1, 2, 8}
    assert degrees(()) == {1}
