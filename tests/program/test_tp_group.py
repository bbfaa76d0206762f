"""Stages of which each has its own teams of devices, and its own division of state over replicas."""

import pytest

from pipedejavu.analysis import verify
from pipedejavu.facts import Cost, InputError, Profile, UnitTime
from pipedejavu.plan import Cut, Feed, Keep, Order, Place, Plan, Reduce
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import simulate

RATE, LATENCY, BOUNDARY = 1000.0, 0.01, 10.0
"""Of the links and units in `conftest`."""


def pipeline(place: Place, *, keep: Keep | None = None, **order: object) -> Plan:
    wire = "none" if keep is None else "reduce-scatter"
    return Plan(
        cut=Cut(kind="chain", bounds=(1,)),
        place=place,
        feed=Feed(microbatches=4),
        order=Order.model_validate({"kind": "1f1b", **order}),
        reduce=Reduce.model_validate({"wire": wire}),
        keep=keep or Keep(),
    )


def span(prediction, worker: int, kind: str) -> float:
    """What each action of a kind takes."""
    actions = prediction.program.workers[worker].actions
    found = zip(prediction.graph.of_action[worker], actions, strict=True)
    (time,) = {round(prediction.end[op] - prediction.start[op], 9) for op, a in found if a.kind == kind}
    return time


def launched(profile: Profile, fixed_s: float) -> Profile:
    """Returns the profile with all forwards of 1 s and backwards of 2 s, of which `fixed_s` are launches."""
    passes = {
        name: Cost(fixed_s=fixed_s, per_sample_s=size - fixed_s) for name, size in (("forward", 1), ("backward", 2))
    }
    units = [u.replace(times={kind: time.replace(**passes) for kind, time in u.times.items()}) for u in profile.units]
    return profile.replace(units=tuple(units))


def test_a_team_takes_its_part_of_the_time_and_two_all_reduces_each_way(model, computer):
    plan = pipeline(Place(workers=2, stage_shards=(2, 1)))
    program = compile_plan(plan, launched(model(2), 0.0), computer(3))
    verify(program)
    assert program.devices == ("gpu0", "gpu2")
    prediction = simulate(program)
    reduced = 2 * (2 * LATENCY + BOUNDARY / RATE)  # two rounds, in each half of the boundary, twice
    assert span(prediction, 0, "F") == pytest.approx(1 / 2 + reduced)
    assert span(prediction, 0, "B") == pytest.approx(2 / 2 + reduced)
    assert span(prediction, 0, "UPDATE") == pytest.approx(0.1 / 2)
    assert span(prediction, 1, "F") == 1.0
    assert span(prediction, 1, "B") == 2.0


def test_launches_are_not_divided_and_all_reduces_wait_for_the_last_member(model, computer):
    machine = computer(9)
    machine = machine.replace(links=tuple(link.replace(sum_start_s=0.1) for link in machine.links))
    for size, start_s in ((2, 0.1), (4, 0.2), (8, 0.3)):
        plan = pipeline(Place(workers=2, stage_shards=(size, 1)))
        prediction = simulate(compile_plan(plan, launched(model(2), 0.4), machine))
        ring_s = 2 * (size - 1) * LATENCY + 2 * (size - 1) / size * BOUNDARY / RATE
        assert span(prediction, 0, "F") == pytest.approx(0.4 + 0.6 / size + 2 * (start_s + ring_s))
        assert span(prediction, 0, "B") == pytest.approx(0.4 + 1.6 / size + 2 * (start_s + ring_s))


def test_a_team_takes_the_times_that_the_profile_states_for_it(model, computer):
    profile = model(2)
    kind = next(iter(profile.units[0].times))
    stated = UnitTime(forward=Cost(fixed_s=0.7), backward=Cost(fixed_s=1.1))
    units = tuple(u.replace(tp_times={f"2x{kind}": stated}) for u in profile.units)
    plan = pipeline(Place(workers=2, stage_shards=(2, 1)))
    prediction = simulate(compile_plan(plan, profile.replace(units=units), computer(3)))
    reduced = 2 * (2 * LATENCY + BOUNDARY / RATE)
    assert span(prediction, 0, "F") == pytest.approx(0.7 + reduced)
    assert span(prediction, 0, "B") == pytest.approx(1.1 + reduced)


def test_a_team_errs_as_its_devices(model, computer):
    plan = pipeline(Place(workers=2, stage_shards=(2, 1)))
    program = compile_plan(plan, model(2).replace(error={"gpu": 0.1}), computer(3))
    assert program.profile.error == {"gpu": 0.1, "2xgpu": 0.1}
    assert simulate(program).chance.varies


def test_a_team_adds_its_all_reduces_to_times_that_were_measured(model, computer):
    forward = Cost(per_sample_s=1.0, measured_s={1: 3.0, 2: 4.0})
    profile = model(2)
    units = [
        u.replace(times={kind: time.replace(forward=forward) for kind, time in u.times.items()}) for u in profile.units
    ]
    plan = pipeline(Place(workers=2, stage_shards=(2, 1)))
    program = compile_plan(plan, profile.replace(units=tuple(units)), computer(3))
    prediction = simulate(program, verify(program))
    assert span(prediction, 0, "F") == pytest.approx(3.0 / 2 + 2 * (2 * LATENCY + BOUNDARY / RATE))


def test_a_team_has_the_memory_of_all_its_devices(model, computer):
    # Each unit has 100 bytes of weights, 100 of gradients and 600 of optimizer state.
    alone, tp_group = pipeline(Place(workers=2)), pipeline(Place(workers=2, stage_shards=(2, 2)))
    with pytest.raises(InputError, match=r"has 600 B"):
        verify(compile_plan(alone, model(2), computer(4, memory_bytes=600)))
    verify(compile_plan(tp_group, model(2), computer(4, memory_bytes=600)))


def test_devices_are_named_team_by_team(model, computer):
    place = Place(workers=2, replicas=2, stage_shards=(1, 2), devices=("gpu5", "gpu0", "gpu1", "gpu4", "gpu2", "gpu3"))
    plan = pipeline(place).replace(reduce=Reduce(wire="all-reduce"))
    program = compile_plan(plan, model(2), computer(6), fold=False)
    verify(program)
    assert program.devices == ("gpu5", "gpu0", "gpu4", "gpu2")
    assert [program.machine.device(name).kind for name in program.devices] == ["gpu", "2xgpu"] * 2
    few = place.replace(devices=("gpu0", "gpu1"))
    with pytest.raises(InputError, match="names 2 devices for 6 members of its tensor-parallel groups; name one"):
        compile_plan(plan.replace(place=few), model(2), computer(6))


def test_devices_that_are_not_alike_are_no_team(model, computer):
    plan = pipeline(Place(workers=2, stage_shards=(2, 1)))
    with pytest.raises(InputError, match=r"group of 'gpu0', 'gpu1', which are not of one kind on one host"):
        compile_plan(plan, model(2, kinds={"a": 1.0, "b": 2.0}), computer(["a", "b", "a"]))
    with pytest.raises(InputError, match="needs 5 devices to train on"):
        compile_plan(plan.replace(place=Place(workers=2, stage_shards=(4, 1))), model(2), computer(3))


def zeros(*numbers: int) -> Keep:
    keep = {"kind": f"zero-{max(numbers)}", "zeros": numbers, "persists": 3 in numbers}
    return Keep.model_validate(keep)


def test_only_stages_that_divide_their_state_gather_weights_and_hold_less(model, computer):
    place = Place(workers=2, replicas=2)
    program = compile_plan(pipeline(place, keep=zeros(1, 0)), model(2), computer(4))
    verify(program)
    prediction = simulate(program)
    gathers = [sum(a.kind == "GATHER" for a in worker.actions) for worker in program.workers]
    assert gathers == [1, 0]
    mixed = [curve.peak_bytes for worker in prediction.workers for curve in worker.memory if curve.memory == "device"]
    whole = simulate(compile_plan(pipeline(place, keep=zeros(1, 1)), model(2), computer(4)))
    divided = [curve.peak_bytes for worker in whole.workers for curve in worker.memory if curve.memory == "device"]
    assert mixed[0] == divided[0]
    assert mixed[1] == divided[1] + 600 / 2
    # What is not divided goes around the ring twice; what is, once, and new weights once.
    assert span(prediction, 1, "REDUCE") == pytest.approx(2 * (LATENCY + 100 / 2 / RATE))
    assert span(prediction, 0, "REDUCE") == span(prediction, 0, "GATHER") == pytest.approx(LATENCY + 100 / 2 / RATE)


@pytest.mark.parametrize("numbers", [(0, 1), (2, 0), (3, 0), (1, 3), (2, 1), (3, 2), (0, 3)])
@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("place", [Place(workers=2, replicas=2), Place(stage_replicas=(2, 4))])
def test_every_mixture_of_zero_stages_is_a_legal_program(numbers, is_eager, place, model, computer):
    plan = pipeline(place, keep=zeros(*numbers), is_eager=is_eager).replace(steps=2, cut=Cut(kind="chain", bounds=(2,)))
    verify(compile_plan(plan, model(5), computer(6), fold=False))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_same_zero_stage_for_each_is_that_of_all(number, model, computer):
    keep = zeros(number, number)
    programs = [
        compile_plan(pipeline(Place(workers=2, replicas=2), keep=kept), model(4), computer(4))
        for kept in (keep, keep.replace(zeros=None))
    ]
    assert programs[0].to_text() == programs[1].to_text()
    assert simulate(programs[0]).makespan_s == simulate(programs[1]).makespan_s
