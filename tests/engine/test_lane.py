"""Lanes as streams, with stand-ins for CUDA's: who waits where, and how far the host runs ahead."""

from contextlib import contextmanager

import pytest
import torch

from pipedejavu.engine import lane as lane_file
from pipedejavu.engine.lane import AHEAD, HostLane, HostMark, Origin, StreamLane, StreamMark, make_lane
from pipedejavu.program import parse_action

ACTION = parse_action("F0.0@0")


class Event:
    """Notes in `told` what is asked of it."""

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

    monkeypatch.setattr(lane_file, "_event", lambda: Event(told))
    monkeypatch.setattr(torch.cuda, "stream", current)
    return told


def test_an_action_is_issued_between_two_events_of_its_stream(told):
    lane = StreamLane(Stream("s", told), waits_on_host=False)
    lane.run(lambda a: told.append(("does", str(a))), ACTION)
    issued = [("into", "s"), ("record", 0, "s"), ("does", "F0.0@0"), ("record", 1, "s"), ("out of", "s")]
    assert told == [("new", 0), ("new", 1), *issued]


@pytest.mark.parametrize(("waits_on_host", "expected"), [(False, ("stream waits", "s", 1)), (True, ("host waits", 1))])
def test_a_stream_waits_for_another_unless_it_brings_values_in(told, waits_on_host, expected):
    lane, mark = StreamLane(Stream("s", told), waits_on_host), StreamMark(Event(told), Event(told))
    lane.wait(mark)
    lane.wait(HostMark(0.0, 1.0))
    assert told[2:] == [expected]


def test_the_host_waits_for_a_stream_and_for_its_own_copies(told):
    lane = HostLane(Stream("s", told))
    lane.wait(StreamMark(Event(told), Event(told)))
    mark = lane.run(lambda a: told.append(("does", str(a))), ACTION)
    assert told[2:] == [("host waits", 1), ("into", "s"), ("does", "F0.0@0"), ("out of", "s"), ("host waits", "s")]
    assert mark.start_s <= mark.end_s


def test_the_host_runs_only_so_far_ahead(told):
    lane = StreamLane(Stream("s", told), waits_on_host=False)
    marks = [lane.run(lambda _: None, ACTION) for _ in range(AHEAD + 2)]
    waits = [entry for entry in told if entry[0] == "host waits"]
    assert waits == [("host waits", mark.end.number) for mark in marks[:2]]


@pytest.mark.parametrize("name", ["compute", "copy-in", "copy-out", "host", "net>1", "net*s0"])
def test_lanes_of_a_cpu_end_with_their_actions(name):
    lane = make_lane(name, torch.device("cpu"))
    assert isinstance(lane, HostLane)
    assert lane.stream is None


def test_times_count_from_the_origin():
    assert HostMark(11.0, 13.0).times_s(Origin(10.0, None)) == (1.0, 3.0)
