"""Several initialisations side by side: each worker trains its share of them, and the run goes on with the best.

Candidate c has the weights of seed + c; samples, their order and dropout are those of the run's own seed for all. A
candidate makes the plan's updates, whole, on one worker. What the best one has become is the run's first checkpoint:
the plan takes it up as it would any other, behind the updates that were made, with the samples that come next.
"""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from pipedejavu.engine import Batches, Threads
from pipedejavu.engine.device import be_deterministic
from pipedejavu.engine.engine_state import take_all
from pipedejavu.facts import InputError, keep_heap
from pipedejavu.health.watchdog import HangWatchdog
from pipedejavu.launch.init_selection import InitSelection
from pipedejavu.launch.launch import run_workers
from pipedejavu.launch.rank_group import RankGroup
from pipedejavu.launch.worker import WorkerLaunch, run_process
from pipedejavu.plan import Feed, Place, Plan, Reduce
from pipedejavu.planner.worker_host import num_threads
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.run_folder import RunFolder, RunStart
from pipedejavu.run.run_lock import lock_run
from pipedejavu.run.settings import Settings
from pipedejavu.source.fingerprint import fingerprints_to_save
from pipedejavu.source.task import prepare
from pipedejavu.store import Saver


class ChosenInit(NamedTuple):
    """Where the run goes on, and what was done to find the best candidate."""

    start: RunStart
    winner: int
    updates: tuple[int, ...]
    """That each candidate made."""
    samples: int
    """That all of them were trained on, together."""


class InitTrial:
    """One initialisation, trained on one worker's device as the plan would train it."""

    def __init__(self, options: TrainOptions, program: Program, worker: int, number: int, batches: Batches):
        own, _ = prepare(
            options.replace(seed=options.seed + number, byzantine=None), program.sizes, program.plan.cut.begins
        )
        # One whose update cannot be made stays where it is and loses; the others go on.
        job = replace(own, seed=options.seed, on_nan="skip", max_consecutive_skips=None)
        self.batches = batches
        plan = Plan(
            name=f"candidate {number}",
            place=Place(devices=(program.devices[worker],)),
            feed=Feed(microbatches=len(program.sizes), samples=max(program.sizes)),
            reduce=Reduce(clip="global"),
        )
        self.threads = Threads(compile_plan(plan, program.profile, program.machine), job, self.batches)
        self.log = self.threads.handlers[0].log

    def step(self) -> float:
        """Makes one update; returns its mean loss, infinity if the update could not be made."""
        self.threads.run()
        count = sum(self.batches.count(i) for i in self.log.losses)
        loss = sum(self.log.losses.values()) / count
        self.log.forget_losses()
        self.log.events.clear()
        is_made = not self.log.skipped
        self.log.skipped.clear()
        return loss if is_made else math.inf

    def state(self) -> dict[str, Tensor]:
        """Returns a copy of its weights, optimizer state and buffers."""
        return take_all(self.threads)


Share = Callable[[Tensor], object]
"""Adds up a vector over all ranks, in place."""


def run_init_trials(
    options: TrainOptions, program: Program, rank: int, size: int, share: Share
) -> tuple[InitSelection, InitTrial | None]:
    """Trains this rank's candidates until the race is over; returns it, and the winner where that is this rank's."""
    count, batches = options.init_candidates, prepare(options, program.sizes, program.plan.cut.begins).batches
    selection = InitSelection(count, options.init_steps)
    mine = {n: InitTrial(options, program, rank, n, batches) for n in range(rank, count, size)}
    while not selection.is_over:
        losses = torch.zeros(count, dtype=torch.float64)
        for number, candidate in mine.items():
            losses[number] = candidate.step()
        share(losses)
        if not selection.updates and len({*losses.tolist()}) == 1 and count > 1:
            raise InputError(
                f"all {count} candidates begin alike, with a loss of {losses[0]:.6g}: the model does not depend on the"
                " seed; leave --init-candidates out"
            )
        selection.take(losses.tolist())
        mine = {number: candidate for number, candidate in mine.items() if number in selection.alive}
    return selection, mine.get(selection.winner)


def choose_init(
    options: TrainOptions, program: Program, run_dir: str, ranks: RankGroup, again: RunStart | None = None
) -> ChosenInit:
    """Lets candidates compete on the plan's workers; leaves the best in the run folder, as its first checkpoint.

    `again` is given where the folder holds a run that has not come so far.
    """
    _check(options)
    folder = RunFolder(run_dir)
    with lock_run(folder.path) if ranks.is_first else nullcontext():
        return _choose(options, program, folder, ranks, again)


def _choose(
    options: TrainOptions, program: Program, folder: RunFolder, ranks: RankGroup, again: RunStart | None
) -> ChosenInit:
    if ranks.is_first:
        folder.create(options, program, again, fingerprints_to_save(options, again))
    if ranks.is_launched:
        dist.barrier()
        _compete_here(ranks.rank, ranks.size, folder, options, program)
        dist.barrier()
    else:
        run_workers(folder, min(len(program.workers), options.init_candidates), options.hang_after_s, work)
    found = folder.checkpoint_dir.newest(lambda _: None) if ranks.is_first else None
    if ranks.is_first and (found is None or "candidates" not in found.manifest.facts):
        raise InputError(
            f"the best candidate could not be saved in {folder.checkpoint_dir.path}; see what was said above"
        )
    facts = found.manifest.facts["candidates"] if found else {}
    facts = json.loads(ranks.share(json.dumps(facts).encode()))
    start = RunStart(step=facts["updates"][facts["winner"]], samples=facts["start"])
    if ranks.is_first:
        start = start.replace(fingerprints=folder.start().fingerprints)
    return ChosenInit(start, facts["winner"], tuple(facts["updates"]), facts["samples"])


def _check(options: TrainOptions) -> None:
    if options.init_steps >= options.steps:
        raise InputError(
            f"candidates train for up to {options.init_steps} steps (--init-steps) of the run's {options.steps}; use"
            " fewer, or more --steps"
        )
    if options.weights is not None:
        raise InputError("--weights says what a run begins with, and each candidate has its own; leave one out")
    if options.keeps_log:
        raise InputError("--audit replays a run from its beginning, which candidates have behind them; leave one out")


def work(rank: int, size: int, launched: WorkerLaunch) -> None:
    """Runs a rank's share of the candidates, in a process of its own."""
    run_process(rank, size, launched, _run)


def _run(folder: RunFolder, _: Store, __: HangWatchdog) -> tuple[int, bytes]:
    _compete_here(dist.get_rank(), dist.get_world_size(), folder, folder.options(), folder.program())
    return 0, b""


def _compete_here(rank: int, size: int, folder: RunFolder, options: TrainOptions, program: Program) -> None:
    """Lets this rank's candidates compete; whoever has the winner writes it to the folder."""
    keep_heap()
    torch.set_num_threads(num_threads(program.machine, program.devices, rank))
    be_deterministic()
    selection, winner = run_init_trials(options, program, rank, size, dist.all_reduce)
    if winner is None:
        return
    losses = selection.losses[selection.winner]
    if not all(map(math.isfinite, losses)):
        raise InputError("the losses of all candidates are no numbers; lower the learning rate")
    samples = sum(program.sizes)
    facts: dict[str, Any] = {
        "winner": selection.winner,
        "updates": [*map(len, selection.losses)],
        "start": selection.updates * samples,
        "samples": sum(map(len, selection.losses)) * samples,
        "drops": selection.drops,
    }
    for step, loss in enumerate(losses, start=1):
        folder.add_metrics({"step": step, "loss": loss, "candidate": selection.winner})
    folder.add_metrics({"candidates": facts})
    more = {"candidates": facts, "fingerprints": folder.start().fingerprints}
    about = {"samples": facts["start"], **Settings.of(options, program).in_manifest(more)}
    saver = Saver(folder.checkpoint_dir, note=folder.add_metrics)
    saver.save(selection.updates, winner.state(), lambda: about)
    saver.wait()
