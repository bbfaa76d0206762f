import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from pipedejavu.facts import Span, Timeline
from pipedejavu.report import render_trace

Make = Callable[..., Timeline]


def _events(timeline: Timeline, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(render_trace(timeline))["traceEvents"] if event["ph"] == phase]


def test_every_action_is_a_complete_event_in_microseconds(pipeline: Make) -> None:
    timeline = pipeline(4, 8)
    events = _events(timeline, "X")
    assert len(events) == len(timeline)
    first = next(e for e in events if e["name"] == "F1.0@0")
    assert first["pid"] == 1
    assert (first["ts"], first["dur"]) == (pytest.approx(1400), pytest.approx(1000))
    assert first["args"] == {"action": "F1.0@0", "piece": 1, "microbatch": 0, "version": 0}


def test_times_below_a_microsecond_stay_and_neighbours_meet(as_timeline: Make) -> None:
    spans = [Span(0, "compute", f"F0.{m}@0", m * 3.337e-7, (m + 1) * 3.337e-7) for m in range(100)]
    events = _events(as_timeline(spans), "X")
    assert events[0]["dur"] == pytest.approx(0.334)
    for before, after in pairwise(events):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=1e-6)


def test_workers_are_processes_and_lanes_are_threads(pipeline: Make) -> None:
    names = {}
    for event in _events(pipeline(3, 2, copies=2), "M"):
        names[event["name"], event["pid"], event.get("tid")] = event["args"]
    assert names["process_name", 1, None] == {"name": "worker 1: gpu1 ×2 copies"}
    assert names["process_sort_index", 2, None] == {"sort_index": 2}
    threads = [names["thread_name", 1, tid]["name"] for tid in range(1, 6)]
    assert threads == ["compute", "net>0", "net>2", "net<0", "net<2"]
    assert names["thread_sort_index", 1, 5] == {"sort_index": 5}


def test_memory_is_a_counter_by_class(pipeline: Make) -> None:
    timeline = pipeline(2, 4)
    counters = [e for e in _events(timeline, "C") if e["pid"] == 0]
    curve = timeline.workers[0].memory[0]
    assert len(counters) == len(curve.times_s)
    assert {e["name"] for e in counters} == {"device memory"}
    assert max(sum(e["args"].values()) for e in counters) == curve.peak_bytes
    assert list(counters[0]["args"]) == ["weights", "gradients", "optimizer", "activations", "buffers"]


def test_an_unreadable_action_is_kept_as_it_is(as_timeline: Make) -> None:
    (event,) = _events(as_timeline([Span(0, "odd", "</script>\n", 0.0, 1.0)]), "X")
    assert event["name"] == event["args"]["action"] == "</script>\n"
    assert event["cat"] == "other"
