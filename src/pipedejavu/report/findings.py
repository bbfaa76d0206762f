"""Findings of an experiment, and the page about several of them: figures beside published ones, curves and tables.

It knows how findings are shown; how they are found is up to the caller.
"""

from collections.abc import Sequence
from html import escape
from math import isfinite
from typing import Any, NamedTuple

from pipedejavu.facts import format_seconds
from pipedejavu.report.html import content_policy, read_part
from pipedejavu.report.line_chart import LineChart, render_chart
from pipedejavu.report.table import Cell, render_table


class Compared(NamedTuple):
    """A figure of today beside the published one."""

    name: str
    today: str
    published: str = "–"
    """The published figure; '–' if there is none."""
    meaning: str = ""
    """What the pair says, or why it cannot be compared."""


class FindingsTable(NamedTuple):
    """A table of texts; the first cell of each row names it."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


class ExperimentFindings(NamedTuple):
    """What an experiment found."""

    name: str
    title: str
    question: str
    conditions: Sequence[tuple[str, str]]
    """Name and value of what the figures depend on: model, data, device, size."""
    compared: Sequence[Compared] = ()
    charts: Sequence[LineChart] = ()
    tables: Sequence[FindingsTable] = ()
    answers: Sequence[str] = ()
    """What the figures say, in sentences; negative results too."""
    notes: Sequence[str] = ()
    """What differs from the published setting, in sentences."""
    time_s: float = 0.0

    def to_form(self) -> dict[str, Any]:
        """Returns the findings as JSON has them; numbers that are not finite become null."""
        form = _plain(self)
        assert isinstance(form, dict)
        return form


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: _plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


def render_findings(title: str, findings: Sequence[ExperimentFindings], notes: Sequence[str] = ()) -> str:
    """Returns a self-contained page without scripts; with several findings it begins with links to them."""
    style = read_part("page.css") + read_part("findings.css")
    links = "".join(f'<a href="#{escape(each.name)}">{escape(each.title)}</a>' for each in findings)
    lead = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(content_policy(style))}">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{style}</style></head><body>'
        f"<header><h1>{escape(title)}</h1>{f'<nav>{links}</nav>' if len(findings) > 1 else ''}{lead}</header>"
        f"<main>{''.join(map(_section, findings))}</main></body></html>\n"
    )


def _section(found: ExperimentFindings) -> str:
    parts = [
        f'<div class="heading"><h2>{escape(found.title)}</h2><p class="hint">{escape(found.question)}</p></div>',
        *(f'<p class="answer">{escape(answer)}</p>' for answer in found.answers),
    ]
    if found.compared:
        rows = [[Cell(c.name, head=True), Cell(c.today), Cell(c.published), Cell(c.meaning)] for c in found.compared]
        count = 4 if any(c.meaning for c in found.compared) else 3
        heads = ("Figure", "Today", "Published", "What it says")[:count]
        parts.append(render_table(heads, [row[:count] for row in rows], "compared"))
    if found.charts:
        parts.append(f'<div class="columns">{"".join(map(render_chart, found.charts))}</div>')
    parts += map(_table, found.tables)
    pairs = [*found.conditions, ("time", format_seconds(found.time_s))]
    rows = [[Cell(name, head=True), Cell(value)] for name, value in pairs]
    parts.append(f"<h3>Conditions</h3>{render_table(('What', 'Value'), rows, 'pairs')}")
    parts += [f'<p class="note">{escape(note)}</p>' for note in found.notes]
    return f'<section id="{escape(found.name)}">{"".join(parts)}</section>'


def _table(table: FindingsTable) -> str:
    rows = [[Cell(row[0], head=True), *map(Cell, row[1:])] for row in table.rows]
    return f'<h3>{escape(table.title)}</h3><div class="wide">{render_table(table.heads, rows, "found")}</div>'
