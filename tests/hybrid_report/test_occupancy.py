"""How the lanes of recorded runs were used: written runs with shares that can be counted, and one on CPU stand-ins."""

import pytest

from pipedejavu.hybrid_report import occupancy_of
from tests.hybrid_report.test_recording import made, train

Span = tuple[str, str, float, float]


def steps(*spans: Span, length: float = 10.0, count: int = 3) -> list[Span]:
    """The same spans in every step."""
    return [(lane, action, n * length + s, n * length + e) for n in range(count) for lane, action, s, e in spans]


def test_busy_shares_are_those_of_a_whole_step() -> None:
    run = made(
        *steps(
            ("compute", "F0", 0, 2), ("compute", "B0", 2, 7), ("copy-out", "OFFLOAD:d0", 5, 7.5),
            ("host", "UPDATE0~host", 7.5, 9), ("copy-in", "FETCH:w0", 9, 10), ("compute", "wait0", 8.5, 10),
        )
    )  # fmt: skip
    found = occupancy_of(run)
    assert found.step_s == pytest.approx(10.0)
    assert found.busy == pytest.approx({"compute": 0.7, "copy-out": 0.25, "host": 0.15, "copy-in": 0.1})
    # it waits 1.5 s: half a second for the update, one second for the copy; another 1.5 s belong to no lane
    assert found.bounds == pytest.approx({"compute": 0.7, "copy-out": 0.0, "host": 0.05, "copy-in": 0.1, "loop": 0.15})
    assert found.hidden == pytest.approx(0.0)  # it waits for as long as the host works
    assert found.bound == "compute"
    assert str(found) == (
        "compute bounds 0.70 of a step of 10 s, loop 0.15, copy-in 0.10, host 0.05; busy: compute 0.70, copy-out 0.25,"
        " host 0.15, copy-in 0.10; 0.00 of the host's work is hidden"
    )


def test_the_host_bounds_a_step_that_mostly_waits_for_it() -> None:
    run = made(
        *steps(
            ("compute", "wait0", 0, 7), ("compute", "F0", 7, 8), ("compute", "B0", 8, 10),
            ("host", "UPDATE0~host", 0, 7), ("copy-in", "FETCH:w0", 7, 7),
        ),
        ("host", "UPDATE0~host", 30, 37), ("copy-in", "FETCH:w0", 37, 37),
    )  # fmt: skip
    found = occupancy_of(run)
    assert found.bound == "host"
    assert found.bounds["host"] == pytest.approx(0.7)
    assert found.hidden == pytest.approx(0.0)


def test_work_that_is_waited_for_in_part_is_hidden_in_part() -> None:
    run = made(
        *steps(
            ("compute", "F0", 0, 4), ("compute", "wait0", 4, 5), ("compute", "F0", 5, 5), ("compute", "B0", 5, 10),
            ("host", "UPDATE0~host", 0, 4), ("copy-in", "FETCH:w0", 4, 4),
        ),
        ("host", "UPDATE0~host", 30, 34), ("copy-in", "FETCH:w0", 34, 34),
    )  # fmt: skip
    assert occupancy_of(run).hidden == pytest.approx(0.75)


def test_overlapping_spans_of_a_lane_count_once() -> None:
    spans = steps(("compute", "F0", 0, 2), ("compute", "B0", 2, 10))
    host = [("host", "UPDATE0~guess", 1.0, 4.0), ("host", "UPDATE0~guess", 3.0, 6.0), ("host", "UPDATE0~host", 31, 32)]
    found = occupancy_of(made(*spans, *host))
    assert found.busy["host"] == pytest.approx(5.0 / 20.0)
    assert found.hidden == 1.0


def test_gaps_before_a_forward_are_waits_if_none_were_recorded() -> None:
    found = occupancy_of(
        made(
            *steps(("compute", "F0", 0, 2), ("compute", "B0", 2, 7), ("copy-in", "FETCH:o0", 6, 9)),
            places="v",
        )
    )  # fmt: skip
    assert found.bounds == pytest.approx({"compute": 0.7, "copy-out": 0.0, "host": 0.0, "copy-in": 0.3, "loop": 0.0})
    assert "hidden" not in str(found)


def test_state_on_the_device_is_not_waited_for() -> None:
    spans = steps(
        ("compute", "F0", 0, 2), ("compute", "B0", 2, 7), ("compute", "UPDATE0", 7, 8), ("compute", "loop", 8, 10)
    )
    found = occupancy_of(made(*spans, places="g"))
    assert found.busy["compute"] == pytest.approx(0.8)
    assert found.bounds["loop"] == pytest.approx(0.2)
    assert found.hidden == 1.0


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_the_shares_of_a_real_run_are_shares(clip_norm: float | None) -> None:
    optimizer, run = train(gpu_units=2, clip_norm=clip_norm, speculate=False)
    optimizer.close()
    found = occupancy_of(run)
    assert found.busy.keys() == {"compute", "copy-out", "host", "copy-in"}
    assert all(0 < share < 1 for share in found.busy.values())
    assert sum(found.bounds.values()) == pytest.approx(1.0)
    assert 0 <= found.hidden <= 1
