"""Shares that follow measured rates."""

import pytest

pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.engine import share_control


def adjusted_counts(counts, times, bounds=None):
    return share_control.adjusted_counts(counts, times, bounds or [(1, sum(counts))] * len(counts))


def test_shares_follow_the_rates() -> None:
    assert adjusted_counts((8, 8), (1.0, 3.0)) == (12, 4)


def test_what_gains_nothing_changes_nothing() -> None:
    assert adjusted_counts((12, 4), (1.0, 1.0)) == (12, 4)
    assert adjusted_counts((12, 4), (1.0, 1.005)) == (12, 4)


def test_every_replica_keeps_a_sample() -> None:
    assert adjusted_counts((4, 4), (0.001, 100.0)) == (7, 1)


def test_no_share_exceeds_its_bounds() -> None:
    assert adjusted_counts((8, 8), (1.0, 3.0), [(2, 10), (2, 16)]) == (10, 6)
    assert adjusted_counts((8, 8), (1.0, 30.0), [(1, 16), (3, 16)]) == (13, 3)


def test_without_a_measurement_or_a_choice_nothing_changes() -> None:
    assert adjusted_counts((4, 4), (0.0, 1.0)) == (4, 4)
    assert adjusted_counts((8,), (1.0,)) == (8,)


@settings(max_examples=200, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 100)), min_size=2, max_size=5))
def test_the_batch_stays_whole_and_the_slowest_ends_no_later(rows) -> None:
    counts, times = [c for c, _ in rows], [t for _, t in rows]
    found = adjusted_counts(counts, times)
    assert sum(found) == sum(counts)
    assert min(found) >= 1
    per_microbatch = [t / c for c, t in rows]
    assert max(n * t for n, t in zip(found, per_microbatch, strict=True)) <= max(times) * (1 + 1e-9)


@pytest.mark.parametrize("speeds", [(1.0, 4.0), (3.0, 1.0), (1.0, 1.0)])
def test_the_controller_settles_on_fixed_speeds(speeds) -> None:
    counts: tuple[int, ...] = (16, 16)
    for _ in range(5):
        counts = adjusted_counts(counts, [n / s for n, s in zip(counts, speeds, strict=True)])
    assert counts == adjusted_counts(counts, [n / s for n, s in zip(counts, speeds, strict=True)])
    assert counts[0] / 32 == pytest.approx(speeds[0] / sum(speeds), abs=1 / 32)


def test_replicas_beside_an_idle_one_still_follow_their_rates() -> None:
    assert adjusted_counts((20, 12, 0), (1.0, 1.8, 0.0)) == (24, 8, 0)
    assert adjusted_counts((20, 0, 0), (1.0, 0.0, 0.0)) == (20, 0, 0)
