"""The plane of time and memory: who is on the front, and what the page says of it."""

import re
from collections.abc import Callable

import pytest

from pipedejavu.facts import Timeline
from pipedejavu.report import Choice, render_html
from pipedejavu.report.scatter import find_front, render_choices


def choice(time_s: float, share: float, name: str = "plan") -> Choice:
    return Choice(name, time_s, share, "gpu0 1 GiB of 2 GiB", "it computes")


def test_the_front_has_those_that_no_other_beats_in_both() -> None:
    choices = [choice(2, 0.5), choice(1, 0.9), choice(3, 0.5), choice(2.5, 0.6), choice(4, 0.1)]
    assert find_front(choices) == [1, 0, 4]


def test_of_equal_ones_the_front_has_one() -> None:
    assert find_front([choice(1, 0.5), choice(1, 0.5)]) == [0]


def test_points_are_numbered_as_the_table_is() -> None:
    text = render_choices([choice(1, 0.5, "one"), choice(2, 0.25, "two")._replace(is_winner=True)])
    assert text.count("<circle") == 2
    assert '<title>two: 2 s, 25%</title></circle><text x="90.00%"' in text  # an eighth to spare
    assert '<g class="point chosen on-front">' in text
    assert "two (chosen)" in text
    assert text.count('class="front"') == 2  # one step: right, then down


def test_times_that_are_far_apart_are_on_a_logarithmic_axis() -> None:
    text = render_choices([choice(1, 0.5), choice(2, 0.4), choice(4, 0.3)])
    places = [float(found) for found in re.findall(r'</circle><text x="([0-9.]+)%"', text)]
    assert places == pytest.approx([90, 50, 10])  # drawn from the last to the first
    assert re.findall(r'<text class="below" [^>]*>([^<]*)<', text) == ["1 s", "2 s"]  # 5 s is beyond the right end


def test_names_are_escaped_and_pages_without_choices_have_no_plane(pipeline: Callable[..., Timeline]) -> None:
    page = render_html(pipeline(2, 2), "run", {}, choices=[choice(1, 0.5, "<b>")])
    assert "<b>:" not in page
    assert "&lt;b&gt;: 1 s, 50%" in page
    assert 'id="choices"' not in render_html(pipeline(2, 2), "run", {})
