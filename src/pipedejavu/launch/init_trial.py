"""Trials of several initialisations: each worker trains some of them, and the run goes on with the best.

Candidate c has the weights of seed + c; samples, their order and dropout follow the run's own seed for all. A candidate
makes the plan's updates on one worker, without the pipeline. The state of the best one becomes the run's first
checkpoint, from which the plan goes on as from any other, with the next samples.
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

from pipedejavu.engine import Batches, Threads
from pipedejavu.engine.engine_state import take_all
from pipedejavu.facts import InputError
from pipedejavu.launch.backend import RunSetup
from pipedejavu.launch.init_selection import InitSelection
from pipedejavu.launch.run_session import backend_of
from pipedejavu.launch.worker_process import set_up_process
from pipedejavu.plan import Feed, Place, Plan, Reduce
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.run_folder import RunFolder, RunStart
from pipedejavu.run.run_lock import lock_run
from pipedejavu.run.settings import Settings
from pipedejavu.session.rank_group import RankGroup
from pipedejavu.source.fingerprint import fingerprints_to_save
from pipedejavu.source.task import prepare
from pipedejavu.store import Saver


class ChosenInit(NamedTuple):
    """The winning candidate, where the run goes on with it, and the cost of the trials."""

    start: RunStart
    winner: int
    updates: tuple[int, ...]
    """Updates that each candidate made."""
    samples: int
    """Samples that all candidates together were trained on."""


class InitTrial:
    """One initialisation, trained on one worker's device as the plan would train it."""

    def __init__(self, options: TrainOptions, program: Program, worker: int, number: int, batches: Batches):
        job, _ = prepare(
            options.replace(seed=options.seed + number, byzantine=None), program.sizes, program.plan.cut.begins
        )
        # A candidate with a non-finite update keeps its weights and loses; the others go on.
        job = replace(job, seed=options.seed, on_nan="skip", max_consecutive_skips=None)
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
        """Makes one update; returns its mean loss, or infinity if the update was skipped."""
        self.threads.run()
        count = sum(self.batches.count(i) for i in self.log.losses)
        loss = sum(self.log.losses.values()) / count
        self.log.forget_losses()
        self.log.events.clear()
        is_made = not self.log.skipped
        self.log.skipped.clear()
        return loss if is_made else math.inf

    def state(self) -> dict[str, Tensor]:
        """Returns copies of the weights, the optimizer state and the buffers."""
        return take_all(self.threads)


AllReduce = Callable[[Tensor], object]
"""Adds up a vector over all ranks, in place."""


def run_init_trials(
    options: TrainOptions, program: Program, rank: int, size: int, all_reduce: AllReduce
) -> tuple[InitSelection, InitTrial | None]:
    """Trains this rank's candidates until one is selected.

    Returns the selection, and the winner if this rank trained it.
    """
    count, batches = options.init_candidates, prepare(options, program.sizes, program.plan.cut.begins).batches
    selection = InitSelection(count, options.init_steps)
    mine = {n: InitTrial(options, program, rank, n, batches) for n in range(rank, count, size)}
    while not selection.is_over:
        losses = torch.zeros(count, dtype=torch.float64)
        for number, candidate in mine.items():
            losses[number] = candidate.step()
        all_reduce(losses)
        if not selection.updates and len({*losses.tolist()}) == 1 and count > 1:
            raise InputError(
                f"all {count} candidates begin alike, with a loss of {losses[0]:.6g}: the model does not depend on the"
                " seed; leave --init-candidates out"
            )
        selection.take(losses.tolist())
        mine = {number: candidate for number, candidate in mine.items() if number in selection.alive}
    return selection, mine.get(selection.winner)


def choose_init(
    options: TrainOptions, program: Program, run_dir: str, ranks: RankGroup, restart: RunStart | None = None
) -> ChosenInit:
    """Runs the trials on the plan's workers; leaves the best candidate in the run folder as its first checkpoint.

    `restart` is set if the folder holds a run that ended before it had selected a candidate.
    """
    _check(options)
    folder = RunFolder(run_dir)
    with lock_run(folder.path) if ranks.is_first else nullcontext():
        return _choose(options, program, folder, ranks, restart)


def _choose(
    options: TrainOptions, program: Program, folder: RunFolder, ranks: RankGroup, restart: RunStart | None
) -> ChosenInit:
    if ranks.is_first:
        folder.create(options, program, restart, fingerprints_to_save(options, restart))
    backend_of(ranks).run_task(folder, RunSetup(options, program, None), run_trials_here, options.init_candidates)
    checkpoint = folder.checkpoint_dir.newest(lambda _: None) if ranks.is_first else None
    if ranks.is_first and (checkpoint is None or "candidates" not in checkpoint.manifest.facts):
        raise InputError(
            f"the best candidate could not be saved in {folder.checkpoint_dir.path}; see what was said above"
        )
    facts = checkpoint.manifest.facts["candidates"] if checkpoint else {}
    facts = json.loads(ranks.broadcast(json.dumps(facts).encode()))
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
        raise InputError(
            "--audit replays a run from its beginning, which is before the winner is chosen; leave one out"
        )


def run_trials_here(rank: int, size: int, folder: RunFolder, setup: RunSetup) -> None:
    """Runs the trials of this rank; the rank that has the winner writes its state to the folder."""
    options, program, _ = setup
    set_up_process(program, rank, is_deterministic=options.deterministic)
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
