"""Starts the workers of a Trainer, and says how its session holds them."""

from collections.abc import Sequence

from torch import nn

from pipedejavu.engine import Batches, Job, Threads
from pipedejavu.facts import InputError
from pipedejavu.facts.start_phase import START
from pipedejavu.one_device import start_threads
from pipedejavu.program import Program
from pipedejavu.session.rank_rounds import RankRounds, Workers
from pipedejavu.session.training_session import LocalWorkers, RankWorker, ThreadWorkers


def start_workers(program: Program, job: Job, batches: Batches, model: nn.Module, *, has_ranks: bool) -> Workers:
    """Returns the workers of this process: one of several ranks, or all of them as threads.

    One GPU and its host train the model's own modules if these rest there.
    """
    if has_ranks:
        return RankRounds(program, job, batches)
    with START.phase("workers"):
        workers = start_threads(program, job, batches, in_place=all(module is not model for _, module in job.units))
    for worker in workers.handlers:
        worker.needs_spans = len(program.workers) > 1  # to plan again
    return workers


def held_by_session(workers: Workers) -> LocalWorkers:
    """Returns workers in the form in which a session saves and restores them."""
    if isinstance(workers, Threads):
        return ThreadWorkers(workers)
    return RankWorker(workers.rank, workers.handlers[0], workers)


def detach(workers: Workers, jobs: Sequence[Job]) -> None:
    """Ends workers that train the modules of one of the jobs themselves, so that another Trainer can take these."""
    if isinstance(workers, Threads) and any(workers.handlers[0].job.units is job.units for job in jobs):
        workers.close()
        workers.failure = InputError("another Trainer trains this model now; go on with that one")
