import json
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from pipedejavu.facts import Span, Timeline
from pipedejavu.report import render_html

Make = Callable[..., Timeline]
HOSTILE = "</script></title><img src=x onerror=alert(1)><!--<script>\"'&"
AXES = {"cut": "chain(4)", "order": "1f1b"}


class Page(HTMLParser):
    """Collects the tags, the attributes and the script texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.tags:
            self.texts.setdefault(self.tags[-1], []).append(data)

    @property
    def data(self) -> dict[str, object]:
        found = json.loads(self.texts["script"][0])
        assert isinstance(found, dict)
        return found


def test_the_page_shows_the_key_figures_the_axes_and_the_reasons(pipeline: Make) -> None:
    text = render_html(pipeline(4, 8, copies=3), "my run", AXES, [("order", "1f1b", "least memory")], ["a note"])
    for expected in ("my run", "39.9 ms", "38.6%", "3.2 GiB", "81% of 4.0 GiB", "4 shown, with copies"):
        assert expected in text
    for expected in (
        "gpu3 ×3 copies",
        "chain(4)",
        "least memory",
        "a note",
        "activations\N{NO-BREAK SPACE}1.2",
    ):
        assert expected in text
    assert "<dd>12<small>" in text
    assert "$" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def test_a_peak_above_the_capacity_stands_out(pipeline: Make) -> None:
    assert 'class="over"' in render_html(pipeline(16, 16), "", {})
    assert 'class="over"' not in render_html(pipeline(4, 8), "", {})


def test_the_data_holds_every_bar_and_its_words(pipeline: Make) -> None:
    data = Page(render_html(pipeline(4, 8), "", AXES)).data
    assert data["num_drawn"] == 164
    assert isinstance(data["words"], dict)
    assert data["words"]["F2.5@0"].startswith("computes the forward of piece 2, microbatch 5")


def test_hostile_text_stays_text(pipeline: Make, as_timeline: Make) -> None:
    spans = [Span(0, HOSTILE, HOSTILE, 0.0, 1.0)]
    worker = pipeline(1, 1).workers[0].replace(device=HOSTILE)
    text = render_html(
        as_timeline(spans, (worker,)), HOSTILE, {HOSTILE: HOSTILE}, [(HOSTILE, HOSTILE, HOSTILE)], [HOSTILE]
    )
    page = Page(text)
    assert "img" not in page.tags
    assert page.tags.count("script") == 2
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<!--" not in text
    assert HOSTILE in json.dumps(page.data).encode().decode("unicode_escape")
    assert HOSTILE in "".join(page.texts["h1"])


def test_nothing_comes_from_outside(pipeline: Make) -> None:
    text = render_html(pipeline(4, 8), "", AXES)
    page = Page(text)
    assert not re.findall(r"https?:|//[a-z]+\.|@import|url\(", text)
    assert {value for name, value in page.attributes if name in ("src", "href")} == {"data:,"}
    assert [value for _, value in page.attributes if value.startswith("default-src 'none'")]


@pytest.mark.parametrize("spans", [[], [Span(0, "compute", "DROP:w0@0", 0.0, 0.0)]])
def test_a_timeline_in_which_nothing_takes_time_has_a_page(as_timeline: Make, spans: list[Span]) -> None:
    data = Page(render_html(as_timeline(spans), "nothing", {})).data
    assert data["num_actions"] == 0
    assert data["span_s"] == 1.0
