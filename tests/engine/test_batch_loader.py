"""Microbatches that are made ahead of their turn: in order, no more than asked, and with their faults."""

import threading
import time

import pytest

from pipedejavu.engine.batch_loader import BatchLoader
from pipedejavu.facts import InputError


class Numbers:
    """Microbatches whose inputs are their number and how often the sizes have changed."""

    def __init__(self) -> None:
        self.num_changes, self.made = 0, []
        self.fault: Exception | None = None

    def inputs(self, microbatch):
        self.made.append(microbatch)
        if self.fault is not None:
            raise self.fault
        return microbatch, self.num_changes

    def targets(self, microbatch):
        raise NotImplementedError(microbatch)

    length = count = targets


@pytest.fixture
def program(make):
    """Two replicas with two microbatches per update each, and two updates per round."""
    return make("hyscale", workers=1, microbatches=2, steps=2).program


def settled(batches, count):
    while len(batches.made) < count:
        time.sleep(1e-3)
    for thread in threading.enumerate():
        if thread.name.startswith("loader of"):
            thread.join()
    return sorted(batches.made)


def test_microbatches_are_made_two_ahead_and_into_the_next_round(program) -> None:
    batches = Numbers()
    loader = BatchLoader(program, 0, batches)
    own = [a.microbatch for a in program.workers[0].actions if str(a).startswith("FETCH")]
    size = program.update_size * 2
    following = [*own, *(n + size for n in own), *(n + 2 * size for n in own)]
    for place, number in enumerate(following[: len(own) + 1]):
        assert loader.inputs(number) == (number, 0)
        assert settled(batches, place + 3) == sorted(following[: place + 3])


def test_what_was_made_under_other_sizes_is_made_again(program) -> None:
    batches = Numbers()
    loader = BatchLoader(program, 0, batches)
    first, second, *_ = [a.microbatch for a in program.workers[0].actions if str(a).startswith("FETCH")]
    loader.inputs(first)
    settled(batches, 3)
    batches.num_changes = 1
    assert loader.inputs(second) == (second, 1)


def test_a_fault_of_a_thread_reaches_the_worker_as_a_sentence(program) -> None:
    batches = Numbers()
    batches.fault = OSError("the disk is gone")
    loader = BatchLoader(program, 0, batches)
    first = next(a.microbatch for a in program.workers[0].actions if str(a).startswith("FETCH"))
    with pytest.raises(InputError, match="the samples of microbatch 0 could not be made: OSError: the disk is gone"):
        loader.inputs(first)
    batches.fault = InputError("there is no sample 7")
    with pytest.raises(InputError, match=r"^there is no sample 7$"):
        BatchLoader(program, 0, batches).inputs(first)
