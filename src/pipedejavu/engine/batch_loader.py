"""Makes a worker's microbatches ahead of their turn: the first of two stages, before the copy to the device.

    microbatch        i         i+1       i+2
    loader threads                        sample, gather into (pinned) host memory
    copy-in lane                copy
    compute lane      train

The plan's `order.prefetch` bounds how many are made ahead. The order in which they are taken is the program's, and each
is a pure function of its number, so threads change no result. Knows nothing of what a sample is.
"""

import threading
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from pipedejavu.engine.job import Batches
from pipedejavu.facts import InputError
from pipedejavu.program import ActionKind, Program, ValueKind


@runtime_checkable
class ReadableAhead(Batches, Protocol):
    """Microbatches that can be read before the round that trains on them."""

    @property
    def num_changes(self) -> int:
        """How often the sizes of later microbatches have changed; what was made before is not used then."""


class BatchLoader:
    """The inputs of one worker's microbatches, in the order of its program."""

    def __init__(self, program: Program, index: int, batches: Batches):
        fetches = (a for a in program.workers[index].actions if a.kind == ActionKind.FETCH)
        self._numbers = [a.microbatch for a in fetches if a.what == ValueKind.BATCH]
        self._places = {number: place for place, number in enumerate(self._numbers)}
        self._round_size = program.update_size * program.plan.steps
        self._ahead, self._batches = program.plan.order.prefetch, batches
        self._made: dict[int, _Making] = {}
        self._num_changes = 0

    def inputs(self, microbatch: int) -> Any:
        """Returns the inputs of a microbatch, counted from the start of the run, and starts on those that follow."""
        if isinstance(self._batches, ReadableAhead) and self._num_changes != self._batches.num_changes:
            self._num_changes = self._batches.num_changes
            self._made.clear()
        future = self._made.pop(microbatch, None) or _Making(self._batches, microbatch)
        for number in self._following(microbatch):
            if number not in self._made:
                self._made[number] = _Making(self._batches, number)
        try:
            return future.result()
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"the samples of microbatch {microbatch} could not be made: {type(error).__name__}: {error}; the run"
                " stops, as another batch in their place would train another model"
            ) from error

    def _following(self, microbatch: int) -> list[int]:
        """Returns the next microbatches of this worker; those of later rounds only if they can be known."""
        begin, number = divmod(microbatch, self._round_size)
        places = range(self._places[number] + 1, self._places[number] + 1 + self._ahead)
        count = len(self._numbers)
        if not isinstance(self._batches, ReadableAhead):
            places = range(places.start, min(places.stop, count))
        return [(begin + place // count) * self._round_size + self._numbers[place % count] for place in places]


class _Making(Future[Any]):
    """The inputs of one microbatch, made by a thread of their own, which ends with them."""

    def __init__(self, batches: Batches, number: int):
        super().__init__()
        self.batches, self.number = batches, number
        threading.Thread(target=self._run, name=f"loader of microbatch {number}", daemon=True).start()

    def _run(self) -> None:
        try:
            self.set_result(self.batches.inputs(self.number))
        except BaseException as error:
            self.set_exception(error)
