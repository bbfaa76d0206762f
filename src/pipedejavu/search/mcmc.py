"""The random searcher: Markov chain Monte Carlo over candidate plans, with the rule of FlexFlow or with ours.

A step changes a cut, the ZeRO stage of a pipeline stage, or the subspace; it accepts a worse candidate with probability
exp(−Δ/temperature). FlexFlow's rule has one temperature and never restarts. Our temperature is relative to the best
time so far and cools down, and the chain restarts from the best candidate after many steps without gain.
"""

import random
from dataclasses import replace
from math import exp, inf

from pipedejavu.search.candidate_plan import CandidatePlan, PlanningProblem, Stage
from pipedejavu.search.dp import solve
from pipedejavu.search.plan_estimate import estimate
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.subspace import SearchSubspace, subspaces

STEPS = 4000
PATIENCE = 200
"""Steps without gain after which our rule restarts from the best candidate."""
FIRST, LAST = 0.2, 0.002
"""First and last temperature of our rule, relative to the best time."""
FLEXFLOW = 0.05
"""FlexFlow's temperature, relative to the time of the first candidate."""
FEASIBLE_SHARE = 0.3
"""Share of the time budget for a first candidate that fits."""
PENALTY = 10.0
"""Weight of a memory shortage in a candidate's time, so that a chain can pass through candidates that do not fit."""


def run(
    pool: Pool,
    problems: list[PlanningProblem],
    options: SearchOptions,
    *,
    is_flexflow: bool = False,
    steps: int = STEPS,
) -> bool:
    """Walks at random from data parallelism or, if that does not fit, from a cut of `dp`; returns False.

    A walk is never complete.
    """
    chance = random.Random(options.seed)
    listed = (subspace for problem in problems for subspace in subspaces(problem, options))
    every = [subspace for subspace in listed if any(subspace.groupings(len(subspace.problem.profile.units)))]
    if not every:
        return True
    chain = _Chain(pool, every, chance)
    first = max(every, key=lambda f: (f.mode.is_plain, f.sizes == (len(f.order),), len(f.order), not f.problem.note))
    state = chain.start(first)
    if pool.shortage > 1:
        state = chain.start_feasible() or state
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
        best = min(best, new, key=lambda state: state[1])
        if not is_flexflow and since >= PATIENCE:
            state, since = best, 0
    return False


_State = tuple[CandidatePlan, float, SearchSubspace]
"""A candidate, its score with the penalty, and its subspace."""


class _Chain:
    """The random changes that lead from one candidate to the next."""

    def __init__(self, pool: Pool, every: list[SearchSubspace], chance: random.Random):
        self.pool, self.every, self.chance = pool, every, chance
        self.first_s = inf

    def start(self, subspace: SearchSubspace) -> _State:
        """Returns the first state: equal cuts in a subspace."""
        state = self._evaluated(subspace, self._equal(subspace))
        self.first_s = state[1]
        return state

    def start_feasible(self) -> _State | None:
        """Returns a first state that fits, the best cut of the first subspace that has any; None if time is over."""
        until_s = self.pool.elapsed_s + FEASIBLE_SHARE * self.pool.options.time_budget_s
        for subspace in sorted(self.every, key=lambda s: (not s.mode.recomputes, s.mode.uses_host, -len(s.order))):
            if self.pool.elapsed_s > until_s:
                break
            candidate = solve(subspace, self.pool.costs(subspace.problem, subspace.samples))
            if candidate is not None:
                state = self._evaluated(subspace, candidate.stages)
                self.first_s = state[1]
                return state
        return None

    def change(self, state: _State) -> _State:
        """Moves a cut, changes the ZeRO stage of one pipeline stage, or goes to another subspace."""
        candidate, _, subspace = state
        if len(candidate.stages) > 1 and self.chance.random() < 0.6:
            return self._evaluated(subspace, self._moved(candidate))
        if len(subspace.zeros) > 1 and self.chance.random() < 0.3:
            at = self.chance.randrange(len(candidate.stages))
            return self._evaluated(
                subspace,
                (
                    *candidate.stages[:at],
                    self._with_zero(candidate.stages[at], subspace),
                    *candidate.stages[at + 1 :],
                ),
            )
        near = [f for f in self.chance.choices(self.every, k=8) if self._is_near(f, subspace)]
        other = self.chance.choice(near or self.every)
        if other.order == subspace.order and (other.sizes, other.degrees) == (subspace.sizes, subspace.degrees):
            return self._evaluated(other, tuple(self._with_zero(stage, other) for stage in candidate.stages))
        return self._evaluated(other, self._equal(other))

    @staticmethod
    def _is_near(one: SearchSubspace, other: SearchSubspace) -> bool:
        """Whether two subspaces differ in exactly one of devices, group sizes and microbatches."""
        return sum((one.order == other.order, one.sizes == other.sizes, one.samples == other.samples)) == 2

    def _evaluated(self, subspace: SearchSubspace, stages: tuple[Stage, ...]) -> _State:
        """Returns the state of a candidate, which is offered to the pool."""
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
        """Returns stages of about equal length, on groups of random sizes if these are free."""
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
        for n, (used, shards) in enumerate(groups):
            after = groups[n + 1][0] if n + 1 < len(groups) else 0
            group = subspace.order[count - used : count - after]
            end = units * (n + 1) // len(groups)
            stages.append(self._with_zero(Stage(first, end, group, shards), subspace))
            first = end
        return tuple(stages)

    def _with_zero(self, stage: Stage, subspace: SearchSubspace) -> Stage:
        """Returns a stage with a random ZeRO stage of those that the subspace allows."""
        return replace(stage, zero=self.chance.choice(subspace.zeros) if stage.replicas > 1 else 0)

    def _moved(self, candidate: CandidatePlan) -> tuple[Stage, ...]:
        """Returns the stages with one boundary moved, mostly by one unit."""
        stages = [*candidate.stages]
        at = self.chance.randrange(1, len(stages))
        low, high = stages[at - 1].start + 1, stages[at].end - 1
        here = stages[at].start
        to = self.chance.randint(low, high) if self.chance.random() < 0.2 else here + self.chance.choice((-1, 1))
        to = min(max(to, low), high)
        stages[at - 1] = replace(stages[at - 1], end=to)
        stages[at] = replace(stages[at], start=to)
        return tuple(stages)
