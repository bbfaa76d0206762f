"""The memory that streamed state shares: it is reused after a return, and no wait lasts for ever."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.streamed_state import StreamBuffer
from pipedejavu.optim.native import HostUpdate


@pytest.fixture
def buffer() -> Iterator[StreamBuffer]:
    lanes = HybridLanes(torch.device("cpu"), HostUpdate(1))
    yield StreamBuffer(lanes)
    lanes.close()


def taking(buffer: StreamBuffer, size: int) -> tuple[threading.Thread, list[Tensor | None]]:
    taken: list[Tensor | None] = []
    buffer.expect()
    thread = threading.Thread(target=lambda: taken.append(buffer.take(size)))
    thread.start()
    return thread, taken


def test_memory_passes_to_the_state_that_waits_for_it(buffer: StreamBuffer) -> None:
    memory = buffer.add(torch.empty(64, dtype=torch.uint8))
    buffer.queue_return(lambda: None)
    thread, taken = taking(buffer, 48)
    buffer.release(memory, was_returned=True)
    thread.join()
    assert taken[0] is memory


def test_memory_that_no_state_expects_is_freed(buffer: StreamBuffer) -> None:
    buffer.queue_return(lambda: None)
    buffer.release(buffer.add(torch.empty(64, dtype=torch.uint8)), was_returned=True)
    assert buffer._size_bytes == 0
    assert buffer.take(1) is None


def test_state_that_the_compute_lane_needs_does_not_wait_for_state_that_stays(buffer: StreamBuffer) -> None:
    buffer.add(torch.empty(64, dtype=torch.uint8))  # it is returned only after its own forward
    thread, taken = taking(buffer, 64)
    with buffer.urgent():
        thread.join()
    assert taken == [None]


def test_the_forward_pass_waits_only_for_returns(buffer: StreamBuffer) -> None:
    memory = buffer.add(torch.empty(64, dtype=torch.uint8))
    buffer.add(torch.empty(32, dtype=torch.uint8))
    buffer.shrink(100)
    buffer.queue_return(lambda: None)
    timer = threading.Timer(0.05, lambda: buffer.release(memory, was_returned=True))
    timer.start()
    buffer.shrink(40)
    assert buffer._size_bytes == 32
    buffer.finish()
    assert buffer._size_bytes == 32


def test_queued_returns_start_with_the_next_forward(buffer: StreamBuffer) -> None:
    memory, returned = buffer.add(torch.empty(64, dtype=torch.uint8)), []

    def start() -> None:
        returned.append(memory)
        buffer.release(memory, was_returned=True)

    buffer.queue_return(start)
    assert not returned
    buffer.shrink(0)
    assert len(returned) == 1
    assert buffer._size_bytes == 0
