"""The interface through which a run session drives its workers, whichever processes they run in.

`ProcessBackend` (launch) starts a process per worker; `TorchrunBackend` (torchrun) is one of the processes that
torchrun started.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from pipedejavu.launch.handover import RunForecast
from pipedejavu.program import Program
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.run_folder import RunFolder, RunStart
from pipedejavu.run.worker_result import WorkerResult
from pipedejavu.session.rank_group import RankGroup

REMEDY = "--resume --on-oom replan goes on with such a plan"
"""What a user can do about a device that ran out of memory."""


class RunSetup(NamedTuple):
    """What workers run until the run ends or switches plans."""

    options: TrainOptions
    program: Program
    start: RunStart | None
    """Where the run goes on; None for a new run."""


Task = Callable[[int, int, RunFolder, RunSetup], None]
"""A module-level function that each rank runs, given its rank, the number of ranks, and the run's folder and setup."""


class Backend(Protocol):
    """The workers of a run, as the process that drives them sees them."""

    ranks: RankGroup
    """The processes that plan and drive the run together."""

    def prepare(self, folder: RunFolder, setup: RunSetup) -> RunSetup:
        """Returns the setup, limited to what all hosts can do with the run folder."""
        ...

    def run(self, folder: RunFolder, setup: RunSetup, forecast: RunForecast | None) -> bytes:
        """Runs the workers to the end, or until the run switches plans: then returns the switch as JSON.

        The forecast is needed on the first rank only. Raises WorkerError if a worker fails.
        """
        ...

    def run_task(self, folder: RunFolder, setup: RunSetup, task: Task, most: int) -> None:
        """Runs a task on one rank per worker, on at most as many ranks as `most` if the backend starts them itself.

        The ranks form a process group of torch.distributed.
        """
        ...

    def finish(self, folder: RunFolder) -> list[WorkerResult]:
        """Returns the results of all workers, on the first rank; raises StoppedError if a signal stopped the run."""
        ...
