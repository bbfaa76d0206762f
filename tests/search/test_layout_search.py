"""Layouts in the search: those of the model's graph are proposed, and chosen where they pay."""

import pytest

from pipedejavu.facts import CollectiveTime, DividedSums, Machine, Profile
from pipedejavu.plan import Layout
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import RankedPlan, SearchOptions, search
from pipedejavu.search.planning_problem import problems_of
from pipedejavu.simulate import simulate
from tests.search.case import machine, profile

EVERY = dict.fromkeys(("sequence", "vocabulary", "sequence+vocabulary", "context"), (2, 4))
OPTIONS = SearchOptions(batch=1, is_runnable=True)


def cpus(count: int, room: int = 2**40) -> Machine:
    place = machine(["fast"] * count, room=room, within=1e9)
    devices = tuple(device.replace(type="cpu") for device in place.devices)
    return place.replace(devices=devices, links=tuple(link.replace(source="*", target="*") for link in place.links))


def proposed(model: Profile, place: Machine) -> set[tuple[int, tuple[Layout, ...]]]:
    problems = problems_of(model, place, OPTIONS)
    return {(problem.tp_size, problem.layouts) for problem in problems if problem.tp_groups}


def best(model: Profile, place: Machine) -> RankedPlan:
    ranked = search(model, place, OPTIONS).best
    assert ranked is not None
    assert ranked.is_runnable
    return ranked


def test_only_layouts_of_the_graph_are_proposed() -> None:
    model = profile([1e-3] * 2)
    assert proposed(model, cpus(4)) == set()  # nobody knows what its operators are
    assert proposed(model.replace(tp_sizes=(2,)), cpus(4)) == {(2, ())}
    known = model.replace(tp_sizes=(2,), layout_sizes={"context": (4,), "vocabulary": (2,)})
    assert proposed(known, cpus(4)) == {(2, ()), (2, ("vocabulary",)), (4, ("context",))}
    assert proposed(known, cpus(2)) == {(2, ()), (2, ("vocabulary",))}
    both = ("sequence", "vocabulary")
    full = model.replace(tp_sizes=(2,), layout_sizes=EVERY)
    twos = {(2, ()), (2, ("vocabulary",)), (2, both), (2, ("context",))}
    assert {row for row in proposed(full, cpus(4)) if row[0] == 2} == twos
    assert {row for row in proposed(full, cpus(32)) if row[0] == 2} == {(2, ()), (2, both)}


def test_cpus_beside_gpus_form_no_groups() -> None:
    place = machine(["fast"] * 4, host_room=2**40)
    model = profile([1e-3] * 2, {"fast": 1.0, "cpu": 0.5}).replace(tp_sizes=(2,))
    problems = [problem for problem in problems_of(model, place, OPTIONS) if problem.tp_groups]
    assert [problem.tp_groups for problem in problems] == [(("gpu0", "gpu1"), ("gpu2", "gpu3"))]


def test_activations_that_a_group_repeats_are_divided_along_the_sequence_if_memory_is_short() -> None:
    """One sample saves 100 bytes per unit; each device of a group has them whole, or with a divided sequence half."""
    model = profile([1e-3] * 2, weights=10, saved=100.0)
    units = tuple(unit.replace(replicated_bytes=100.0) for unit in model.units)
    model = model.replace(units=units, tp_sizes=(2,), layout_sizes={"sequence": (2,)})
    roomy, tight = best(model, cpus(2)), best(model, cpus(2, room=190))
    assert (roomy.plan.place.stage_shards, roomy.plan.cut.layouts) == ((2,), ())
    assert (tight.plan.place.stage_shards, tight.plan.cut.layouts) == ((2,), ("sequence",))
    assert not tight.plan.order.has_recompute
    assert tight.plan.name == "one group, operators, sequence over 2 devices"
    program = compile_plan(tight.plan, model, cpus(2, room=190), fold=False)
    assert len(program.workers) == 2
    assert max(peak["device"] for peak in simulate(program).peaks()) <= 190


def test_a_head_whose_vocabulary_is_whole_takes_its_whole_time() -> None:
    model = profile([1e-3, 3e-3])
    whole, divided = DividedSums(parameter_share=0.0, work_share=0.0), DividedSums()
    block, head = model.units
    head = head.replace(divided_sums={"pairs/2": whole, "vocabulary/2": divided})
    block = block.replace(divided_sums={"pairs/2": divided, "vocabulary/2": divided})
    model = model.replace(units=(block, head), tp_sizes=(2,), layout_sizes={"vocabulary": (2,)})
    ranked = best(model, cpus(2))
    assert ranked.plan.cut.layouts == ("vocabulary",)
    assert ranked.time_s == pytest.approx(3 * 4e-3 / 2)
    found = {c.plan.cut.layouts: c.time_s for c in search(model, cpus(2), OPTIONS).candidates if c.plan.degrees == (2,)}
    assert found[()] == pytest.approx(3 * (0.5e-3 + 3e-3))


def test_groups_are_costed_by_measured_collectives() -> None:
    model = profile([1e-3], boundary=1e4).replace(tp_sizes=(2,))
    place = cpus(2)
    measured = CollectiveTime(kind="all-reduce", members=2, latency_s=1e-4, bytes_per_s=1e9)
    place = place.replace(links=tuple(link.replace(collectives=(measured,)) for link in place.links))
    ranked = next(c for c in search(model, place, OPTIONS).candidates if c.plan.degrees == (2,))
    assert ranked.time_s == pytest.approx(3e-3 / 2 + 4 * (1e-4 + 1e4 / 1e9))
    assert simulate(compile_plan(ranked.plan, model, place, fold=False)).makespan_s == pytest.approx(ranked.time_s)
