"""Plans that are ranked: of long pipelines a part is simulated, and says the same as all of it."""

import pytest

from pipedejavu.facts import Machine, Profile
from pipedejavu.plan import Cut, Feed, Keep, Order, Place, Plan, Reduce
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import SearchOptions, search
from pipedejavu.search.candidate_plan import PlanningProblem
from pipedejavu.search.planning_problem import problems_of
from pipedejavu.search.ranking import Timed, admit, faster_form, memory_needs, time_plan
from pipedejavu.search.search_result import RankedPlan
from pipedejavu.simulate import check_fit, simulate
from tests.search.case import machine, profile

MODEL = profile([1e-3, 4e-3, 2e-3, 3e-3, 1e-3, 5e-3, 2e-3, 1e-3], boundary=2e6, update_s=1e-3, weights=10**6)


def scene_on(place: Machine, model: Profile = MODEL) -> PlanningProblem:
    (problem,) = problems_of(model, place, SearchOptions(batch=64, is_runnable=True))
    return problem


def pipeline(microbatches: int, order: Order, workers: int = 4, replicas: int = 1, **other: object) -> Plan:
    return Plan(
        name="pipeline",
        cut=Cut(kind="chain", bounds=(2, 4, 6) if workers == 4 else (4,)),
        place=Place(workers=workers, replicas=replicas),
        feed=Feed(microbatches=microbatches, samples=1),
        order=order,
        reduce=Reduce(wire="all-reduce" if replicas > 1 else "none"),
    ).replace(**other)


LONG = [
    pipeline(64, Order(kind="1f1b")),
    pipeline(64, Order(kind="1f1b", recompute=1.0)),
    pipeline(40, Order(kind="1f1b", is_eager=True, prefetch=1), keep=Keep(activations="host")),
    pipeline(32, Order(kind="1f1b"), workers=2, replicas=2),
    Plan(name="one device", feed=Feed(microbatches=20, samples=2), order=Order(kind="step")),
]


@pytest.mark.parametrize("plan", LONG, ids=[str(n) for n in range(len(LONG))])
def test_of_a_long_pipeline_a_part_says_what_the_whole_takes(plan: Plan) -> None:
    place = machine(["fast"] * 4, hosts=2, within=1e9, between=5e8, host_room=2**60, pcie=2e9, has_interfaces=True)
    problem = scene_on(place, profile_with_cpu())
    timed = time_plan(plan, problem, 1.0)
    assert isinstance(timed, Timed)
    assert timed.others > 0
    whole = simulate(compile_plan(plan, problem.profile, problem.machine))
    assert timed.time_s == pytest.approx(whole.makespan_s, rel=1e-4)  # by which paces may differ
    assert memory_needs(timed.prediction, {}) == memory_needs(whole, {})
    ranked = admit(timed, SearchOptions(batch=64))
    assert isinstance(ranked, RankedPlan)
    assert ranked.plan == whole.program.plan
    assert ranked.bubble_fraction == pytest.approx(whole.bubble_fraction, abs=1e-4)
    complete = Timed(plan, whole, 0.0, problem, 1.0)
    assert ranked.bound == admit(complete, SearchOptions(batch=64)).bound  # type: ignore[union-attr]


@pytest.mark.parametrize("plan", LONG, ids=[str(n) for n in range(len(LONG))])
def test_of_a_long_pipeline_a_part_says_what_the_whole_reserves(plan: Plan) -> None:
    size = 3 * 2**20
    parts = {"parameter_parts": (size, size // 2), "activation_parts": (2e6, 5e6, 12e6), "activation_bytes": 19e6}
    model = MODEL.replace(
        units=tuple(unit.replace(**parts, backward_work_bytes=4e6) for unit in profile_with_cpu().units)
    )
    place = machine(["fast"] * 4, hosts=2, within=1e9, between=5e8, host_room=2**60, pcie=2e9, has_interfaces=True)
    timed = time_plan(plan, scene_on(place, model), 1.0)
    assert isinstance(timed, Timed)
    assert timed.others > 0
    assert check_fit(timed.prediction) == check_fit(simulate(compile_plan(plan, model, place)))


def test_a_plan_that_an_allocator_does_not_get_through_is_no_candidate() -> None:
    # Weights of 3 MiB with their gradient, two moments and an update's copies: 18 MiB, in a segment of 20.
    size = 3 * 2**20
    model = profile([1e-3], weights=size, saved=0.0, boundary=0.0, update_s=1e-3)
    model = model.replace(units=(model.units[0].replace(parameter_parts=(size,)),))
    plan = Plan(name="one", order=Order(kind="step"))
    small, enough = (scene_on(machine(["fast"], room=room * 2**20), model) for room in (19, 20))
    reason = admit(time_plan(plan, small, 1.0), SearchOptions(batch=1))  # type: ignore[arg-type]
    assert reason == (
        "the allocator of device 'gpu0' would reserve 20.0 MiB for tensors of 18.0 MiB, and the device has 19.0 MiB;"
        " use more workers, smaller microbatches, recompute, or keep state on the host"
    )
    assert isinstance(admit(time_plan(plan, enough, 1.0), SearchOptions(batch=1)), RankedPlan)  # type: ignore[arg-type]


def test_a_search_answers_with_plans_that_allocators_get_through() -> None:
    # Links are slow, so one GPU is best. Its live tensors take 25 MiB: ten of 2.5, in two segments of 20.
    size = 5 * 2**19
    model = profile([1e-3, 1e-3], weights=size, saved=0.0, boundary=size, update_s=1e-3)
    known = model.replace(units=tuple(unit.replace(parameter_parts=(size,)) for unit in model.units))
    options = SearchOptions(batch=1, is_runnable=True)
    for units, room, count in ((known, 40, 1), (known, 39, 2), (model, 39, 1)):
        result = search(units, machine(["fast"] * 2, room=room * 2**20, within=1e6), options)
        assert result.best is not None
        assert result.best.plan.num_workers == count
        held = [need.reserved_bytes for need in result.best.memory]
        assert held == [None if units is model else 40 * 2**20 / count] * count
        assert any("would reserve" in note for note in result.notes) == (count == 2)


def profile_with_cpu() -> Profile:
    units = [unit.replace(times=unit.times | {"cpu": unit.times["fast"]}) for unit in MODEL.units]
    return MODEL.replace(units=tuple(units))


def test_a_pace_that_takes_turns_is_not_taken_for_an_even_one() -> None:
    # Behind slow links two microbatches make a round of three stages: of any three, two are quick or one is.
    place = machine(["fast"] * 3, hosts=3, between=2e8, host_room=2**60, has_interfaces=True)
    problem = scene_on(place, profile_with_cpu())
    plan = pipeline(40, Order(kind="1f1b"), cut=Cut(kind="chain", bounds=(1, 4)), place=Place(workers=3))
    timed = time_plan(plan, problem, 1.0)
    assert isinstance(timed, Timed)
    assert timed.time_s == simulate(compile_plan(plan, problem.profile, problem.machine)).makespan_s


def test_a_pipeline_that_fills_slowly_is_simulated_for_longer_but_not_whole() -> None:
    # The first stage is the slowest by little, which the last ones feel only after a while.
    problem = scene_on(machine(["fast"] * 8), profile([1.03e-3] + [1e-3] * 7, boundary=0.0))
    plan = pipeline(128, Order(kind="1f1b"), cut=Cut(kind="chain", bounds=tuple(range(1, 8))), place=Place(workers=8))
    timed = time_plan(plan, problem, 1.0)
    assert isinstance(timed, Timed)
    assert 0 < timed.others < 128 - 3 * 8
    assert timed.time_s == pytest.approx(simulate(compile_plan(plan, problem.profile, problem.machine)).makespan_s)


def test_short_pipelines_and_those_that_go_in_turns_are_simulated_whole() -> None:
    problem = scene_on(machine(["fast"] * 4))
    short = pipeline(16, Order(kind="1f1b"))
    looped = pipeline(
        64, Order(kind="interleaved"), cut=Cut(kind="chain"), place=Place(workers=4, kind="loop", chunks=2)
    )
    for plan in (short, looped):
        timed = time_plan(plan, problem, 1.0)
        assert isinstance(timed, Timed)
        assert timed.others == 0
        assert timed.time_s == simulate(compile_plan(plan, problem.profile, problem.machine)).makespan_s


def test_replicas_of_a_pipeline_add_gradients_up_beside_its_last_backwards_where_that_is_faster() -> None:
    model = profile([1e-3] * 4, weights=10**6, boundary=1e3, update_s=1e-4)
    plan = pipeline(2, Order(kind="1f1b"), workers=2, replicas=2, cut=Cut(kind="chain", bounds=(2,)), bucket_bytes=1)
    slow, fast = (scene_on(machine(["fast"] * 4, within=rate), model) for rate in (1e9, 1e12))
    timed = time_plan(plan, slow, 1.0)
    assert isinstance(timed, Timed)
    faster = faster_form(plan, timed)
    # A unit's megabyte takes 1 ms around two replicas, and the backward of a unit 2 ms. Behind the last come one
    # sum and one update where two and two came.
    assert timed.tail_s == pytest.approx(2e-3 + 2e-4)
    assert timed.time_s - faster.time_s == pytest.approx(1e-3 + 1e-4)
    assert faster.plan.order == Order(kind="1f1b", is_eager=True)
    assert faster.plainer is timed
    # Sums that take no time leave nothing to hide.
    timed = time_plan(plan, fast, 1.0)
    assert isinstance(timed, Timed)
    assert faster_form(plan, timed) is timed


@pytest.mark.parametrize("is_eager", [True, False])
def test_a_search_takes_the_faster_form_of_a_pipeline_that_fits(is_eager: bool) -> None:
    # Two stages of two units, whose state takes 208 MiB. One microbatch moves a megabyte between the units of a stage,
    # which is held where gradients are added up unit by unit.
    size = 26 * 2**20
    model = profile([1e-3] * 4, weights=size, boundary=[1e6, 1.0, 1e6, 1.0], update_s=1e-4)
    room = 8 * size + (3_000_000 if is_eager else 500_000)
    options = SearchOptions(batch=4, samples=1, is_runnable=True)
    result = search(model, machine(["fast"] * 4, room=room, within=size / 1e-3), options)
    (ranked,) = (c for c in result.candidates if c.plan.name == "2 stages × 2")
    assert ranked.plan.order == Order(kind="1f1b", is_eager=is_eager)
    assert any("order: eager" in reason for reason in ranked.reasons) == is_eager
    assert any(note.startswith("2 stages × 2: device 'gpu0'") for note in result.notes) == (not is_eager)
