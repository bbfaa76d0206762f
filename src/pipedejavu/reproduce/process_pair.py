"""Two processes that train networks of their own side by side, and then one network together.

The first process has the study's first device, the second its second one. Results come back as JSON in a folder.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.multiprocessing.spawn import start_processes

from pipedejavu.engine import Outcome
from pipedejavu.engine.engine_state import final_buffers
from pipedejavu.engine.rank_process import RankRun
from pipedejavu.engine.threads import final_weights
from pipedejavu.facts import end_with_parent
from pipedejavu.launch.loopback_store import connect_store, serve_store
from pipedejavu.plan import Plan
from pipedejavu.reproduce.training_study import Evaluated, StudyRun, TrainingStudy
from pipedejavu.source.task import SampleOrder

SIZE = 2
"""Processes."""


class Trained(NamedTuple):
    """What a process measured while a network was trained."""

    pid: int
    losses: list[float]
    """Mean training loss of each update, over the samples of this process."""
    evaluations: list[Evaluated]
    """Of the whole network; none in the second process of two that train together."""


class PairResult(NamedTuple):
    """The networks of two processes."""

    apart: tuple[Trained, ...]
    """Each process's own network."""
    together: tuple[Trained, ...]
    """What each process saw of the network that both trained."""


class PairRequest(NamedTuple):
    """What both processes train."""

    studies: Callable[[], Sequence[TrainingStudy]]
    """Returns, in each process, the study of the first one, that of the second, each with one device, and the common
    one."""
    plan_alone: Plan
    plan_both: Plan
    updates: int
    evaluate_every: int
    seed: int


def train_pair(request: PairRequest) -> PairResult:
    """Trains apart, then together, in two processes; raises what the first one to fail raised."""
    store = serve_store()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_work, args=(store.port, folder, request), nprocs=SIZE, start_method="spawn")  # type: ignore[no-untyped-call]
        forms = [json.loads(Path(folder, f"{rank}.json").read_text("utf-8")) for rank in range(SIZE)]
    rows = [[Trained(pid, losses, [Evaluated(*e) for e in ends]) for pid, losses, ends in form] for form in forms]
    return PairResult(*zip(*rows, strict=True))


def _work(rank: int, port: int, folder: str, request: PairRequest) -> None:
    """Trains this process's own network, then its part of the common one."""
    end_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=PrefixStore("pair", connect_store(port)), rank=rank, world_size=SIZE)
    studies = request.studies()
    own = StudyRun(studies[rank], request.seed + rank)
    dist.barrier()  # both begin at once
    course = own.train(request.plan_alone, request.updates, request.evaluate_every)
    trained = [Trained(os.getpid(), course.losses, course.evaluations), _train_together(rank, request, studies[SIZE])]
    Path(folder, f"{rank}.json").write_text(json.dumps(trained), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _train_together(rank: int, request: PairRequest, study: TrainingStudy) -> Trained:
    """Trains this process's part of the network that both train; the first process evaluates it."""
    run = StudyRun(study, request.seed)
    program = study.program(request.plan_both)
    batches = SampleOrder(run.task, run.cut, program.sizes, request.seed)
    worker, elapsed_s, step_s = RankRun(program, run.job(), batches), 0.0, study.simulated_s(program)
    trained, started = Trained(os.getpid(), [], []), time.perf_counter()
    for update, _ in worker.rounds(range(0, request.updates, program.plan.steps)):
        elapsed_s += time.perf_counter() - started
        log = worker.handlers.log
        trained.losses.append(sum(log.losses.values()) / sum(batches.count(number) for number in log.losses))
        log.forget_losses()
        if rank == 0 and (update % request.evaluate_every == 0 or update >= request.updates):
            outcome = Outcome(final_weights(worker.handlers), (log,), ())
            figures = run.evaluate(program, outcome, final_buffers(worker.handlers))
            so_far = (update * sum(program.sizes), elapsed_s, update * step_s)
            trained.evaluations.append(Evaluated(*so_far, *figures))
        started = time.perf_counter()
    worker.wire.close()
    return trained
