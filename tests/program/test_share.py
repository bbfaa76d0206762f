"""Shares of a batch: what each replica gets, and why."""

import pytest

from pipedejavu.analysis import verify
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.plan import Feed, Place, preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.share import cut_evenly, cut_samples, divide


def host(bytes_per_s: float = 1e9) -> Machine:
    devices = (
        Device(name="gpu", kind="fast", type="gpu", host="here", memory_bytes=2**40),
        Device(name="cpu", kind="slow", type="cpu", host="here", memory_bytes=2**40),
    )
    return Machine(name="here", hosts=(Host(name="here"),), devices=devices, links=(Link(bytes_per_s=bytes_per_s),))


def model(fast: Cost, slow: Cost, gradient_bytes: int = 10**6, slow_update_s: float = 0.0) -> Profile:
    """Two units; a third of each time is the forward's."""

    def time(cost: Cost, update_s: float) -> UnitTime:
        parts = [cost.times(p / 2) for p in (1 / 3, 2 / 3)]
        return UnitTime(forward=parts[0], backward=parts[1], update_s=update_s / 2)

    times = {"fast": time(fast, 0.0), "slow": time(slow, slow_update_s)}
    unit = Unit(name="u", times=times, parameter_bytes=gradient_bytes // 2, gradient_bytes=gradient_bytes // 2)
    return Profile(name="model", units=(unit, unit.replace(name="v")))


def shares(profile: Profile, machine: Machine, microbatches: int, samples: int, **feed):
    plan = preset("coarse").at(workers=1, microbatches=microbatches, samples=samples)
    program = compile_plan(plan.replace(feed=plan.feed.replace(**feed)), profile, machine, fold=False)
    verify(program)
    return program


def test_samples_are_cut_into_few_microbatches_of_about_one_size() -> None:
    assert cut_samples(10, 4) == (4, 3, 3)
    assert cut_samples(8, 4) == (4, 4)
    assert cut_samples(0, 4) == ()
    assert cut_evenly(7, 2) == (4, 3)
    assert divide(7, (1, 1, 2)) == (2, 2, 3)
    assert divide(4, (0.9, 0.1)) == (4, 0)


def test_a_fast_and_a_slow_replica_end_together() -> None:
    program = shares(model(Cost(per_sample_s=1e-3), Cost(per_sample_s=9e-3)), host(), 1, 100)
    assert program.parts == ((90,), (10,))
    assert program.plan.feed.shares == (0.9, 0.1)
    (decision,) = (d for d in program.plan.decisions if d.axis == "feed")
    assert decision.choice == "90 + 10 of 100 samples"
    assert decision.reason == (
        "an update is estimated at 91 ms (90 ms to compute, 1 ms to add up gradients, 0 us to update),"
        " and without the CPU at 100 ms"
    )


@pytest.mark.parametrize(
    ("why", "profile", "machine"),
    [
        ("sums", model(Cost(per_sample_s=1e-3), Cost(per_sample_s=9e-3), 10**8), host()),
        ("updates", model(Cost(per_sample_s=1e-3), Cost(per_sample_s=9e-3), slow_update_s=0.02), host()),
        ("starts", model(Cost(per_sample_s=1e-3), Cost(fixed_s=0.2, per_sample_s=1e-3)), host()),
        ("waits", model(Cost(fixed_s=0.1), Cost(per_sample_s=1e-3)), host()),
    ],
)
def test_the_cpu_gets_none_where_its_share_does_not_pay(why: str, profile: Profile, machine: Machine) -> None:
    program = shares(profile, machine, 1, 100)
    assert program.parts == ((100,), ())
    assert program.workers[1].actions == ()
    assert program.groups == {}
    (decision,) = (d for d in program.plan.decisions if d.axis == "feed")
    assert decision.reason.startswith("the CPU gets none: an update is estimated at 100 ms (100 ms to compute, 0 us to")
    assert "samples on the CPU, its best part, at " in decision.reason


def test_a_share_can_be_forced() -> None:
    profile = model(Cost(per_sample_s=1e-3), Cost(per_sample_s=1.0))
    program = shares(profile, host(), 2, 50, shares=(0.75, 0.25))
    assert program.parts == ((38, 37), (25,))
    assert program.plan.decisions[-1].reason == "the plan's shares"


def test_a_resolved_plan_compiles_to_the_same_program() -> None:
    for samples in range(2, 40):
        program = shares(model(Cost(per_sample_s=1e-3), Cost(per_sample_s=3e-3)), host(), 3, samples)
        again = compile_plan(program.plan.replace(decisions=()), program.profile, program.machine, fold=False)
        assert again.parts == program.parts
        assert again.to_text() == program.to_text()


def test_each_cpu_replica_has_a_worker_of_its_own() -> None:
    devices = [Device(name=f"cpu{n}", kind="slow", type="cpu", host="here", memory_bytes=2**40) for n in (1, 2)]
    place = host().replace(devices=(*host().devices, *devices))
    plan = preset("hyscale").plan.replace(place=Place(replicas=1, cpu_replicas=3), feed=Feed(kind="share", samples=40))
    program = compile_plan(plan, model(Cost(per_sample_s=1e-3), Cost(per_sample_s=1e-3)), place, fold=False)
    verify(program)
    assert program.parts == ((10,), (10,), (10,), (10,))
    assert program.devices == ("gpu", "cpu", "cpu1", "cpu2")
