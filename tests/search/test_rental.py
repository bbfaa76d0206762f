"""Which machine to rent: the order of machines, and the expected time of work that is interrupted."""

import math
import random

import pytest

from pipedejavu.facts import InputError
from pipedejavu.search import SearchOptions, TrainingGoal, compare_rentals, search
from pipedejavu.search.rental import expected_time, failure_of
from tests.search.case import machine, profile

HOUR = 3600.0


def interrupted(work_s: float, failure_s: float, save_s: float, restart_s: float, draw: random.Random) -> float:
    """Plays work with Young's interval once, failure by failure."""
    interval = min(work_s, math.sqrt(2 * save_s * failure_s))
    now, next_failure = 0.0, draw.expovariate(1 / failure_s)
    left = work_s
    while left > 1e-9:
        part = min(interval, left)
        end = now + part + save_s
        while next_failure < end:
            now = next_failure
            next_failure = now + draw.expovariate(1 / failure_s)
            while next_failure < now + restart_s:  # fails again while it restarts
                now = next_failure
                next_failure = now + draw.expovariate(1 / failure_s)
            now += restart_s
            end = now + part + save_s
        now, left = end, left - part
    return now


@pytest.mark.parametrize(("failure_s", "save_s", "restart_s"), [(5000.0, 10.0, 100.0), (2000.0, 40.0, 300.0)])
def test_the_expected_time_is_that_of_played_failures(failure_s: float, save_s: float, restart_s: float) -> None:
    interval = math.sqrt(2 * save_s * failure_s)
    work, draw = 40 * interval, random.Random(7)
    times = [interrupted(work, failure_s, save_s, restart_s, draw) for _ in range(3000)]
    mean = sum(times) / len(times)
    error = math.sqrt(sum((t - mean) ** 2 for t in times) / len(times)) / math.sqrt(len(times))
    assert expected_time(work, failure_s, save_s, restart_s) == pytest.approx(mean, abs=4 * error)


def test_work_without_failures_takes_its_time_and_hopeless_work_never_ends() -> None:
    assert expected_time(1000.0, math.inf, 10.0, 100.0) == 1000.0
    assert expected_time(1000.0, 0.1, 10.0, 100.0) == math.inf


def test_failures_of_all_devices_add_up() -> None:
    where = machine(["fast", "fast", "half"])
    assert failure_of(where, {"fast": 10.0}) == pytest.approx(5.0)
    assert failure_of(where, {"fast": 10.0, "half": 5.0}) == pytest.approx(2.5)
    assert failure_of(where, {}) == math.inf


def rentals(goal: TrainingGoal, **prices: float):
    model = profile([1e-3] * 4, {"fast": 1.0, "half": 0.5})
    fast, half = machine(["fast"]).replace(name="a fast one"), machine(["half"]).replace(name="a slow one")
    options = SearchOptions(batch=8, prices=prices, candidates=1)
    return compare_rentals([(model, fast), (model, half)], options, goal, search)


def test_the_cheapest_comes_first_and_a_late_one_last() -> None:
    # 12 ms per sample on the fast one, 24 ms on the other: 1.2e6 samples take 4 and 8 hours.
    goal = TrainingGoal(samples=1_200_000)
    first, second = rentals(goal, fast=3.0, half=1.0)
    assert (first.machine, second.machine) == ("a slow one", "a fast one")
    assert (first.time_s, second.time_s) == pytest.approx((8 * HOUR, 4 * HOUR))
    assert (first.cost, second.cost) == pytest.approx((8.0, 12.0))
    in_time, late = rentals(goal.replace(deadline_s=5 * HOUR), fast=3.0, half=1.0)
    assert (in_time.machine, late.machine) == ("a fast one", "a slow one")
    assert in_time.is_in_time
    assert not late.is_in_time


def test_failures_can_change_the_order() -> None:
    goal = TrainingGoal(samples=1_200_000, failure_s={"half": HOUR / 15})
    first, second = rentals(goal, fast=3.0, half=1.0)
    assert first.machine == "a fast one"
    assert first.lost_share == 0
    assert second.cost > first.cost  # it fails every four minutes, and takes two to start again


def test_a_kind_that_no_machine_has_is_refused() -> None:
    with pytest.raises(InputError, match="--price names 'slow', which none of the machines has; they have fast, half"):
        rentals(TrainingGoal(samples=1), slow=1.0)
    with pytest.raises(InputError, match=r"machine 'a slow one' has no price; give --price for a kind .*\(half\)"):
        rentals(TrainingGoal(samples=1), fast=1.0)


def test_a_machine_that_is_too_small_comes_last() -> None:
    model = profile([1e-3] * 2, weights=2**20)
    small, large = machine(["fast"], room=2**20).replace(name="small"), machine(["fast"]).replace(name="large")
    first, last = compare_rentals(
        [(model, small), (model, large)], SearchOptions(batch=8, candidates=1), TrainingGoal(samples=8), search
    )
    assert first.machine == "large"
    assert (last.best, last.refusal) == (None, "no plan fits")


def test_energy_is_paid_for_at_the_stated_power() -> None:
    goal = TrainingGoal(samples=1_200_000, energy_price=0.5, power_w={"fast": 300.0, "half": 100.0})
    first, second = rentals(goal)
    assert (first.machine, first.energy_kwh, first.cost) == ("a slow one", pytest.approx(0.8), pytest.approx(0.4))
    assert (second.energy_kwh, second.cost) == pytest.approx((1.2, 0.6))
    with pytest.raises(InputError, match=r"the power of 'half' is not known, .* give it \(--power half=W\)"):
        rentals(goal.replace(power_w={"fast": 300.0}))


def test_known_devices_state_their_power() -> None:
    model = profile([1e-3] * 4, {"a100-80gb": 1.0})
    where = machine(["a100-80gb"] * 2)
    goal = TrainingGoal(samples=1_200_000, energy_price=1.0)
    (only,) = compare_rentals([(model, where)], SearchOptions(batch=8, candidates=1), goal, search)
    assert only.power_w == 800
