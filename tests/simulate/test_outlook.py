"""The outlook of a run on sequences whose end is known."""

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest

from pipedejavu.simulate import Outlook


def after(times: Sequence[float], seen: int, forecast_s: float) -> tuple[Outlook, float]:
    """Returns the outlook once some steps were seen, and what the others really take."""
    outlook = Outlook(forecast_s, len(times))
    for step, elapsed in enumerate(accumulate(times[:seen]), 1):
        outlook.saw(step, elapsed)
    return outlook, sum(times[seen:])


def test_before_the_first_step_it_is_the_forecast() -> None:
    left = Outlook(2.0, 50).left()
    assert (left.time_s, left.step_s) == (100.0, 2.0)
    assert left.spread_s == pytest.approx(1.645 * 0.3 * 100)


@pytest.mark.parametrize("forecast_s", [0.5, 1.0, 3.0])
def test_equal_steps_are_known_after_a_few(forecast_s: float) -> None:
    outlook, real = after([1.0] * 100, 5, forecast_s)
    left = outlook.left()
    assert left.time_s == pytest.approx(real)
    assert left.spread_s == pytest.approx(0.0, abs=1e-9)


def test_one_measured_step_moves_the_forecast_part_of_the_way() -> None:
    outlook, real = after([2.0] * 10, 1, 1.0)
    left = outlook.left()
    assert 9.0 < left.time_s < real
    assert left.spread_s > 0


def test_the_warm_up_does_not_count() -> None:
    """The plain mean of the first ten would be 1.9 times too long."""
    outlook, real = after([8.0, 3.0, *[1.0] * 98], 10, 1.0)
    assert outlook.left().time_s == pytest.approx(real)


def test_a_slow_worker_makes_every_step_long() -> None:
    """Every third step waits for it: what is left is their mean, and the spread holds what really comes."""
    times = [1.0, 1.0, 2.5] * 40
    outlook, real = after(times, 30, 1.0)
    left = outlook.left()
    assert abs(left.time_s - real) < left.spread_s < 0.25 * real
    assert left.time_s == pytest.approx(real, rel=0.06)


def test_a_drift_widens_the_spread() -> None:
    steady, _ = after([1.0] * 100, 40, 1.0)
    drifting, real = after([1.0 + n / 200 for n in range(100)], 40, 1.0)
    left = drifting.left()
    assert left.spread_s > steady.left().spread_s
    assert left.time_s < real < left.time_s + 4 * left.spread_s


def test_a_new_throughput_is_learnt() -> None:
    """The share of a batch has moved, say: the last 64 reports count."""
    outlook, real = after([2.0] * 100 + [1.0] * 200, 170, 2.0)
    assert outlook.left().time_s == pytest.approx(real)


def test_steps_that_are_told_together_count_as_many() -> None:
    alone, together = Outlook(1.0, 100), Outlook(1.0, 100)
    for step in range(1, 41):
        alone.saw(step, step * 0.5)
        together.saw(step, (step + 3) // 4 * 2.0)  # four at a time, at the end of the last
    assert together.left().time_s == pytest.approx(alone.left().time_s)


@pytest.mark.parametrize("seen", [3, 10, 50])
def test_the_spread_holds_nine_of_ten(seen: int) -> None:
    """Of 400 runs with noise of 20 %; 81 % are six standard deviations of the count below nine of ten."""
    draw = random.Random(1)
    held = 0
    for _ in range(400):
        outlook, real = after([draw.gauss(1.0, 0.2) for _ in range(200)], seen, draw.gauss(1.0, 0.3))
        left = outlook.left()
        held += abs(left.time_s - real) <= left.spread_s
    assert held >= 0.81 * 400


def test_at_the_end_nothing_is_left() -> None:
    outlook, _ = after([1.0, 1.1, 0.9], 3, 1.0)
    assert outlook.left()[:2] == (0.0, 0.0)
