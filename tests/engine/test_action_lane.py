"""Stream lanes with stand-ins for CUDA: which side waits, and how far the host runs ahead."""

from contextlib import contextmanager

import pytest
import torch

from pipedejavu.engine.action_lane import AHEAD, HostActionLane, StreamActionLane, make_lane
from pipedejavu.program import parse_action
from pipedejavu.runtime import lane as lane_file
from pipedejavu.runtime.lane_event import ClockOrigin, HostEvent, StreamEvent

ACTION = parse_action("F0.0@0")


class Event:
    """Appends each call to `told`."""

    def __init__(self, told):
        self.told, self.number = told, sum(entry[0] == "new" for entry in told)
        told.append(("new", self.number))

    def record(self, stream):
        self.told.append(("record", self.number, stream.name))

    def synchronize(self):
        self.told.append(("host waits", self.number))


class Stream:
    def __init__(self, name, told):
        self.name, self.told = name, told

    def wait_event(self, event):
        self.told.append(("stream waits", self.name, event.number))

    def synchronize(self):
        self.told.append(("host waits", self.name))


@pytest.fixture
def told(monkeypatch):
    told = []

    @contextmanager
    def current(stream):
        told.append(("into", stream.name))
        yield
        told.append(("out of", stream.name))

    monkeypatch.setattr(lane_file, "make_event", lambda **_: Event(told))
    monkeypatch.setattr(torch.cuda, "stream", current)
    return told


def test_an_action_is_issued_between_two_events_of_its_stream(told):
    lane = StreamActionLane(Stream("s", told), waits_on_host=False)
    lane.run(lambda a: told.append(("does", str(a))), ACTION)
    issued = [("record", 0, "s"), ("does", "F0.0@0"), ("record", 1, "s")]
    assert told == [("into", "s"), ("new", 0), ("new", 1), *issued, ("out of", "s")]


@pytest.mark.parametrize(("waits_on_host", "expected"), [(False, ("stream waits", "s", 1)), (True, ("host waits", 1))])
def test_a_stream_waits_for_another_unless_it_brings_values_in(told, waits_on_host, expected):
    lane, event = StreamActionLane(Stream("s", told), waits_on_host), StreamEvent(start=Event(told), end=Event(told))
    lane.wait(event)
    lane.wait(HostEvent(0.0, 1.0))
    assert told[2:] == [expected]


def test_the_host_waits_for_a_stream_and_for_its_own_copies(told):
    lane = HostActionLane(Stream("s", told))
    lane.wait(StreamEvent(start=Event(told), end=Event(told)))
    event = lane.run(lambda a: told.append(("does", str(a))), ACTION)
    assert told[2:] == [("host waits", 1), ("into", "s"), ("does", "F0.0@0"), ("out of", "s"), ("host waits", "s")]
    assert event.start_s <= event.end_s


def test_the_host_runs_only_so_far_ahead(told):
    lane = StreamActionLane(Stream("s", told), waits_on_host=False)
    events = [lane.run(lambda _: None, ACTION) for _ in range(AHEAD + 2)]
    waits = [entry for entry in told if entry[0] == "host waits"]
    assert waits == [("host waits", event.end.number) for event in events[:2]]


@pytest.mark.parametrize("name", ["compute", "copy-in", "copy-out", "host", "net>1", "net*s0"])
def test_lanes_of_a_cpu_end_with_their_actions(name):
    lane = make_lane(name, torch.device("cpu"))
    assert isinstance(lane, HostActionLane)
    assert lane.stream is None


def test_times_count_from_the_origin():
    assert HostEvent(11.0, 13.0).times_s(ClockOrigin(10.0, None)) == (1.0, 3.0)
