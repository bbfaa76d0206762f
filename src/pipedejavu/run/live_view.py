"""The live view of a run on a terminal: the loss curve, and the busy lanes and memory of each worker.

Shows each forecast next to its measurement. Does not know how the figures are collected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipedejavu.facts import format_bytes, format_seconds
from pipedejavu.facts.printable import printable

CURVE_ROWS = 6
MOST_WORKERS = 12
"""Workers that are shown; more would not fit on a screen."""
_BAR = 8
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a braille character, by column and row."""


@dataclass
class WorkerPanel:
    """One worker: its forecast and its latest report."""

    device: str
    capacity_bytes: float = 0
    forecast_bytes: float = 0
    forecast_busy: float | None = None
    """Busy fraction of the compute lane."""
    peak_bytes: int = 0
    busy: Mapping[str, float] = field(default_factory=dict)
    """Busy fraction by lane, in the last finished round."""


@dataclass
class LiveView:
    """Everything that is shown; its owner updates the fields between two redraws."""

    steps: int
    step: int = 0
    facts: str = ""
    losses: list[float] = field(default_factory=list)
    panels: Sequence[WorkerPanel] = ()
    forecast_s: float = 0.0
    measured_s: float | None = None
    """Measured seconds per step."""
    evaluation: str = ""
    """The figures of the last evaluation."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws the view within the width and height of the terminal."""
        width = options.max_width
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(self.steps, self.step, width=min(40, width // 4))
        head.add_row("training", bar, f"{self.step}/{self.steps}")
        yield head
        yield Text(self.facts, no_wrap=True, overflow="ellipsis")
        if self.evaluation:
            yield Text(self.evaluation, no_wrap=True, overflow="ellipsis")
        shown = self.panels[:MOST_WORKERS]
        if console.height >= CURVE_ROWS + len(shown) + 8 and len(self.losses) > 1:
            yield self._curve(width)
        yield self._workers(shown)
        if len(self.panels) > len(shown):
            yield f"and {len(self.panels) - len(shown)} workers more"
        yield self._step()

    def _curve(self, width: int) -> RenderableType:
        top, bottom = max(self.losses), min(self.losses)
        marks = [f"{top:.4g}", *[""] * (CURVE_ROWS - 2), f"{bottom:.4g}"]
        margin = max(map(len, marks))
        rows = draw_curve(self.losses, max(10, min(width, 100) - margin - 7), CURVE_ROWS)
        drawn = Text("\n").join(
            Text.assemble(("loss " if not n else "     ", "dim"), (mark.rjust(margin), "dim"), " ", (row, "cyan"))
            for n, (mark, row) in enumerate(zip(marks, rows, strict=True))
        )
        drawn.no_wrap = True
        return drawn

    def _workers(self, panels: Sequence[WorkerPanel]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("worker", "compute (forecast)", "other lanes", "memory (tensors, forecast)"):
            table.add_column(column, no_wrap=True)
        for number, panel in enumerate(panels):
            table.add_row(f"{number} {printable(panel.device)}", _busy(panel), _others(panel), _memory(panel))
        return table

    def _step(self) -> str:
        forecast = f"a step was forecast to take {format_seconds(self.forecast_s)}"
        if not self.measured_s:
            return forecast
        ratio = f", {self.measured_s / self.forecast_s:.2f} × that" if self.forecast_s else ""
        return f"{forecast}, and takes {format_seconds(self.measured_s)}{ratio}"


def draw_curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Plots values in braille characters and returns the lines from top to bottom; each dot is the mean of its bin."""
    columns = min(2 * width, len(values))
    top, bottom = max(values), min(values)
    scale = (4 * height - 1) / (top - bottom) if top > bottom else 0.0
    cells = [[0x2800] * ((columns + 1) // 2) for _ in range(height)]
    for column in range(columns):
        bin_values = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        dot = round((top - sum(bin_values) / len(bin_values)) * scale)
        cells[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
    return ["".join(map(chr, row)) for row in cells]


def _bar(share: float) -> str:
    eighths = round(8 * _BAR * min(1.0, max(0.0, share)))
    part = " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return ("█" * (eighths // 8) + part).ljust(_BAR, "·")


def _busy(panel: WorkerPanel) -> str:
    forecast = "" if panel.forecast_busy is None else f" ({panel.forecast_busy:.0%})"
    share = panel.busy.get("compute")
    return f"{_bar(share or 0.0)} {'–' if share is None else f'{share:.0%}'}{forecast}"


def _others(panel: WorkerPanel) -> str:
    return "  ".join(f"{lane} {share:.0%}" for lane, share in sorted(panel.busy.items()) if lane != "compute") or "–"


def _memory(panel: WorkerPanel) -> str:
    size = format_bytes(panel.peak_bytes)
    if panel.capacity_bytes:
        size = f"{_bar(panel.peak_bytes / panel.capacity_bytes)} {size} of {format_bytes(panel.capacity_bytes)}"
    return f"{size} ({format_bytes(panel.forecast_bytes)})" if panel.forecast_bytes else size
