"""Charts of several curves with a legend, drawn without a script.

Positions are percentages of the plot's width and height, so that text keeps its size on any screen.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, floor, isfinite, log10
from typing import NamedTuple

from pipedejavu.report.scatter import round_ticks

NUM_STYLES = 8
"""Colours of curves; curves beyond them repeat the colours with dashes."""
_MAX_POINTS = 400
_HEIGHT = 260
_BOX = 1000
_LEAST = 1e-12
_NEAR = 0.005
"""Share of the height by which curves that lie on one another differ at most."""


class Curve(NamedTuple):
    """A named sequence of points, in rising order of x; a point that is no number leaves a gap."""

    name: str
    points: Sequence[tuple[float, float]]


class LineChart(NamedTuple):
    """Curves over one pair of axes."""

    title: str
    x: str
    """What the horizontal axis shows, with its unit."""
    y: str
    curves: Sequence[Curve]
    has_log_y: bool = False
    has_log_x: bool = False


class _Scale(NamedTuple):
    """An axis: the position of a value between 0 and 1, and the values that are marked."""

    position: Callable[[float], float]
    ticks: Sequence[float]


def render_chart(chart: LineChart) -> str:
    """Returns a figure with the chart and its legend, or a note if nothing can be drawn."""
    points = [point for curve in chart.curves for point in curve.points if all(map(isfinite, point))]
    if not points:
        return f'<p class="note">{escape(chart.title)}: no value is a number, so there is no curve.</p>'
    across = _scale([x for x, _ in points], chart.has_log_x)
    up = _scale([y for _, y in points], chart.has_log_y)
    drawn = [*_ticks(across, up)]
    styles = _styles(chart.curves, up)
    for curve, style in zip(chart.curves, styles, strict=True):
        drawn += _curve(curve, f"curve {style}", across, up)
    label = f"{chart.title}: {chart.y} over {chart.x} of {', '.join(curve.name for curve in chart.curves)}"
    svg = f'<svg role="img" aria-label="{escape(label)}" height="{_HEIGHT}">{"".join(drawn)}</svg>'
    return (
        f"<figure><figcaption><b>{escape(chart.title)}</b> <small>{escape(chart.y)} over {escape(chart.x)}</small>"
        f'</figcaption><div class="panel plane">{svg}</div>{_legend(chart.curves, styles)}</figure>'
    )


def _styles(curves: Sequence[Curve], up: _Scale) -> list[str]:
    """Returns the classes of each curve; one that covers earlier ones has gaps, through which these are seen."""
    styles = []
    for number, curve in enumerate(curves):
        covered = sum(_covers(curve, other, up) for other in curves[:number])
        gaps = f" over{min(covered, 2)}" if covered else " dashed" if number >= NUM_STYLES else ""
        styles.append(f"c{number % NUM_STYLES}{gaps}")
    return styles


def _covers(curve: Curve, other: Curve, up: _Scale) -> bool:
    """Whether two curves lie on one another wherever both are drawn."""
    pairs = [*zip(curve.points, other.points, strict=False)]
    return bool(pairs) and all(
        (isfinite(a[1]) and isfinite(b[1]) and abs(up.position(a[1]) - up.position(b[1])) < _NEAR and a[0] == b[0])
        or not (isfinite(a[1]) or isfinite(b[1]))
        for a, b in pairs
    )


def _legend(curves: Sequence[Curve], styles: Sequence[str]) -> str:
    entries = (
        f'<span><svg class="sample" width="26" height="8"><line class="curve {style}" x1="0" x2="26" y1="4"'
        f' y2="4"></line></svg>{escape(curve.name)}</span>'
        for curve, style in zip(curves, styles, strict=True)
    )
    return f'<div class="legend">{"".join(entries)}</div>'


def _scale(values: Sequence[float], is_log: bool) -> _Scale:
    low, high = min(values), max(values)
    if is_log:
        low, high = log10(max(low, _LEAST)), log10(max(high, _LEAST))
        low, high = (low - 0.05, high + 0.05) if high > low else (low - 0.5, high + 0.5)
        ticks = [10.0**k for k in range(ceil(low), floor(high) + 1)]
        if len(ticks) < 3:
            between = (n * 10.0**k for k in range(floor(low), ceil(high) + 1) for n in (1, 2, 5))
            ticks = [tick for tick in between if low <= log10(tick) <= high]
        if len(ticks) < 3:
            ticks = [*round_ticks(10**low, 10**high)]
        return _Scale(lambda value: (log10(max(value, _LEAST)) - low) / (high - low), ticks)
    margin = (high - low or abs(high) or 1.0) / 20
    low, high = (0.0 if 0 <= low <= margin else low - margin), high + margin
    return _Scale(lambda value: (value - low) / (high - low), round_ticks(low, high))


def _ticks(across: _Scale, up: _Scale) -> Iterator[str]:
    for x in across.ticks:
        yield f'<text class="below" x="{100 * across.position(x):.2f}%" y="100%" dy="16">{x:,.6g}</text>'
    for y in up.ticks:
        height = f"{100 - 100 * up.position(y):.2f}%"
        yield f'<line class="tick" x1="0" x2="100%" y1="{height}" y2="{height}"></line>'
        yield f'<text class="beside" x="0" y="{height}" dx="-6" dy="4">{y:,.4g}</text>'


def _curve(curve: Curve, style: str, across: _Scale, up: _Scale) -> Iterator[str]:
    """Draws a curve, in parts between values that are no numbers."""
    title = f"<title>{escape(curve.name)}</title>"
    for part in _parts(_thinned(curve.points)):
        places = [(across.position(x), 1 - up.position(y)) for x, y in part]
        if len(places) == 1:
            ((x, y),) = places
            yield f'<circle class="dot {style}" cx="{100 * x:.2f}%" cy="{100 * y:.2f}%" r="3">{title}</circle>'
            continue
        line = " ".join(f"{_BOX * x:.1f},{_BOX * y:.1f}" for x, y in places)
        box = f'viewBox="0 0 {_BOX} {_BOX}" preserveAspectRatio="none" width="100%" height="100%"'
        yield f'<svg {box}><polyline class="{style}" points="{line}">{title}</polyline></svg>'


def _parts(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    part: list[tuple[float, float]] = []
    for point in points:
        if all(map(isfinite, point)):
            part.append(point)
        elif part:
            yield part
            part = []
    if part:
        yield part


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most as many points as a screen can show: the first, and the mean of each interval."""
    stretch = -(-len(points) // _MAX_POINTS)
    groups = [points[start : start + stretch] for start in range(0, len(points), stretch)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
