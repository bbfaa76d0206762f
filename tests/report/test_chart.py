from collections.abc import Callable

from pipedejavu.facts import MemoryCurve, Span, Timeline, WorkerSummary
from pipedejavu.report.chart import chart_data

Make = Callable[..., Timeline]


def test_zero_length_actions_are_not_drawn(pipeline: Make) -> None:
    data = chart_data(pipeline(4, 8))
    drawn = [bar for worker in data["workers"] for lane in worker["lanes"] for bar in lane["bars"]]
    assert len(drawn) == data["num_drawn"] == data["num_actions"] == 4 * 8 * 2 + 4 + 2 * 2 * 3 * 8
    assert not [bar for bar in drawn if bar[1] == "DROP"]
    assert [kind for kind, _ in data["kinds"]] == ["F", "B", "UPDATE", "SEND", "RECV"]


def test_beyond_the_limit_the_bars_that_start_first_are_kept(pipeline: Make) -> None:
    timeline = pipeline(4, 8)
    data = chart_data(timeline, max_bars=10)
    drawn = [bar for worker in data["workers"] for lane in worker["lanes"] for bar in lane["bars"]]
    starts = sorted(s.start_s for s in timeline.spans() if s.end_s > s.start_s)
    assert (data["num_drawn"], data["num_actions"]) == (10, 164)
    assert len(drawn) == 10
    assert data["drawn_s"] == starts[9]


def test_pieces_of_one_worker_have_different_shades(as_timeline: Make) -> None:
    spans = [Span(0, "compute", f"F{piece}.0@0", piece, piece + 1) for piece in (0, 2, 4)]
    spans.append(Span(0, "compute", "F0/1.1@0", 5, 6))
    worker = chart_data(as_timeline(spans))["workers"][0]
    assert [bar[5] for bar in worker["lanes"][0]["bars"]] == [0, 1, 2, 3]
    assert worker["num_shades"] == 4


def _summary(worker: int, sizes: tuple[float, ...]) -> WorkerSummary:
    curve = MemoryCurve(
        memory="device",
        capacity_bytes=1000,
        times_s=tuple(float(i) for i in range(len(sizes))),
        classes={"weights": sizes},
        peak_bytes=max(sizes),
        peak_classes={"weights": max(sizes)},
    )
    return WorkerSummary(
        worker=worker,
        device="cpu",
        busy_s=0.0,
        peak_bytes=max(sizes),
        peak_live_microbatches=0,
        weight_versions=1,
        memory=(curve,),
    )


def test_many_workers_are_listed_fullest_first(as_timeline: Make) -> None:
    workers = tuple(_summary(n, (100.0 * n,)) for n in range(10))
    numbers = [curve["number"] for curve in chart_data(as_timeline([], workers))["memory"]]
    assert numbers == [9, 8, 7, 6, 5, 4, 3, 2, 1]  # worker 0 holds nothing, so it has no chart


def test_a_long_curve_keeps_its_peak_and_its_ends(as_timeline: Make) -> None:
    sizes = [1.0] * 50_000
    sizes[12_345] = 7.0
    (curve,) = chart_data(as_timeline([], (_summary(0, tuple(sizes)),)))["memory"]
    assert len(curve["times"]) <= 2_002
    assert max(curve["sizes"]["weights"]) == 7
    assert (curve["times"][0], curve["times"][-1], curve["peak_s"]) == (0.0, 49_999.0, 12_345.0)
