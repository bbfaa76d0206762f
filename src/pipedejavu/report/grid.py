"""A timeline as a grid of characters: a row per worker, a column per slice of time."""

from pipedejavu.facts import Timeline
from pipedejavu.report.label import parse_label

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
    pieces: dict[int, list[tuple[int, int]]] = {}
    for span in spans:
        label = parse_label(span.action)
        seen = pieces.setdefault(span.worker, [])
        if (pair := (label.replica or 0, label.piece or 0)) not in seen:
            seen.append(pair)
    names: dict[int, list[str]] = {worker: [""] * columns for worker in sorted(pieces)}
    has_chunks = any(len(p) > 1 for p in pieces.values())
    for span in spans:
        label, row = parse_label(span.action), names[span.worker]
        first, last = round(span.start_s / slice_s), round(span.end_s / slice_s)
        chunk = ""
        if has_chunks:
            chunk = CHUNKS[sorted(pieces[span.worker]).index((label.replica or 0, label.piece or 0)) % len(CHUNKS)]
        for column in range(first, min(last, columns)):
            number = "" if label.microbatch is None else label.microbatch
            row[column] = f"{label.kind[0]}{number}{chunk}" if column == first else "·"
    width = max(len(cell) for row in names.values() for cell in row) + 1
    lines = [f"w{worker:<3}" + "".join(f"{cell:<{width}}" for cell in row).rstrip() for worker, row in names.items()]
    if total > columns:
        lines.append(f"… and {total - columns} more slices of time")
    return "\n".join(lines) + "\n"
