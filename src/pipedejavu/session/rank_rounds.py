"""One rank's worker of a program, run round by round from the user's loop, with the interface of `Threads`."""

import copy
from collections.abc import Iterator
from dataclasses import replace

from pipedejavu.engine import Threads
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.job import Batches, Job
from pipedejavu.engine.rank_process import RankRound, RankRun
from pipedejavu.engine.threads import Outcome, final_weights
from pipedejavu.facts import Span
from pipedejavu.program import Program


class RankRounds:
    """This rank's worker; all ranks call `run` together."""

    def __init__(self, program: Program, job: Job, batches: Batches):
        self.updates = 0
        self.failure: BaseException | None = None
        # The user's model keeps its tensors, as with threads.
        self._run = RankRun(program, replace(job, units=copy.deepcopy(list(job.units))), batches)
        self._rounds: Iterator[RankRound] | None = None

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._run.rank

    @property
    def handlers(self) -> list[Handlers]:
        """The state of this rank's worker."""
        return [self._run.handlers]

    def run(self) -> tuple[Span, ...]:
        """Runs the program once; returns the span of every action of this rank's worker."""
        if self.failure is not None:
            raise self.failure
        if self._rounds is None:
            self._rounds = self._run.rounds(self._numbers())
        try:
            done = next(self._rounds)
        except BaseException as error:
            self.failure = error
            raise
        self.updates = done.update
        return tuple(done.spans)

    def _numbers(self) -> Iterator[int]:
        """Yields the update that each round starts from; a checkpoint may change it between rounds."""
        while True:
            yield self.updates

    def outcome(self) -> Outcome:
        """Returns the weights and the log of this rank's worker."""
        handlers = self._run.handlers
        return Outcome(final_weights(handlers), (handlers.log,), ())

    def give_up(self, error: BaseException) -> None:
        """Makes later calls of `run` raise an error."""
        self.failure = self.failure or error


Workers = Threads | RankRounds
"""The workers of this process."""
