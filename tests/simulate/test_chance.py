"""How long a program takes where the times of its actions vary."""

import math

import pytest

from pipedejavu.plan import preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import Prediction, simulate, unit_costs
from pipedejavu.simulate import chance as room
from pipedejavu.simulate.chance import QUARTILE


def predicted(name: str, workers: int, spread: float, microbatches: int = 2, drift: float = 0.0) -> Prediction:
    """Returns a prediction in which every forward and backward lies so far off, and all of them together by a drift."""
    plan, profile, machine = unit_costs(preset(name).at(workers=workers, microbatches=microbatches), {})
    units = [
        unit.replace(
            times={
                kind: time.replace(
                    forward=time.forward.replace(spread=spread), backward=time.backward.replace(spread=spread)
                )
                for kind, time in unit.times.items()
            }
        )
        for unit in profile.units
    ]
    profile = profile.replace(units=tuple(units), drift={device.kind: drift for device in machine.devices})
    return simulate(compile_plan(plan, profile, machine, fold=False))


def test_what_never_varies_takes_what_its_timeline_says() -> None:
    prediction = predicted("ddp", 2, spread=0.0)
    assert prediction.chance == (prediction.makespan_s,) * 3
    assert not prediction.chance.varies


def test_one_worker_takes_the_mean_of_what_varies() -> None:
    sigma, prediction = 0.1 / QUARTILE, predicted("ddp", 1, spread=0.1, microbatches=100)
    mean, variance = math.exp(sigma**2 / 2), math.exp(sigma**2) * (math.exp(sigma**2) - 1)
    # A round adds up 100 forwards of 1 and 100 backwards of 2; the mean of all draws is off by 4 of its own deviations.
    deviation = math.sqrt(100 * (1 + 4) * variance / room.DRAWS)
    assert prediction.chance.mean_s == pytest.approx(300 * mean, abs=4 * deviation)
    assert prediction.chance.low_s < prediction.chance.mean_s < prediction.chance.high_s


def test_the_more_wait_for_each_other_the_longer_it_takes() -> None:
    rounds = [predicted("ddp", n, spread=0.1) for n in (1, 2, 8)]
    slower = [prediction.chance.mean_s / prediction.makespan_s for prediction in rounds]
    assert 1 < slower[0] < slower[1] < slower[2]
    assert predicted("1f1b", 4, spread=0.2).chance.mean_s > predicted("1f1b", 4, spread=0.1).chance.mean_s


def test_what_all_times_have_in_common_does_not_average_out() -> None:
    # Nine of ten lie within 1.645 standard deviations on each side; of 40 draws the outer two on each side tell.
    for drift in (0.0, 0.1):
        chance = predicted("ddp", 2, spread=0.01, microbatches=100, drift=drift).chance
        assert chance.mean_s == pytest.approx(300, rel=0.01)
        width = math.log(chance.high_s / chance.low_s)
        assert width == pytest.approx(2 * 1.645 * math.hypot(drift, room.OFF["gpu"]), rel=0.1)


def test_a_program_has_the_same_chances_each_time() -> None:
    assert predicted("gpipe", 3, spread=0.2).chance == predicted("gpipe", 3, spread=0.2).chance


def test_programs_that_are_too_long_to_be_drawn_take_their_medians(monkeypatch) -> None:
    monkeypatch.setattr(room, "MOST_OPERATIONS", 10)
    prediction = predicted("gpipe", 2, spread=0.2)
    assert prediction.chance == (prediction.makespan_s,) * 3


def test_estimated_times_have_the_error_of_such_estimates() -> None:
    plan, profile, machine = unit_costs(preset("ddp").at(workers=2), {})
    kind = machine.devices[0].kind
    prediction = simulate(compile_plan(plan, profile.replace(error={kind: 0.1}), machine, fold=False))
    chance, half = prediction.chance, math.exp(1.645 * 0.1)
    assert chance.mean_s == prediction.makespan_s
    assert chance.low_s == pytest.approx(prediction.makespan_s / half)
    assert chance.high_s == pytest.approx(prediction.makespan_s * half)


def test_devices_without_a_known_error_have_none() -> None:
    plan, profile, machine = unit_costs(preset("ddp").at(workers=2), {})
    prediction = simulate(compile_plan(plan, profile.replace(error={"other": 0.1}), machine, fold=False))
    assert not prediction.chance.varies
