"""What a running program does between rounds, whichever backend runs its workers: compare replicas, save, restore.

A backend holds the workers of this process: all of a plan's workers as threads (`ThreadWorkers`), or the one worker of
a rank (`RankWorker`), whose process our launcher or torchrun started.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipedejavu.engine import Threads
from pipedejavu.engine.engine_state import Source, put_all, put_state, take_norm, take_state
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.replicas import ReplicaCheck
from pipedejavu.health.failure import WorkerError
from pipedejavu.run.saved_facts import current_gpu, random_state, saved_in, set_random_state
from pipedejavu.run.whole_state import WholeState
from pipedejavu.session.rank_rounds import RankRounds
from pipedejavu.store import Checkpoint, Tensors


class LocalWorkers(Protocol):
    """The workers that run in this process."""

    rank: int
    """The number of this process; 0 if there is only one."""
    is_lead: bool
    """Whether this process saves the part of the model that is not trained."""

    @property
    def handlers(self) -> Sequence[Handlers]:
        """The state of each worker."""
        ...

    @property
    def generator_device(self) -> torch.device | None:
        """The GPU whose random generator a checkpoint saves, if any."""
        ...

    def add_up(self, table: Tensor) -> None:
        """Adds up a table over all processes, in place."""
        ...

    def put_state(self, update: int, source: Source, norm: float | None) -> None:
        """Replaces the state of the workers by the one that `update` updates have made."""
        ...


class ThreadWorkers:
    """All workers of a plan, as threads of this process."""

    rank = 0
    is_lead = True

    def __init__(self, threads: Threads):
        self.threads = threads

    @property
    def handlers(self) -> Sequence[Handlers]:
        """The state of each worker."""
        return self.threads.handlers

    @property
    def generator_device(self) -> torch.device | None:
        """The current GPU, whose generator the user's loop may use too."""
        return current_gpu()

    def add_up(self, table: Tensor) -> None:
        """Does nothing: all workers have written to the table."""

    def put_state(self, update: int, source: Source, norm: float | None) -> None:
        """Replaces the state of all workers; their next round begins with `update`."""
        put_all(self.threads, update, source, norm)


class RankWorker:
    """The worker of one rank of several processes."""

    def __init__(
        self,
        rank: int,
        handlers: Handlers,
        rounds: RankRounds | None = None,
        *,
        lead: int = 0,
        add_up: Callable[[Tensor], object] = dist.all_reduce,
    ):
        """With `rounds`, the state may be replaced between two rounds."""
        self.rank, self._handlers, self._rounds = rank, handlers, rounds
        self.is_lead, self._add_up = rank == lead, add_up

    @property
    def handlers(self) -> Sequence[Handlers]:
        """The state of this rank's worker."""
        return [self._handlers]

    @property
    def generator_device(self) -> torch.device | None:
        """The worker's device."""
        return self._handlers.device

    def add_up(self, table: Tensor) -> None:
        """Adds up a table over all ranks; all of them call it."""
        self._add_up(table)

    def put_state(self, update: int, source: Source, norm: float | None) -> None:
        """Replaces the state of the worker; its next round begins with `update`."""
        put_state(self._handlers, source, norm)
        if self._rounds is not None:
            self._rounds.updates = update


class TrainingSession:
    """The state of a running program, between its rounds."""

    def __init__(self, workers: LocalWorkers, replicas: ReplicaCheck, whole: WholeState):
        self.workers, self.replicas, self.whole = workers, replicas, whole

    def check_replicas(self, updates: int) -> None:
        """Raises WorkerError if replicas that share every update hold different weights."""
        if sentence := self.compare_replicas(updates):
            raise WorkerError(sentence)

    def compare_replicas(self, update: int) -> str:
        """Returns a sentence that names replicas with different weights, or nothing if all are equal.

        All processes call it together.
        """
        return self.replicas.find(update, self.workers.handlers, self.workers.add_up)

    def take_state(self) -> Tensors:
        """Returns copies of the state that this process saves; raises InputError if it is not finite.

        The lead also saves the part of the model that is not trained.
        """
        workers = self.workers
        tensors = {name: tensor for worker in workers.handlers for name, tensor in take_state(worker).items()}
        tensors |= random_state(workers.rank, workers.generator_device)
        return self.whole.saved_rest() | tensors if workers.is_lead else tensors

    def take_norm(self) -> float | None:
        """Returns the gradient norm that the next update is clipped by, if that is the last update's."""
        return take_norm(self.workers.handlers[0])

    def restore(self, checkpoint: Checkpoint) -> None:
        """Replaces the workers' state and the random generators by those of a checkpoint."""
        saved, facts = checkpoint.manifest.tensors, saved_in(checkpoint)
        self.workers.put_state(
            checkpoint.step,
            lambda name: checkpoint.tensor(name) if name in saved else None,
            facts.norm,
        )
        self.replicas.agreed = checkpoint.step
        set_random_state(checkpoint, self.workers.rank, self.workers.generator_device)


def take_losses(handlers: Sequence[Handlers]) -> list[float]:
    """Returns the losses that workers have logged, which forget them."""
    losses = [loss for worker in handlers for loss in worker.log.losses.values()]
    for worker in handlers:
        worker.log.forget_losses()
    return losses
