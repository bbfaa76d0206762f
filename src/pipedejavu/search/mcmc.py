"""The random searcher: Markov chain Monte Carlo over whole drafts, with the rule of FlexFlow or with ours.

A step changes one thing of a draft: a cut, the frame, or both; worse drafts are accepted with exp(−Δ/temperature).
FlexFlow's rule has one temperature for the whole run and goes on from wherever it is. Ours is relative to the best time
so far, cools down, and starts again from the best when nothing was gained for long.
"""

import random
from dataclasses import replace
from math import exp, inf

from pipedejavu.search.candidate_plan import CandidatePlan, PlanningProblem, Stage
from pipedejavu.search.plan_estimate import estimate
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.subspace import SearchSubspace, subspaces

STEPS = 4000
PATIENCE = 200
"""Steps without gain, after which ours starts again from the best."""
FIRST, LAST = 0.2, 0.002
"""Of our temperature, as parts of the best time."""
FLEXFLOW = 0.05
"""Of FlexFlow's temperature, as a part of the first draft's time."""
PENALTY = 10.0
"""Times that a shortage of memory makes a draft longer, so that a chain can pass through what does not fit."""


def run(
    pool: Pool,
    problems: list[PlanningProblem],
    options: SearchOptions,
    *,
    is_flexflow: bool = False,
    steps: int = STEPS,
) -> bool:
    """Walks at random from data parallelism on; returns False, as it never knows that it saw all."""
    chance = random.Random(options.seed)
    found = (subspace for problem in problems for subspace in subspaces(problem, options))
    every = [
        subspace for subspace in found if any(True for _ in subspace.seatings(len(subspace.problem.profile.units)))
    ]
    if not every:
        return True
    chain = _Chain(pool, every, chance)
    first = max(every, key=lambda f: (f.mode.is_plain, f.sizes == (len(f.order),), len(f.order), not f.problem.note))
    state = chain.start(first)
    best = state
    since = 0
    for step in range(steps):
        if pool.is_over:
            break
        if step % PATIENCE == 0:
            pool.report(step / steps, f"walking at random, step {step} of {steps}")
        new = chain.change(state)
        cooled = FIRST * (LAST / FIRST) ** (step / steps)
        warmth = FLEXFLOW * first_s if is_flexflow and (first_s := chain.first_s) < inf else cooled * best[1]
        if new[1] <= state[1] or chance.random() < exp((state[1] - new[1]) / warmth if warmth else -inf):
            state = new
        since = 0 if new[1] < best[1] else since + 1
        best = min(best, new, key=lambda found: found[1])
        if not is_flexflow and since >= PATIENCE:
            state, since = best, 0
    return False


_State = tuple[CandidatePlan, float, SearchSubspace]


class _Chain:
    """Drafts and the changes that lead from one to the next."""

    def __init__(self, pool: Pool, every: list[SearchSubspace], chance: random.Random):
        self.pool, self.every, self.chance = pool, every, chance
        self.first_s = inf

    def start(self, subspace: SearchSubspace) -> _State:
        state = self._seen(subspace, self._equal(subspace))
        self.first_s = state[1]
        return state

    def change(self, state: _State) -> _State:
        """Moves a cut, divides the state of a stage or leaves it whole, or takes another frame, its cut if it fits."""
        candidate, _, subspace = state
        if len(candidate.stages) > 1 and self.chance.random() < 0.6:
            return self._seen(subspace, self._moved(candidate))
        if len(subspace.zeros) > 1 and self.chance.random() < 0.3:
            at = self.chance.randrange(len(candidate.stages))
            return self._seen(
                subspace,
                (
                    *candidate.stages[:at],
                    self._with_zero(candidate.stages[at], subspace),
                    *candidate.stages[at + 1 :],
                ),
            )
        near = [f for f in self.chance.choices(self.every, k=8) if self._likeness(f, subspace)]
        other = self.chance.choice(near or self.every)
        if other.order == subspace.order and (other.sizes, other.degrees) == (subspace.sizes, subspace.degrees):
            return self._seen(other, tuple(self._with_zero(stage, other) for stage in candidate.stages))
        return self._seen(other, self._equal(other))

    @staticmethod
    def _likeness(one: SearchSubspace, other: SearchSubspace) -> bool:
        return sum((one.order == other.order, one.sizes == other.sizes, one.samples == other.samples)) == 2

    def _seen(self, subspace: SearchSubspace, stages: tuple[Stage, ...]) -> _State:
        candidate = CandidatePlan(
            subspace.problem, stages, subspace.samples, subspace.microbatches, subspace.mode, subspace.is_stale
        )
        cost = estimate(candidate, self.pool.costs(subspace.problem, subspace.samples))
        self.pool.num_estimated += 1
        self.pool.offer(candidate, cost)
        short = max(cost.shortage - 1, 0.0)
        return (
            candidate,
            self.pool.score(subspace.problem, candidate.devices, cost.time_s) * (1 + PENALTY * short),
            subspace,
        )

    def _equal(self, subspace: SearchSubspace) -> tuple[Stage, ...]:
        """Returns stages with about as many units each, on groups of random sizes where these are free."""
        units, count = len(subspace.problem.profile.units), len(subspace.order)
        groups: list[tuple[int, int]] = []
        after = 0
        while after < count:
            size, shards = self.chance.choice([*subspace.groups(after)])
            groups.append((after + size * shards, shards))
            after = groups[-1][0]
            if len(groups) > units:
                groups, after = [], 0
        groups.reverse()
        stages, first = [], 0
        for n, (behind, shards) in enumerate(groups):
            last = groups[n + 1][0] if n + 1 < len(groups) else 0
            members = subspace.order[count - behind : count - last]
            end = units * (n + 1) // len(groups)
            stages.append(self._with_zero(Stage(first, end, members, shards), subspace))
            first = end
        return tuple(stages)

    def _with_zero(self, stage: Stage, subspace: SearchSubspace) -> Stage:
        """Returns a stage with its state divided or whole, at random, as far as a frame lets it."""
        return replace(stage, zero=self.chance.choice(subspace.zeros) if stage.replicas > 1 else 0)

    def _moved(self, candidate: CandidatePlan) -> tuple[Stage, ...]:
        """Moves one border between stages, mostly by one unit."""
        stages = [*candidate.stages]
        at = self.chance.randrange(1, len(stages))
        low, high = stages[at - 1].start + 1, stages[at].end - 1
        here = stages[at].start
        to = self.chance.randint(low, high) if self.chance.random() < 0.2 else here + self.chance.choice((-1, 1))
        to = min(max(to, low), high)
        stages[at - 1] = replace(stages[at - 1], end=to)
        stages[at] = replace(stages[at], start=to)
        return tuple(stages)
