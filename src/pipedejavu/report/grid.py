"""A timeline as a grid of characters: a row per worker, a column per slice of time."""

from collections.abc import Iterable

from pipedejavu.facts import Span, Timeline
from pipedejavu.report.label import Label, parse_label

CHUNKS = "abcdefghijklmnopqrstuvwxyz"


def render_grid(timeline: Timeline, max_columns: int = 40) -> str:
    """Draws the compute lanes; a cell is one slice of time, as long as the shortest action.

    A cell shows the action's kind and microbatch at its start, and dots while it goes on; with several pieces on a
    worker, a letter names the piece. Slices after `max_columns` are cut off, and their number is shown.
    """
    spans = [s for s in timeline.spans() if s.lane == "compute" and s.end_s > s.start_s]
    if not spans:
        return "nothing to compute\n"
    slice_s = min(s.end_s - s.start_s for s in spans)
    total = round(max(s.end_s for s in spans) / slice_s)
    columns = min(total, max_columns)
    letters = _piece_letters(spans)
    names: dict[int, list[str]] = {worker: [""] * columns for worker in sorted({s.worker for s in spans})}
    for span in spans:
        label, row = parse_label(span.action), names[span.worker]
        first, last = round(span.start_s / slice_s), round(span.end_s / slice_s)
        number = "" if label.microbatch is None else label.microbatch
        for column in range(first, min(last, columns)):
            row[column] = f"{label.kind[0]}{number}{letters[span.worker, _piece(label)]}" if column == first else "·"
    width = max(len(cell) for row in names.values() for cell in row) + 1
    lines = [f"w{worker:<3}" + "".join(f"{cell:<{width}}" for cell in row).rstrip() for worker, row in names.items()]
    if total > columns:
        lines.append(f"… and {total - columns} more slices of time")
    return "\n".join(lines) + "\n"


def _piece_letters(spans: Iterable[Span]) -> dict[tuple[int, tuple[int, int]], str]:
    """Returns the letter of each worker's pieces; no letters if every worker has one piece."""
    pieces = sorted({(span.worker, _piece(parse_label(span.action))) for span in spans})
    numbers = {pair: sum(worker == pair[0] for worker, _ in pieces[:n]) for n, pair in enumerate(pieces)}
    has_letters = any(numbers.values())
    return {pair: CHUNKS[number % len(CHUNKS)] if has_letters else "" for pair, number in numbers.items()}


def _piece(label: Label) -> tuple[int, int]:
    return label.replica or 0, label.piece or 0
