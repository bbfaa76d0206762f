"""Comparison of timelines: a collective's wait for its other members is no transfer."""

import pytest

from pipedejavu.facts import Timeline
from pipedejavu.report import compare


def timeline(origin: str, *spans: tuple[int, str, str, float, float]) -> Timeline:
    worker, lane, action, start, end = zip(*spans, strict=True)
    return Timeline(
        origin=origin,
        makespan_s=max(end),
        bubble_fraction=0.0,
        workers=(),
        worker=worker,
        lane=lane,
        action=action,
        start_s=start,
        end_s=end,
    )


def test_a_member_that_arrives_early_waits_and_the_last_one_shows_the_transfer() -> None:
    predicted = timeline(
        "predicted", (0, "net*s0", "GATHER:w0@0*s0", 0.0, 2.0), (1, "net*s0", "GATHER:w0/1@0*s0", 0.0, 2.0)
    )
    measured = timeline(
        "measured",
        (0, "net*s0", "GATHER:w0@0*s0", 0.0, 9.0),
        (0, "net*s0", "GATHER:w0@0*s0", 20.0, 23.0),
        (1, "net*s0", "GATHER:w0/1@0*s0", 6.0, 9.0),
        (1, "net*s0", "GATHER:w0/1@0*s0", 10.0, 23.0),
    )
    rows = compare(predicted, measured)
    assert [(row.worker, row.num_actions, row.predicted_s) for row in rows] == [(0, 2, 2.0), (1, 2, 2.0)]
    assert [row.measured_s for row in rows] == [3 + 3, 3 + 3]
    assert [row.waited_s for row in rows] == [6, 10]
    assert rows[0].ratio == pytest.approx(3.0)


def test_actions_of_one_worker_have_no_wait() -> None:
    predicted = timeline("predicted", (0, "compute", "F0.0@0", 0.0, 1.0), (1, "compute", "F0/1.1@0", 0.0, 1.0))
    measured = timeline("measured", (0, "compute", "F0.0@0", 0.0, 4.0), (1, "compute", "F0/1.1@0", 0.0, 1.0))
    assert [(row.measured_s, row.waited_s) for row in compare(predicted, measured)] == [(4.0, 0.0), (1.0, 0.0)]
