"""Charts of several curves: what is drawn of them."""

import re
from itertools import pairwise

from pipedejavu.report import Curve, LineChart
from pipedejavu.report.line_chart import render_chart


def lines(text: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'<polyline class="[^"]*" points="([^"]*)"', text)
    return [[tuple(map(float, pair.split(","))) for pair in line.split()] for line in found]


def test_curves_share_the_axes_and_higher_values_are_drawn_higher() -> None:
    chart = LineChart(
        "Loss", "update", "mean loss", [Curve("a", [(0, 4.0), (10, 1.0)]), Curve("b", [(0, 2.0), (10, 0.5)])]
    )
    (a, b) = lines(render_chart(chart))
    assert a[0][1] < b[0][1] < a[1][1] < b[1][1]
    assert a[0][0] == b[0][0] < a[1][0] == b[1][0]


def test_a_value_that_is_no_number_leaves_a_gap() -> None:
    points = [(0, 1.0), (1, 2.0), (2, float("nan")), (3, 1.0), (4, float("inf"))]
    text = render_chart(LineChart("Loss", "update", "loss", [Curve("a", points)]))
    assert [len(line) for line in lines(text)] == [2]
    assert text.count("<circle") == 1  # the single point between them


def test_nothing_to_draw_is_said() -> None:
    text = render_chart(LineChart("Loss", "update", "loss", [Curve("a", [(0, float("nan"))])]))
    assert "no value is a number" in text


def test_a_logarithmic_axis_marks_powers_of_ten() -> None:
    points = [(n, 10.0**-n) for n in range(5)]
    text = render_chart(LineChart("Loss", "update", "loss", [Curve("a", points)], has_log_y=True))
    heights = [y for _, y in lines(text)[0]]
    steps = [round(b - a) for a, b in pairwise(heights)]
    assert len({*steps}) == 1
    assert ">0.01<" in text


def test_names_are_escaped() -> None:
    text = render_chart(LineChart("<i>", "x", "y", [Curve("<b>", [(0, 1.0), (1, 2.0)])]))
    assert "<i>" not in text
    assert "<b>" not in text.replace("<b>&lt;i&gt;</b>", "")


def test_a_curve_that_covers_another_has_gaps_through_which_it_is_seen() -> None:
    course = [(0, 4.0), (1, 2.0), (2, 1.0)]
    near, far = [(x, y + 0.001) for x, y in course], [(x, y + 0.5) for x, y in course]
    curves = [Curve("one", course), Curve("two", near), Curve("three", course), Curve("apart", far)]
    text = render_chart(LineChart("Loss", "update", "loss", curves))
    assert re.findall(r'<polyline class="curve ([^"]*)"', text) == ["c0", "c1 over1", "c2 over2", "c3"]
    assert re.findall(r'<line class="curve ([^"]*)"', text) == ["c0", "c1 over1", "c2 over2", "c3"]  # the legend


def test_a_logarithmic_axis_within_a_power_of_ten_has_marks() -> None:
    text = render_chart(LineChart("Loss", "update", "loss", [Curve("a", [(0, 2.9), (1, 2.1)])], has_log_y=True))
    assert text.count('class="beside"') >= 3
