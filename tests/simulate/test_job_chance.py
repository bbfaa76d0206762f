"""The time of a whole job: the distribution in closed form, what earlier jobs teach, and how often intervals hold."""

from math import exp, lgamma, log, pi

import numpy as np
import pytest

from pipedejavu.simulate import Chance, JobChance, JobKey, PastJob, job_chance, scale_of
from pipedejavu.simulate.student_t import FREEDOM, predict_next

KEY = JobKey("mlp", "ddp, 2 workers", 64)
OTHER = JobKey("vgg19", "1f1b, 4 workers", 8)


def density(x: float, centre: float, scale: float, freedom: float) -> float:
    """Student's t."""
    constant = lgamma((freedom + 1) / 2) - lgamma(freedom / 2) - log(freedom * pi) / 2 - log(scale)
    return exp(constant - (freedom + 1) / 2 * log(1 + ((x - centre) / scale) ** 2 / freedom))


def test_the_closed_form_is_the_integral_over_the_unknown_scale() -> None:
    """Given its variance, the next value is normal, by the rules for jointly normal values; the variance is unknown."""
    values, prior = np.array([0.4, 0.1, 0.3]), 0.2
    both = np.array([[1, 0.3, 0.5, 0.9], [0.3, 1, 0.3, 0.3], [0.5, 0.3, 1, 0.5], [0.9, 0.3, 0.5, 1]])
    found = predict_next([*values], both[:3, :3].tolist(), both[3, :3].tolist(), prior)
    inner, to_next = np.linalg.inv(both[:3, :3]), both[3, :3]
    centre, spread = to_next @ inner @ values, 1 - to_next @ inner @ to_next
    variances = np.exp(np.linspace(log(1e-4), log(100), 20_001))
    shape, rate = FREEDOM / 2, FREEDOM * prior**2 / 2
    weights = variances**-shape * np.exp(-rate / variances)  # inverse gamma, over the logarithm of the variance
    weights *= variances**-1.5 * np.exp(-values @ inner @ values / 2 / variances)  # how likely the values are
    for x in (-0.5, 0.0, 0.3, 1.0):
        normal = np.exp(-((x - centre) ** 2) / (2 * variances * spread)) / np.sqrt(2 * pi * variances * spread)
        integral = float((weights * normal).sum() / weights.sum())
        assert density(x, *found) == pytest.approx(integral, rel=1e-6)


def test_without_an_earlier_job_it_is_the_forecast_and_a_usual_start() -> None:
    chance = job_chance(KEY, 1.0, 0.2, 3600, ())
    assert chance.time_s == pytest.approx(3604, rel=0.01)
    assert chance.high_s / chance.time_s == pytest.approx(exp(1.533 * 0.2), rel=0.02)  # t with 4 degrees of freedom
    assert chance.low_s < chance.time_s - chance.deviation_s < chance.time_s + chance.deviation_s < chance.high_s
    assert chance.origin == "no earlier run on these devices to learn from"


def test_an_hour_in_words() -> None:
    chance = JobChance(time_s=3600.0, low_s=3240.0, high_s=4260.0, deviation_s=600.0)
    assert str(chance) == "60 min, deviation 10 min; 54 to 71 min in 8 of 10 such jobs"


def test_it_learns_most_from_the_same_job() -> None:
    def past(key: JobKey) -> list[PastJob]:
        return [PastJob(key, 1.5, 10.0), PastJob(key, 1.55, 11.0), PastJob(key, 1.45, 9.0)]

    same, other, none = (job_chance(KEY, 1.0, 0.2, 3600, known) for known in (past(KEY), past(OTHER), ()))
    assert none.time_s < other.time_s < same.time_s < 1.5 * 3610
    assert same.time_s > 1.4 * 3600
    assert same.high_s / same.low_s < other.high_s / other.low_s
    assert same.origin == "learned from 3 earlier runs on these devices"


def test_a_short_job_takes_as_long_as_its_start() -> None:
    chance = job_chance(KEY, 1e-3, 0.2, 10, [PastJob(KEY, 1.0, 20.0)] * 20)
    assert chance.time_s == pytest.approx(20, rel=0.05)


def test_times_that_were_not_measured_are_not_the_end_of_it() -> None:
    chance = job_chance(KEY, 1.0, 0.2, 10, [PastJob(KEY, 1.0, 0.0)])
    assert 10 < chance.time_s < 14


def test_the_scale_is_that_of_the_forecast() -> None:
    assert scale_of(Chance(1.0, exp(-0.329), exp(0.329))) == pytest.approx(0.2)
    assert scale_of(Chance(1.0, 1.0, 1.0)) == 0.3


@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_eight_of_ten_intervals_hold(spread: float) -> None:
    """Jobs of random models under random plans, each with its own bias, and now and then a disturbed one."""
    source = np.random.default_rng(1)
    names = [JobKey(f"model{m}", f"plan{p}", 8) for m in range(6) for p in range(4)]
    bias = {name: spread * source.standard_normal() for name in names}
    past: list[PastJob] = []
    held = 0
    for _ in range(150):
        key = names[source.integers(len(names))]
        own = 0.5 * spread * source.standard_t(4)
        ran = PastJob(key, exp(0.2 + bias[key] + own), 8.0 * exp(0.3 * source.standard_normal()))
        chance = job_chance(key, 1.0, 0.2, 60, past[-64:])
        held += chance.low_s <= 60 * ran.ratio + ran.start_s <= chance.high_s
        past.append(ran)
    assert 0.7 * 150 <= held <= 0.9 * 150
