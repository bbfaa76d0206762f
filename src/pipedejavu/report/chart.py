"""The data that the page's scripts draw: bars by worker and lane, and memory curves.

It decides what is drawn (which bars, how many points), not how it looks.
"""

from collections.abc import Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any

from pipedejavu.facts import MEMORY_CLASSES, MemoryCurve, Span, Timeline, WorkerSummary
from pipedejavu.report.label import KINDS, Label, describe, name_in_words, parse_label
from pipedejavu.report.lane_order import COMPUTE, is_network, sort_lanes

MAX_BARS = 20_000
"""A browser still zooms smoothly with this many bars."""

_MAX_POINTS = 20_000
_MAX_CURVE_POINTS = 2_000
_NUM_SHADES = 4


def chart_data(timeline: Timeline, max_bars: int = MAX_BARS) -> dict[str, Any]:
    """Returns the data of both charts; if there are more than `max_bars` bars, the earliest are kept."""
    spans = sorted((s for s in timeline.spans() if s.end_s > s.start_s), key=attrgetter("start_s"))
    drawn = spans[:max_bars]
    labels = {action: parse_label(action) for action in {s.action for s in drawn}}
    end_s = max([timeline.makespan_s, *timeline.end_s])
    kinds = {label.kind for label in labels.values()}
    return {
        "span_s": end_s or 1.0,
        "drawn_s": end_s if len(drawn) == len(spans) else drawn[-1].start_s,
        "num_drawn": len(drawn),
        "num_actions": len(spans),
        "kinds": [[k, KINDS[k]] for k in KINDS if k in kinds] + [[k, "other"] for k in sorted(kinds - set(KINDS))],
        "words": {action: describe(label) for action, label in labels.items()},
        "names": {action: name_in_words(label, _piece_word(timeline, labels)) for action, label in labels.items()},
        "workers": _workers(timeline, drawn, labels),
        "classes": _classes(timeline),
        "memory": _memory(timeline),
    }


def _piece_word(timeline: Timeline, labels: Mapping[str, Label]) -> str:
    """Returns what pieces are called: stages, unless workers have several, which may be parts of a stage."""
    pieces = {label.piece for label in labels.values() if label.piece is not None}
    return "stage" if len(pieces) <= len(timeline.workers) else "piece"


def chart_both(measured: Timeline, forecast: Timeline) -> dict[str, Any]:
    """Returns the data of both charts for two timelines of one program, with each worker's rows below each other.

    Only the forecast has memory over time.
    """
    one, two = (chart_data(timeline, MAX_BARS // 2) for timeline in (measured, forecast))
    for part in (*two["workers"], *two["memory"]):
        part["name" if "name" in part else "worker"] += ", forecast"
    kinds = {kind for kind, _ in one["kinds"]}
    rows = [*one["workers"], *two["workers"]]
    last = min((part["drawn_s"] for part in (one, two) if part["num_drawn"] < part["num_actions"]), default=None)
    span_s = max(one["span_s"], two["span_s"])
    return {
        "span_s": span_s,
        "drawn_s": span_s if last is None else last,
        "num_drawn": one["num_drawn"] + two["num_drawn"],
        "num_actions": one["num_actions"] + two["num_actions"],
        "kinds": one["kinds"] + [pair for pair in two["kinds"] if pair[0] not in kinds],
        "words": one["words"] | two["words"],
        "names": one["names"] | two["names"],
        "workers": sorted(rows, key=lambda row: int(row["name"].split()[1].rstrip(","))),
        "classes": one["classes"] or two["classes"],
        "memory": one["memory"] or two["memory"],
    }


def worker_name(number: int) -> str:
    """Returns a worker's name, the same everywhere on the page."""
    return f"Worker {number}"


def _workers(timeline: Timeline, spans: list[Span], labels: dict[str, Label]) -> list[dict[str, Any]]:
    summaries: dict[int, WorkerSummary] = {w.worker: w for w in timeline.workers}
    by_worker = {
        number: list(group)
        for number, group in groupby(sorted(spans, key=attrgetter("worker")), key=attrgetter("worker"))
    }
    rows = []
    for number in sorted(summaries.keys() | by_worker.keys()):
        summary = summaries.get(number)
        worker_spans = by_worker.get(number, [])
        shades = _shades(worker_spans, labels)
        lanes = {COMPUTE} | {s.lane for s in worker_spans}
        rows.append(
            {
                "name": worker_name(number),
                "device": summary.device if summary else "",
                "copies": summary.copies if summary else 1,
                "num_shades": len(set(shades.values())),
                "lanes": [
                    {
                        "name": lane,
                        "role": "compute" if lane == COMPUTE else "net" if is_network(lane) else "local",
                        "bars": [_bar(s, labels[s.action], shades) for s in worker_spans if s.lane == lane],
                    }
                    for lane in sort_lanes(lanes)
                ],
            }
        )
    return rows


def _shades(spans: list[Span], labels: dict[str, Label]) -> dict[tuple[int, int], int]:
    """Assigns different shades to neighbouring (replica, piece) pairs of one worker."""
    computed = [labels[s.action] for s in spans if s.lane == COMPUTE]
    pairs = {(x.replica or 0, x.piece) for x in computed if x.piece is not None}
    return {pair: rank % _NUM_SHADES for rank, pair in enumerate(sorted(pairs))}


def _bar(span: Span, label: Label, shades: dict[tuple[int, int], int]) -> list[Any]:
    """Returns one bar as [action, kind, start_s, end_s, text inside, shade]."""
    inside = label.kind if label.microbatch is None else str(label.microbatch)
    shade = shades.get((label.replica or 0, label.piece if label.piece is not None else -1), 0)
    return [span.action, label.kind, _short(span.start_s), _short(span.end_s), inside, shade]


def _classes(timeline: Timeline) -> list[str]:
    """Returns the memory classes that are in use at some time, known ones first."""
    curves = [c for w in timeline.workers for c in w.memory]
    used = {name for c in curves for name, sizes in c.classes.items() if any(sizes)}
    return [c for c in MEMORY_CLASSES if c in used] + sorted(used - set(MEMORY_CLASSES))


def _memory(timeline: Timeline) -> list[dict[str, Any]]:
    """Returns the curves that are not all zero; of many workers, the fullest first."""
    pairs = [
        (w, curve)
        for w in timeline.workers
        for curve in w.memory
        if any(any(sizes) for sizes in curve.classes.values())
    ]
    if len({w.worker for w, _ in pairs}) > 8:
        pairs.sort(key=lambda pair: -_fullness(pair[1]))
    num_points = min(_MAX_CURVE_POINTS, max(100, _MAX_POINTS // max(1, len(pairs))))
    return [_curve(w, curve, num_points) for w, curve in pairs]


def _fullness(curve: MemoryCurve) -> float:
    return curve.peak_bytes / curve.capacity_bytes if curve.capacity_bytes else curve.peak_bytes


def _curve(worker: WorkerSummary, curve: MemoryCurve, num_points: int) -> dict[str, Any]:
    totals = [sum(sizes) for sizes in zip(*curve.classes.values(), strict=True)]
    kept = _thin(totals, num_points)
    peak = max(range(len(totals)), key=totals.__getitem__)
    return {
        "worker": worker_name(worker.worker),
        "number": worker.worker,
        "device": worker.device,
        "memory": curve.memory,
        "capacity": curve.capacity_bytes,
        "peak": max(curve.peak_bytes, totals[peak]),
        "peak_s": curve.times_s[peak],
        "times": [_short(curve.times_s[i]) for i in kept],
        "sizes": {name: [round(sizes[i]) for i in kept] for name, sizes in curve.classes.items() if any(sizes)},
    }


def _thin(totals: list[float], num_points: int) -> list[int]:
    """Returns about `num_points` indices at most: the fullest moment of each interval, so that peaks stay."""
    if len(totals) <= num_points:
        return list(range(len(totals)))
    starts = range(0, len(totals), -(-len(totals) // num_points))
    picked = {max(range(a, min(a + starts.step, len(totals))), key=totals.__getitem__) for a in starts}
    return sorted({0, *picked, len(totals) - 1})


def _short(time_s: float) -> float:
    """Drops digits that a screen cannot show, to keep the page small."""
    return float(f"{time_s:.9g}")
