"""A timeline as compact Chrome trace JSON, which Perfetto and chrome://tracing open.

Each worker is a process, each of its lanes a thread, and its memory a counter. This file knows only the trace format.
"""

from collections.abc import Iterator
from typing import Any

from pipedejavu.facts import MEMORY_CLASSES, MemoryCurve, Timeline, WorkerSummary, to_json_text
from pipedejavu.report.label import KINDS, parse_label
from pipedejavu.report.lane_order import sort_lanes

Event = dict[str, Any]


def render_trace(timeline: Timeline) -> str:
    """Returns the trace as JSON text: {"traceEvents": […]}, with times in microseconds."""
    threads = _number_threads(timeline)
    events = [
        *(event for worker in timeline.workers for event in _name_process(worker)),
        *(event for key, thread in threads.items() for event in _name_thread(*key, thread)),
        *_actions(timeline, threads),
        *(event for w in timeline.workers for curve in w.memory for event in _memory(w.worker, curve)),
    ]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin": timeline.origin}}
    return to_json_text(trace, is_ascii=False, is_compact=True)


def _number_threads(timeline: Timeline) -> dict[tuple[int, str], int]:
    """Numbers the lanes of each worker from 1, compute first; some viewers treat thread 0 as the process."""
    lanes: dict[int, set[str]] = {}
    for worker, lane in set(zip(timeline.worker, timeline.lane, strict=True)):
        lanes.setdefault(worker, set()).add(lane)
    return {
        (worker, lane): number for worker in sorted(lanes) for number, lane in enumerate(sort_lanes(lanes[worker]), 1)
    }


def _name_process(worker: WorkerSummary) -> Iterator[Event]:
    copies = f" ×{worker.copies} copies" if worker.copies > 1 else ""
    name = f"worker {worker.worker}: {worker.device}{copies}"
    yield {"ph": "M", "name": "process_name", "pid": worker.worker, "args": {"name": name}}
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": worker.worker,
        "args": {"sort_index": worker.worker},
    }


def _name_thread(worker: int, lane: str, thread: int) -> Iterator[Event]:
    where = {"ph": "M", "pid": worker, "tid": thread}
    yield where | {"name": "thread_name", "args": {"name": lane}}
    yield where | {"name": "thread_sort_index", "args": {"sort_index": thread}}


def _actions(timeline: Timeline, threads: dict[tuple[int, str], int]) -> Iterator[Event]:
    for span in timeline.spans():
        label = parse_label(span.action)
        start_us = _microseconds(span.start_s)
        parts = {
            "piece": label.piece,
            "replica": label.replica,
            "microbatch": label.microbatch,
            "version": label.version,
        }
        yield {
            "ph": "X",
            "name": span.action,
            "cat": KINDS.get(label.kind, "other"),
            "pid": span.worker,
            "tid": threads[span.worker, span.lane],
            "ts": start_us,
            "dur": round(_microseconds(span.end_s) - start_us, 3),
            "args": {"action": span.action} | {k: v for k, v in parts.items() if v is not None},
        }


def _memory(worker: int, curve: MemoryCurve) -> Iterator[Event]:
    order = {name: index for index, name in enumerate(MEMORY_CLASSES)}
    names = sorted((n for n, sizes in curve.classes.items() if any(sizes)), key=lambda n: order.get(n, 99))
    if not names:
        return
    for index, time_s in enumerate(curve.times_s):
        yield {
            "ph": "C",
            "name": f"{curve.memory} memory",
            "pid": worker,
            "ts": _microseconds(time_s),
            "args": {name: round(curve.classes[name][index]) for name in names},
        }


def _microseconds(time_s: float) -> float:
    """Returns microseconds rounded to whole nanoseconds, as viewers count them, so that neighbours never overlap."""
    return round(time_s * 1e6, 3)
