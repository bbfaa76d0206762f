"""The course of a run, step by step: curves of loss and throughput, and a table of events; drawn without a script.

Positions are percentages of the plot's width and height, so that text keeps its size on any screen.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from pipedejavu.facts import format_seconds
from pipedejavu.report.scatter import round_ticks
from pipedejavu.report.table import Cell, render_table

_MAX_POINTS = 800
_MAX_EVENTS = 200
_HEIGHT = 200
_BOX = 1000


class Story(NamedTuple):
    """The course of a run, from its metrics."""

    losses: Sequence[tuple[int, float]]
    """Loss by step."""
    rates: Sequence[tuple[int, float]]
    """Samples per second, by step."""
    forecast_rate: float | None
    events: Sequence[tuple[int, str, str]]
    """The step that the event follows, its kind, and its text."""
    evaluations: Sequence["StoryEvaluation"] = ()


class StoryEvaluation(NamedTuple):
    """An evaluation on samples that are not trained on."""

    step: int
    epoch: float
    elapsed_s: float
    loss: float | None
    figure: str
    """Perplexity or accuracy, in words; empty without either."""
    value: float | None = None
    """The perplexity or accuracy."""


def render_story(story: Story) -> str:
    """Returns the sections of loss, throughput and events."""
    return (
        '<div class="columns">'
        + _section("loss", "Loss", _loss_hint(story), _plane(story.losses, "loss", None, _points(story.evaluations)))
        + _section("rate", "Throughput", _rate_hint(story), _plane(story.rates, "samples/s", story.forecast_rate))
        + "</div>"
        + _evaluations(story)
        + _section("events", "Events", "faults, restarts and all else beside steps", _events(story.events))
    )


def _section(name: str, title: str, hint: str, content: str) -> str:
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><div class="heading"><h2 id="{name}-title">{title}</h2>'
        f'<p class="hint">{escape(hint)}</p></div>{content}</section>'
    )


def _evaluations(story: Story) -> str:
    """Returns curves of perplexity, accuracy or else the loss, by epoch and by second, and a table of the figures."""
    if not story.evaluations:
        return ""
    known = [done for done in story.evaluations if done.loss is not None]
    name = known[-1].figure.partition(" ")[0] if known and known[-1].value is not None else "loss"
    values = [done.loss if done.value is None or name == "loss" else done.value for done in known]
    curves = ""
    if len(known) > 1:
        pairs = [(done, value) for done, value in zip(known, values, strict=True) if value is not None]
        curves = (
            '<div class="columns">'
            + _plane([(done.epoch, value) for done, value in pairs], name, None, axis="epoch")
            + _plane([(done.elapsed_s, value) for done, value in pairs], name, None, axis="second")
            + "</div>"
        )
    hint = f"{name} by epoch and by second" if curves else "by epoch and by second"
    return _section("evaluations", "Evaluation", hint, curves + _table(story))


def _loss_hint(story: Story) -> str:
    return "of each update, by step" + ("; with dots: evaluation" if _points(story.evaluations) else "")


def _points(evaluations: Sequence[StoryEvaluation]) -> list[tuple[int, float]]:
    return [(done.step, done.loss) for done in evaluations if done.loss is not None]


def _table(story: Story) -> str:
    rows = [
        [
            Cell(f"{done.step}", head=True), Cell(f"{done.epoch:.2f}"), Cell(format_seconds(done.elapsed_s)),
            Cell("not finite" if done.loss is None else f"{done.loss:.4f}"), Cell(done.figure or "–"),
        ]
        for done in story.evaluations[-_MAX_EVENTS:]
    ]  # fmt: skip
    return render_table(("After step", "Epochs", "Time", "Loss", "Perplexity or accuracy"), rows, "evaluated")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _rate_hint(story: Story) -> str:
    line = "" if story.forecast_rate is None else f"; dashed: forecast, {_number(story.forecast_rate)}"
    return f"samples per second, by step{line}"


def _plane(
    points: Sequence[tuple[float, float]],
    unit: str,
    forecast: float | None,
    others: Sequence[tuple[int, float]] = (),
    axis: str = "step",
) -> str:
    """Draws a curve over steps, epochs or seconds, and a second one with a dot for each of its points."""
    if len(points) < 2:
        return '<p class="note">Fewer than two steps are known, which make no curve.</p>'
    shown = _thin(points)
    values = [value for _, value in (*shown, *others)] + ([] if forecast is None else [forecast])
    low, high = (0.0 if forecast is not None else min(values)), max(values)
    margin = (high - low or abs(high) or 1.0) / 16
    bottom, top = low - margin * (forecast is None), high + margin
    first, last = shown[0][0], max(step for step, _ in (*shown, *others))

    def x(step: float, whole: float = 100) -> float:
        return whole * (step - first) / (last - first)

    def y(value: float, whole: float = 100) -> float:
        return whole * (top - value) / (top - bottom)

    drawn = []
    ticks = round_ticks(first, last)
    for step in {round(tick) for tick in ticks} if axis == "step" else ticks:
        drawn.append(f'<text class="below" x="{x(step):.2f}%" y="100%" dy="16">{step:,.6g}</text>')
    for value in round_ticks(bottom, top):
        drawn.append(f'<line class="tick" x1="0" x2="100%" y1="{y(value):.2f}%" y2="{y(value):.2f}%"></line>')
        drawn.append(f'<text class="beside" x="0" y="{y(value):.2f}%" dx="-6" dy="4">{_number(value)}</text>')
    if forecast is not None:
        height = f"{y(forecast):.2f}%"
        drawn.append(f'<line class="forecast" x1="0" x2="100%" y1="{height}" y2="{height}"></line>')
    line = " ".join(f"{x(step, _BOX):.1f},{y(value, _BOX):.1f}" for step, value in shown)
    box = f'viewBox="0 0 {_BOX} {_BOX}" preserveAspectRatio="none"'
    drawn.append(f'<svg {box} width="100%" height="100%"><polyline class="curve" points="{line}"></polyline></svg>')
    if others:
        second = " ".join(f"{x(step, _BOX):.1f},{y(value, _BOX):.1f}" for step, value in others)
        drawn.append(
            f'<svg {box} width="100%" height="100%"><polyline class="second" points="{second}"></polyline></svg>'
        )
        for step, value in others:
            dot = f"evaluation after step {step}: {value:.4g}"
            drawn.append(
                f'<circle class="second" cx="{x(step):.2f}%" cy="{y(value):.2f}%" r="3"><title>{dot}</title></circle>'
            )
    label = f"{unit} from {points[0][1]:.4g} at {axis} {first:,.6g} to {points[-1][1]:.4g} at {axis} {last:,.6g}"
    if others:
        label += f"; evaluation from {others[0][1]:.4g} to {others[-1][1]:.4g}"
    if axis != "step":
        drawn.append(f'<text class="unit" x="100%" y="0" dy="-4">by {axis}</text>')
    svg = f'<svg role="img" aria-label="{escape(label)}" height="{_HEIGHT}">{"".join(drawn)}</svg>'
    return f'<div class="panel plane">{svg}</div>'


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most as many points as a screen can show: the last step and the mean of each interval."""
    stretch = -(-len(points) // _MAX_POINTS)
    groups = [points[start : start + stretch] for start in range(0, len(points), stretch)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _events(events: Sequence[tuple[int, str, str]]) -> str:
    saved = [event for event in events if event[1] == "saved"]
    others = [event for event in events if event[1] != "saved"]
    words = []
    if saved:
        count = "one checkpoint" if len(saved) == 1 else f"{len(saved)} checkpoints"
        words.append(f"{count} written, the last: {saved[-1][2]}")
    if not others:
        words.append("nothing else happened: no fault, no restart, no update left out")
    if len(others) > _MAX_EVENTS:
        words.append(f"the last {_MAX_EVENTS} of {len(others)} others are shown")
    said = "; ".join(words)
    text = f'<p class="note">{escape(said[:1].upper() + said[1:])}.</p>' if said else ""
    rows = [[Cell(f"{step}", head=True), Cell(kind), Cell(about)] for step, kind, about in others[-_MAX_EVENTS:]]
    return text + (render_table(("After step", "Event", "What it says"), rows, "reasons") if rows else "")
