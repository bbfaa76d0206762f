"""Vectors of filters to drop: for each share of the computation, those with which training converges best.

A vector is scored by what it computes, and by the loss of the whole model on samples that were not trained on, after
some updates that each left other filters out. All vectors begin with the same weights and see the same samples.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pipedejavu.engine.applier import as_leaves
from pipedejavu.engine.filter_masks import FilterFinder
from pipedejavu.engine.masked_optimizer import MaskedOptimizer
from pipedejavu.engine.optimizer import State
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import backward, with_loss
from pipedejavu.engine.unit_random import mixed
from pipedejavu.facts import Record
from pipedejavu.plan import Decision, Plan
from pipedejavu.runtime.kept_filters import KeptFilters
from pipedejavu.search.genetic import Vector, evolve
from pipedejavu.source.task import Prepared

_NUM_TESTED = 4
"""Microbatches that vectors are tested on."""
_MOST_GENERATIONS = 32


class DropVector(Record):
    """A vector of the table."""

    drops: tuple[float, ...]
    """The share of filters to drop, per group."""
    cost: float
    """The share of the multiplications of the whole model."""
    loss: float
    """Mean loss of the whole model on held-out samples, after training with the vector."""


class DropTable(Record):
    """The Pareto-optimal vectors of a model, by rising cost."""

    groups: tuple[str, ...]
    """For each share of a vector, the first weight that makes the group's filters."""
    updates: int
    """Updates that each vector was trained for."""
    samples: int
    """Samples per update."""
    tried: int
    """Vectors that were trained."""
    vectors: tuple[DropVector, ...]

    def plan(self, plan: Plan) -> Plan:
        """Returns a plan that chooses from this table."""
        reason = (
            f"the Pareto front of {self.tried} vectors by multiplications and by the loss after {self.updates} updates"
        )
        decision = Decision(axis="feed", choice=f"{len(self.vectors)} vectors of filters to drop", reason=reason)
        drops = tuple(vector.drops for vector in self.vectors)
        return plan.replace(feed=plan.feed.replace(drops=drops), decisions=(*plan.decisions, decision))


@dataclass(frozen=True)
class DropTrial:
    """Trains a model with vectors, one at a time."""

    prepared: Prepared
    updates: int

    def loss(self, kept_at: Callable[[int], KeptFilters]) -> float:
        """Returns the loss of the whole model after training with the filters of each update."""
        job, batches = self.prepared
        units = [(n, name, copy.deepcopy(module)) for n, (name, module) in enumerate(job.units)]
        runner, state = PieceRunner(units, job.seed), State()
        weights, runner.filters = as_leaves({n: w.clone() for n, w in runner.initial.items()}), kept_at
        for number in range(self.updates):
            output, saved = runner.forward(weights, batches.inputs(number), number, is_first=True)
            loss = job.loss(output, batches.targets(number))
            _, gradients = backward(with_loss(saved, loss), (torch.ones_like(loss),))
            new = {name: torch.empty_like(weight) for name, weight in weights.items()}
            optimizer = MaskedOptimizer(job.optimizer, kept_at(number))
            optimizer.step(number, weights, gradients, state, 1 / batches.count(number), out=new)
            weights = as_leaves(new)
        total, count, runner.filters = 0.0, 0, None
        for number in range(self.updates, self.updates + _NUM_TESTED):
            with torch.no_grad():
                output, _ = runner.forward(weights, batches.inputs(number), number, keeps_buffers=True, is_first=True)
                total += float(job.loss(output, batches.targets(number)))
            count += batches.count(number)
        return total / count if total == total else float("inf")


def search_drops(
    prepared: Prepared,
    plan: Plan,
    *,
    updates: int,
    population: int = 16,
    generations: int = _MOST_GENERATIONS,
    time_budget_s: float = 60.0,
    progress: Callable[[float, str], object] = lambda _share, _text: None,
) -> DropTable:
    """Returns the table of a model for the microbatches of a plan; raises InputError if it has no filters to drop."""
    seed, started_s = prepared.job.seed, time.monotonic()
    layout = FilterFinder(plan, prepared.job, prepared.batches).layout(0)
    trial, losses = DropTrial(prepared, updates), dict[tuple[int, ...], float]()

    def evaluate(vector: Vector) -> tuple[float, float]:
        counts = layout.counts(vector)
        if counts not in losses:
            numbers = range(len(counts))
            losses[counts] = trial.loss(
                lambda update: KeptFilters(layout, counts, [mixed(seed, update, group) for group in numbers])
            )
        return layout.cost(counts), losses[counts]

    def goes_on(share: float) -> bool:
        elapsed = (time.monotonic() - started_s) / time_budget_s
        progress(max(share, elapsed), f"{len(losses)} vectors trained")
        return elapsed < 1

    front = evolve(
        len(layout.groups), evaluate, population=population, generations=generations, seed=seed, goes_on=goes_on
    )
    vectors = tuple(DropVector(drops=entry.vector, cost=entry.costs[0], loss=entry.costs[1]) for entry in front)
    groups = tuple(group.name for group in layout.groups)
    return DropTable(groups=groups, updates=updates, samples=plan.feed.samples, tried=len(losses), vectors=vectors)
