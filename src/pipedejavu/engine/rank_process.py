"""Workers as processes under torch.distributed: runs one rank's worker of a program."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from pipedejavu.analysis import verify
from pipedejavu.engine.device import CPU
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.job import Batches, Job
from pipedejavu.engine.threads import check_runnable, check_units, make_handlers
from pipedejavu.engine.wire import ProcessWire
from pipedejavu.engine.worker_loop import WorkerLoop
from pipedejavu.facts import InputError, MemoryFile, Span
from pipedejavu.program import Program, ValueKind

BeforeRound = Callable[[Handlers], None]
"""Called before a round with the worker's handlers."""
AfterRound = Callable[[int, Handlers, list[Span]], bool]
"""Called after a round with the number of updates so far, the handlers and the spans; returns whether to continue."""


def run_rank(
    program: Program,
    job: Job,
    batches: Batches,
    updates: range,
    after: AfterRound,
    before: BeforeRound = lambda _: None,
    restore: BeforeRound = lambda _: None,
) -> Handlers:
    """Runs this rank's worker, one round from each of `updates`; the process group must be initialised.

    All ranks start the first round together. A rank starts its next round when `after` returns; `after` may wait for
    the other ranks. `restore` may load state before the first round.
    """
    check_runnable(program)
    check_units(program, job)
    rank, size = dist.get_rank(), dist.get_world_size()
    if size != len(program.workers):
        raise InputError(
            f"the plan has {len(program.workers)} workers and {size} processes were started; start one for each"
        )
    wire = ProcessWire(rank, {name: group.workers for name, group in program.groups.items()})
    handlers = make_handlers(program, rank, job, batches, wire)
    restore(handlers)
    if program.plan.keep.kind == "shared":
        _share_weights(handlers)
    worker = WorkerLoop(verify(program), rank, handlers)
    dist.barrier()
    for update in updates:
        handlers.begin(update)
        before(handlers)
        if not after(update + program.plan.steps, handlers, worker.run()):
            break
    return handlers


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
