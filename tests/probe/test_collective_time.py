"""Measured collectives: every kind by number of members, and the line that is fitted to samples."""

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.probe.collective_time import (
    KINDS,
    LARGE_BYTES,
    CollectiveSample,
    fit_collectives,
    measure_collectives,
)


def test_every_kind_is_measured_among_as_many_members_as_there_are_cores() -> None:
    for cores, counts in ((1, {2}), (2, {2}), (4, {2, 4})):
        times = measure_collectives(cores)
        assert {(time.kind, time.members) for time in times} == {(kind, n) for kind in KINDS for n in counts}
        assert all(1e-7 < time.latency_s < 1 and time.bytes_per_s > 1e6 and time.core_share > 0 for time in times)


def test_the_last_member_to_arrive_decides_and_the_others_only_wait() -> None:
    def samples(small: list[float], large: list[float]) -> dict[str, list[list[CollectiveSample]]]:
        rows = [[CollectiveSample(s, 0.5 * s) for s in at_size] for at_size in (small, large)]
        return dict.fromkeys(KINDS, rows)

    one, other = samples([1.0, 9.0, 2.0], [8.0, 5.0, 5.0]), samples([7.0, 2.0, 2.0], [5.0, 50.0, 6.0])
    for time in fit_collectives([one, other]):
        assert (time.members, time.latency_s) == (2, 2.0)  # the median of 1, 2 and 2
        assert time.bytes_per_s == LARGE_BYTES / (5.0 - 2.0)
        assert time.core_share == min(1.0, 4.0 / 5.0)  # the median of 4, 25 and 3, in 5 s
