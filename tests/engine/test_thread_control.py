"""Threads that follow the measured times of stages."""

import pytest

pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.engine.thread_control import adjusted_threads


def test_a_thread_moves_from_the_fastest_stage_to_the_slowest() -> None:
    assert adjusted_threads((4, 4, 8), (1.0, 3.0, 2.0)) == (3, 5, 8)


def test_nothing_moves_without_a_gain_a_spare_thread_or_a_time() -> None:
    assert adjusted_threads((4, 4), (1.0, 1.0)) == (4, 4)
    assert adjusted_threads((4, 4), (1.0, 1.2)) == (4, 4)  # the stage that gave one would be the slowest
    assert adjusted_threads((1, 4), (1.0, 3.0)) == (1, 4)
    assert adjusted_threads((3, 4), (0.0, 0.0)) == (3, 4)


@settings(max_examples=200, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.0, 50)), min_size=1, max_size=5))
def test_the_slowest_stage_gets_faster_until_nothing_moves(rows) -> None:
    threads, work = tuple(count for count, _ in rows), [amount for _, amount in rows]
    slowest = []
    for _ in range(60):
        times = [amount / count for amount, count in zip(work, threads, strict=True)]
        slowest.append(max(times))
        following = adjusted_threads(threads, times)
        assert sum(following) == sum(threads)
        assert min(following) >= 1
        threads = following
    assert slowest == sorted(slowest, reverse=True)
    assert following == adjusted_threads(following, [a / c for a, c in zip(work, following, strict=True)])
