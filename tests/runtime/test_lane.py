"""Lanes: order of work and events on a stream, with stand-ins for CUDA, and on a thread."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipedejavu.runtime import lane as lane_file
from pipedejavu.runtime.lane import StreamLane, ThreadLane
from pipedejavu.runtime.lane_event import StreamEvent, ThreadEvent

CUDA = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of stand-ins for streams and events, in order."""
    calls: list[str] = []

    def make_event(*, is_timed: bool) -> SimpleNamespace:
        name = "timed" if is_timed else "untimed"
        return SimpleNamespace(record=lambda _: calls.append(f"record {name}"))

    @contextmanager
    def current(stream: Any) -> Any:
        calls.append(f"into {stream}")
        yield
        calls.append(f"out of {stream}")

    monkeypatch.setattr(lane_file, "make_event", make_event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: "s")
    monkeypatch.setattr(torch.cuda, "stream", current)
    return calls


def test_a_stream_waits_then_works_then_records(calls: list[str]) -> None:
    lane = StreamLane("copy-in", CUDA)
    lane.delay = lambda: calls.append("delay")
    before = StreamEvent(SimpleNamespace(wait=lambda: calls.append("wait")))  # type: ignore[arg-type]
    lane.submit("FETCH", lambda: calls.append("work"), before, None)
    assert calls == ["into s", "wait", "delay", "work", "record untimed", "out of s"]


def test_a_recorded_stream_times_the_work_alone(calls: list[str]) -> None:
    lane, spans = StreamLane("copy-in", CUDA), []
    lane.recorder = SimpleNamespace(add_events=lambda *span: spans.append(span))  # type: ignore[assignment]
    event = lane.submit("FETCH", lambda: calls.append("work"))
    assert calls == ["into s", "record timed", "work", "record timed", "out of s"]
    assert isinstance(event, StreamEvent)
    assert spans == [("copy-in", "FETCH", event.start, event.end)]


def test_a_thread_waits_for_events_and_raises_what_its_work_raised() -> None:
    lane, done, before = ThreadLane("host"), [], ThreadEvent()
    first = lane.submit("a", lambda: done.append("a"), before)
    assert not first.is_past()
    before.event.set()
    lane.submit("b", lambda: done.append(1 // 0))
    last = lane.submit("c", lambda: done.append("c"))
    with pytest.raises(ZeroDivisionError):
        last.wait_on_host()
    first.wait_on_host()
    lane.close()
    assert done == ["a"]
    with pytest.raises(ZeroDivisionError):
        lane.check()
