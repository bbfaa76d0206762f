"""Programs on workers that are processes under torch.distributed, one rank each."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from pipedejavu.engine.device import CPU
from pipedejavu.engine.handle import Handlers
from pipedejavu.engine.job import Batches, Job
from pipedejavu.engine.run import check_runnable, check_units, make_handlers
from pipedejavu.engine.wire import ProcessWire
from pipedejavu.engine.worker import Worker
from pipedejavu.facts import InputError, Span
from pipedejavu.program import Program, verify

BeforeRound = Callable[[Handlers], None]
"""Is given the worker's state that the round will run on."""
AfterRound = Callable[[int, Handlers, list[Span]], bool]
"""Is told of each round with the updates made so far, the worker's state and its spans; says whether to go on."""


def run_rank(
    program: Program,
    job: Job,
    batches: Batches,
    updates: range,
    after: AfterRound,
    shared: Path,
    before: BeforeRound = lambda _: None,
    restore: BeforeRound = lambda _: None,
) -> Handlers:
    """Runs this rank's worker of a program once from each of `updates` on; the process group must be there.

    All ranks start the first round together; each starts the next when `after` returns, which may wait for the others.
    `shared` is a folder for weights that processes of one host share. `restore` may change what the run begins with.
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
        _share_weights(handlers, shared)
    worker = Worker(verify(program), rank, handlers)
    dist.barrier()
    for update in updates:
        handlers.begin(update)
        before(handlers)
        if not after(update + program.plan.steps, handlers, worker.run()):
            break
    return handlers


def _share_weights(handlers: Handlers, folder: Path) -> None:
    """Puts the weights into files that all processes map into their memory."""
    if handlers.device != CPU:
        raise InputError(f"plan '{handlers.program.plan.name}' shares weights in host memory; use --devices cpu")
    for key in [key for key in handlers.values if key[0] == "w"]:
        for name, weight in handlers.values[key].items():
            path = folder / f"{key[1]}.{name}.bin"
            if handlers.index == 0:
                path.write_bytes(weight.detach().contiguous().numpy().tobytes())
            dist.barrier()
            mapped = torch.from_file(str(path), shared=True, size=weight.numel(), dtype=weight.dtype)
            handlers.values[key][name] = mapped.view_as(weight).requires_grad_()
