"""A scatter plot of plans by time and memory, with their Pareto front; drawn without a script.

Positions are percentages of the plot's width and height, so that text keeps its size on any screen.
"""

from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from typing import NamedTuple

from pipedejavu.facts import format_seconds
from pipedejavu.report.table import Cell, render_table

_NUM_TICKS = 5
_HEIGHT = 280
_WIDE = 3.0
"""Ratio of the largest to the smallest time from which the time axis is logarithmic."""


class Choice(NamedTuple):
    """A plan that was considered."""

    name: str
    time_s: float
    """Time per sample, since plans may differ in the size of an update."""
    share: float
    """Share of its memory that the fullest device needs."""
    memory: str
    bound: str
    is_winner: bool = False


def find_front(choices: Sequence[Choice]) -> list[int]:
    """Returns the indices of the Pareto-optimal choices in time and memory, the fastest first."""
    front, least = [], float("inf")
    for index in sorted(range(len(choices)), key=lambda n: (choices[n].time_s, choices[n].share)):
        if choices[index].share < least:
            front.append(index)
            least = choices[index].share
    return front


def render_choices(choices: Sequence[Choice]) -> str:
    """Returns the section with all choices: the plot, and a table with the numbers of its points."""
    front = find_front(choices)
    rows = [
        [
            Cell(f"{n + 1}", head=True),
            Cell(choice.name + (" (chosen)" if choice.is_winner else "")),
            Cell(format_seconds(choice.time_s)),
            Cell(_percent(choice.share)),
            Cell("yes" if n in front else "no"),
            Cell(choice.memory),
            Cell(choice.bound),
        ]
        for n, choice in enumerate(choices)
    ]
    heads = ("No.", "Plan", "Sample", "Fullest memory", "On the front", "Memory", "Bounded by")
    return (
        '<section id="choices" aria-labelledby="choices-title"><div class="heading">'
        '<h2 id="choices-title">Plans that were considered</h2>'
        '<p class="hint">Time for a sample (right) against the fullest memory (up). The line is the front: less of one'
        " costs more of the other.</p></div>"
        f'<div class="panel plane">{_plane(choices, front)}</div>{render_table(heads, rows, "choices")}</section>'
    )


def _plane(choices: Sequence[Choice], front: Sequence[int]) -> str:
    position, ticks = _axis([choice.time_s for choice in choices])
    top = 1.08 * max(choice.share for choice in choices) or 1.0

    def x(time_s: float) -> str:
        return f"{100 * position(time_s):.2f}%"

    def y(share: float) -> str:
        return f"{100 - 100 * share / top:.2f}%"

    drawn = []
    for time_s in ticks:
        drawn.append(f'<line class="tick" x1="{x(time_s)}" x2="{x(time_s)}" y1="0" y2="100%"></line>')
        drawn.append(f'<text class="below" x="{x(time_s)}" y="100%" dy="16">{escape(format_seconds(time_s))}</text>')
    for share in round_ticks(0.0, top):
        drawn.append(f'<line class="tick" x1="0" x2="100%" y1="{y(share)}" y2="{y(share)}"></line>')
        drawn.append(f'<text class="beside" x="0" y="{y(share)}" dx="-6" dy="4">{_percent(share)}</text>')
    for one, two in pairwise(front):
        (a, b), (c, d) = ((choices[n].time_s, choices[n].share) for n in (one, two))
        drawn.append(f'<line class="front" x1="{x(a)}" x2="{x(c)}" y1="{y(b)}" y2="{y(b)}"></line>')
        drawn.append(f'<line class="front" x1="{x(c)}" x2="{x(c)}" y1="{y(b)}" y2="{y(d)}"></line>')
    for n, choice in reversed([*enumerate(choices)]):
        style = "point" + " chosen" * choice.is_winner + " on-front" * (n in front)
        about = f"{choice.name}: {format_seconds(choice.time_s)}, {_percent(choice.share)}"
        circle = f'<circle cx="{x(choice.time_s)}" cy="{y(choice.share)}" r="9"><title>{escape(about)}</title></circle>'
        number = f'<text x="{x(choice.time_s)}" y="{y(choice.share)}" dy="4">{n + 1}</text>'
        drawn.append(f'<g class="{style}">{circle}{number}</g>')
    label = f"{len(choices)} plans by time and memory"
    return f'<svg role="img" aria-label="{label}" height="{_HEIGHT}">{"".join(drawn)}</svg>'


def _axis(times: Sequence[float]) -> tuple[Callable[[float], float], list[float]]:
    """Returns a function from times to positions between 0 and 1, with a margin on both sides, and the tick times."""
    if 0 < _WIDE * min(times) < max(times):
        margin = (max(times) / min(times)) ** (1 / 8)
        left, right = min(times) / margin, max(times) * margin
        decades = range(floor(log10(left)), ceil(log10(right)))
        ticks = [n * 10.0**k for k in decades for n in (1, 2, 5) if left <= n * 10.0**k <= right]
        return lambda time_s: log10(time_s / left) / log10(right / left), ticks
    margin = (max(times) - min(times) or max(times) or 1.0) / 8
    left, right = max(0.0, min(times) - margin), max(times) + margin
    return lambda time_s: (time_s - left) / (right - left), round_ticks(left, right)


def round_ticks(start: float, end: float) -> list[float]:
    """Returns round numbers between two ends, about as many as fit beside each other."""
    step = 10.0 ** floor(log10((end - start) / _NUM_TICKS))
    step *= next(n for n in (1, 2, 5, 10) if n * step * _NUM_TICKS >= end - start)
    return [n * step for n in range(ceil(start / step), floor(end / step) + 1)]


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
