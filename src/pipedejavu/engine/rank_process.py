"""Workers as processes under torch.distributed: runs one rank's worker of a program."""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipedejavu.analysis import verify
from pipedejavu.engine.device import CPU
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.job import Batches, Job
from pipedejavu.engine.rank_wire import RankWire
from pipedejavu.engine.threads import WorkerRunner, check_begin, check_runnable, check_units, make_handlers
from pipedejavu.engine.worker_loop import WorkerLoop
from pipedejavu.facts import InputError, MemoryFile, Span
from pipedejavu.program import Program, ValueKind
from pipedejavu.runtime.compute_precision import allowed_tf32

SPANS_EVERY = 50
"""Rounds between two whose spans are kept, besides the last round; the first round is a warm-up."""


class RankRound(NamedTuple):
    """A round that has ended."""

    update: int
    """The number of updates so far."""
    spans: list[Span]
    """When its actions ran; empty if the worker did not record them, as the handlers allow it."""


class RankRun:
    """This rank's worker of a program; the process group must be initialised.

    Load state into `handlers` before the first round.
    """

    def __init__(self, program: Program, job: Job, batches: Batches, worker: WorkerRunner | None = None):
        """Makes the worker, or uses the one that is given."""
        check_runnable(program)
        check_units(program, job)
        rank, size = dist.get_rank(), dist.get_world_size()
        if size != len(program.workers):
            raise InputError(
                f"the plan has {len(program.workers)} workers and {size} processes were started; start one for each"
            )
        self.program, self.rank, self.wire = program, rank, RankWire(program, rank)
        if worker is None:
            compiler = job.compiler_for(program)
            worker = WorkerLoop(verify(program), rank, make_handlers(program, rank, job, batches, self.wire, compiler))
        self.worker, self.handlers = worker, worker.handlers

    def rounds(self, updates: Iterable[int], meet: Callable[[], object] = dist.barrier) -> Iterator[RankRound]:
        """Runs a round from each of `updates`, and yields it when it has ended.

        All ranks start the first round together, after they `meet`. A rank starts its next round when the caller asks
        for it; the caller may wait for the other ranks in between.
        """
        if self.program.plan.keep.kind == "shared":
            _share_weights(self.handlers)
        meet()
        last = updates[-1] if isinstance(updates, range) and updates else None
        for number, update in enumerate(updates):
            check_begin(self.program, update)
            self.handlers.begin(update)
            self.handlers.needs_spans = number % SPANS_EVERY == 1 or update == last
            with allowed_tf32(self.program.plan.precision):
                spans = self.worker.run()
            yield RankRound(update + self.program.plan.steps, spans)


def _share_weights(handlers: Handlers) -> None:
    """Moves the weights to memory that all processes of this host share."""
    if handlers.device != CPU:
        raise InputError(f"plan '{handlers.program.plan.name}' shares weights in host memory; use --devices cpu")
    for key in [key for key in handlers.values if key.kind == ValueKind.WEIGHTS]:
        for name, weight in handlers.values[key].items():
            handlers.values[key][name] = _shared(weight.detach()).requires_grad_()


def _shared(weight: Tensor) -> Tensor:
    """Returns the first rank's tensor in memory shared by all ranks; all ranks call it together."""
    is_first, file = dist.get_rank() == 0, None
    place = torch.zeros(2, dtype=torch.int64)
    if is_first:
        file = MemoryFile("weight", weight.nbytes)
        place = torch.tensor([os.getpid(), file.file])
    dist.broadcast(place, 0)
    pid, number = place.tolist()
    mapped = torch.from_file(f"/proc/{pid}/fd/{number}", shared=True, size=weight.numel(), dtype=weight.dtype)
    mapped = mapped.view_as(weight)
    if is_first:
        mapped.copy_(weight)
    dist.barrier()  # all ranks have mapped it, and it is filled
    if file is not None:
        file.close()
    return mapped
