"""The search runs a head in chunks if its logits leave too little memory, or if chunks were measured to be faster."""

import pytest

from pipedejavu.facts import Cost, Device, HeadForm, Host, InputError, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.plan import Order, Plan
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import SearchOptions, search

MIB = 2**20


def machine(memory_bytes: int) -> Machine:
    gpu = Device(name="gpu0", kind="gpu", type="gpu", host="here", memory_bytes=memory_bytes)
    cpu = Device(name="cpu", kind="cpu", type="cpu", host="here", memory_bytes=MIB)
    return Machine(name="m", hosts=(Host(name="here"),), devices=(gpu, cpu), links=(Link(bytes_per_s=1e9),))


def profile(ratio: float) -> Profile:
    time = UnitTime(forward=Cost(per_sample_s=1.0), backward=Cost(per_sample_s=2.0), recompute=Cost(per_sample_s=1.0))
    forms = tuple(
        HeadForm(
            chunks=n, forward={"gpu": 1.0 if n == 1 else ratio}, backward={"gpu": 1.0 if n == 1 else ratio},
            activation_bytes=40 * MIB if n == 1 else MIB, forward_work_bytes=20 * MIB / n,
            backward_work_bytes=60 * MIB / n, boundary_bytes=20 * MIB if n == 1 else 0.0,
        )
        for n in (1, 4, 16)
    )  # fmt: skip
    unit = Unit(
        name="body", times={"gpu": time}, parameter_bytes=MIB, gradient_bytes=MIB, optimizer_bytes=2 * MIB,
        parameter_parts=(MIB,), activation_bytes=MIB, boundary_bytes=MIB,
    )  # fmt: skip
    head = unit.replace(name="head", **{name: getattr(forms[0], name) for name in _BYTES})
    return Profile(name="p", units=(unit, head), head_forms=forms)


_BYTES = ("activation_bytes", "forward_work_bytes", "backward_work_bytes", "boundary_bytes")
OPTIONS = SearchOptions(batch=1, is_runnable=True)


def best(memory_bytes: int, ratio: float, options: SearchOptions = OPTIONS) -> Plan | None:
    result = search(profile(ratio), machine(memory_bytes), options)
    return result.best.plan if result.best else None


def test_chunks_make_a_model_fit() -> None:
    assert best(40 * MIB, 1.1, OPTIONS.replace(head_chunks=1)) is None
    plan = best(40 * MIB, 1.1)
    assert plan is not None
    assert plan.order.head_chunks > 1
    decision = next(d for d in plan.decisions if d.choice.startswith("the head and its loss in"))
    assert decision.axis == "order"
    assert "per microbatch in the last unit" in decision.reason


def test_with_enough_memory_slower_chunks_are_left_out_and_faster_ones_taken() -> None:
    plan = best(2000 * MIB, 1.1)
    assert plan is not None
    assert plan.order.head_chunks == 1
    plan = best(2000 * MIB, 0.8)
    assert plan is not None
    assert plan.order.head_chunks > 1


def test_a_number_that_is_asked_for_is_kept() -> None:
    plan = best(2000 * MIB, 1.1, OPTIONS.replace(head_chunks=8))
    assert plan is not None
    assert plan.order.head_chunks == 8
    assert "head in 8 chunks" in plan.name


def test_the_program_has_the_bytes_and_times_of_its_chunks() -> None:
    plan = Plan(order=Order(head_chunks=4))
    program = compile_plan(plan, profile(1.5), machine(2000 * MIB))
    assert program.profile.units[-1].backward_work_bytes == 15 * MIB
    assert program.profile.units[-1].times["gpu"].forward.at(1) == pytest.approx(1.5)
    assert str(plan.order) == "step + head(4 chunks)"
    with pytest.raises(InputError, match=r"leave order\.head_chunks out, or measure the model again"):
        compile_plan(plan, profile(1.5).replace(head_forms=()), machine(2000 * MIB))
