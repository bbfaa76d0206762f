"""What actions cost: the halves of a backward, and scores."""

import pytest

from pipedejavu.analysis import verify
from pipedejavu.analysis.size import Sizes
from pipedejavu.facts import CollectiveTime, Cost, Device, Host, Link
from pipedejavu.plan import Feed, Place, Reduce, preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import simulate, unit_costs


def makespan_s(input_backward: Cost | None) -> float:
    plan, profile, machine = unit_costs(preset("zb-h1").at(workers=1, microbatches=3), {})
    units = [
        unit.replace(times={kind: time.replace(input_backward=input_backward) for kind, time in unit.times.items()})
        for unit in profile.units
    ]
    program = compile_plan(plan, profile.replace(units=tuple(units)), machine)
    return simulate(program, verify(program)).makespan_s


def test_the_input_half_is_the_rest_of_the_backward_unless_it_is_known() -> None:
    assert makespan_s(None) == makespan_s(Cost(per_sample_s=1.0)) == 3 * (1 + 1 + 1)
    assert makespan_s(Cost(per_sample_s=1.5)) == 3 * (1 + 1.5 + 1)


def test_scores_cost_a_forward_for_each_contribution_and_gradients_travel_one_by_one() -> None:
    plan, profile, machine = unit_costs(preset("zeno").at(workers=3, microbatches=2), {"F": 1.0, "B": 2.0})
    program = compile_plan(plan, profile, machine)
    prediction = simulate(program, verify(program))
    assert prediction.makespan_s == 2 * (1 + 2) + 3 * 1
    assert prediction.workers[3].busy_s == 3
    gathered = [a for a in program.workers[3].actions if a.kind == "RECV" and a.what == "d"]
    assert [(a.peer, a.replica) for a in gathered] == [(0, 0), (1, 1), (2, 2)]


def test_a_server_that_scores_needs_room_for_a_stepped_copy_of_the_weights() -> None:
    plan, profile, machine = unit_costs(preset("zeno").at(workers=3, microbatches=1), {})
    units = tuple(
        u.replace(
            parameter_bytes=100, gradient_bytes=100, optimizer_bytes=0, parameter_parts=(100,), boundary_bytes=0.0
        )
        for u in profile.units
    )
    program = compile_plan(plan, profile.replace(units=units), machine)
    scores = [a for a in program.workers[3].actions if a.kind == "EVAL"]
    assert [Sizes(program).workspace(a, is_first=False) for a in scores] == [100 * len(units)] * 3


def test_who_has_the_last_unit_and_not_the_first_makes_samples_for_their_targets() -> None:
    def forwards_s(workers: int) -> list[float]:
        plan, profile, machine = unit_costs(preset("gpipe").at(workers=workers, microbatches=1), {"F": 1.0})
        program = compile_plan(plan, profile.replace(batch={"unit": Cost(fixed_s=0.25)}), machine)
        spans = simulate(program, verify(program)).timeline().spans()
        return [span.end_s - span.start_s for span in spans if span.action.startswith("F")]

    assert forwards_s(1) == [1.0]  # whose first unit has it in its time
    assert forwards_s(3) == [1.0, 1.0, 1.25]


@pytest.mark.parametrize(("type_", "held_up_s"), [("gpu", 0.0), ("cpu", 1.0)])
def test_a_cpu_worker_computes_while_it_sends_and_pays_to_receive(type_: str, held_up_s: float) -> None:
    plan, profile, machine = unit_costs(preset("gpipe").at(workers=2, microbatches=2), {"F": 4.0, "B": 8.0})
    devices = (d.replace(type=type_) for d in machine.devices if d.name != "host")
    links = (Link(latency_s=0.25, bytes_per_s=4 / 3),)  # one byte takes 0.75 s beyond
    program = compile_plan(plan, profile, machine.replace(devices=tuple(devices), links=links))
    spans = simulate(program, verify(program)).timeline().spans()
    duration_s = {(s.worker, s.action.partition("@")[0]): s.end_s - s.start_s for s in spans if s.lane == "compute"}
    assert duration_s[0, "F0.0"] == 4.0
    assert duration_s[0, "F0.1"] == 4.0 + held_up_s, "after the send of the first one"
    assert duration_s[1, "F1.0"] == 4.0 + held_up_s / 4, "after the latency of its input"
    assert duration_s[1, "B1.0"] == 8.0 + held_up_s, "after the send of the other gradient"


def test_sums_take_what_was_measured_of_sums() -> None:
    def sums_s(**rates: float) -> float:
        plan, profile, machine = unit_costs(preset("ddp").at(workers=2, microbatches=1), {"F": 1.0})
        links = (Link(latency_s=0.5, bytes_per_s=1.0, **rates),)
        program = compile_plan(plan, profile, machine.replace(links=links))
        spans = simulate(program, verify(program)).timeline().spans()
        return max(span.end_s - span.start_s for span in spans if span.action.startswith("REDUCE"))

    assert sums_s() == 2 * 0.5 + 1  # one byte, twice half of it
    assert sums_s(sum_latency_s=2.0, sum_bytes_per_s=0.1) == 2 * 2 + 10


def gathered(cores: int, *times: CollectiveTime) -> tuple[float, float]:
    """Returns the makespan of a ZeRO-3 step of two CPU workers and the longest GATHER."""
    plan, profile, machine = unit_costs(preset("zero-3").at(workers=2, microbatches=1), {"F": 100.0, "B": 200.0})
    devices = tuple(d.replace(type="cpu") for d in machine.devices if d.name != "host")
    hosts = tuple(host.replace(cores=cores) for host in machine.hosts)
    links = (Link(bytes_per_s=1e9, collectives=times),)
    units = tuple(u.replace(parameter_bytes=800, gradient_bytes=800) for u in profile.units)
    program = compile_plan(
        plan, profile.replace(units=units), machine.replace(devices=devices, hosts=hosts, links=links), fold=False
    )
    prediction = simulate(program, verify(program))
    spans = [s for s in prediction.timeline().spans() if s.action.startswith("GATHER")]
    return prediction.makespan_s, max(s.end_s - s.start_s for s in spans)


def collective_times(core_share: float, members: int = 2) -> tuple[CollectiveTime, ...]:
    times = {"all-gather": (1.0, 100.0), "reduce-scatter": (2.0, 200.0)}
    return tuple(
        CollectiveTime(kind=kind, members=members, latency_s=a, bytes_per_s=rate, core_share=core_share)
        for kind, (a, rate) in times.items()
    )


def test_collectives_take_what_was_measured_of_their_kind_and_size() -> None:
    assert gathered(64, *collective_times(0.0))[1] == 1 + 800 / 100
    # From four members to two: a third of the rounds, and two thirds of the traffic.
    assert gathered(64, *collective_times(0.0, members=4))[1] == pytest.approx(1 / 3 + 800 / 100 * (1 / 2) / (3 / 4))


def test_a_collective_takes_its_time_from_the_compute_of_a_cpu_worker_without_a_spare_core() -> None:
    hidden_s, _ = gathered(8, *collective_times(1.0))
    crowded_s, slowed_s = gathered(2, *collective_times(1.0))
    plan_units = (crowded_s - hidden_s, slowed_s)
    assert slowed_s == 2 * (1 + 800 / 100), "it has half of the core while the worker computes"
    assert crowded_s > hidden_s, plan_units
    assert gathered(2, *collective_times(0.0)) == gathered(8, *collective_times(1.0)), "a wait for messages takes none"


@pytest.mark.parametrize(("again", "expected"), [((0,), 1.0), ((1,), 2.0), ((0, 1), 3.0)])
def test_recomputing_takes_the_time_of_the_units_that_are_named(again: tuple[int, ...], expected: float) -> None:
    plan, profile, machine = unit_costs(preset("gpipe").at(workers=2, microbatches=1), {})
    plan = plan.replace(cut=plan.cut.replace(bounds=(2,)), order=plan.order.replace(recompute_units=again))
    unit, other = profile.units
    cost = {"first": 1.0, "second": 2.0, "third": 1.0, "fourth": 1.0}
    units = tuple(
        unit.replace(
            name=name,
            activation_bytes=10.0 / time_s,
            times={k: t.replace(recompute=Cost(fixed_s=time_s)) for k, t in other.times.items()},
        )
        for name, time_s in cost.items()
    )
    program = compile_plan(plan, profile.replace(units=units), machine)
    spans = simulate(program, verify(program)).timeline().spans()
    assert [s.end_s - s.start_s for s in spans if s.action.startswith("R0")] == [expected]


def test_while_one_batch_is_copied_the_host_makes_the_next() -> None:
    def fetch_s(loading_s: float) -> float:
        plan, profile, machine = unit_costs(preset("hyscale").at(workers=1, samples=4, microbatches=1), {"F": 1.0})
        plan = plan.replace(place=Place(), feed=Feed(samples=4), reduce=Reduce())
        gpu = Device(name="gpu0", kind="unit", type="gpu", host="h", memory_bytes=2**40)
        devices = (gpu, gpu.replace(name="cpu0", type="cpu"))
        links = (Link(scope="same-host", bytes_per_s=10.0),)
        machine = machine.replace(hosts=(Host(name="h"),), devices=devices, links=links)
        profile = profile.replace(batch_bytes=5.0, batch={"unit": Cost(fixed_s=loading_s)})
        program = compile_plan(plan, profile, machine)
        spans = simulate(program, verify(program)).timeline().spans()
        return next(span.end_s - span.start_s for span in spans if span.action.startswith("FETCH"))

    assert fetch_s(0.0) == 4 * 5.0 / 10.0
    assert fetch_s(3.0) == 3.0
