"""Times of two sizes of microbatch as a line."""

import pytest

pytest.importorskip("torch")

from pipedejavu.facts import Cost, Profile, Unit, UnitTime
from pipedejavu.train.measure import fit


def measured(forward_s: float, samples: int) -> Profile:
    """A profile as it is measured: all of a time is the samples'."""
    cost = Cost(per_sample_s=forward_s / samples)
    return Profile(name="model", units=(Unit(name="u", times={"cpu": UnitTime(forward=cost, update_s=0.5)}),))


@pytest.mark.parametrize(
    ("small_s", "large_s", "fixed_s", "per_sample_s"),
    [
        (3.0, 9.0, 1.0, 1.0),
        (2.0, 8.0, 0.0, 1.0),
        (1.0, 8.0, 0.0, 1.0),  # faster at first: all of it grows
        (8.0, 8.0, 8.0, 0.0),
        (9.0, 8.0, 8.0, 0.0),  # noise: none shrinks
    ],
)
def test_a_line_through_both(small_s: float, large_s: float, fixed_s: float, per_sample_s: float) -> None:
    (unit,) = fit(measured(small_s, 2), 2, measured(large_s, 8), 8).units
    found = unit.times["cpu"]
    assert found.forward.fixed_s == pytest.approx(fixed_s)
    assert found.forward.per_sample_s == pytest.approx(per_sample_s)
    assert found.forward.at(8) == pytest.approx(large_s)
    assert found.update_s == 0.5
