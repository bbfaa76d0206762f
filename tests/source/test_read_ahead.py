"""Microbatches that a thread reads ahead are those of the batches themselves, in any order, up to the end."""

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from pipedejavu.source.read_ahead import ReadAhead


class Counted:
    """Microbatches of three samples; knows which were read, and by which thread."""

    num_changes = 0

    def __init__(self, fails_at: int | None = None):
        self.read: list[tuple[int, str]] = []
        self.fails_at = fails_at

    def inputs(self, microbatch: int) -> Any:
        if microbatch == self.fails_at:
            raise OSError("the disk is gone")
        self.read.append((microbatch, threading.current_thread().name))
        return {"x": torch.full((3,), float(microbatch))}

    def targets(self, microbatch: int) -> Tensor:
        return torch.full((3,), microbatch)

    def length(self, microbatch: int) -> int:  # noqa: ARG002
        return 3

    def count(self, microbatch: int) -> int:
        return 3 + microbatch


def test_each_microbatch_is_read_once_and_all_but_the_first_ahead() -> None:
    batches = Counted()
    ahead = ReadAhead(batches, 5)
    for n in range(5):
        assert torch.equal(ahead.inputs(n)["x"], torch.full((3,), float(n)))
        assert torch.equal(ahead.targets(n), torch.full((3,), n))
        assert (ahead.length(n), ahead.count(n)) == (3, 3 + n)
    ahead.close()
    assert [number for number, _ in batches.read] == [0, 1, 2, 3, 4]
    assert [name.startswith("read-ahead") for _, name in batches.read] == [False, True, True, True, True]


def test_other_orders_read_what_they_ask_for() -> None:
    ahead = ReadAhead(Counted(), 9)
    for n in (3, 4, 1, -2, 2, 8, 8):
        assert torch.equal(ahead.targets(n), torch.full((3,), n))
        assert torch.equal(ahead.inputs(n)["x"], torch.full((3,), float(n)))
    ahead.close()


def test_an_error_comes_with_the_microbatch_that_it_is_of() -> None:
    ahead = ReadAhead(Counted(fails_at=1), 9)
    assert ahead.count(0) == 3
    assert torch.equal(ahead.targets(0), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.inputs(1)
    ahead.close()
