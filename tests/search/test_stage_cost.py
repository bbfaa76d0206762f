"""The estimate against closed forms, and against the simulator where wires are shared."""

import pytest

from pipedejavu.program import compile as compile_plan
from pipedejavu.search import SearchOptions, search
from pipedejavu.search.candidate_plan import PLAIN, CandidatePlan, Mode, PlanningProblem, Stage
from pipedejavu.search.plan_estimate import estimate
from pipedejavu.search.plan_writer import write
from pipedejavu.search.slot import DeviceOrder, schedule_slot
from pipedejavu.search.stage_cost import StageCosts
from pipedejavu.simulate import simulate
from tests.search.case import machine, profile


def test_of_rings_on_one_wire_the_smaller_ends_first_and_the_larger_when_all_is_through() -> None:
    # Two stages of two replicas, one of each on either host: both rings go through both interfaces, 1 byte a second.
    model = profile([1e-3] * 2, weights=[100, 300])
    place = machine(["fast"] * 4, hosts=2, between=1.0, has_interfaces=True)
    order = ("gpu0", "gpu2", "gpu1", "gpu3")
    problem = PlanningProblem(model, place, order)
    costs, device_order = StageCosts(problem, 1), DeviceOrder(problem, order, 2)
    tails = []
    for stage in (0, 1):
        scheduled = schedule_slot(device_order.slot(2 - 2 * stage, 2), 2, is_stale=False)
        tails.append(float(costs.stage(stage, stage + 1, scheduled, PLAIN).tail_s))
    # Of two members each sends the value once; 100 and 100 of the other's go together, and then 200 alone.
    assert tails == pytest.approx([200.0, 400.0])


def test_a_transfer_meets_the_gradients_that_leave_its_host_for_the_stage_before() -> None:
    model = profile([1e-3] * 3, boundary=100.0)
    place = machine(["fast"] * 3, hosts=3, between=1e5, has_interfaces=True)
    problem = PlanningProblem(model, place, ("gpu0", "gpu1", "gpu2"))
    device_order = DeviceOrder(problem, problem.devices, 1)
    assert [device_order.slot(after, 1).next.contention for after in (0, 1, 2)] == [1.0, 2.0, 2.0]
    apart = machine(["fast"] * 3, hosts=3, between=1e5)
    device_order = DeviceOrder(PlanningProblem(model, apart, problem.devices), problem.devices, 1)
    assert device_order.slot(1, 1).next.contention == 1.0
    stages = tuple(Stage(n, n + 1, (f"gpu{n}",)) for n in range(3))
    # One microbatch meets nothing: three stages of 3 ms, and two borders of 1 ms there and back.
    alone = estimate(CandidatePlan(problem, stages, 1, 1), StageCosts(problem, 1))
    assert alone.time_s == pytest.approx(13e-3, rel=1e-3)


@pytest.mark.parametrize("between", [2e5, 1e6])
def test_the_estimate_across_interfaces_is_near_the_simulator(between: float) -> None:
    # A border takes 0.5 or 0.1 of a stage's 6 ms. Each transfer is slowed by 0 to 1 times the one that it may meet, and
    # half of that is assumed: estimates of the round trip err by half a transfer of each border and way at most.
    model = profile([1e-3] * 8, weights=10**6, boundary=300.0)
    place = machine(["fast"] * 8, hosts=4, within=1e12, between=between, has_interfaces=True)
    result = search(model, place, SearchOptions(batch=64, samples=2, is_runnable=True, candidates=3))
    compared = [c for c in result.candidates if c.plan.order.kind == "1f1b"]
    assert compared
    for ranked in compared:
        sent = 2 * 300.0 / between
        err = sent / (3e-3 * 2 + 2 * sent)
        assert abs(ranked.time_s / ranked.estimated_s - 1) < err + 0.05  # and a twentieth for what drains


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_replicas_of_one_host_share_the_cpu_that_updates_for_them(hosts: int) -> None:
    # Four units of 3 ms on each of four GPUs; an update of one takes 4 ms on a CPU, and no copy takes any time.
    model = profile([1e-3] * 4, {"fast": 1.0, "cpu": 0.5}, update_s=2e-3)
    place = machine(["fast"] * 4, hosts=hosts, host_room=2**60)
    names = tuple(f"gpu{n}" for n in range(4))
    problem = PlanningProblem(model, place, names)
    candidate = CandidatePlan(problem, (Stage(0, 4, names),), 1, 4, Mode(state="host"))
    costs = StageCosts(problem, 1)
    update = 4e-3 * (4 // hosts)
    # The first one begins when its backward has ended, after 6 ms, and the others follow.
    plan = write(candidate, SearchOptions(batch=4), costs)
    assert simulate(compile_plan(plan, model, place)).makespan_s == pytest.approx(6e-3 + 4 * update)
    # The estimate hides what it can under the whole backward, and adds a last update after it.
    assert estimate(candidate, costs).time_s == pytest.approx(12e-3 + 4 * update - 8e-3 + update)


def test_stages_of_one_host_share_the_cpu_that_updates_for_them() -> None:
    model = profile([1e-3] * 4, {"fast": 1.0, "cpu": 0.5}, update_s=2e-3)
    place = machine(["fast"] * 4, host_room=2**60)
    problem = PlanningProblem(model, place, ("gpu0", "gpu1", "gpu2", "gpu3"))
    device_order = DeviceOrder(problem, problem.devices, 2)
    tails = []
    for stage, (start, end) in enumerate(((0, 1), (1, 4))):
        scheduled = schedule_slot(device_order.slot(2 - 2 * stage, 2), 2, is_stale=False)
        tails.append(float(StageCosts(problem, 1).stage(start, end, scheduled, Mode(state="host")).tail_s))
    # Two replicas of one unit and of as much of the other stage's, and then two of all four, 4 ms each.
    updates = [2 * 2 * 4e-3, 2 * 4 * 4e-3]
    assert tails == pytest.approx([updates[0] - 2e-3 + updates[0], updates[1] - 6e-3 + updates[1] / 3])
