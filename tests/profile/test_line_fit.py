"""Lines through measured times, on numbers whose lines are known."""

import pytest

pytest.importorskip("torch")

from pipedejavu.profile.line_fit import fit_line


def test_times_on_a_line_give_that_line() -> None:
    line = fit_line({n: [0.5 + 0.25 * n] * 3 for n in (2, 5, 8)})
    assert (line.fixed_s, line.per_sample_s) == (pytest.approx(0.5), pytest.approx(0.25))
    assert line.spread == pytest.approx(0, abs=1e-12)


def test_an_outlier_moves_neither_the_median_nor_the_quartiles() -> None:
    line = fit_line({n: [1.0 * n] * 6 + [900.0] for n in (2, 4, 8)})
    assert line.at(4) == pytest.approx(4)
    assert line.spread == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("times", "fixed_s", "per_sample_s"),
    [
        ({2: 3.0, 4: 3.0, 8: 3.0}, 3.0, 0.0),
        ({2: 4.0, 4: 3.0, 8: 2.0}, 156 / 61, 0.0),  # noise: (¼ + ⅓ + ½) / (¼² + ⅓² + ½²)
        ({2: 1.0, 8: 8.0}, 0.0, 0.6),  # faster at first: (2 + 1) / (2² + 1²)
        ({4: 6.0}, 0.0, 1.5),
    ],
)
def test_no_line_falls_or_begins_below_zero(times, fixed_s: float, per_sample_s: float) -> None:
    line = fit_line({n: [t] for n, t in times.items()})
    assert line.fixed_s == pytest.approx(fixed_s)
    assert line.per_sample_s == pytest.approx(per_sample_s)


def test_the_spread_is_that_of_the_middle_half() -> None:
    line = fit_line({4: [3.0, 4.0, 5.0, 4.0, 4.0, 2.0, 6.0]})  # quartiles 3.5 and 4.5
    assert line.at(4) == pytest.approx(4.0)
    assert line.spread == pytest.approx(0.125)


def test_where_a_line_misses_the_medians_these_hold() -> None:
    line = fit_line({1: [1.0, 1.0], 2: [3.0, 3.5], 4: [4.0, 4.0]})
    assert line.measured_s == {1: 1.0, 2: 3.25, 4: 4.0}
    assert [line.at(n) for n in (1, 2, 3, 4)] == [1.0, 3.25, 3.625, 4.0]
    assert line.spread == pytest.approx(0.125 / 3.25)


def test_one_sample_does_not_bend_the_line_after_the_last_size() -> None:
    line = fit_line({1: [0.5], 2: [3.0], 4: [4.0], 8: [6.0]})
    assert line.per_sample_s == pytest.approx(0.5)
    assert [line.at(n) for n in (1, 8, 16)] == pytest.approx([0.5, 6.0, 10.0])
    assert fit_line({1: [1.0], 2: [1.5]}).per_sample_s == pytest.approx(0.5)  # two sizes are needed


def test_a_line_through_all_medians_says_it_all() -> None:
    assert fit_line({n: [0.5 + 0.25 * n] for n in (1, 2, 4, 8)}).measured_s == {}


def test_a_part_that_does_not_run_costs_nothing() -> None:
    assert fit_line({2: [0.0, 0.0], 4: [0.0, 0.0]}).at(8) == 0
