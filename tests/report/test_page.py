"""Opens the page in a headless browser and looks at what its scripts drew."""

import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipedejavu.facts import Span, Timeline
from pipedejavu.report import render_html

Make = Callable[..., Timeline]
Open = Callable[..., str]

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
    "--virtual-time-budget=5000",
    "--dump-dom",
)


@pytest.fixture
def open_page(tmp_path: Path) -> Open:
    """Returns a function that renders a timeline, opens it and returns the document as text."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")

    def open_(timeline: Timeline, title: str = "a run", view: str = "") -> str:
        path = tmp_path / "page.html"
        path.write_text(render_html(timeline, title, {"cut": "whole"}), encoding="utf-8")
        command = [browser, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri() + view]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        root = re.search(r"<html[^>]*>", done.stdout)
        assert root, done.stderr
        assert "data-error" not in root[0], root[0]
        assert 'data-ready="true"' in root[0], done.stderr
        return done.stdout

    return open_


def _bars(document: str) -> list[tuple[str, str]]:
    found = re.findall(r'<rect class="bar [^"]*" data-action="([^"]*)" data-kind="([^"]*)"', document)
    return [(unescape(action), unescape(kind)) for action, kind in found]


def _tags(document: str) -> set[str]:
    found: set[str] = set()

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.add(tag)
            assert not [name for name, _ in attrs if name.startswith("on")]

    Tags().feed(document)
    return found


def test_every_action_that_takes_time_is_a_bar(open_page: Open, pipeline: Make) -> None:
    timeline = pipeline(4, 8)
    document = open_page(timeline)
    expected = [s.action for s in timeline.spans() if s.end_s > s.start_s]
    assert sorted(action for action, _ in _bars(document)) == sorted(expected)
    assert ("B3.7@0", "B") in _bars(document)
    assert document.count('class="worker memory"') == 4


def test_many_workers_have_the_fullest_memories_in_sight(open_page: Open, pipeline: Make) -> None:
    document = open_page(pipeline(16, 64))
    assert len(_bars(document)) == 16 * (64 * 2 + 1) + 15 * 64 * 4
    charts = re.findall(r'<div class="worker memory"( hidden="")?><div class="name"><b>(.*?)</b>', document)
    assert [name for hidden, name in charts if not hidden] == [f"Worker {n}" for n in range(8)]
    assert "Show all 16 workers" in document


def test_the_address_sets_the_view_and_opens_an_action(open_page: Open, pipeline: Make) -> None:
    document = open_page(pipeline(4, 8), view="#zoom=0.2,0.4&action=F2.2@0")
    tip = document[document.index('<div id="tip"') :]
    assert "computes the forward of piece 2, microbatch 2, weights version 0." in tip
    assert "<dt>duration</dt><dd>1 ms</dd>" in tip
    axis = document[document.index('class="axis"') :].split("</svg>")[0]
    assert re.findall(r">([\d.]+ ms)<", axis)[0] == "8 ms"


@pytest.mark.slow
def test_bars_beyond_the_limit_are_counted_in_a_note(open_page: Open, as_timeline: Make) -> None:
    spans = [Span(0, "compute", f"F0.{m}@0", m * 1e-3, (m + 1) * 1e-3) for m in range(21_000)]
    document = open_page(as_timeline(spans))
    assert len(_bars(document)) == 20_000
    assert "1,000 of 21,000 actions are not drawn" in document


def test_hostile_text_is_shown_and_does_nothing(open_page: Open, as_timeline: Make) -> None:
    hostile = "</script><img src=x onerror=\"document.documentElement.dataset.error='ran'\">"
    document = open_page(as_timeline([Span(0, hostile, hostile, 0.0, 1.0)]), title=hostile)
    assert _bars(document) == [(hostile, "?")]
    assert "rect" in _tags(document)
    assert "img" not in _tags(document)


def test_an_empty_timeline_says_so(open_page: Open, as_timeline: Make) -> None:
    document = open_page(as_timeline([]))
    assert "nothing to draw" in document
    assert "says nothing about memory" in document
