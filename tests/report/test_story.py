"""The story of a run: curves of loss and rate, events, and both timelines on one page."""

import re

from pipedejavu.facts import Timeline, WorkerSummary
from pipedejavu.report import Story, StoryEvaluation, render_html
from pipedejavu.report.chart import chart_both
from pipedejavu.report.story import render_story


def timeline(origin: str, factor: float, workers: int = 2) -> Timeline:
    summary = {"busy_s": factor, "peak_bytes": 1.0, "peak_live_microbatches": 1, "weight_versions": 1}
    return Timeline.model_validate(
        {
            "origin": origin,
            "makespan_s": factor,
            "bubble_fraction": 0.5,
            "workers": tuple(WorkerSummary(worker=n, device=f"cpu{n}", **summary) for n in range(workers)),
            "worker": tuple(range(workers)),
            "lane": ("compute",) * workers,
            "action": tuple(f"F0.{n}@0" for n in range(workers)),
            "start_s": (0.0,) * workers,
            "end_s": (factor,) * workers,
        }
    )


def points(text: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'points="([^"]*)"', text)
    return [[tuple(map(float, pair.split(","))) for pair in line.split(" ")] for line in found]


def test_a_falling_loss_falls_on_the_page() -> None:
    story = Story([(1, 4.0), (2, 2.0), (3, 1.0)], [(2, 10.0), (3, 20.0)], 20.0, [])
    losses, rates = points(render_story(story))
    assert [x for x, _ in losses] == [0.0, 500.0, 1000.0]
    heights = [y for _, y in losses]  # from the top
    assert heights == sorted(heights)
    rounding = 6 * 0.05  # of six heights to a tenth
    assert abs(heights[1] - heights[0] - 2 * (heights[2] - heights[1])) <= rounding
    assert rates[0][1] > rates[1][1]


def test_the_forecast_of_the_rate_is_drawn_where_it_is_reached() -> None:
    text = render_story(Story([], [(1, 10.0), (2, 20.0)], 20.0, []))
    (_, reached), *_ = reversed(points(text)[0])
    (line,) = re.findall(r'class="forecast" x1="0" x2="100%" y1="([0-9.]+)%"', text)
    assert abs(float(line) - reached / 10) < 0.01  # both are rounded to a hundredth of a percent
    assert "dashed: forecast, 20" in text


def test_a_long_run_is_thinned_and_keeps_its_end() -> None:
    (line,) = points(render_story(Story([(n, float(n)) for n in range(1, 5001)], [], None, [])))
    assert len(line) <= 800
    assert line[-1][0] == 1000.0


def test_too_few_steps_make_no_curve() -> None:
    assert points(render_story(Story([(1, 1.0)], [], None, []))) == []


def test_events_are_told_and_escaped_and_checkpoints_are_counted() -> None:
    events = [(1, "saved", "step 1"), (2, "failed", "<b>worker</b>"), (2, "saved", "step 2, 1 MiB")]
    text = render_story(Story([], [], None, events))
    assert "2 checkpoints written, the last: step 2, 1 MiB." in text
    assert "&lt;b&gt;worker&lt;/b&gt;" in text
    assert "Nothing else happened" not in text
    assert "Nothing else happened: no fault" in render_story(Story([], [], None, []))


def test_both_timelines_stand_below_each_other() -> None:
    data = chart_both(timeline("measured", 2.0, 11), timeline("predicted", 1.0, 11))
    names = [worker["name"] for worker in data["workers"]]
    assert names[:4] == ["Worker 0", "Worker 0, forecast", "Worker 1", "Worker 1, forecast"]
    assert names[-1] == "Worker 10, forecast"
    assert (data["span_s"], data["drawn_s"], data["num_actions"]) == (2.0, 2.0, 22)


def test_the_page_names_forecast_and_reality() -> None:
    story = Story([(1, 4.0), (2, 2.0)], [], None, [])
    page = render_html(timeline("measured", 2.0), "a run", {}, forecast=timeline("predicted", 1.0), story=story)
    assert "measured, forecast 1 s" in page
    assert page.index('id="loss"') < page.index('id="events"') < page.index('id="timeline"')
    assert 'id="loss"' not in render_html(timeline("measured", 2.0), "a run", {})


def test_accuracy_is_drawn_by_epoch_and_by_second() -> None:
    done = [StoryEvaluation(10 * n, n / 2, 3.0 * n, 1.0 / n, f"accuracy {n / 10:.0%}", n / 10) for n in (1, 2, 4)]
    text = render_story(Story([], [], None, [], done))
    by_epoch, by_second = points(text)
    assert by_epoch == by_second  # both are even here: 1.5 epochs and 9 seconds from end to end
    assert [round(x, 1) for x, _ in by_epoch] == [0.0, 333.3, 1000.0]
    assert "accuracy from 0.1 at epoch 0.5 to 0.4 at epoch 2" in text
    assert "accuracy from 0.1 at second 3 to 0.4 at second 12" in text
    assert "accuracy 40%" in text
    assert points(render_story(Story([], [], None, [], done[:1]))) == []
