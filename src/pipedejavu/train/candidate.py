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
from pipedejavu.engine.state import take_all
from pipedejavu.facts import InputError, keep_heap
from pipedejavu.plan import Feed, Place, Plan, Reduce
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.store import Saver
from pipedejavu.train.folder import RunFolder, Start
from pipedejavu.train.hold import hold
from pipedejavu.train.launch import run_workers
from pipedejavu.train.options import TrainOptions
from pipedejavu.train.race import Race
from pipedejavu.train.seal import Settings
from pipedejavu.train.site import num_threads
from pipedejavu.train.task import prepare
from pipedejavu.train.team import Team
from pipedejavu.train.vigil import Vigil
from pipedejavu.train.worker import Launched, run_process


class Chosen(NamedTuple):
    """Where the run goes on, and what was done to find the best candidate."""

    start: Start
    winner: int
    updates: tuple[int, ...]
    """That each candidate made."""
    samples: int
    """That all of them were trained on, together."""


class Candidate:
    """One initialisation, trained on one worker's device as the plan would train it."""

    def __init__(self, options: TrainOptions, program: Program, worker: int, number: int, batches: Batches):
        own, _ = prepare(
            options.but(seed=options.seed + number, byzantine=None), program.sizes, program.plan.cut.begins
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


def compete(
    options: TrainOptions, program: Program, rank: int, size: int, share: Share
) -> tuple[Race, Candidate | None]:
    """Trains this rank's candidates until the race is over; returns it, and the winner where that is this rank's."""
    count, batches = options.init_candidates, prepare(options, program.sizes, program.plan.cut.begins).batches
    race = Race(count, options.init_steps)
    mine = {n: Candidate(options, program, rank, n, batches) for n in range(rank, count, size)}
    while not race.is_over:
        losses = torch.zeros(count, dtype=torch.float64)
        for number, candidate in mine.items():
            losses[number] = candidate.step()
        share(losses)
        if not race.updates and len({*losses.tolist()}) == 1 and count > 1:
            raise InputError(
                f"all {count} candidates begin alike, with a loss of {losses[0]:.6g}: the model does not depend on the"
                " seed; leave --init-candidates out"
            )
        race.take(losses.tolist())
        mine = {number: candidate for number, candidate in mine.items() if number in race.alive}
    return race, mine.get(race.winner)


def choose_candidate(
    options: TrainOptions, program: Program, run_dir: str, team: Team, again: Start | None = None
) -> Chosen:
    """Lets candidates compete on the plan's workers; leaves the best in the run folder, as its first checkpoint.

    `again` is given where the folder holds a run that has not come so far.
    """
    _check(options)
    folder = RunFolder(run_dir)
    with hold(folder.path) if team.is_first else nullcontext():
        return _choose(options, program, folder, team, again)


def _choose(options: TrainOptions, program: Program, folder: RunFolder, team: Team, again: Start | None) -> Chosen:
    if team.is_first:
        folder.create(options, program, again)
    if team.is_launched:
        dist.barrier()
        _compete_here(team.rank, team.size, folder, options, program)
        dist.barrier()
    else:
        run_workers(folder, min(len(program.workers), options.init_candidates), options.hang_after_s, work)
    found = folder.shelf.newest(lambda _: None) if team.is_first else None
    if team.is_first and (found is None or "candidates" not in found.manifest.facts):
        raise InputError(f"the best candidate could not be saved in {folder.shelf.path}; see what was said above")
    facts = found.manifest.facts["candidates"] if found else {}
    facts = json.loads(team.share(json.dumps(facts).encode()))
    start = Start(step=facts["updates"][facts["winner"]], samples=facts["start"])
    if team.is_first:
        start = start.but(fingerprints=folder.start().fingerprints)
    return Chosen(start, facts["winner"], tuple(facts["updates"]), facts["samples"])


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


def work(rank: int, size: int, launched: Launched) -> None:
    """Runs a rank's share of the candidates, in a process of its own."""
    run_process(rank, size, launched, _run)


def _run(folder: RunFolder, _: Store, __: Vigil) -> tuple[int, bytes]:
    _compete_here(dist.get_rank(), dist.get_world_size(), folder, folder.options(), folder.program())
    return 0, b""


def _compete_here(rank: int, size: int, folder: RunFolder, options: TrainOptions, program: Program) -> None:
    """Lets this rank's candidates compete; whoever has the winner writes it to the folder."""
    keep_heap()
    torch.set_num_threads(num_threads(program.machine, program.devices, rank))
    be_deterministic()
    race, winner = compete(options, program, rank, size, dist.all_reduce)
    if winner is None:
        return
    losses = race.losses[race.winner]
    if not all(map(math.isfinite, losses)):
        raise InputError("the losses of all candidates are no numbers; lower the learning rate")
    samples = sum(program.sizes)
    facts: dict[str, Any] = {
        "winner": race.winner,
        "updates": [*map(len, race.losses)],
        "start": race.updates * samples,
        "samples": sum(map(len, race.losses)) * samples,
        "drops": race.drops,
    }
    for step, loss in enumerate(losses, start=1):
        folder.add_metrics({"step": step, "loss": loss, "candidate": race.winner})
    folder.add_metrics({"candidates": facts})
    more = {"candidates": facts, "fingerprints": folder.start().fingerprints}
    about = {"samples": facts["start"], **Settings.of(options, program).in_manifest(more)}
    saver = Saver(folder.shelf, note=folder.add_metrics)
    saver.save(race.updates, winner.state(), lambda: about)
    saver.wait()
