"""The backend for torchrun: this process is one rank, and runs its worker itself."""

import secrets
import signal
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load
from torch._C._distributed_c10d import PrefixStore

from pipedejavu.facts import InputError
from pipedejavu.facts.printable import tell
from pipedejavu.health.failure import ShortageError, WorkerError, with_rest
from pipedejavu.launch.backend import REMEDY, RunSetup, Task
from pipedejavu.launch.handover import RunForecast
from pipedejavu.launch.worker import Rank
from pipedejavu.planner.replan import relieve
from pipedejavu.run.run_folder import RunFolder, RunStart
from pipedejavu.run.stop_signal import stopped
from pipedejavu.run.worker_result import WorkerResult
from pipedejavu.session.rank_group import RankGroup
from pipedejavu.store import CheckpointDir


@dataclass
class _Ended:
    """A rank whose worker has run, and its result."""

    rank: Rank
    result: WorkerResult


class TorchrunBackend:
    """Runs the worker of this rank; the other ranks run theirs at the same time."""

    def __init__(self, ranks: RankGroup):
        self.ranks = ranks
        self._numbers = count()
        self._ended: _Ended | None = None

    def prepare(self, folder: RunFolder, setup: RunSetup) -> RunSetup:
        """Turns checkpoints off if a host does not see the run folder, and tells the user.

        Raises InputError if the run is to go on from a checkpoint there.
        """
        options, _, start = setup
        shared = self._shared_parts(folder)
        probe = shared / self.ranks.broadcast(secrets.token_hex(8).encode()).decode()
        if self.ranks.is_first:
            probe.touch()
        dist.barrier()
        seen = self.ranks.all_gather(b"1" if probe.exists() else b"0")
        blind = [rank for rank, answer in enumerate(seen) if answer == b"0"]
        if not blind or not options.checkpoint_every:
            return setup
        reason = f"rank {blind[0]} does not see the run folder {shared.parent}, which all hosts must share"
        if start is not None and start.step:
            raise InputError(f"the run cannot go on: {reason}; put --run-dir on a file system of all")
        if self.ranks.is_first:
            tell(f"no checkpoints: {reason}; put --run-dir on a file system of all")
        return setup._replace(options=options.replace(checkpoint_every=0, replan=False))

    def run(self, folder: RunFolder, setup: RunSetup, forecast: RunForecast | None) -> bytes:
        """Runs this rank's worker to its end; returns the switch to another plan as JSON, on all ranks."""
        ranks = self.ranks
        assert ranks.store is not None
        shared = self._shared_parts(folder)
        forecast = RunForecast.from_json(ranks.broadcast(forecast.to_json().encode() if forecast else b""))
        ranks.checkpoint_dir = CheckpointDir(shared.parent / folder.checkpoint_dir.path.name)
        store, watchdog = PrefixStore(f"watch{next(self._numbers)}", ranks.store), ranks.start_watchdog(setup.options)
        start = folder.start() if ranks.is_first else setup.start or RunStart()
        rank = Rank(setup.options, setup.program, store, folder, start, watchdog, forecast, keeps_workers=True)
        try:
            self._ended = _Ended(rank, rank.run(ranks.checkpoint_dir))
        except ShortageError as shortage:
            raise _explain(shortage, rank, shared) from None
        except WorkerError as error:
            raise WorkerError(with_rest(str(error), ranks.checkpoint_dir.steps())) from None
        switches = ranks.is_first and rank.is_stopped and not rank.stop_signal.number and folder.switch.exists()
        return ranks.broadcast(folder.switch.read_bytes() if switches else b"")

    def run_task(self, folder: RunFolder, setup: RunSetup, task: Task, most: int) -> None:  # noqa: ARG002
        """Runs a task on every rank that torchrun started, this one among them."""
        dist.barrier()
        task(self.ranks.rank, self.ranks.size, folder, setup)
        dist.barrier()

    def finish(self, folder: RunFolder) -> list[WorkerResult]:
        """Returns the results of all ranks on the first, nothing elsewhere; raises StoppedError after a signal."""
        assert self._ended is not None
        packed = self.ranks.gather(self._ended.result.pack())
        self.ranks.finish()
        if self._ended.rank.is_stopped:
            raise stopped(folder, self._ended.rank.stop_signal.number or signal.SIGTERM)
        return [WorkerResult.unpack(load(data)) for data in packed]

    def _shared_parts(self, folder: RunFolder) -> Path:
        """Returns the path of the folder for workers' files, as the first rank has it."""
        return Path(self.ranks.broadcast(str(folder.parts.resolve()).encode()).decode())


def _explain(shortage: ShortageError, rank: Rank, shared: Path) -> WorkerError:
    """Returns the error of a rank that ran out of memory; saves the plan that the next start takes."""
    switch = relieve(rank.program, shortage, rank.microbatch_samples, len(rank.program.workers))
    if rank.options.on_oom == "stop":
        return WorkerError(f"{switch.reason}; {REMEDY}")
    switch.save(shared / rank.folder.switch.name)
    return WorkerError(f"{switch.reason}: the run goes on with it when it is started again")
