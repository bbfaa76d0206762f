"""Rounds and statistics, on synthetic clocks: what is timed here takes no time."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from statistics import median, stdev

import pytest

from pipedejavu.probe.series import (
    FEWEST_ROUNDS,
    FLOOR,
    LONGEST_RUN_S,
    MOST_ROUNDS,
    PARTS,
    TimedTrial,
    estimate_spread,
    fit_line,
    quantile,
    rates,
    run_rounds,
    summarise,
)

Noise = Callable[[random.Random], Iterator[float]]


class Clock:
    """A clock that moves when trials say so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.visits: list[str] = []

    def trial(self, name: str, times_s: Iterator[float], amount: float = 1.0) -> TimedTrial:
        def time_s(count: int) -> float:
            self.visits.append(name)
            took = sum(next(times_s) for _ in range(count))
            self.now_s += took
            return took

        return TimedTrial(name, "t", "", amount, "B/s", time_s)

    def __call__(self) -> float:
        return self.now_s


def white(random_: random.Random) -> Iterator[float]:
    while True:
        yield max(0.2, 1 + 0.1 * random_.gauss(0, 1))


def heavy_tailed(random_: random.Random) -> Iterator[float]:
    while True:
        yield 1 + 0.05 * random_.paretovariate(1.5)


def drifting(random_: random.Random) -> Iterator[float]:
    """Noise whose memory is a third of a survey of thirty rounds."""
    keep, x = math.exp(-1 / 10), random_.gauss(0, 1)
    while True:
        x = keep * x + math.sqrt(1 - keep**2) * random_.gauss(0, 1)
        yield max(0.2, 1 + 0.1 * x)


def bursts(random_: random.Random) -> Iterator[float]:
    """A neighbour who takes half of the machine for eight rounds, twelve rounds apart."""
    busy = random_.random() < 0.4
    while True:
        busy = busy != (random_.random() < 1 / (8 if busy else 12))
        yield (2.0 if busy else 1.0) * (1 + 0.02 * random_.random())


NOISES: list[Noise] = [white, heavy_tailed, drifting, bursts]


@pytest.mark.parametrize("noise", NOISES)
def test_another_survey_lies_within_the_spread(noise: Noise) -> None:
    """Of 600 pairs of surveys of thirty rounds, five of six differ by less than the first's spread.

    The usual standard error (here that of a median, the smallest) is not honest where disturbances last.
    """
    random_, rounds, num_pairs = random.Random(1), 30, 600
    covered = covered_by_error = 0
    for _ in range(num_pairs):
        one, other = (list(itertools.islice(noise(random_), rounds)) for _ in range(2))
        first, second = summarise("a", "b", "", "s", one), summarise("a", "b", "", "s", other)
        covered += abs(first.value - second.value) <= first.spread
        covered_by_error += abs(median(one) - median(other)) <= 1.96 * 1.25 * stdev(one) / math.sqrt(rounds)
    assert covered > 5 / 6 * num_pairs
    if noise in (drifting, bursts):
        assert covered_by_error < num_pairs / 2


def test_the_spread_is_not_wider_than_single_rounds_are_apart() -> None:
    """Of independent rounds it is about what one of them may be off, and no more: 1.3 to 2 standard deviations."""
    random_ = random.Random(2)
    spreads = [estimate_spread(list(itertools.islice(white(random_), 40)), 0.5) for _ in range(200)]
    assert 0.1 < median(spreads) < 0.2


def test_a_neighbour_for_half_of_the_time_does_not_change_a_value() -> None:
    quiet, busy = [1.0, 1.01, 1.02, 1.03] * 4, [2.0, 2.5, 3.0, 3.5] * 4
    assert 1.0 <= summarise("a", "b", "", "s", quiet + busy).value <= 1.03
    rates_ = [1 / time for time in busy + quiet]
    assert 1 / 1.03 <= summarise("a", "b", "", "B/s", rates_).value <= 1.0


def test_of_ratios_and_sizes_the_median_counts() -> None:
    for unit in ("×", "B"):
        assert summarise("a", "b", "", unit, [1.0, 2.0, 9.0]).value == 2.0  # type: ignore[arg-type]


def test_quantiles() -> None:
    values = [4.0, 1.0, 3.0, 2.0, 5.0]
    assert [quantile(values, share) for share in (0, 0.25, 0.5, 0.625, 1)] == [1.0, 2.0, 3.0, 3.5, 5.0]
    assert quantile([7.0], 0.25) == 7.0


def test_a_quiet_clock_still_has_a_spread() -> None:
    found = summarise("a", "b", "c", "s", [2.0] * 20)
    assert (found.value, found.spread, found.rounds) == (2.0, FLOOR * 2.0, 20)


def test_a_single_round_knows_nothing_of_its_spread() -> None:
    assert summarise("a", "b", "", "s", [3.0]).spread == 3.0


def test_values_that_were_not_measured_do_not_count() -> None:
    found = summarise("a", "b", "", "×", [1.0, math.nan, 3.0, 2.0])
    assert (found.value, found.rounds) == (2.0, 3)


def test_trials_take_turns_and_every_round_starts_elsewhere() -> None:
    clock = Clock()
    trials = [clock.trial(name, itertools.repeat(0.1)) for name in "abc"]
    found = run_rounds(trials, 6.0, now=clock)
    warm_up, rounds = clock.visits[:6], clock.visits[6:]
    assert warm_up == ["a", "a", "b", "b", "c", "c"]
    first = [rounds[n : n + 3] for n in range(0, 9, 3)]
    assert first == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert {len(times) for times in found.times_s.values()} == {len(rounds) // 3}


def test_rounds_end_before_the_budget_is_spent() -> None:
    clock = Clock()
    trials = [clock.trial(name, itertools.repeat(0.1)) for name in "ab"]
    found = run_rounds(trials, 5.0, now=clock)
    assert 4.5 < clock.now_s <= 5.0
    assert len(found.times_s["a t"]) == 23  # 0.4 s to warm up, 0.2 s a round


@pytest.mark.parametrize(("budget_s", "rounds"), [(0.0, FEWEST_ROUNDS), (1e9, MOST_ROUNDS)])
def test_there_are_never_too_few_rounds_nor_too_many(budget_s: float, rounds: int) -> None:
    clock = Clock()
    found = run_rounds([clock.trial("a", itertools.repeat(0.1))], budget_s, now=clock)
    assert len(found.times_s["a t"]) == rounds


def test_the_fastest_part_of_a_trial_counts() -> None:
    clock = Clock()
    times = itertools.chain([0.01, 0.01], itertools.cycle([0.03, 0.01, 0.02]))
    found = run_rounds([clock.trial("a", times)], 1.0, now=clock)
    assert set(found.times_s["a t"]) == {0.01}
    assert len(clock.visits) == 2 + PARTS * len(found.times_s["a t"])


def test_short_runs_are_repeated() -> None:
    clock = Clock()
    found = run_rounds([clock.trial("a", itertools.repeat(1e-4), amount=5.0)], 9.0, now=clock)
    assert found.times_s["a t"] == pytest.approx([1e-4] * MOST_ROUNDS)
    trial = clock.trial("a", itertools.repeat(1.0), amount=5.0)
    assert rates(trial, found.times_s) == pytest.approx([5e4] * MOST_ROUNDS)


def test_what_takes_too_long_or_fails_is_left_out_with_the_reason() -> None:
    clock = Clock()

    def fail(count: int) -> float:
        raise RuntimeError("no such type\nand more")

    def fail_later(count: int) -> float:
        if clock.now_s > 2 * 2 * LONGEST_RUN_S + 1:
            raise OSError("the disk is full")
        return 0.1

    trials = [
        clock.trial("slow", itertools.repeat(2 * LONGEST_RUN_S)),
        TimedTrial("bad", "t", "", 1, "s", fail),
        TimedTrial("tired", "t", "", 1, "s", fail_later),
        clock.trial("good", itertools.repeat(0.4)),
    ]
    found = run_rounds(trials, 10.0, now=clock)
    assert list(found.times_s) == ["good t"]
    assert found.left_out == {"slow t": "one run takes 2 s", "bad t": "no such type", "tired t": "the disk is full"}


def test_a_line_through_exact_times() -> None:
    line = fit_line({size: 20e-6 + size / 5e9 for size in (1 << 12, 1 << 16, 1 << 20, 1 << 26)})
    assert line.latency_s == pytest.approx(20e-6)
    assert line.bytes_per_s == pytest.approx(5e9)


def test_a_line_through_times_that_are_a_tenth_off() -> None:
    random_ = random.Random(3)
    sizes = [1 << n for n in range(12, 27, 2)]
    line = fit_line({size: (20e-6 + size / 5e9) * random_.uniform(0.9, 1.1) for size in sizes})
    # A weighted mean of factors between 0.9 and 1.1, which the two unknowns may push apart by as much again.
    assert line.latency_s == pytest.approx(20e-6, rel=0.2)
    assert line.bytes_per_s == pytest.approx(5e9, rel=0.2)


def test_a_line_whose_latency_does_not_show() -> None:
    line = fit_line({1000: 1.0, 2000: 2.2})
    assert line.latency_s == 0.0
    assert 2000 / 2.2 <= line.bytes_per_s <= 1000.0


def test_a_line_whose_bandwidth_does_not_show() -> None:
    line = fit_line({1000: 2.0, 4000: 1.0})
    assert 1.0 <= line.latency_s <= 2.0
    assert math.isfinite(line.bytes_per_s)
    assert line.bytes_per_s > 0
