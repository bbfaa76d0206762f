"""One self-contained HTML page about a timeline: assembled here, drawn by the scripts beside this file.

All text is written and escaped here; the charts' data is embedded as JSON. The page loads nothing from outside, and its
content security policy allows only its own script.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from pipedejavu.facts import Timeline, format_bytes, format_seconds, to_json_text
from pipedejavu.report.chart import chart_both, chart_data, worker_name
from pipedejavu.report.headline import Headline
from pipedejavu.report.scatter import Choice, render_choices
from pipedejavu.report.story import Story, render_story
from pipedejavu.report.table import Cell, render_table, worker_table

_SCRIPTS = ("page.js", "format.js", "view.js", "panel.js", "tip.js", "gantt.js", "memory.js")


def render_html(
    timeline: Timeline,
    title: str,
    axes: Mapping[str, str],
    decisions: Sequence[tuple[str, str, str]] = (),
    notes: Sequence[str] = (),
    choices: Sequence[Choice] = (),
    forecast: Timeline | None = None,
    story: Story | None = None,
    leads: Sequence[Headline] = (),
) -> str:
    """Returns the page; `axes` maps each axis to its value, `decisions` are (axis, choice, reason).

    `choices` are the plans that were considered, `forecast` is the predicted timeline of a measured one, and `story` is
    the course of the whole run. The page begins with the `leads`.
    """
    above = (render_choices(choices) if choices else "") + (render_story(story) if story else "")
    data = chart_both(timeline, forecast) if forecast else chart_data(timeline)
    below = render_section("workers", "Workers", worker_table(timeline)) + _plan(axes, decisions)
    return render_chart(data, title, _figures(timeline, forecast, leads), notes, above=above, below=below)


def render_chart(
    data: dict[str, Any], title: str, figures: str, notes: Sequence[str] = (), *, above: str = "", below: str = ""
) -> str:
    """Returns a page around the data of a chart; figures and what is above and below it are trusted markup."""
    style = read_part("page.css")
    script = "".join(read_part(name) for name in _SCRIPTS)
    return Template(read_part("page.html")).substitute(
        title=escape(title),
        policy=escape(content_policy(style, script)),
        style=style,
        script=script,
        figures=figures,
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in notes),
        above=above,
        below=below,
        data=_embed(data),
    )


def read_part(name: str) -> str:
    """Returns a style, script or template that lies beside this file."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def content_policy(style: str, script: str = "") -> str:
    """Returns a content security policy that allows exactly this style and script, and no requests."""

    def source(text: str) -> str:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        return f"'sha256-{digest}'"

    return f"default-src 'none'; img-src data:; style-src {source(style)}" + (
        f"; script-src {source(script)}" if script else ""
    )


def _embed(data: dict[str, Any]) -> str:
    """Returns JSON that is safe inside a script element: no '<' can end it or open a comment."""
    return to_json_text(data, is_compact=True).replace("<", "\\u003c")


def _figures(timeline: Timeline, forecast: Timeline | None, leads: Sequence[Headline]) -> str:
    num_workers = sum(w.copies for w in timeline.workers)
    shown = "all shown" if num_workers == len(timeline.workers) else f"{len(timeline.workers)} shown, with copies"
    times, idle = str(timeline.origin), "of compute lanes is idle"
    if forecast:
        times += f", forecast {format_seconds(forecast.makespan_s)}"
        idle += f", forecast {forecast.bubble_fraction:.1%}"
    return "".join(
        (
            render_figures(leads),
            _figure("Makespan", format_seconds(timeline.makespan_s), times),
            _figure("Bubble", f"{timeline.bubble_fraction:.1%}", idle),
            _peak_figure(timeline),
            _figure("Workers", f"{num_workers}", shown),
        )
    )


def render_figures(leads: Sequence[Headline]) -> str:
    """Returns the figures that a page begins with."""
    return "".join(_figure(*lead) for lead in leads)


def _peak_figure(timeline: Timeline) -> str:
    name = "Highest peak memory"
    fullest = max(timeline.workers, key=lambda w: w.peak_bytes, default=None)
    if fullest is None or not fullest.peak_bytes:
        return _figure(name, "–", "not known")
    peak, where = format_bytes(fullest.peak_bytes), worker_name(fullest.worker)
    capacity = next((c.capacity_bytes for c in fullest.memory if c.memory == "device"), 0)
    if not capacity:
        return _figure(name, peak, where)
    share = f"{where}, {fullest.peak_bytes / capacity:.0%} of {format_bytes(capacity)}"
    return _figure(name, peak, share, is_over=fullest.peak_bytes > capacity)


def _figure(name: str, value: str, aside: str, *, is_over: bool = False) -> str:
    style = ' class="over"' if is_over else ""
    text = f"{escape(value)}<small{style}>{escape(aside)}</small>"
    return f"<div><dt>{escape(name)}</dt><dd{style}>{text}</dd></div>"


def _plan(axes: Mapping[str, str], decisions: Sequence[tuple[str, str, str]]) -> str:
    sections = []
    if axes:
        rows = [[Cell(axis, head=True), Cell(value)] for axis, value in axes.items()]
        sections.append(render_section("plan", "Plan", render_table(("Axis", "Value"), rows, "pairs")))
    if decisions:
        rows = [[Cell(axis, head=True), Cell(choice), Cell(reason)] for axis, choice, reason in decisions]
        table = render_table(("Axis", "Choice", "Reason"), rows, "reasons")
        sections.append(render_section("decisions", "Decisions", table))
    return f'<div class="columns">{"".join(sections)}</div>' if sections else ""


def render_section(name: str, title: str, content: str) -> str:
    """Returns a section with a heading; its content is trusted markup."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">'
        f'<div class="heading"><h2 id="{name}-title">{title}</h2></div>{content}</section>'
    )
