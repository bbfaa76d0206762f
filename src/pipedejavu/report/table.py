"""The page's tables as escaped HTML; a table turns into cards on a narrow screen."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from pipedejavu.facts import MEMORY_CLASSES, Timeline, WorkerSummary, format_bytes, format_seconds
from pipedejavu.report.chart import worker_name

_WORKER_HEADS = (
    "Worker",
    "Device",
    "Busy",
    "Busy share",
    "Peak memory",
    "Live microbatches",
    "Weight versions",
)


class Cell(NamedTuple):
    """One cell: its text, and optionally a drawing (trusted markup) after the text."""

    text: str
    drawing: str = ""
    head: bool = False
    """Whether the cell names its row."""


def render_table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], style: str) -> str:
    """Returns a table of CSS class `style`; each cell repeats its column's head for narrow screens."""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    body = "".join(f"<tr>{''.join(map(_cell, heads, row))}</tr>" for row in rows)
    return f'<table class="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def worker_table(timeline: Timeline) -> str:
    """Returns the table of workers: busy time, peak memory, live microbatches and weight versions."""
    rows = [_worker_row(worker, timeline.makespan_s) for worker in timeline.workers]
    return render_table(_WORKER_HEADS, rows, "workers")


def _cell(head: str, cell: Cell) -> str:
    tag = 'th scope="row"' if cell.head else "td"
    return f'<{tag} data-head="{escape(head)}">{escape(cell.text)}{cell.drawing}</{tag[:2]}>'


def _worker_row(worker: WorkerSummary, makespan_s: float) -> list[Cell]:
    copies = f" ×{worker.copies} copies" if worker.copies > 1 else ""
    share = worker.busy_s / makespan_s if makespan_s else 0.0
    return [
        Cell(worker_name(worker.worker), head=True),
        Cell(worker.device + copies),
        Cell(format_seconds(worker.busy_s)),
        Cell(f"{share:.1%}", _strip([("busy", share)], 1.0)),
        Cell("", _peaks(worker)),
        Cell(f"{worker.peak_live_microbatches}"),
        Cell(f"{worker.weight_versions}"),
    ]


def _peaks(worker: WorkerSummary) -> str:
    """Draws the peak of each of a worker's memories: its size, a strip, and its split in words."""
    used = [curve for curve in worker.memory if curve.peak_bytes]
    if not used:
        return escape(format_bytes(worker.peak_bytes)) if worker.peak_bytes else "–"
    peaks = []
    for curve in used:
        split = _sorted_split(curve.peak_classes)
        total = f"{format_bytes(curve.peak_bytes)} {curve.memory}"
        words = " · ".join(f"{name} {format_bytes(size)}".replace(" ", "\N{NO-BREAK SPACE}") for name, size in split)
        peaks.append(
            f'<div class="peak"><span>{escape(total)}</span>{_strip(split, curve.peak_bytes)}'
            f"<small>{escape(words)}</small></div>"
        )
    return "".join(peaks)


def _sorted_split(classes: Mapping[str, float]) -> list[tuple[str, float]]:
    order = {name: index for index, name in enumerate(MEMORY_CLASSES)}
    return sorted(((n, s) for n, s in classes.items() if s > 0), key=lambda item: order.get(item[0], len(order)))


def _strip(parts: Iterable[tuple[str, float]], whole: float) -> str:
    """Draws shares of a whole side by side; the text beside the strip says the same."""
    drawn, left = "", 0.0
    for name, size in parts:
        width = 100 * size / whole
        drawn += f'<rect data-class="{escape(name)}" x="{left:.2f}" width="{width:.2f}" height="6"></rect>'
        left += width
    box = 'viewBox="0 0 100 6" preserveAspectRatio="none"'
    return f'<svg class="strip" {box} aria-hidden="true">{drawn}</svg>'
