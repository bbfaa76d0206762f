"""The memory that visitors share: what one has left takes in the next, and nobody waits for ever."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.native import HostUpdate
from pipedejavu.hybrid.streamed_state import StreamBuffer


@pytest.fixture
def room() -> Iterator[StreamBuffer]:
    lanes = HybridLanes(torch.device("cpu"), HostUpdate(1))
    yield StreamBuffer(lanes)
    lanes.close()


def taking(room: StreamBuffer, size: int) -> tuple[threading.Thread, list[Tensor | None]]:
    found: list[Tensor | None] = []
    room.expect()
    thread = threading.Thread(target=lambda: found.append(room.take(size)))
    thread.start()
    return thread, found


def test_memory_passes_to_the_visitor_that_waits_for_it(room: StreamBuffer) -> None:
    memory = room.add(torch.empty(64, dtype=torch.uint8))
    room.leave(lambda: None)
    thread, found = taking(room, 48)
    room.give(memory, has_left=True)
    thread.join()
    assert found[0] is memory


def test_memory_that_nobody_expects_is_freed(room: StreamBuffer) -> None:
    room.leave(lambda: None)
    room.give(room.add(torch.empty(64, dtype=torch.uint8)), has_left=True)
    assert room._size_bytes == 0
    assert room.take(1) is None


def test_a_visitor_that_the_compute_lane_needs_does_not_wait_for_those_that_stay(room: StreamBuffer) -> None:
    room.add(torch.empty(64, dtype=torch.uint8))  # it leaves only when its own forward comes
    thread, found = taking(room, 64)
    with room.urgency():
        thread.join()
    assert found == [None]


def test_the_forward_pass_waits_only_for_those_that_are_leaving(room: StreamBuffer) -> None:
    memory = room.add(torch.empty(64, dtype=torch.uint8))
    room.add(torch.empty(32, dtype=torch.uint8))
    room.shrink(100)
    room.leave(lambda: None)
    timer = threading.Timer(0.05, lambda: room.give(memory, has_left=True))
    timer.start()
    room.shrink(40)
    assert room._size_bytes == 32
    room.finish()
    assert room._size_bytes == 32


def test_who_is_about_to_leave_sets_out_when_the_next_forward_comes(room: StreamBuffer) -> None:
    memory, gone = room.add(torch.empty(64, dtype=torch.uint8)), []

    def depart() -> None:
        gone.append(memory)
        room.give(memory, has_left=True)

    room.leave(depart)
    assert not gone
    room.shrink(0)
    assert len(gone) == 1
    assert room._size_bytes == 0
