"""The estimate of updates and windows on the host beside the simulator, and the choices that plans leave `auto`."""

import random

import pytest

from pipedejavu.analysis import verify
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.plan import Plan, Reduce, preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.offload_time import OffloadTime
from pipedejavu.simulate import simulate

LARGE = 2**40


def model(draw: random.Random, count: int) -> Profile:
    """Units of different times and sizes; their updates on the host take about as long as their passes."""

    def unit(n: int) -> Unit:
        size, forward = draw.randrange(50, 200), draw.uniform(0.5, 2.0)
        on_gpu = UnitTime(forward=Cost(fixed_s=forward), backward=Cost(fixed_s=2 * forward), update_s=0.05)
        on_cpu = UnitTime(update_s=draw.uniform(0.5, 4.0))
        return Unit(
            name=f"u{n}", times={"gpu": on_gpu, "cpu": on_cpu}, parameter_bytes=size, gradient_bytes=size,
            optimizer_bytes=6 * size, activation_bytes=10.0, boundary_bytes=1.0,
        )  # fmt: skip

    return Profile(name="model", units=tuple(map(unit, range(count))))


def computer(bytes_per_s: float, memory_bytes: int = LARGE) -> Machine:
    gpu = Device(name="gpu", kind="gpu", type="gpu", host="here", memory_bytes=memory_bytes)
    cpu = Device(name="cpu", kind="cpu", type="cpu", host="here", memory_bytes=LARGE)
    return Machine(name="here", hosts=(Host(name="here"),), devices=(gpu, cpu), links=(Link(bytes_per_s=bytes_per_s),))


def update_s(plan: Plan, profile: Profile, machine: Machine) -> float:
    """Returns the simulated time of an update of a long run."""
    long, short = (compile_plan(plan.replace(steps=steps), profile, machine) for steps in (6, 4))
    return (simulate(long, verify(long)).makespan_s - simulate(short, verify(short)).makespan_s) / 2


def plans(draw: random.Random) -> Plan:
    name = draw.choice(["cotrain", "stronghold"])
    plan = preset(name).at(microbatches=draw.choice([1, 3]), samples=1)
    return plan.replace(reduce=Reduce(clip=draw.choice(["none", "global"])))


@pytest.mark.parametrize("seed", range(16))
def test_the_estimate_is_the_simulators_on_links_of_their_own(seed):
    draw = random.Random(seed)
    profile, plan, machine = model(draw, 9), plans(draw), computer(draw.choice([30.0, 100.0, 1e4]))
    for number in (1, 2, 5, 9):
        fields = {"window": number} if plan.keep.kind == "host" else {"device_pieces": number}
        chosen = plan.replace(keep=plan.keep.replace(**fields))
        estimate = OffloadTime(compile_plan(chosen, profile, machine)).seconds(
            number if plan.keep.kind == "host" else 1, number
        )
        assert estimate == pytest.approx(update_s(chosen, profile, machine), rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_within_a_thousandth_of_the_best_of_a_simulated_sweep(seed):
    draw = random.Random(100 + seed)
    profile, plan, machine = model(draw, 10), plans(draw), computer(draw.choice([50.0, 300.0]))
    sweep = {}
    for number in range(11):
        fields = {"window": max(1, number)} if plan.keep.kind == "host" else {"device_pieces": number}
        sweep[number] = update_s(plan.replace(keep=plan.keep.replace(**fields)), profile, machine)
    chosen = compile_plan(plan, profile, machine).plan
    assert update_s(plan.replace(keep=chosen.keep), profile, machine) <= 1.0011 * min(sweep.values())
    assert [decision.axis for decision in chosen.decisions] == ["keep"]


@pytest.mark.parametrize(("host_s", "on_device"), [(0.9, 2), (0.3, 1), (100.0, 4)])
def test_an_update_is_on_the_host_if_it_ends_before_the_next_forward_of_its_unit(host_s, on_device):
    """Forwards begin at 0, 1, 2 and 3 s; the host updates from the last unit, which has its gradient first.

    At 0.9 s each, updates of units 3, 2 and 1 would end at 0.9, 1.8 and 2.7 s: the last one after its forward begins.
    """
    times = {
        "gpu": UnitTime(forward=Cost(fixed_s=1.0), backward=Cost(fixed_s=1e-6), update_s=1e-6),
        "cpu": UnitTime(update_s=host_s),
    }
    sizes = {"parameter_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 6, "boundary_bytes": 1.0}
    units = tuple(Unit(name=f"u{n}", times=times, **sizes) for n in range(4))
    plan = preset("cotrain").at(microbatches=1)
    assert compile_plan(plan, Profile(name="four", units=units), computer(1e9)).plan.keep.device_pieces == on_device


def test_time_is_flat_from_the_chosen_window_on():
    profile, machine = model(random.Random(1), 12), computer(150.0)
    plan = preset("stronghold").at(microbatches=1, samples=1)
    chosen = compile_plan(plan, profile, machine).plan.keep.num_windowed
    sweep = [update_s(plan.replace(keep=plan.keep.replace(window=w)), profile, machine) for w in range(1, 13)]
    assert 1 < chosen < 12
    assert sweep[chosen - 2] > 1.001 * min(sweep)
    assert max(sweep[chosen - 1 :]) <= 1.002 * min(sweep)


def test_a_device_holds_what_is_chosen():
    profile = model(random.Random(2), 10)
    state = [7 * unit.parameter_bytes for unit in profile.units]
    resting = sum(unit.parameter_bytes for unit in profile.units) + 10 * 10
    machine = computer(20.0, memory_bytes=resting + sum(state[:3]) + max(state) // 7)
    chosen = compile_plan(preset("cotrain").at(microbatches=1, samples=1), profile, machine)
    assert chosen.plan.keep.device_pieces == 3
    assert "with 3 on the device, which is all that it holds" in chosen.plan.decisions[-1].reason
